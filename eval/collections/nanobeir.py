"""NanoBEIR: thirteen BEIR data sets cut to fifty queries and a few thousand documents; a preview, not comparable with BEIR.

The split is published under the name ``train``; nothing is trained on it. There are neither titles nor grades. No document is dropped
for having the query's id, ArguAna's and Quora's neither: mteb and sentence-transformers, which published numbers come from, do not.

Source: https://huggingface.co/zeta-alpha-ai; numbers of documents and queries and the licence from mteb 2.26; sizes of the three files
from ir_datasets' catalogue.
"""

from __future__ import annotations

from eval.collections.entry import Entry
from eval.collections.facts import Facts
from eval.collections.layouts import HubTable
from eval.collections.origins import HubTables

# BEIR's name, the repository's, documents, queries, bytes.
_SETS = (
    ("arguana", "NanoArguAna", 3_635, 50, 2_256_595),
    ("climate-fever", "NanoClimateFEVER", 3_408, 50, 3_342_681),
    ("dbpedia-entity", "NanoDBPedia", 6_045, 50, 1_506_689),
    ("fever", "NanoFEVER", 4_996, 50, 3_937_251),
    ("fiqa", "NanoFiQA2018", 4_598, 50, 2_539_434),
    ("hotpotqa", "NanoHotpotQA", 5_090, 50, 1_257_545),
    ("msmarco", "NanoMSMARCO", 5_043, 50, 1_121_135),
    ("nfcorpus", "NanoNFCorpus", 2_953, 50, 2_481_704),
    ("nq", "NanoNQ", 5_035, 50, 1_781_772),
    ("quora", "NanoQuoraRetrieval", 5_046, 50, 235_356),
    ("scidocs", "NanoSCIDOCS", 2_210, 50, 1_292_399),
    ("scifact", "NanoSciFact", 2_919, 50, 2_415_575),
    ("webis-touche2020", "NanoTouche2020", 5_745, 49, 7_286_401),
)


def nanobeir() -> tuple[Entry, ...]:
    """The entries of NanoBEIR."""
    return tuple(_entry(*row) for row in _SETS)


def nano_tables(unit: str, repository: str) -> HubTables:
    """The layout of NanoBEIR's repositories: three configs, each with the one split ``train``."""
    corpus, queries, qrels = (
        HubTable(repository, (config,), "train", (f"{config}/train-*.parquet",)) for config in ("corpus", "queries", "qrels")
    )
    return HubTables(unit, corpus, queries, qrels, ("train",), graded=False)


def _entry(name: str, repository: str, documents: int, queries: int, size: int) -> Entry:
    key = f"nanobeir/{name}"
    tables = nano_tables(f"{key}/hub", f"zeta-alpha-ai/{repository}")
    return Entry(
        key,
        f"nano-{name}",
        "train",
        ("train",),
        {"hub": tables},
        Facts("cc-by-4.0", tables.revision, tables.url, documents, queries, bytes=size),
        note="A cut of the data set of that name in BEIR: a quick look, not a number to compare with BEIR's. The split is called train; "
        "nothing is trained on it.",
    )
