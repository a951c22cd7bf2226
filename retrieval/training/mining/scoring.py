"""Teacher scores for the rows of a training file: the same rows, each with one score for each of its documents.

    OUT/train.jsonl.gz    the rows with the field ``scores``
    OUT/scoring.json      which teacher, how, and what its scores look like; written last

Rows are scored in parts that are kept on the disk: a run that is killed goes on where it was, and ends with the same files. Of several
teachers each scores all rows before the next one begins.

Shapes: R rows, B pairs of a part.
Source of min-max normalised teacher scores: JaColBERTv2.5, arXiv:2407.20750.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.training.mining.ensemble import Ensemble, min_max
from quiver.retrieval.training.mining.scoring_data import ScoringData, read_again, read_scoring_data, row_line
from quiver.retrieval.training.mining.teachers import Teacher
from quiver.retrieval.training.mining.work_folder import WorkFolder, open_work
from quiver.retrieval.training.sections import DataSection
from quiver.retrieval.versions import installed_version

SCHEMA = "quiver-scoring/1"
RECORD, ROWS = "scoring.json", "train.jsonl.gz"
"""What a run leaves in its folder."""

# Pairs of a part: less than a minute of a small cross-encoder on two CPU cores.
_PAIRS = 4096


NORMALISERS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {"none": lambda scores: scores, "minmax": min_max}
"""How the scores of a row are written."""


def score_rows(
    section: DataSection,
    teacher: Teacher | Ensemble,
    out: Path,
    *,
    normalize: str = "none",
    cache: Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Score the rows of a source into a folder.

    Args:
        section: Where the rows lie and which of their fields are what, as in a recipe; its ``format`` is texts or ids.
        teacher: Gives the scores; of an ensemble each member in turn.
        out: The folder to write.
        normalize: A key of ``NORMALISERS``.
        cache: Folder that keeps vectors for the next time; None keeps none.
        overwrite: Begin anew, whatever is in ``out``.
        progress: Show bars.
        command: The command line to record.

    Returns:
        What ``scoring.json`` holds.

    Raises:
        InputError: The rows or the teacher cannot be used, a score is not finite, or ``out`` is taken.
    """
    started = time.perf_counter()
    if normalize not in NORMALISERS:
        raise InputError(f"scores are normalised by one of {', '.join(NORMALISERS)}, got {normalize!r}")
    members = teacher.members if isinstance(teacher, Ensemble) else (teacher,)
    # Not the weights: what is kept are the scores before them, so that a run may go on with others.
    settings = {"teacher": teacher.description["fingerprint"], "normalize": normalize, "rows": _named_fields(section)}
    with open_work(out, RECORD, SCHEMA, settings=settings, overwrite=overwrite) as work:
        data = read_scoring_data(section, work.fresh("texts"))
        work.agree(data=data.sha256)
        parts = _parts(data.ends)
        pairs = int(data.ends[-1])
        sizes = [int(data.ends[part.stop] - data.ends[part.start]) for part in parts]
        for place, member in enumerate(members):
            first = place * len(parts)  # the parts of one teacher behind those of another
            missing = {number: part for number, part in enumerate(parts) if not work.has(first + number)}
            if not missing:
                continue
            with member.scorer(data, cache=cache, progress=progress) as score:
                label = "scoring" if len(members) == 1 else f"scoring, teacher {place + 1} of {len(members)}"
                with progress_bar(label, pairs, enabled=progress) as advance:
                    advance(pairs - sum(sizes[number] for number in missing))
                    for number, scores in score(missing):
                        work.write(first + number, _checked(scores, section, parts[number], data.ends).tobytes())
                        advance(sizes[number])
        result = _write(section, data, _row_scores(work, parts, data.ends, teacher, members=len(members)), out, NORMALISERS[normalize])
        record = {
            "schema": SCHEMA,
            "command": command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: installed_version(name) for name in ("quiver-retrieval", "torch", "numpy", "sentence-transformers")},
            **settings,
            "teacher": dict(teacher.description),
            "data": {"sha256": data.sha256},
            "result": result,
            "seconds": round(time.perf_counter() - started, 1),
        }
        work.finish(RECORD, record)
    return record


def _named_fields(section: DataSection) -> dict[str, Any]:
    """What of a section decides which texts are scored."""
    names = (
        "train",
        "format",
        "query_field",
        "document_fields",
        "queries",
        "documents",
        "query_id_field",
        "document_id_field",
        "text_field",
    )
    fields = section.model_dump()
    return {name: fields[name] for name in names}


def _parts(ends: NDArray[np.int64]) -> list[slice]:
    """Runs of rows with at most ``_PAIRS`` pairs together, one row at least."""
    parts: list[slice] = []
    first, rows = 0, len(ends) - 1
    while first < rows:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _PAIRS, side="right")) - 1)
        parts.append(slice(first, last))
        first = last
    return parts


def _checked(scores: NDArray[np.float32], section: DataSection, rows: slice, ends: NDArray[np.int64]) -> NDArray[np.float32]:
    if not np.isfinite(scores).all():
        pair = int(ends[rows.start]) + int(np.isfinite(scores).argmin())
        row = int(np.searchsorted(ends, pair, side="right"))
        raise InputError(f"{', '.join(section.train)}: row {row}: the teacher's score is not finite; the model cannot be used on it")
    return np.ascontiguousarray(scores, "<f4")


def _row_scores(
    work: WorkFolder, parts: list[slice], ends: NDArray[np.int64], teacher: Teacher | Ensemble, *, members: int
) -> Iterator[NDArray[np.float64]]:
    """The scores of each row, in order."""
    for number, part in enumerate(parts):
        inner = ends[part.start + 1 : part.stop] - ends[part.start]
        kept = [np.frombuffer(work.read(place * len(parts) + number), "<f4") for place in range(members)]
        for scores in zip(*(np.split(one, inner) for one in kept), strict=True):
            together = teacher.together(scores) if isinstance(teacher, Ensemble) else scores[0].astype(np.float64)
            if not np.abs(together).max() <= np.finfo(np.float32).max:
                raise InputError("the weights of the teachers make scores that float32 cannot hold; run it again with smaller ones")
            yield together


def _write(
    section: DataSection,
    data: ScoringData,
    scores: Iterator[NDArray[np.float64]],
    out: Path,
    normalise: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> dict[str, Any]:
    """Write the rows once more with their scores; what came of them, for the record."""
    best, positives, everything, lowest, highest = 0, 0.0, 0.0, np.inf, -np.inf
    rows = read_again(section, data)
    with atomic_file(out / ROWS) as file:
        for (place, row), raw in zip(rows, scores, strict=True):
            values = [float(f"{score:.9g}") for score in normalise(raw).tolist()]
            file.write(row_line(place, row, values).encode("utf-8") + b"\n")
            best += bool(raw.argmax() == 0)
            positives += float(raw[0])
            everything += float(raw.sum(dtype=np.float64))
            lowest, highest = min(lowest, float(raw.min())), max(highest, float(raw.max()))
    count, pairs = len(data), int(data.ends[-1])
    means = {"positive": positives / count, "others": (everything - positives) / max(pairs - count, 1)}
    return {
        "rows": count,
        "pairs": pairs,
        "positive_first": best,
        "mean_scores": {name: round(mean, 6) for name, mean in means.items()},
        "lowest": lowest,
        "highest": highest,
    }
