"""NanoBEIR: thirteen BEIR data sets reduced to about fifty queries and a few thousand documents, for quick, preliminary results.

Its scores are not comparable with BEIR's. The split is published under the name ``train``, but nothing is trained on it. There are no
titles and no grades. No document is dropped for having the query's id, even in ArguAna and Quora: mteb and sentence-transformers, the
sources of the published results, do not drop them.

Source: https://huggingface.co/zeta-alpha-ai; numbers of documents and queries, the licence and the revisions of mteb's copies from mteb
2.26; sizes of the three files from ir_datasets' catalogue.
"""

from __future__ import annotations

from quiver.eval.datasets.beir import mteb_tables
from quiver.eval.datasets.metadata import Entry, Metadata
from quiver.eval.datasets.sources import HubTable, HubTables, Source

# BEIR's name, the repository's name, documents, queries, bytes, mteb's repository and its revision.
_SETS = (
    ("arguana", "NanoArguAna", 3_635, 50, 2_256_595, "NanoArguAnaRetrieval", "63ac9f026e8f6b85dc0622f3d630ed7a1758e9ec"),
    ("climate-fever", "NanoClimateFEVER", 3_408, 50, 3_342_681, "NanoClimateFeverRetrieval", "ccb5552bc17e87afe0f9479fb4346898213a71db"),
    ("dbpedia-entity", "NanoDBPedia", 6_045, 50, 1_506_689, "NanoDBPediaRetrieval", "2d088f80d7a640eac0be5c66408d68c3f782baa1"),
    ("fever", "NanoFEVER", 4_996, 50, 3_937_251, "NanoFEVERRetrieval", "a6490dfeed0f13c2a052e39c6ddaeb6086afd4a8"),
    ("fiqa", "NanoFiQA2018", 4_598, 50, 2_539_434, "NanoFiQA2018Retrieval", "ede84da4793cd2d4e61bba0dd08fc58de90f3681"),
    ("hotpotqa", "NanoHotpotQA", 5_090, 50, 1_257_545, "NanoHotpotQARetrieval", "a38a2615f29adba8b47a42905031aa9c137d8fae"),
    ("msmarco", "NanoMSMARCO", 5_043, 50, 1_121_135, "NanoMSMARCORetrieval", "5a5aa0c3df65d6883d85c8f5cdc88e679633595e"),
    ("nfcorpus", "NanoNFCorpus", 2_953, 50, 2_481_704, "NanoNFCorpusRetrieval", "2eec9d63140fb9af7c75ad0fdbf6350aaf20e94e"),
    ("nq", "NanoNQ", 5_035, 50, 1_781_772, "NanoNQRetrieval", "e3973b405feb9e94d07fd971d690d24d7f45264a"),
    ("quora", "NanoQuoraRetrieval", 5_046, 50, 235_356, "NanoQuoraRetrieval", "3ee153e5710da83a7f35df0cb1db4a0ad036072a"),
    ("scidocs", "NanoSCIDOCS", 2_210, 50, 1_292_399, "NanoSCIDOCSRetrieval", "cf39b8741a6f2e984d0b8f4796b2dd5bb65390f9"),
    ("scifact", "NanoSciFact", 2_919, 50, 2_415_575, "NanoSciFactRetrieval", "8c5f7bbe90bb865f46c67710221afa7d9096251b"),
    ("webis-touche2020", "NanoTouche2020", 5_745, 49, 7_286_401, "NanoTouche2020Retrieval", "ff81c0caff8b6febe1495eae9f2ca3eddad074b8"),
)


def nanobeir() -> tuple[Entry, ...]:
    """Entries of NanoBEIR."""
    return tuple(_entry(*row) for row in _SETS)


def nano_tables(unit: str, repository: str) -> HubTables:
    """Tables of a NanoBEIR repository: three configs, each with the single split ``train``."""
    corpus, queries, qrels = (
        HubTable(repository, (config,), "train", (f"{config}/train-*.parquet",)) for config in ("corpus", "queries", "qrels")
    )
    return HubTables(unit, corpus, queries, qrels, ("train",), graded=False)


def _entry(name: str, repository: str, documents: int, queries: int, size: int, mteb: str, mteb_revision: str) -> Entry:
    key = f"nanobeir/{name}"
    tables = nano_tables(f"{key}/hub", f"zeta-alpha-ai/{repository}")
    sources: dict[str, Source] = {"hub": tables, "mteb": mteb_tables(f"{key}/mteb", f"mteb/{mteb}", mteb_revision, ("train",))}
    return Entry(
        key,
        f"nano-{name}",
        "train",
        ("train",),
        sources,
        Metadata("cc-by-4.0", tables.revision, tables.url, documents, queries, bytes=size),
        note="A cut of the data set of that name in BEIR: a quick look, not a number to compare with BEIR's. The split is called train; "
        "nothing is trained on it.",
    )
