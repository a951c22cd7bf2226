"""BEIR: the fifteen public data sets of its paper, from BEIR's archives or from the BeIR and mteb repositories on the Hugging Face Hub.

Policies. In ArguAna, each query is an argument of the corpus and its answer is the counter-argument. In Quora, each query is a question of
the corpus and its answers are duplicates of it. The query's own document would come first in both, so ``exclude_self`` drops it. In the
other data sets, no query is a document; equal ids there (numbers on both sides, as in FiQA and MS MARCO) name different texts. BEIR's own
code drops those documents too, as mteb does in some tasks, and so loses documents that may be relevant. Titles are part of the text in
all data sets.

Splits. Published results are on ``test``, except for MS MARCO: its ``test`` is TREC-DL 2019, and BEIR's result is on ``dev``.

Source: arXiv:2104.08663; splits and md5 of https://github.com/beir-cellar/beir at 6351df88; sizes of the archives from ir_datasets 0.6.3;
numbers of documents and queries, licences and revisions of mteb's repositories from mteb 2.26. If mteb's licence is "not specified", it
is None here.
"""

from __future__ import annotations

from typing import NamedTuple

from quiver.eval.datasets.metadata import Entry, Metadata
from quiver.eval.datasets.sources import HubTable, HubTables, Source, ZipArchive

_ARCHIVES = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
_CQADUPSTACK_MD5 = "4e41456d7df8ee7760a7f866133bda78"
_CQADUPSTACK_BYTES = 5_343_728_040


class _Set(NamedTuple):
    """Properties of one data set; the first split is that of the published results."""

    name: str
    splits: tuple[str, ...]
    documents: int
    queries: int
    bytes: int
    md5: str
    licence: str | None
    mteb: str
    mteb_revision: str
    exclude_self: bool = False
    note: str = ""


