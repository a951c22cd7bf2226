"""Results as metadata for the Hugging Face Hub and as result files of mteb.

``model-index`` is metadata in the README of a model, ``.eval_results`` are files for leaderboards, and mteb's files can be read by the
tools for mteb. All name data sets by their id on the Hub if there is one; the latter two hold only collections that mteb has a task for.
The revision that was scored may be of another copy of the data, such as BEIR's archive: it is recorded in arguments, notes and
``dataset_revision``, never as the revision of the data set on the Hub. mteb did not make the scores, so that ``mteb_version`` is null.

A collection has a task only if texts and judgements are those of mteb. CoIR's sets have none, because mteb puts titles before the texts and
CoIR leaves them out; cosqa has none either: mteb's version has duplicates, Quiver's has not, and the scores differ by a factor of 2. A
score is not mteb's either if only one of the two drops the document with the query's own id: mteb does so for FiQA, FEVER and MS MARCO,
BEIR, whose published numbers a collection's policy follows, does not.

Sources: huggingface_hub's ``EvalResult`` and ``EvalResultEntry``; ``mteb.results.TaskResult`` and the task names, ids and units of mteb
2.26 (fractions in ``model-index``, points in ``.eval_results``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_target, write_json, write_text
from quiver.eval.datasets.benchmarks import registry
from quiver.eval.metrics import grouped, is_whole
from quiver.eval.report.compare import LABELS
from quiver.eval.results import HEADLINE, CollectionResult, Results, index_name, read_results


@dataclass(frozen=True)
class Task:
    """mteb's task for a collection."""

    name: str
    data_set: str
    subset: str = "default"
    languages: tuple[str, ...] = ("eng-Latn",)
    exclude_self: bool = False


_FORUMS = [
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
]  # and android
_CODE = ("go", "java", "javascript", "php", "python", "ruby")
# fmt: off
_LANGUAGES: Mapping[str, str] = {
    "ar": "ara-Arab", "de": "deu-Latn", "en": "eng-Latn", "es": "spa-Latn", "fr": "fra-Latn", "hi": "hin-Deva", "it": "ita-Latn",
    "ja": "jpn-Jpan", "ko": "kor-Hang", "pt": "por-Latn", "ru": "rus-Cyrl", "th": "tha-Thai", "zh": "cmn-Hans",
}
_NANO: Mapping[str, str] = {
    "arguana": "ArguAna", "climate-fever": "ClimateFever", "dbpedia-entity": "DBPedia", "fever": "FEVER", "fiqa": "FiQA2018",
    "hotpotqa": "HotpotQA", "msmarco": "MSMARCO", "nfcorpus": "NFCorpus", "nq": "NQ", "quora": "Quora", "scidocs": "SCIDOCS",
    "scifact": "SciFact", "webis-touche2020": "Touche2020",
}
# fmt: on

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
    # The first of the twelve forums follows another naming scheme on the Hub.
    "cqadupstack-android": Task("CQADupstackAndroidRetrieval", "mteb/CQADupstackAndroidRetrieval"),
    **{f"cqadupstack-{each}": Task(f"CQADupstack{each.capitalize()}Retrieval", f"mteb/cqadupstack-{each}") for each in _FORUMS},
    **{f"mldr-{key}": Task("MultiLongDocRetrieval", "mteb/MultiLongDocRetrieval", key, (name,)) for key, name in _LANGUAGES.items()},
    **{f"mteb-codesearchnet-{key}": Task("CodeSearchNetRetrieval", "mteb/CodeSearchNetRetrieval", key, (f"{key}-Code",)) for key in _CODE},
    **{f"nano-{key}": Task(f"Nano{name}Retrieval", f"mteb/Nano{name}Retrieval") for key, name in _NANO.items()},
}
"""Collection -> mteb's task."""

AGGREGATES: Mapping[str, str] = {"cqadupstack": "CQADupstackRetrieval"}
"""Group of collections -> mteb's task for its mean."""

HUB = "https://huggingface.co/datasets/"


def task_of(collection: CollectionResult) -> Task | None:
    """Mteb's task for a scored collection; None if there is none, or if mteb scores the collection in another way.

    mteb always uses titles, and it has a policy on the query's own document for each task. A local folder must have the size of the
    published collection.
    """
    task = TASKS.get(collection.name)
    if task is None or not collection.use_title or collection.exclude_self != task.exclude_self:
        return None
    return task if collection.revision is not None or _has_published_size(collection) else None


