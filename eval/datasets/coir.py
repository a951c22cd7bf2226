"""Code collections: CodeSearchNet and StackOverflow-QA of CoIR, and mteb's CodeSearchNet, a different task with the same name.

In CoIR's CodeSearchNet a query is a function, and the documents are all comments of its language. In mteb's, a query is a comment, and the
documents are a thousand functions. CoIR leaves titles out and mteb puts them before the texts; scores differ widely where titles exist.
Each entry follows the convention of the published results. Ids of queries and documents differ in both, so ``exclude_self`` has no
effect.

Source: arXiv:2407.02883; layouts of https://huggingface.co/CoIR-Retrieval and https://huggingface.co/mteb; numbers, licences and
revisions from mteb 2.26, which holds all of CoIR's CodeSearchNet in one repository (the second source here, and the one with a fixed
revision).
"""

from __future__ import annotations

from quiver.eval.datasets.beir import mteb_tables
from quiver.eval.datasets.metadata import Entry, Metadata
from quiver.eval.datasets.sources import HubTable, HubTables, Source

_COIR_CODESEARCHNET = ("CoIR-Retrieval/CodeSearchNet", "4adc7bc41202b5c13543c9c886a25f340634dab3")
_MTEB_CODESEARCHNET = ("mteb/CodeSearchNetRetrieval", "68e8f0731a656fa4bd5b7c81936d95ad48a39bfe")
_MTEB_STACKOVERFLOW = ("mteb/StackOverflowQA", "7b46f5ebd2365278c1bb025986dda2fee893bbf5")
_TOUCHE_V3 = ("mteb/webis-touche2020-v3", "431886eaecc48f067a3975b70d0949ea2862463c")

# Language, documents and queries in CoIR; mteb's version has 1,000 of each.
_LANGUAGES = (
    ("python", 280_310, 14_918),
    ("javascript", 64_854, 3_291),
    ("go", 182_440, 8_122),
    ("ruby", 27_570, 1_261),
    ("java", 180_866, 10_955),
    ("php", 267_725, 14_014),
)

_SPLITS = ("test", "valid", "train")


def coir() -> tuple[Entry, ...]:
    """Entries of CoIR: six languages of CodeSearchNet, and StackOverflow-QA."""
    return (*(_coir_codesearchnet(*row) for row in _LANGUAGES), _stackoverflow())


def mteb() -> tuple[Entry, ...]:
    """Entries that only mteb publishes: its CodeSearchNet, and version 3 of Touche-2020."""
    return (*(_mteb_codesearchnet(language) for language, _, _ in _LANGUAGES), _touche())


def coir_tables(unit: str, task: str) -> HubTables:
    """Tables of a CoIR task: corpus and queries as two splits of one repository, the judgements of all splits in another."""
    texts = f"CoIR-Retrieval/{task}-queries-corpus"
    return HubTables(
        unit,
        HubTable(texts, ("default",), "corpus", ("data/corpus-*.parquet",)),
        HubTable(texts, ("default",), "queries", ("data/queries-*.parquet",)),
        HubTable(f"CoIR-Retrieval/{task}-qrels", ("default",), "{split}", ("data/{split}-*.parquet",)),
        _SPLITS,
    )


def _coir_codesearchnet(language: str, documents: int, queries: int) -> Entry:
    key = f"coir/codesearchnet/{language}"
    tables = coir_tables(f"{key}/coir", f"CodeSearchNet-{language}")
    sources: dict[str, Source] = {"coir": tables, "mteb": mteb_tables(f"{key}/mteb", *_COIR_CODESEARCHNET, _SPLITS, f"{language}-")}
    return Entry(
        key,
        f"coir-codesearchnet-{language}",
        "test",
        _SPLITS,
        sources,
        Metadata("mit", tables.revision, tables.url, documents, queries, "coir-codesearchnet", len(_LANGUAGES)),
        use_title=False,
        note="Code to comment: the query is a function, the documents are comments. One of six languages; CodeSearchNet in CoIR is their "
        "mean. Titles are left away, as CoIR does. Not mteb/codesearchnet, which is comment to code among 1,000.",
    )


def _stackoverflow() -> Entry:
    key, documents, queries = "coir/stackoverflow-qa", 19_931, 1_994
    tables = coir_tables(f"{key}/coir", "stackoverflow-qa")
    sources: dict[str, Source] = {"coir": tables, "mteb": mteb_tables(f"{key}/mteb", *_MTEB_STACKOVERFLOW, ("test",))}
    return Entry(
        key,
        "coir-stackoverflow-qa",
        "test",
        _SPLITS,
        sources,
        Metadata("mit", tables.revision, tables.url, documents, queries),
        use_title=False,
        note="Question to answer; many queries are longer than 512 tokens. Titles are left away, as CoIR does; mteb's StackOverflowQA puts "
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
        Metadata("mit", tables.revision, tables.url, 1_000, 1_000, "mteb-codesearchnet", len(_LANGUAGES)),
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
        Metadata("cc-by-sa-4.0", tables.revision, tables.url, documents, queries),
        note="Version 3 of Touche-2020: short arguments removed from the corpus, holes in the judgements filled. Not the one in BEIR's "
        "paper and tables, which is beir/webis-touche2020.",
    )