_SETS = (
    _Set("trec-covid", ("test",), 171_332, 50, 73_876_720, "ce62140cb23feb9becf6270d0d1fe6d1", None,
         "mteb/trec-covid", "bb9466bac8153a0349341eb1b22e06409e78ef4e"),
    _Set("nfcorpus", ("test", "dev", "train"), 3_633, 323, 2_448_432, "a89dba18a62ef92f7d323ec890a0d38d", None,
         "mteb/nfcorpus", "ec0fa4fe99da2ff19ca1214b7966684033a58814"),
    _Set("nq", ("test", "train"), 2_681_468, 3_452, 498_307_926, "d4d3d2e48787a744b6f6e691ff534307", "cc-by-nc-sa-3.0",
         "mteb/nq", "b774495ed302d8c44a3a7ea25c90dbce03968f31"),
    _Set("hotpotqa", ("test", "dev", "train"), 5_233_329, 7_405, 654_025_350, "f412724f78b0d91183a0e86805e16114", "cc-by-sa-4.0",
         "mteb/hotpotqa", "ab518f4d6fcca38d87c25209f94beba119d02014"),
    _Set("fiqa", ("test", "dev", "train"), 57_638, 648, 17_948_027, "17918ed23cd04fb15047f73e6c3bd9d9", None,
         "mteb/fiqa", "27a168819829fe9bcd655c2df245fb19452e8e06"),
    _Set("arguana", ("test",), 8_674, 1_406, 3_773_617, "8ad3e3c2a5867cdced806d6503f29b99", "cc-by-sa-4.0",
         "mteb/arguana", "c22ab2a51041ffd869aaddef7af8d8215647e41a", exclude_self=True,
         note="Queries are documents of the corpus; each one's own document is dropped before the cut."),
    _Set("webis-touche2020", ("test",), 382_545, 49, 227_132_363, "46f650ba5a527fc69e0a6521c5a23563", "cc-by-sa-4.0",
         "mteb/touche2020", "a34f9a33db75fa0cbb21bb5cfc3dae8dc8bec93f",
         note="Version 2 of the judgements, as in BEIR's paper. mteb/webis-touche2020-v3 has a cleaned corpus and new judgements: "
         "its numbers are much higher and not comparable."),
    _Set("quora", ("test", "dev"), 522_931, 10_000, 15_853_968, "18fb154900ba42a600f84b839c173167", None,
         "mteb/quora", "e4e08e0b7dbe3c8700f0daef558ff32256715259", exclude_self=True,
         note="Queries are documents of the corpus; each one's own document is dropped before the cut."),
    _Set("dbpedia-entity", ("test", "dev"), 4_635_922, 400, 639_285_131, "c2a39eb420a3164af735795df012ac2c", "mit",
         "mteb/dbpedia", "c0f706b76e590d620bd6618b3ca8efdd34e2d659"),
    _Set("scidocs", ("test",), 25_657, 1_000, 142_471_588, "38121350fc3a4d2f48850f6aff52e4a9", "cc-by-sa-4.0",
         "mteb/scidocs", "f8c2fcf00f625baaa80f62ec5bd9e1fff3b8ae88"),
    _Set("fever", ("test", "dev", "train"), 5_416_568, 6_666, 1_236_988_269, "5a818580227bfb4b35bb6fa46d9b6c03", "cc-by-nc-sa-3.0",
         "mteb/fever", "bea83ef9e8fb933d90a2f1d5515737465d613e12"),
    _Set("climate-fever", ("test",), 5_416_593, 1_535, 1_228_666_652, "8b66f0a9126c521bae2bde127b4dc99d", "cc-by-sa-4.0",
         "mteb/climate-fever", "47f2ac6acb640fc46020b02a5b59fdda04d39380"),
    _Set("scifact", ("test", "train"), 5_183, 300, 2_816_079, "5f7d1de60b170fc8027bb7898e2efca1", "cc-by-nc-4.0",
         "mteb/scifact", "d56462d0e63a25450459c4f213e49ffdb866f7f9"),
    _Set("msmarco", ("dev", "test", "train"), 8_841_823, 6_980, 1_082_258_632, "444067daf65d982533ea17ebd59501e4", "msr-la-nc",
         "mteb/msmarco", "c5a29a104738b98a9e76336939199e264163d4a0",
         note="BEIR's number is on dev; the split called test is TREC-DL 2019. Averages over BEIR usually leave it out for models that "
         "were trained on MS MARCO."),
)  # fmt: skip

# Forum, documents, queries, mteb's repository and its revision.
_FORUMS = (
    ("android", 22_998, 699, "mteb/CQADupstackAndroidRetrieval", "9be4c0e46342e8e3aff577a89b9a1ec9bc6b4af3"),
    ("english", 40_221, 1_570, "mteb/cqadupstack-english", "ad9991cb51e31e31e430383c75ffb2885547b5f0"),
    ("gaming", 45_301, 1_595, "mteb/cqadupstack-gaming", "4885aa143210c98657558c04aaf3dc47cfb54340"),
    ("gis", 37_637, 885, "mteb/cqadupstack-gis", "5003b3064772da1887988e05400cf3806fe491f2"),
    ("mathematica", 16_705, 804, "mteb/cqadupstack-mathematica", "90fceea13679c63fe563ded68f3b6f06e50061de"),
    ("physics", 38_316, 1_039, "mteb/cqadupstack-physics", "79531abbd1fb92d06c6d6315a0cbbbf5bb247ea4"),
    ("programmers", 32_176, 876, "mteb/cqadupstack-programmers", "6184bc1440d2dbc7612be22b50686b8826d22b32"),
    ("stats", 42_269, 652, "mteb/cqadupstack-stats", "65ac3a16b8e91f9cee4c9828cc7c335575432a2a"),
    ("tex", 68_184, 2_906, "mteb/cqadupstack-tex", "46989137a86843e03a6195de44b09deda022eec7"),
    ("unix", 47_382, 1_072, "mteb/cqadupstack-unix", "6c6430d3a6d36f8d2a829195bc5dc94d7e063e53"),
    ("webmasters", 17_405, 506, "mteb/cqadupstack-webmasters", "160c094312a0e1facb97e55eeddb698c0abe3571"),
    ("wordpress", 48_605, 541, "mteb/cqadupstack-wordpress", "4ffe81d471b1924886b33c7567bfb200e9eec5c4"),
)


