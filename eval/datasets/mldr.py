"""MLDR: long documents in thirteen languages; each query has one relevant document and is searched in all documents of its language.

The same collection serves for in-domain and out-of-domain evaluation. Only the caller knows whether the model was trained on MLDR's own
training pairs, and has to say so.

Source: arXiv:2402.03216; file names from the repository's loading script, which is not executed; numbers of documents and queries and the
licence from mteb 2.26; the revision is the one that public pipelines pin.
"""

from __future__ import annotations

from quiver.eval.datasets.metadata import Entry, Metadata
from quiver.eval.datasets.sources import HubTable, HubTables
from quiver.retrieval.data.corpus import Columns

_REPOSITORY = "Shitao/MLDR"
_REVISION = "d67138e705d963e346253a80e59676ddb418810a"

# Language, documents, queries of the test split; the dev split has 200 queries in every language.
_LANGUAGES = (
    ("ar", 7_607, 200),
    ("de", 10_000, 200),
    ("en", 200_000, 800),
    ("es", 9_551, 200),
    ("fr", 10_000, 200),
    ("hi", 3_806, 200),
    ("it", 10_000, 200),
    ("ja", 10_000, 200),
    ("ko", 6_176, 200),
    ("pt", 6_569, 200),
    ("ru", 10_000, 200),
    ("th", 10_000, 200),
    ("zh", 200_000, 800),
)


def mldr() -> tuple[Entry, ...]:
    """Entries of MLDR, one per language."""
    return tuple(_entry(*row) for row in _LANGUAGES)


def _entry(language: str, documents: int, queries: int) -> Entry:
    key, folder, splits = f"mldr/{language}", f"mldr-v1.0-{language}", ("test", "dev")
    tables = HubTables(
        f"{key}/hub",
        HubTable(_REPOSITORY, (f"corpus-{language}",), "corpus", (f"{folder}/corpus.jsonl.gz",)),
        HubTable(_REPOSITORY, (language,), "{split}", (f"{folder}/{{split}}.jsonl.gz",)),
        HubTable(_REPOSITORY, (), "{split}", (f"qrels/qrels.{folder}-{{split}}.tsv",)),
        splits,
        {_REPOSITORY: _REVISION},
        document_columns=Columns(("docid",)),
        query_columns=Columns(("query_id",), "query"),
    )
    return Entry(
        key,
        f"mldr-{language}",
        "test",
        splits,
        {"hub": tables},
        Metadata("mit", _REVISION, tables.url, documents, queries),
        note=f"All {documents:,} documents are searched, not only the relevant ones. Out-of-domain, or in-domain for a model trained on "
        "MLDR's training pairs. The documents have no titles.",
    )
