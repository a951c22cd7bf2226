"""A benchmark of indexes from vectors to its record.

A system that is finished is written down, and not measured again when a run is started again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import numpy as np

from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.benchmark import load_average, processor
from quiver.eval.bench.encoder.results import NotRun, Spread
from quiver.eval.bench.index.measuring import Measuring, Running, Subject
from quiver.eval.bench.index.results import (
    IndexBenchmark,
    IndexSettings,
    PointResult,
    SystemResult,
    Throughput,
    read_system,
    write_system,
)
from quiver.eval.bench.index.systems import LIBRARIES, NOT_COMPARED, System, unsupported_reason
from quiver.eval.bench.index.truth import Exact, exact_search, load_exact, ndcg, recall, save_exact
from quiver.eval.bench.index.vectors import VectorFolder
from quiver.eval.provenance import provenance
from quiver.retrieval.versions import installed_version

DEFAULTS = Running()
"""How a benchmark is run if nobody says otherwise."""


def bench_index(
    vectors: VectorFolder,
    systems: Sequence[System],
    settings: IndexSettings,
    *,
    work: Path,
    names: tuple[str, str | None],
    command: str | None = None,
    running: Running = DEFAULTS,
) -> IndexBenchmark:
    """Measure indexes on vectors.

    Args:
        vectors: The documents and queries.
        systems: What is measured; names differ. One whose library is not installed is told of, and left out.
        settings: How to run.
        work: A folder for indexes and for what is finished; made if it is missing.
        names: Of the data and of the model, for the report.
        command: The command line to record.
        running: How it is run beside that.

    Raises:
        InputError: The vectors are damaged, or nothing could be measured.
        ValueError: Two systems have one name, or a setting is too small.
    """
    _check(systems, settings, running)
    vectors.check()
    load, fingerprint = load_average(), vectors.fingerprint()
    not_run = [NotRun(name, reason) for name, reason in NOT_COMPARED[vectors.kind].items()]
    subjects, done = [], {}
    for system in systems:
        if reason := unsupported_reason(system.library):
            not_run.append(NotRun(system.name, reason))
            continue
        key = _key(system, fingerprint, settings)
        done[system.name] = read_system(_record(work, system), key)
        if done[system.name] is None:
            subjects.append(Subject(system, key, work / "indexes" / _slug(system)))
    exacts = (
        {} if vectors.synthetic is not None else _exacts(vectors, settings, systems, work / f"exact-{fingerprint[:16]}-{settings.deep}")
    )
    exact = exacts.get(None)
    Measuring(vectors, settings, running, exact).measure(subjects)
    measured = _results(subjects, vectors, settings, exacts)
    for subject in subjects:
        not_run += [NotRun(f"{subject.system.name} {subject.system.points[place].name}", why) for place, why in subject.refused.items()]
        if subject.failed is not None:
            not_run.append(NotRun(subject.system.name, subject.failed))
    for result in measured:
        done[result.name] = result
        write_system(result, _record(work, result))
    found = [result for result in done.values() if result is not None]
    if not found:
        raise InputError("nothing could be measured: " + "; ".join(f"{each.what}: {each.reason}" for each in not_run))
    shutil.rmtree(work / "indexes", ignore_errors=True)
    qrels = vectors.qrels
    return IndexBenchmark(
        data=names[0],
        model=names[1],
        kind=vectors.kind,
        documents=len(vectors),
        synthetic=vectors.synthetic is not None,
        vectors=int(vectors.lengths.sum()),
        dim=vectors.dim,
        queries=len(vectors.queries),
        query_vectors=sum(1 if query.ndim == 1 else len(query) for query in vectors.queries),
        judged=len(qrels or {}),
        exact_ndcg=None if qrels is None or exact is None else ndcg([rows.tolist()[:10] for rows in exact.rows], vectors, qrels),
        settings=settings,
        systems=tuple(found),
        not_run=tuple(not_run),
        processor=processor("cpu"),
        load_average=load,
        provenance=replace(provenance(command), threads=max(settings.threads)),
    )


def _check(systems: Sequence[System], settings: IndexSettings, running: Running) -> None:
    names = [system.name for system in systems]
    if len(names) != len(set(names)):
        raise ValueError(f"two systems have one name: {', '.join(names)}")
    if settings.rounds < 1 or settings.k < 1 or settings.deep < settings.k or min(settings.threads, default=0) < 1:
        raise ValueError(f"rounds, k and threads must be >= 1 and deep >= k, got {settings}")
    if not running.timeout > 0:
        raise ValueError(f"the timeout must be > 0, got {running.timeout}")


def _key(system: System, fingerprint: str, settings: IndexSettings) -> str:
    what = {"system": asdict(system), "vectors": fingerprint, "settings": asdict(settings), "versions": _versions(system)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _versions(system: System) -> dict[str, str]:
    found = {name: installed_version(name) for name in LIBRARIES[system.library].packages}
    return {name: version for name, version in found.items() if version is not None}


def _slug(system: System | SystemResult) -> str:
    """A name of a folder."""
    readable = "".join(letter if letter.isalnum() else "-" for letter in system.name)[:60]
    return f"{readable}-{hashlib.sha256(system.name.encode()).hexdigest()[:8]}"


def _record(work: Path, system: System | SystemResult) -> Path:
    return work / "systems" / f"{_slug(system)}.json"


def _exacts(vectors: VectorFolder, settings: IndexSettings, systems: Sequence[System], stem: Path) -> dict[int | None, Exact]:
    """What exact search finds, of all documents and of the numbers of them that some point is allowed."""
    exacts: dict[int | None, Exact] = {}
    for allowed in dict.fromkeys([None, *(point.allowed for system in systems for point in system.points)]):
        path = stem.with_name(f"{stem.name}{'' if allowed is None else f'-{allowed}'}.npz")
        if path.is_file():
            exacts[allowed] = load_exact(path)
            continue
        exacts[allowed] = exact_search(vectors, settings.deep, allowed=allowed)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_exact(exacts[allowed], path)
    return exacts


def _results(
    subjects: Sequence[Subject], vectors: VectorFolder, settings: IndexSettings, exacts: Mapping[int | None, Exact]
) -> list[SystemResult]:
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results = []
    for subject in subjects:
        if subject.failed is None and not subject.points:
            subject.failed = "it could not be searched at any point"
        if subject.failed is None and subject.build is not None and subject.memory is not None:
            points = [_point(subject, place, vectors, settings, exacts) for place in sorted(subject.points)]
            results.append(
                SystemResult(
                    name=subject.system.name,
                    library=subject.system.library,
                    versions=_versions(subject.system),
                    parameters={**subject.system.settings, **subject.parameters},
                    build=subject.build,
                    memory=subject.memory,
                    points=tuple(points),
                    key=subject.key,
                    date=date,
                )
            )
    return results


def _point(subject: Subject, place: int, vectors: VectorFolder, settings: IndexSettings, exacts: Mapping[int | None, Exact]) -> PointResult:
    point, measured = subject.system.points[place], subject.points[place]
    exact = exacts.get(point.allowed)
    shares: dict[str, float] = {}
    quality = None
    if exact is not None:
        shares = {str(k): recall(measured.found[settings.k], exact, k) for k in (1, settings.k)}
        shares[str(settings.deep)] = recall(measured.found[settings.deep], exact, settings.deep)
        if vectors.qrels is not None and point.allowed is None:  # judged documents are among those that may not be found
            quality = ndcg([rows[:10] for rows in measured.found[settings.deep if settings.k < 10 else settings.k]], vectors, vectors.qrels)
    p50, p95, p99 = (Spread.of([float(np.percentile(each, share)) for each in measured.rounds]) for share in (50, 95, 99))
    count = len(vectors.queries)
    return PointResult(
        name=point.name,
        knobs=point.knobs,
        recall=shares,
        ndcg=quality,
        p50=p50,
        p95=p95,
        p99=p99,
        processor=Spread.of(measured.processor),
        deep_p50=median(measured.deep),
        throughput=tuple(
            Throughput(threads, Spread.of([count / each for each in seconds])) for threads, seconds in measured.seconds.items()
        ),
        allowed=point.allowed,
    )
