"""The published collections that can be evaluated by name: BEIR, MLDR, CoIR, mteb's code collections and NanoBEIR.

BEIR. The fifteen public data sets of its paper, from BEIR's archives or from the BeIR and mteb repositories on the Hugging Face Hub. In
ArguAna, each query is an argument of the corpus and its answer is the counter-argument. In Quora, each query is a question of the corpus
and its answers are duplicates of it. The query's own document would come first in both, so ``exclude_self`` drops it. In the other data
sets, no query is a document; equal ids there (numbers on both sides, as in FiQA and MS MARCO) name different texts. BEIR's own code drops
those documents too, as mteb does in some tasks, and so loses documents that may be relevant. Titles are part of the text in all data
sets. Published results are on ``test``, except for MS MARCO: its ``test`` is TREC-DL 2019, and BEIR's result is on ``dev``.

MLDR. Long documents in thirteen languages; each query has one relevant document and is searched in all documents of its language. The same
collection serves for in-domain and out-of-domain evaluation. Only the caller knows whether the model was trained on MLDR's own training
pairs, and has to say so.

CoIR and mteb. CodeSearchNet and StackOverflow-QA of CoIR, and mteb's CodeSearchNet, a different task with the same name. In CoIR's
CodeSearchNet a query is a function, and the documents are all comments of its language. In mteb's, a query is a comment, and the documents
are a thousand functions. CoIR leaves titles out and mteb puts them before the texts; scores differ widely where titles exist. Each entry
follows the convention of the published results. Ids of queries and documents differ in both, so ``exclude_self`` has no effect. mteb has
all of CoIR's CodeSearchNet in one repository with a fixed revision, which is the second source of these entries.

NanoBEIR. Thirteen BEIR data sets reduced to about fifty queries and a few thousand documents, for quick, preliminary results that are not
comparable with BEIR's. The split is published under the name ``train``, but nothing is trained on it. There are no titles and no grades.
No document is dropped for having the query's id, even in ArguAna and Quora: mteb and sentence-transformers, the sources of the published
results, do not drop them.

Source: BEIR, arXiv:2104.08663; splits and md5 of https://github.com/beir-cellar/beir at 6351df88; sizes of the archives from ir_datasets
0.6.3. MLDR, arXiv:2402.03216; file names from the repository's loading script, which is not executed; the revision is the one that public
pipelines pin. CoIR, arXiv:2407.02883; layouts of https://huggingface.co/CoIR-Retrieval and https://huggingface.co/mteb. NanoBEIR,
https://huggingface.co/zeta-alpha-ai; sizes of the three files from ir_datasets' catalogue. For all: numbers of documents and queries,
licences and mteb's revisions from mteb 2.26. If mteb's licence is "not specified", it is None here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from quiver.eval.datasets.sources import HubTable, HubTables, Source, ZipArchive
from quiver.retrieval.data.entries import FieldNames


@dataclass(frozen=True)
class Entry:
    """One published collection."""

    key: str
    name: str
    split: str  # of the published results
    splits: tuple[str, ...]
    sources: Mapping[str, Source]  # the first one is the default for downloads
    metadata: Metadata
    exclude_self: bool = False
    use_title: bool = True
    note: str = ""

    @property
    def source(self) -> Source:
        """The first source, which is the default."""
        return next(iter(self.sources.values()))


@dataclass(frozen=True)
class Metadata:
    """Description of a collection; unknown values are None.

    Attributes:
        licence: Licence of the data as stated by its publisher.
        revision: Commit of a repository, or ``md5:...`` of an archive.
        url: Address of the publication.
        group: Data set that the collection is a part of, such as ``cqadupstack``.
        group_size: Number of collections in the group; 1 without a group.
        documents: Number of documents.
        queries: Number of judged queries in the split.
        bytes: Size of the download in bytes.
    """

    licence: str | None = None
    revision: str | None = None
    url: str | None = None
    group: str | None = None
    group_size: int = 1
    documents: int | None = None
    queries: int | None = None
    bytes: int | None = None


_ARCHIVES = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
_CQADUPSTACK_MD5 = "4e41456d7df8ee7760a7f866133bda78"
_CQADUPSTACK_BYTES = 5_343_728_040


class _BeirSet(NamedTuple):
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


_BEIR_SETS = (
    _BeirSet("trec-covid", ("test",), 171_332, 50, 73_876_720, "ce62140cb23feb9becf6270d0d1fe6d1", None,
         "mteb/trec-covid", "bb9466bac8153a0349341eb1b22e06409e78ef4e"),
    _BeirSet("nfcorpus", ("test", "dev", "train"), 3_633, 323, 2_448_432, "a89dba18a62ef92f7d323ec890a0d38d", None,
         "mteb/nfcorpus", "ec0fa4fe99da2ff19ca1214b7966684033a58814"),
    _BeirSet("nq", ("test", "train"), 2_681_468, 3_452, 498_307_926, "d4d3d2e48787a744b6f6e691ff534307", "cc-by-nc-sa-3.0",
         "mteb/nq", "b774495ed302d8c44a3a7ea25c90dbce03968f31"),
    _BeirSet("hotpotqa", ("test", "dev", "train"), 5_233_329, 7_405, 654_025_350, "f412724f78b0d91183a0e86805e16114", "cc-by-sa-4.0",
         "mteb/hotpotqa", "ab518f4d6fcca38d87c25209f94beba119d02014"),
    _BeirSet("fiqa", ("test", "dev", "train"), 57_638, 648, 17_948_027, "17918ed23cd04fb15047f73e6c3bd9d9", None,
         "mteb/fiqa", "27a168819829fe9bcd655c2df245fb19452e8e06"),
    _BeirSet("arguana", ("test",), 8_674, 1_406, 3_773_617, "8ad3e3c2a5867cdced806d6503f29b99", "cc-by-sa-4.0",
         "mteb/arguana", "c22ab2a51041ffd869aaddef7af8d8215647e41a", exclude_self=True,
         note="Queries are documents of the corpus; each one's own document is dropped before the cut."),
    _BeirSet("webis-touche2020", ("test",), 382_545, 49, 227_132_363, "46f650ba5a527fc69e0a6521c5a23563", "cc-by-sa-4.0",
         "mteb/touche2020", "a34f9a33db75fa0cbb21bb5cfc3dae8dc8bec93f",
         note="Version 2 of the judgements, as in BEIR's paper. mteb/webis-touche2020-v3 has a cleaned corpus and new judgements: "
         "its numbers are much higher and not comparable."),
    _BeirSet("quora", ("test", "dev"), 522_931, 10_000, 15_853_968, "18fb154900ba42a600f84b839c173167", None,
         "mteb/quora", "e4e08e0b7dbe3c8700f0daef558ff32256715259", exclude_self=True,
         note="Queries are documents of the corpus; each one's own document is dropped before the cut."),
    _BeirSet("dbpedia-entity", ("test", "dev"), 4_635_922, 400, 639_285_131, "c2a39eb420a3164af735795df012ac2c", "mit",
         "mteb/dbpedia", "c0f706b76e590d620bd6618b3ca8efdd34e2d659"),
    _BeirSet("scidocs", ("test",), 25_657, 1_000, 142_471_588, "38121350fc3a4d2f48850f6aff52e4a9", "cc-by-sa-4.0",
         "mteb/scidocs", "f8c2fcf00f625baaa80f62ec5bd9e1fff3b8ae88"),
    _BeirSet("fever", ("test", "dev", "train"), 5_416_568, 6_666, 1_236_988_269, "5a818580227bfb4b35bb6fa46d9b6c03", "cc-by-nc-sa-3.0",
         "mteb/fever", "bea83ef9e8fb933d90a2f1d5515737465d613e12"),
    _BeirSet("climate-fever", ("test",), 5_416_593, 1_535, 1_228_666_652, "8b66f0a9126c521bae2bde127b4dc99d", "cc-by-sa-4.0",
         "mteb/climate-fever", "47f2ac6acb640fc46020b02a5b59fdda04d39380"),
    _BeirSet("scifact", ("test", "train"), 5_183, 300, 2_816_079, "5f7d1de60b170fc8027bb7898e2efca1", "cc-by-nc-4.0",
         "mteb/scifact", "d56462d0e63a25450459c4f213e49ffdb866f7f9"),
    _BeirSet("msmarco", ("dev", "test", "train"), 8_841_823, 6_980, 1_082_258_632, "444067daf65d982533ea17ebd59501e4", "msr-la-nc",
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


BEIR_FOLDERS = frozenset(map(itemgetter(0), (*_BEIR_SETS, *_FORUMS)))
"""Last part of the name of each BEIR collection, by which its folder is recognized."""


def beir() -> tuple[Entry, ...]:
    """Entries of BEIR: fourteen data sets, and the twelve forums of CQADupStack, the fifteenth."""
    return (*map(_beir_entry, _BEIR_SETS), *(_forum_entry(*forum) for forum in _FORUMS))


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
    """Tables of an mteb repository: configs ``corpus``, ``queries`` and, for the judgements, ``default`` or ``qrels``."""
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


def _beir_entry(row: _BeirSet) -> Entry:
    key = f"beir/{row.name}"
    archive = ZipArchive(f"{key}/zip", f"{_ARCHIVES}/{row.name}.zip", row.md5, row.bytes, row.name)
    sources: dict[str, Source] = {
        "zip": archive,
        "hub": beir_tables(f"{key}/hub", row.name, row.splits),
        "mteb": mteb_tables(f"{key}/mteb", row.mteb, row.mteb_revision, row.splits),
    }
    metadata = Metadata(row.licence, archive.revision, archive.url, documents=row.documents, queries=row.queries, bytes=row.bytes)
    return Entry(key, row.name, row.splits[0], row.splits, sources, metadata, row.exclude_self, note=row.note)


def _forum_entry(forum: str, documents: int, queries: int, repository: str, revision: str) -> Entry:
    key = f"beir/cqadupstack/{forum}"
    url = f"{_ARCHIVES}/cqadupstack.zip"
    archive = ZipArchive("beir/cqadupstack/zip", url, _CQADUPSTACK_MD5, _CQADUPSTACK_BYTES, f"cqadupstack/{forum}")
    sources: dict[str, Source] = {"zip": archive, "mteb": mteb_tables(f"{key}/mteb", repository, revision, ("test",))}
    metadata = Metadata("apache-2.0", archive.revision, url, "cqadupstack", len(_FORUMS), documents, queries, _CQADUPSTACK_BYTES)
    note = (
        "One of twelve forums, each with its own corpus; CQADupStack is their unweighted mean and counts once in "
        "averages. One archive contains all of them."
    )
    return Entry(key, f"cqadupstack-{forum}", "test", ("test",), sources, metadata, note=note)


_MLDR = "Shitao/MLDR"
_MLDR_REVISION = "d67138e705d963e346253a80e59676ddb418810a"

# Language, documents, queries of the test split; the dev split has 200 queries in every language.
_MLDR_LANGUAGES = (
    *(("ar", 7_607, 200), ("de", 10_000, 200), ("en", 200_000, 800), ("es", 9_551, 200), ("fr", 10_000, 200), ("hi", 3_806, 200)),
    *(("it", 10_000, 200), ("ja", 10_000, 200), ("ko", 6_176, 200), ("pt", 6_569, 200), ("ru", 10_000, 200), ("th", 10_000, 200)),
    ("zh", 200_000, 800),
)


def mldr() -> tuple[Entry, ...]:
    """Entries of MLDR, one per language."""
    return tuple(_mldr_entry(*row) for row in _MLDR_LANGUAGES)


def _mldr_entry(language: str, documents: int, queries: int) -> Entry:
    key, folder, splits = f"mldr/{language}", f"mldr-v1.0-{language}", ("test", "dev")
    tables = HubTables(
        f"{key}/hub",
        HubTable(_MLDR, (f"corpus-{language}",), "corpus", (f"{folder}/corpus.jsonl.gz",)),
        HubTable(_MLDR, (language,), "{split}", (f"{folder}/{{split}}.jsonl.gz",)),
        HubTable(_MLDR, (), "{split}", (f"qrels/qrels.{folder}-{{split}}.tsv",)),
        splits,
        {_MLDR: _MLDR_REVISION},
        document_columns=FieldNames(("docid",)),
        query_columns=FieldNames(("query_id",), "query"),
    )
    return Entry(
        key,
        f"mldr-{language}",
        "test",
        splits,
        {"hub": tables},
        Metadata("mit", _MLDR_REVISION, tables.url, documents=documents, queries=queries),
        note=f"All {documents:,} documents are searched, not only the relevant ones. Out-of-domain, or in-domain for a model trained on "
        "MLDR's training pairs. The documents have no titles.",
    )


_COIR_CODESEARCHNET = ("CoIR-Retrieval/CodeSearchNet", "4adc7bc41202b5c13543c9c886a25f340634dab3")
_MTEB_CODESEARCHNET = ("mteb/CodeSearchNetRetrieval", "68e8f0731a656fa4bd5b7c81936d95ad48a39bfe")
_MTEB_STACKOVERFLOW = ("mteb/StackOverflowQA", "7b46f5ebd2365278c1bb025986dda2fee893bbf5")
_TOUCHE_V3 = ("mteb/webis-touche2020-v3", "431886eaecc48f067a3975b70d0949ea2862463c")

# Language, documents and queries in CoIR; mteb's version has 1,000 of each.
_CODE_LANGUAGES = (
    ("python", 280_310, 14_918),
    ("javascript", 64_854, 3_291),
    ("go", 182_440, 8_122),
    ("ruby", 27_570, 1_261),
    ("java", 180_866, 10_955),
    ("php", 267_725, 14_014),
)

_COIR_SPLITS = ("test", "valid", "train")


def coir() -> tuple[Entry, ...]:
    """Entries of CoIR: six languages of CodeSearchNet, and StackOverflow-QA."""
    return (*(_coir_codesearchnet(*row) for row in _CODE_LANGUAGES), _stackoverflow())


def mteb() -> tuple[Entry, ...]:
    """Entries that only mteb publishes: its CodeSearchNet, and version 3 of Touche-2020."""
    return (*(_mteb_codesearchnet(language) for language, _, _ in _CODE_LANGUAGES), _touche())


def coir_tables(unit: str, task: str) -> HubTables:
    """Tables of a CoIR task: corpus and queries as two splits of one repository, the judgements of all splits in another."""
    texts = f"CoIR-Retrieval/{task}-queries-corpus"
    return HubTables(
        unit,
        HubTable(texts, ("default",), "corpus", ("data/corpus-*.parquet",)),
        HubTable(texts, ("default",), "queries", ("data/queries-*.parquet",)),
        HubTable(f"CoIR-Retrieval/{task}-qrels", ("default",), "{split}", ("data/{split}-*.parquet",)),
        _COIR_SPLITS,
    )


def _coir_codesearchnet(language: str, documents: int, queries: int) -> Entry:
    key = f"coir/codesearchnet/{language}"
    tables = coir_tables(f"{key}/coir", f"CodeSearchNet-{language}")
    sources: dict[str, Source] = {"coir": tables, "mteb": mteb_tables(f"{key}/mteb", *_COIR_CODESEARCHNET, _COIR_SPLITS, f"{language}-")}
    return Entry(
        key,
        f"coir-codesearchnet-{language}",
        "test",
        _COIR_SPLITS,
        sources,
        Metadata("mit", tables.revision, tables.url, "coir-codesearchnet", len(_CODE_LANGUAGES), documents, queries),
        use_title=False,
        note="Code to comment: the query is a function, the documents are comments. One of six languages; CodeSearchNet in CoIR is their "
        "mean. Titles are left out, as in CoIR. Not mteb/codesearchnet, which is comment to code among 1,000.",
    )


def _stackoverflow() -> Entry:
    key, documents, queries = "coir/stackoverflow-qa", 19_931, 1_994
    tables = coir_tables(f"{key}/coir", "stackoverflow-qa")
    sources: dict[str, Source] = {"coir": tables, "mteb": mteb_tables(f"{key}/mteb", *_MTEB_STACKOVERFLOW, ("test",))}
    return Entry(
        key,
        "coir-stackoverflow-qa",
        "test",
        _COIR_SPLITS,
        sources,
        Metadata("mit", tables.revision, tables.url, documents=documents, queries=queries),
        use_title=False,
        note="Question to answer; many queries are longer than 512 tokens. Titles are left out, as in CoIR; mteb's StackOverflowQA puts "
        "them before the texts, and its numbers are not comparable.",
    )


def _mteb_codesearchnet(language: str) -> Entry:
    key = f"mteb/codesearchnet/{language}"
    tables = mteb_tables(f"{key}/mteb", *_MTEB_CODESEARCHNET, ("test",), f"{language}-")
    return Entry(
        key,
        f"mteb-codesearchnet-{language}",
        "test",
        ("test",),
        {"mteb": tables},
        Metadata("mit", tables.revision, tables.url, "mteb-codesearchnet", len(_CODE_LANGUAGES), 1_000, 1_000),
        note="Comment to code: the query is a comment, the documents are 1,000 functions; mteb's CodeSearchNetRetrieval. One of six "
        "languages. Not CoIR's CodeSearchNet (coir/codesearchnet), which is code to comment among all of a language.",
    )


def _touche() -> Entry:
    key, documents, queries = "mteb/webis-touche2020-v3", 303_732, 49
    tables = mteb_tables(f"{key}/mteb", *_TOUCHE_V3, ("test",))
    return Entry(
        key,
        "webis-touche2020-v3",
        "test",
        ("test",),
        {"mteb": tables},
        Metadata("cc-by-sa-4.0", tables.revision, tables.url, documents=documents, queries=queries),
        note="Version 3 of Touche-2020: short arguments removed from the corpus, holes in the judgements filled. Not the one in BEIR's "
        "paper and tables, which is beir/webis-touche2020.",
    )


# BEIR's name, the repository's name, documents, queries, bytes, mteb's repository and its revision.
_NANO_SETS = (
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
    return tuple(_nano_entry(*row) for row in _NANO_SETS)


def nano_tables(unit: str, repository: str) -> HubTables:
    """Tables of a NanoBEIR repository: three configs, each with the single split ``train``."""
    corpus, queries, qrels = (
        HubTable(repository, (config,), "train", (f"{config}/train-*.parquet",)) for config in ("corpus", "queries", "qrels")
    )
    return HubTables(unit, corpus, queries, qrels, ("train",), graded=False)


def _nano_entry(name: str, repository: str, documents: int, queries: int, size: int, mteb: str, mteb_revision: str) -> Entry:
    key = f"nanobeir/{name}"
    tables = nano_tables(f"{key}/hub", f"zeta-alpha-ai/{repository}")
    sources: dict[str, Source] = {"hub": tables, "mteb": mteb_tables(f"{key}/mteb", f"mteb/{mteb}", mteb_revision, ("train",))}
    return Entry(
        key,
        f"nano-{name}",
        "train",
        ("train",),
        sources,
        Metadata("cc-by-4.0", tables.revision, tables.url, documents=documents, queries=queries, bytes=size),
        note="A sample of the BEIR data set of the same name, for quick results that are not comparable with BEIR's. "
        "The split is called train; "
        "nothing is trained on it.",
    )