def hub_id(collection: CollectionResult) -> str | None:
    """Id of the collection's data set on the Hub; None if no such data set is known."""
    task = task_of(collection)
    if task is not None:
        return task.data_set
    urls = [entry.source.url for entry in registry().values() if entry.name == collection.name and collection.revision is not None]
    return next((url.removeprefix(HUB) for url in urls if url.startswith(HUB)), None)


def _has_published_size(collection: CollectionResult) -> bool:
    for entry in registry().values():
        if entry.name == collection.name:
            queries = entry.metadata.queries if entry.split == collection.split else collection.queries
            return (collection.documents, collection.queries) == (entry.metadata.documents, queries)
    return False


NAMES: Mapping[str, str] = {
    each: each.replace("p@", "precision@").replace("@", "_at_")
    for each in ("ndcg@10", "mrr@10", "recall@10", "recall@100", "recall@1000", "p@10")
}
"""Measure -> mteb's name. MAP is not in it: mteb's is over 1,000 documents, Quiver's over the documents kept."""

MAP_DEPTH = 1000  # of mteb's map_at_1000


def without_task(results: Results) -> list[str]:
    """The collections that `task_results` leaves out, see `task_of`."""
    return [collection.key for collection in results.collections if task_of(collection) is None]


def task_results(results: Results) -> Mapping[str, dict[str, object]]:
    """Make the files of mteb: file name -> content, one file per task; the subsets of a task, such as MLDR's languages, share a file."""
    known = [(collection, task) for collection in results.collections if (task := task_of(collection)) is not None]
    if not known:
        without = ", ".join(map(repr, without_task(results))) or "there are no collections"
        raise InputError(f"mteb has no task for these collections, or uses another measure for them: {without}")
    by_task: dict[str, list[tuple[CollectionResult, Task]]] = {}
    for collection, task in known:
        by_task.setdefault(task.name, []).append((collection, task))
    files = {f"{name}.json": _task_file(name, members, results) for name, members in by_task.items()}
    for group, name in AGGREGATES.items():
        tasks = {collection.key: (collection, task) for collection, task in known if collection.group == group}
        wholes = [parts for parts in grouped(collection.part() for collection, _ in tasks.values()).values() if is_whole(parts)]
        if wholes:
            files[f"{name}.json"] = _mean_file(name, [[tasks[part.key] for part in parts] for parts in wholes], results)
    return files


def _task_file(name: str, members: Sequence[tuple[CollectionResult, Task]], results: Results) -> dict[str, object]:
    scores: dict[str, list[dict[str, object]]] = {}
    for collection, task in members:
        scores.setdefault(collection.split, []).append(_subset_scores(_mteb_measures(collection), task))
    return _file_content(name, scores, [collection for collection, _ in members], results)


def _mean_file(name: str, wholes: Sequence[Sequence[tuple[CollectionResult, Task]]], results: Results) -> dict[str, object]:
    """The means over a group, for each split in which it is whole."""
    scores = {}
    for parts in wholes:
        first, task = parts[0]
        measures = [_mteb_measures(collection) for collection, _ in parts]
        shared = [key for key in measures[0] if all(key in each for each in measures)]
        means = {key: math.fsum(each[key] for each in measures) / len(measures) for key in shared}
        scores[first.split] = [_subset_scores(means, task)]
    return _file_content(name, scores, [collection for parts in wholes for collection, _ in parts], results)


def _file_content(name: str, scores: Mapping[str, object], members: Sequence[CollectionResult], results: Results) -> dict[str, object]:
    return {
        "dataset_revision": ", ".join(dict.fromkeys(_revision(collection) for collection in members)),
        "task_name": name,
        "mteb_version": None,
        "scores": scores,
        "evaluation_time": math.fsum(seconds for collection in members for seconds in collection.seconds.values()),
        "kg_co2_emissions": None,
        "date": results.provenance.date,
    }


def _subset_scores(measures: Mapping[str, float], task: Task) -> dict[str, object]:
    return {**measures, "main_score": measures[NAMES[HEADLINE]], "hf_subset": task.subset, "languages": list(task.languages)}


def _mteb_measures(collection: CollectionResult) -> dict[str, float]:
    found = {theirs: collection.measures[ours] for ours, theirs in NAMES.items() if ours in collection.measures}
    if collection.k == MAP_DEPTH and "map" in collection.measures:
        found["map_at_1000"] = collection.measures["map"]
    return found


def _revision(collection: CollectionResult) -> str:
    """Revision of the data; for a local folder, the checksum of its texts and judgements."""
    return collection.revision or f"sha256:{collection.data_sha256}"


TASK_TYPE = "text-retrieval"  # the Hub's name of the task
DIGITS = 5  # decimals of a value, as in mteb