def beir() -> tuple[Entry, ...]:
    """Entries of BEIR: fourteen data sets, and the twelve forums of CQADupStack, the fifteenth."""
    return (*map(_entry, _SETS), *(_forum(*forum) for forum in _FORUMS))


def beir_tables(unit: str, name: str, splits: tuple[str, ...]) -> HubTables:
    """Tables of a BEIR repository on the Hugging Face Hub: corpus and queries in one repository, judgements in another."""
    repository = f"BeIR/{name}"
    return HubTables(
        unit,
        HubTable(repository, ("corpus",), "corpus", ("corpus/corpus-*.parquet", "corpus.jsonl.gz", "corpus.jsonl"), any_split=True),
        HubTable(repository, ("queries",), "queries", ("queries/queries-*.parquet", "queries.jsonl.gz", "queries.jsonl"), any_split=True),
        HubTable(f"{repository}-qrels", ("default",), "{split}", ("{split}.tsv",)),
        splits,
    )


def mteb_tables(unit: str, repository: str, revision: str, splits: tuple[str, ...], prefix: str = "") -> HubTables:
    """Tables of an mteb repository: configs ``corpus``, ``queries`` and, for the judgements, ``default`` or ``qrels``.

    Args:
        unit: Path in the cache.
        repository: ``owner/name`` of the dataset.
        revision: Commit.
        splits: Splits of the judgements, the benchmark's default split first.
        prefix: Prefix of the config names if the repository holds several data sets, such as ``python-``.
    """
    corpus, queries, qrels = f"{prefix}corpus", f"{prefix}queries", f"{prefix}qrels"
    return HubTables(
        unit,
        HubTable(repository, (corpus,), "corpus", (f"{corpus}/*.parquet", f"{corpus}.jsonl"), any_split=True),
        HubTable(repository, (queries,), "queries", (f"{queries}/*.parquet", f"{queries}.jsonl"), any_split=True),
        HubTable(
            repository,
            (qrels,) if prefix else ("default", qrels),
            "{split}",
            (f"{qrels}/{{split}}-*.parquet", f"{qrels}/{{split}}.jsonl", *(() if prefix else ("data/{split}-*.parquet",))),
        ),
        splits,
        {repository: revision},
    )


def _entry(row: _Set) -> Entry:
    key = f"beir/{row.name}"
    archive = ZipArchive(f"{key}/zip", f"{_ARCHIVES}/{row.name}.zip", row.md5, row.bytes, row.name)
    sources: dict[str, Source] = {
        "zip": archive,
        "hub": beir_tables(f"{key}/hub", row.name, row.splits),
        "mteb": mteb_tables(f"{key}/mteb", row.mteb, row.mteb_revision, row.splits),
    }
    metadata = Metadata(row.licence, archive.revision, archive.url, row.documents, row.queries, bytes=row.bytes)
    return Entry(key, row.name, row.splits[0], row.splits, sources, metadata, row.exclude_self, note=row.note)


def _forum(forum: str, documents: int, queries: int, repository: str, revision: str) -> Entry:
    key = f"beir/cqadupstack/{forum}"
    url = f"{_ARCHIVES}/cqadupstack.zip"
    archive = ZipArchive("beir/cqadupstack/zip", url, _CQADUPSTACK_MD5, _CQADUPSTACK_BYTES, f"cqadupstack/{forum}")
    sources: dict[str, Source] = {"zip": archive, "mteb": mteb_tables(f"{key}/mteb", repository, revision, ("test",))}
    metadata = Metadata("apache-2.0", archive.revision, url, documents, queries, "cqadupstack", len(_FORUMS), _CQADUPSTACK_BYTES)
    note = "One of twelve forums, each with its own corpus; CQADupStack is their unweighted mean and counts once. One archive has them all."
    return Entry(key, f"cqadupstack-{forum}", "test", ("test",), sources, metadata, note=note)
