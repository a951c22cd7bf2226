"""Our collections by the names that others give them: mteb's task and subset, and the data set on the Hugging Face Hub.

A collection has a task only where the texts and judgements are the same as mteb's, so that a score may carry its name. Left out on
purpose are CoIR's sets, whose titles mteb puts before the texts and CoIR leaves away, and cosqa: ours is free of duplicates, mteb's is
not, and the scores differ by a factor of two. Nor is a score mteb's where only one of us drops the document with the query's own id:
mteb does so for FiQA, FEVER and MS MARCO, and BEIR, whose numbers a collection's policy is for, does not.

Source: metadata of mteb 2.26.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quiver.eval.datasets.registry import registry
from quiver.eval.results import CollectionResult


@dataclass(frozen=True)
class Task:
    """What mteb calls a collection.

    Attributes:
        name: Of the task.
        data_set: Its data set on the Hub.
        subset: Of the data set.
        languages: Of the texts, as ISO 639-3 and ISO 15924; a programming language has the script ``Code``.
        exclude_self: A document with the query's own id is dropped (mteb's ``ignore_identical_ids``).
    """

    name: str
    data_set: str
    subset: str = "default"
    languages: tuple[str, ...] = ("eng-Latn",)
    exclude_self: bool = False


_FORUMS = (
    "android",
    "english",
    "gaming",
    "gis",
    "mathematica",
    "physics",
    "programmers",
    "stats",
    "tex",
    "unix",
    "webmasters",
    "wordpress",
)

_LANGUAGES: Mapping[str, str] = {
    "ar": "ara-Arab",
    "de": "deu-Latn",
    "en": "eng-Latn",
    "es": "spa-Latn",
    "fr": "fra-Latn",
    "hi": "hin-Deva",
    "it": "ita-Latn",
    "ja": "jpn-Jpan",
    "ko": "kor-Hang",
    "pt": "por-Latn",
    "ru": "rus-Cyrl",
    "th": "tha-Thai",
    "zh": "cmn-Hans",
}

_CODE = ("go", "java", "javascript", "php", "python", "ruby")

_NANO: Mapping[str, str] = {
    "arguana": "ArguAna",
    "climate-fever": "ClimateFever",
    "dbpedia-entity": "DBPedia",
    "fever": "FEVER",
    "fiqa": "FiQA2018",
    "hotpotqa": "HotpotQA",
    "msmarco": "MSMARCO",
    "nfcorpus": "NFCorpus",
    "nq": "NQ",
    "quora": "Quora",
    "scidocs": "SCIDOCS",
    "scifact": "SciFact",
    "webis-touche2020": "Touche2020",
}

TASKS: Mapping[str, Task] = {
    "nfcorpus": Task("NFCorpus", "mteb/nfcorpus"),
    "scifact": Task("SciFact", "mteb/scifact"),
    "trec-covid": Task("TRECCOVID", "mteb/trec-covid"),
    "fiqa": Task("FiQA2018", "mteb/fiqa", exclude_self=True),
    "arguana": Task("ArguAna", "mteb/arguana", exclude_self=True),
    "climate-fever": Task("ClimateFEVER", "mteb/climate-fever"),
    "dbpedia-entity": Task("DBPedia", "mteb/dbpedia"),
    "fever": Task("FEVER", "mteb/fever", exclude_self=True),
    "hotpotqa": Task("HotpotQA", "mteb/hotpotqa"),
    "msmarco": Task("MSMARCO", "mteb/msmarco", exclude_self=True),
    "nq": Task("NQ", "mteb/nq"),
    "quora": Task("QuoraRetrieval", "mteb/quora", exclude_self=True),
    "scidocs": Task("SCIDOCS", "mteb/scidocs"),
    "webis-touche2020": Task("Touche2020", "mteb/touche2020"),
    "webis-touche2020-v3": Task("Touche2020Retrieval.v3", "mteb/webis-touche2020-v3"),
    # The first of the twelve has another name on the Hub than the others.
    "cqadupstack-android": Task("CQADupstackAndroidRetrieval", "mteb/CQADupstackAndroidRetrieval"),
    **{
        f"cqadupstack-{forum}": Task(f"CQADupstack{forum.capitalize()}Retrieval", f"mteb/cqadupstack-{forum}")
        for forum in _FORUMS
        if forum != "android"
    },
    **{f"mldr-{key}": Task("MultiLongDocRetrieval", "mteb/MultiLongDocRetrieval", key, (name,)) for key, name in _LANGUAGES.items()},
    **{f"mteb-codesearchnet-{key}": Task("CodeSearchNetRetrieval", "mteb/CodeSearchNetRetrieval", key, (f"{key}-Code",)) for key in _CODE},
    **{f"nano-{key}": Task(f"Nano{name}Retrieval", f"mteb/Nano{name}Retrieval") for key, name in _NANO.items()},
}
"""Collection -> mteb's task."""

AGGREGATES: Mapping[str, str] = {"cqadupstack": "CQADupstackRetrieval"}
"""Group -> mteb's task for the mean of it."""

HUB = "https://huggingface.co/datasets/"
"""Where data sets on the Hub are."""


def task_of(collection: CollectionResult) -> Task | None:
    """The task of a scored collection; None where there is none, or where what was scored is not what mteb scores.

    That is so without titles, which mteb always uses, where the query's own document was dropped and mteb keeps it or the other way
    round, and for a local folder that only has the name: its size must be the published one.
    """
    task = TASKS.get(collection.name)
    if task is None or not collection.use_title or collection.exclude_self != task.exclude_self:
        return None
    return task if collection.revision is not None or _has_published_size(collection) else None


def hub_id(collection: CollectionResult) -> str | None:
    """The collection's data set on the Hub; None where it is on none that we know of."""
    task = task_of(collection)
    if task is not None:
        return task.data_set
    urls = [entry.origin.url for entry in registry().values() if entry.name == collection.name and collection.revision is not None]
    return next((url.removeprefix(HUB) for url in urls if url.startswith(HUB)), None)


def _has_published_size(collection: CollectionResult) -> bool:
    for entry in registry().values():
        if entry.name == collection.name:
            queries = entry.facts.queries if entry.split == collection.split else collection.queries
            return (collection.documents, collection.queries) == (entry.facts.documents, queries)
    return False