def render_model_index(results: Results, *, name: str | None = None) -> str:
    """Make YAML front matter for the README of a model: every measure of every collection, as fractions."""
    entries = [entry for collection in results.collections for entry in _model_index_entries(collection)]
    if not entries:
        raise InputError("nothing to publish: the results hold no collection")
    model = name or results.system.source.rstrip("/").rpartition("/")[2] or results.system.source
    index = eval_results_to_model_index(model, entries)
    return f"---\n{_dump({'model-index': index})}---\n"


def is_card(text: str) -> bool:
    """Whether a text is exactly what `render_model_index` or `render_eval_results` writes.

    A README that begins with metadata is not, nor is metadata with further fields or comments: overwriting it would lose them.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # not YAML, an impossible date, deep nesting
        return False
    match documents:
        case [{"model-index": list(), **others} as index, None] if not others:
            return text == f"---\n{_dump(index)}---\n"
        case [[{"dataset": dict(), "value": float()}, *_] as entries]:
            return text == _dump(entries)
    return False


def _dump(content: object) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _model_index_entries(collection: CollectionResult) -> Iterator[EvalResult]:
    task = task_of(collection)
    for measure, label in LABELS.items():
        if measure in collection.measures:
            yield EvalResult(
                task_type=TASK_TYPE,
                task_name="Retrieval",
                dataset_type=hub_id(collection) or collection.name,
                dataset_name=collection.name if task is None else f"{task.name} ({task.subset})",
                dataset_config=None if task is None else task.subset,
                dataset_split=collection.split or None,
                dataset_args={"data": _revision(collection)},
                metric_type=NAMES.get(measure, measure),
                metric_name=label,
                metric_value=round(collection.measures[measure], DIGITS),
            )


def render_eval_results(results: Results, *, source_url: str | None = None) -> str:
    """Make ``.eval_results/<any name>.yaml`` of a model's repository: nDCG@10 in points, one entry per collection."""
    known = [(collection, task) for collection in results.collections if (task := task_of(collection)) is not None]
    if not known:
        raise InputError("none of the collections is a data set on the Hub, and this format supports only those")
    entries = [_eval_result(collection, task, results, source_url) for collection, task in known]
    return _dump(entries)


def _eval_result(collection: CollectionResult, task: Task, results: Results, source_url: str | None) -> dict[str, object]:
    documents = f"{collection.documents:,} documents{collection.named_by}"
    made = f"{LABELS[HEADLINE]}, {index_name(collection.index)}, {documents}, data {_revision(collection)}"
    version = f"Quiver {results.provenance.versions.get('quiver', '')}".rstrip()
    entry: dict[str, object] = {
        "dataset": {"id": task.data_set, "task_id": f"{task.name}_{task.subset}_{collection.split}"},
        "value": round(100 * collection.measures[HEADLINE], DIGITS),
        "date": results.provenance.date,
        "notes": f"{made}; {version}",
    }
    if source_url is not None:
        entry["source"] = {"url": source_url}
    return entry


CARDS: Mapping[str, Callable[[Results], str]] = {"model-index": render_model_index, "eval-results": render_eval_results}
"""Kind of metadata -> its renderer."""

YAML = (".yaml", ".yml")
"""Suffixes of metadata files."""


def write_card(folder: str | Path, out: str | Path, *, kind: str = "model-index") -> None:
    """Write the results of one system as metadata for the Hugging Face Hub. Only a file of such metadata is overwritten."""
    if kind not in CARDS:
        raise InputError(f"unknown kind of metadata {kind!r}; choose one of {', '.join(CARDS)}")
    target = Path(out)
    check_target(target)
    if target.suffix.lower() not in YAML:
        raise InputError(f"{target}: the name of a metadata file must end in {' or '.join(YAML)}; choose another output file")
    if target.exists() and not _holds_card(target):
        raise InputError(
            f"{target} exists and holds something other than Quiver's metadata; choose another output file, or delete it first"
        )
    write_text(target, CARDS[kind](read_results(folder)))


def _holds_card(path: Path) -> bool:
    try:
        return is_card(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise InputError(f"{path} exists but cannot be read ({error.strerror}); choose another output file, or delete it first") from error


def write_mteb(folder: str | Path, out: str | Path) -> tuple[list[Path], list[str]]:
    """Write the results of one system as result files of mteb."""
    results = read_results(folder)
    contents = task_results(results)
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror})") from error
    for name, content in contents.items():
        write_json(target / name, content)
    return [target / name for name in contents], without_task(results)
