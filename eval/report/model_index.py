"""Results as metadata of a model on the Hugging Face Hub: ``model-index`` for its README, and ``.eval_results`` for leaderboards.

Both name data sets by their id on the Hub where there is one; ``.eval_results`` can hold no others, and holds those that mteb has a
task for. The revision that was scored is not given as that data set's, for it may be of another copy (BEIR's archive): it stands in the
arguments and the notes.

Source: huggingface_hub's ``EvalResult`` and ``EvalResultEntry``; task names, task ids and units (fractions in the first, points in
the second) are as mteb 2.26 writes them, so that ours stand beside theirs.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from quiver.encoder.errors import InputError
from quiver.eval.report.mteb_json import NAMES
from quiver.eval.report.systems import LABELS, index_name
from quiver.eval.report.tasks import Task, hub_id, task_of
from quiver.eval.results import HEADLINE, CollectionResult, Results

TASK_TYPE = "text-retrieval"
"""The Hub's name for what was done."""

DIGITS = 5
"""Decimals of a value, as mteb and trec_eval's users write it."""


def render_model_index(results: Results, *, name: str | None = None) -> str:
    """YAML front matter for the README of a model: every measure of every collection, as fractions.

    Args:
        results: One system.
        name: Of the model; by default the end of its source.

    Raises:
        InputError: There is no collection.
    """
    entries = [entry for collection in results.collections for entry in _entries(collection)]
    if not entries:
        raise InputError("there is nothing to publish: the results hold no collection")
    model = name or results.system.source.rstrip("/").rpartition("/")[2] or results.system.source
    index = eval_results_to_model_index(model, entries)
    return f"---\n{_dump({'model-index': index})}---\n"


def is_card(text: str) -> bool:
    """Whether a text is what `render_model_index` or `render_eval_results` writes, to the letter.

    A README with metadata at its top is none, nor is metadata that somebody put a field or a comment into: there is more in it.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # not YAML, a date that is none, a thousand brackets
        return False
    match documents:
        case [{"model-index": list(), **others} as index, None] if not others:
            return text == f"---\n{_dump(index)}---\n"
        case [[{"dataset": dict(), "value": float()}, *_] as entries]:
            return text == _dump(entries)
    return False


def _dump(content: object) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def _entries(collection: CollectionResult) -> Iterator[EvalResult]:
    task = task_of(collection)
    for measure, label in LABELS.items():
        if measure in collection.measures:
            yield EvalResult(
                task_type=TASK_TYPE,
                task_name="Retrieval",
                dataset_type=hub_id(collection) or collection.name,
                dataset_name=collection.name if task is None else f"{task.name} ({task.subset})",
                dataset_config=None if task is None else task.subset,
                dataset_split=collection.split,
                dataset_args={"data": _data(collection)},
                metric_type=NAMES.get(measure, measure),
                metric_name=label,
                metric_value=round(collection.measures[measure], DIGITS),
            )


def render_eval_results(results: Results, *, source_url: str | None = None) -> str:
    """The content of ``.eval_results/<any name>.yaml`` in a model's repository: nDCG@10 in points, one entry a collection.

    Args:
        results: One system. Collections without a task of mteb's are left out, see `quiver.eval.report.mteb_json.without_task`.
        source_url: Where the whole report is.

    Raises:
        InputError: No collection is a data set on the Hub.
    """
    known = [(collection, task) for collection in results.collections if (task := task_of(collection)) is not None]
    if not known:
        raise InputError("none of the collections is a data set on the Hub that this format could name")
    entries = [_entry(collection, task, results, source_url) for collection, task in known]
    return _dump(entries)


def _entry(collection: CollectionResult, task: Task, results: Results, source_url: str | None) -> dict[str, object]:
    made = f"{LABELS[HEADLINE]}, {index_name(collection.index)}, {collection.documents:,} documents, data {_data(collection)}"
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


def _data(collection: CollectionResult) -> str:
    return collection.revision or f"sha256:{collection.data_sha256}"
