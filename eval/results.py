"""Results of an evaluation: the fields of ``results.json``, where they come from, and the folder that holds them.

All measures are fractions at full precision; reports convert them to points and round.

``results.json`` holds ``schema``, ``ndcg@10`` (the headline; null if an average lacks a member) and the fields of `Results`. Beside it are
TREC runs under ``runs/``, the scores of every query under ``per_query/`` and the queries under ``queries/``. ``results.json`` is written
last and names the other files with their checksums: if it exists, the folder is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from filelock import FileLock, Timeout

from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, sync_folder, write_json, write_text
from quiver.eval.averages import Part, average, data_sets
from quiver.eval.decoding import decode
from quiver.retrieval.records import Document, ModelCard, Query
from quiver.retrieval.versions import installed_version

logger = logging.getLogger(__name__)

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "quiver": ("quiver-retrieval",),
    "torch": ("torch",),
    "numpy": ("numpy",),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12"),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
    "bm25s": ("bm25s",),
}
"""Name in the report -> distributions that provide it; the first one installed is recorded."""

_MODULUS = 1 << 256


@dataclass(frozen=True)
class Provenance:
    """Where and how a result was made.

    Attributes:
        command: The command line that makes it again; None when a program called the library.
        date: When the evaluation ended: UTC, ISO 8601, to the second.
        versions: Package -> version, Python's among them; packages that are not installed are left out.
        platform: Operating system, processor and, where torch sees one, accelerator.
        threads: Threads torch computes with on the CPU.
    """

    command: str | None
    date: str
    versions: Mapping[str, str]
    platform: str
    threads: int


def provenance(command: str | None) -> Provenance:
    """The provenance of what this process has computed.

    Args:
        command: The command line to record, if there is one.
    """
    accelerators = {torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())}
    return Provenance(
        command=command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_versions()},
        platform=", ".join([platform.platform(), f"{os.cpu_count()} CPUs", *sorted(accelerators)]),
        threads=torch.get_num_threads(),
    )


class DataChecksum:
    """Checksum over a collection's content, for whoever goes through the documents anyway.

    The order of documents, queries and judgements does not matter: the same collection has its rows in one order in an archive and in
    another on the hub. Every row is hashed, the hashes of each kind are added modulo 2^256, and the three sums are hashed with their
    counts; nothing is held of a row. That tells apart data that differ by mistake; it is no seal against somebody who forges rows to
    make a sum come out (such sums want a much longer modulus).

    Source: Bellare and Micciancio 1997, doi 10.1007/3-540-69053-0_13 (AdHASH).

    Example:
        >>> one, other = DataChecksum(), DataChecksum()
        >>> for a, b in ((Document("x", "wings"), Document("y", "fins")), (Document("y", "fins"), Document("x", "wings"))):
        ...     one.add_document(a)
        ...     other.add_document(b)
        >>> one.hexdigest([], {}) == other.hexdigest([], {}) != DataChecksum().hexdigest([], {})
        True
    """

    def __init__(self) -> None:
        """The checksum of a collection without documents."""
        self._sum = 0
        self._count = 0

    def add_document(self, document: Document) -> None:
        """Take a document in; each is added once."""
        self._sum += _row_hash((document.id, document.text, document.title))
        self._count += 1

    def hexdigest(self, queries: Iterable[Query], qrels: Mapping[str, Mapping[str, int]]) -> str:
        """The sha256 over the documents added so far, the queries and the judgements, in hexadecimal.

        Args:
            queries: The queries of the split.
            qrels: Query id -> document id -> grade.
        """
        asked = [_row_hash(query) for query in queries]
        judged = [_row_hash((query, document, grade)) for query, grades in qrels.items() for document, grade in grades.items()]
        kinds = ((self._count, self._sum), (len(asked), sum(asked)), (len(judged), sum(judged)))
        return hashlib.sha256(json.dumps([[count, f"{total % _MODULUS:064x}"] for count, total in kinds]).encode()).hexdigest()


def _row_hash(row: Sequence[str | int]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(row).encode()).digest(), "big")


def _versions() -> dict[str, str]:
    found = {name: next(filter(None, map(installed_version, distributions)), None) for name, distributions in PACKAGES.items()}
    return {name: version for name, version in found.items() if version is not None}


HEADLINE = "ndcg@10"
"""The measure that stands for a result."""

Parameter: TypeAlias = str | int | float | bool | None
"""A setting of an index or a baseline."""

Library: TypeAlias = Literal["quiver", "sentence-transformers", "pylate", "bm25s"]
"""What ran the system."""


@dataclass(frozen=True)
class System:
    """What was evaluated: the fields of a model card, None or empty where a system has no such thing.

    Attributes:
        source: Folder or hub id that the model was loaded from, or ``bm25``.
        kind: ``dense``, ``colbert`` or ``bm25``.
        library: What ran it.
        fingerprint: sha256 over weights, tokenizer and settings.
        dim: Width of a vector.
        similarity: ``cosine``, ``dot`` or ``maxsim``.
        query_length: Tokens a query is cut to, special tokens included.
        document_length: Tokens a document is cut to, special tokens included.
        query_prompt: Text put before every query.
        document_prompt: Text put before every document.
        precision: How the model's matrices were multiplied.
    """

    source: str
    kind: Literal["dense", "colbert", "bm25"]
    library: Library = "quiver"
    fingerprint: str | None = None
    dim: int | None = None
    similarity: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    precision: Precision = "float"

    @classmethod
    def of(cls, card: ModelCard) -> System:
        """The system of a model card."""
        return cls(**asdict(card))


@dataclass(frozen=True)
class FileReference:
    """A file beside ``results.json``.

    Attributes:
        file: Its path from the folder of results, with forward slashes.
        sha256: Checksum of its bytes.
    """

    file: str
    sha256: str


@dataclass(frozen=True)
class Truncated:
    """How many texts lost tokens because they were longer than the model reads.

    Attributes:
        documents: Documents cut.
        queries: Queries cut.
    """

    documents: int
    queries: int


@dataclass(frozen=True)
class IndexUsed:
    """The index a run came from.

    Attributes:
        kind: What it is: ``exact``, ``faiss`` or ``bm25``.
        parameters: Its settings; with ``k``, the documents it was asked for, where how well it searches depends on that.
        recall: Share of the documents an exact search finds that it finds too, ``overlap@10`` and ``overlap@100`` as far as
            so many are kept, means over the judged queries; None for BM25, 1 by definition for an exact index.
        bytes: Size of what is searched; None for BM25.
        query_milliseconds: Wall clock of the search without the encoding of the queries, a query, all of them searched in one call.
    """

    kind: str
    parameters: Mapping[str, Parameter]
    recall: Mapping[str, float] | None = None
    bytes: int | None = None
    query_milliseconds: float | None = None


@dataclass(frozen=True)
class Interval:
    """Bootstrap interval of a mean over queries.

    Attributes:
        low: Its lower end.
        high: Its upper end.
        level: Share of the resamples inside, such as 0.95.
        resamples: Resamples drawn.
    """

    low: float
    high: float
    level: float
    resamples: int


@dataclass(frozen=True)
class TokenMatch:
    """What one token of a query met in a document: a term of MaxSim's sum.

    Attributes:
        query_token: The token as text.
        document_token: The token of the document with the highest similarity, as text.
        similarity: Theirs, -1 to 1.
    """

    query_token: str
    document_token: str
    similarity: float


@dataclass(frozen=True)
class ShownDocument:
    """A document as a report shows it.

    Attributes:
        id: Its id.
        text: Its first characters, at most `SNIPPET`.
        grade: What the judges gave it; None where they did not judge it.
        rank: Where it was found, from 1; None where it is not among the documents kept.
        score: What it scored; None with ``rank``.
        matches: For a ColBERT, the query's tokens in order with what each met; empty otherwise.
    """

    id: str
    text: str
    grade: int | None
    rank: int | None
    score: float | None
    matches: tuple[TokenMatch, ...] = ()


SNIPPET = 400
"""Characters of a document that a report shows."""


@dataclass(frozen=True)
class WorstQuery:
    """One of the queries with the lowest nDCG@10.

    Attributes:
        query: Its id.
        text: Its text.
        score: Its nDCG@10.
        found: The documents found first, at most three, best first; empty where nothing was found.
        wanted: Relevant documents, at most three, the best grade first.
        relevant: How many documents are relevant.
    """

    query: str
    text: str
    score: float
    found: tuple[ShownDocument, ...]
    wanted: tuple[ShownDocument, ...]
    relevant: int


@dataclass(frozen=True)
class Baseline:
    """What a baseline scored on the same collection, under the same policy and cut.

    Attributes:
        name: ``bm25``.
        parameters: Its settings.
        measures: Measure -> mean over the judged queries.
        interval: Of its nDCG@10.
        run: Its TREC run; None when no folder was written.
        per_query: The scores of every query, as for the system; None when no folder was written.
    """

    name: str
    parameters: Mapping[str, Parameter]
    measures: Mapping[str, float]
    interval: Interval
    run: FileReference | None
    per_query: FileReference | None


@dataclass(frozen=True)
class CollectionResult:
    """What a system scored on one split of a collection, and how.

    Attributes:
        name: The collection, such as ``scifact`` or ``cqadupstack-android``.
        split: Its split.
        group: The data set that it is one of several parts of, such as ``cqadupstack``; None where it stands for itself.
        group_size: How many parts the group has; 1 without a group. The group's score is their unweighted mean, and it counts once.
        in_domain: Whoever evaluated says that the model was trained on this collection's training data; False is out of domain.
        licence: Of the data, as its publisher states it; None where that is not known.
        revision: Of the data: a commit, a version or a checksum of the archive; None for a local folder.
        documents: Documents searched, which is all of them.
        queries: Judged queries: the number that every mean is over.
        judgements: Judgements of the split, of any grade.
        use_title: Titles were part of the documents' text.
        exclude_self: A document with the query's own id was dropped before the cut.
        k: Documents kept for a query, at most.
        measures: Measure -> mean over the judged queries.
        interval: Of nDCG@10.
        judged: Share of the first ten documents that were judged, mean over the judged queries: where it is low, the score says
            little, for what nobody judged counts as wrong.
        unanswered: Judged queries for which nothing was found; each scores 0.
        truncated: Texts that were longer than the model reads.
        empty_texts: Documents without a text.
        index: What was searched.
        cached: Documents whose vectors were there already, from an earlier evaluation.
        seconds: Wall clock of ``encode_documents``, ``index``, ``encode_queries`` and ``search`` for a model, of ``search`` alone
            (indexing included) for BM25, of each baseline, of ``check``, reading and checking the data beforehand, and of ``other``:
            reading again, scoring, writing.
        run: The TREC run; None when no folder was written.
        per_query: The scores of every query, ``{query: {measure: value}}``; None when no folder was written.
        query_texts: The judged queries, ``{query: text}``; None when no folder was written.
        data_sha256: Checksum over documents, queries and judgements: equal checksums are the same data.
        worst: The queries with the lowest nDCG@10, at most ten, the worst first and equals by id.
        baselines: What the baselines scored.
    """

    name: str
    split: str
    group: str | None
    group_size: int
    in_domain: bool
    licence: str | None
    revision: str | None
    documents: int
    queries: int
    judgements: int
    use_title: bool
    exclude_self: bool
    k: int
    measures: Mapping[str, float]
    interval: Interval
    judged: float
    unanswered: int
    truncated: Truncated
    empty_texts: int
    index: IndexUsed
    cached: int
    seconds: Mapping[str, float]
    run: FileReference | None
    per_query: FileReference | None
    query_texts: FileReference | None
    data_sha256: str
    worst: tuple[WorstQuery, ...]
    baselines: tuple[Baseline, ...]

    @property
    def key(self) -> str:
        """The collection with its split, as files and tables name it: ``scifact.test``."""
        return f"{self.name}.{self.split}"

    def part(self, value: float | None = None) -> Part:
        """What ``quiver.eval.averages`` has to know of it.

        Args:
            value: The score that is averaged; None where only the grouping matters, or there is none.
        """
        return Part(self.name, self.split, self.group, self.group_size, value)


@dataclass(frozen=True)
class Results:
    """One system on one or more collections.

    Attributes:
        system: What was evaluated.
        collections: What it scored, in the order the collections were given in.
        provenance: Where and how.
    """

    system: System
    collections: tuple[CollectionResult, ...]
    provenance: Provenance

    @property
    def headline(self) -> float | None:
        """The mean nDCG@10 over the data sets, a group counting once; None if there are none, or a group lacks a part."""
        scores = data_sets(self.parts(HEADLINE))
        return average(scores, list(scores)).value

    def parts(self, measure: str) -> list[Part]:
        """What ``quiver.eval.averages`` has to know of the collections.

        Args:
            measure: Name of a measure; a collection that was not scored by it has no value.
        """
        return [each.part(each.measures.get(measure)) for each in self.collections]


def check_results(results: Results, where: str) -> None:
    """Check what the types of the fields cannot say, see `check_collection`, and that no collection is there twice.

    Args:
        results: As they were read.
        where: The file to name in errors.

    Raises:
        InputError: Something cannot be; names the first such field.
    """
    keys: set[str] = set()
    for place, collection in enumerate(results.collections):
        check_collection(collection, f"{where}.collections[{place}]")
        if collection.key in keys:
            raise InputError(f"{where}: holds {collection.key!r} twice; {_DAMAGED}")
        keys.add(collection.key)


def check_collection(collection: CollectionResult, where: str) -> None:
    """Check that the numbers are possible: fractions within 0 and 1, nothing counted or timed below 0, intervals in order.

    Args:
        collection: As it was read.
        where: The place to name in errors.

    Raises:
        InputError: Something cannot be; names the first such field.
    """
    _check_measures(collection.measures, collection.interval, where)
    for place, baseline in enumerate(collection.baselines):
        _check_measures(baseline.measures, baseline.interval, f"{where}.baselines[{place}]")
    index = collection.index
    fractions = {"judged": collection.judged, **{f"index.recall.{name}": share for name, share in (index.recall or {}).items()}}
    for name, fraction in fractions.items():
        _check_fraction(fraction, f"{where}.{name}")
    counts: dict[str, float] = {
        **{name: getattr(collection, name) for name in _COUNTS},
        **{f"truncated.{name}": count for name, count in asdict(collection.truncated).items()},
        **{f"seconds.{step}": seconds for step, seconds in collection.seconds.items()},
        "index.bytes": index.bytes or 0,
        "index.query_milliseconds": index.query_milliseconds or 0,
    }
    for name, count in counts.items():
        if count < 0:
            raise InputError(f"{where}.{name}: must be >= 0, got {count}; {_DAMAGED}")
    if collection.group_size < 1:
        raise InputError(f"{where}.group_size: must be >= 1, got {collection.group_size}; {_DAMAGED}")


_COUNTS = ("documents", "queries", "judgements", "k", "unanswered", "empty_texts", "cached")

_DAMAGED = "the file is damaged or was changed by hand"

# A mean of ones may be a rounding above one.
_ROUNDING = 1e-9


def _check_measures(measures: Mapping[str, float], interval: Interval, where: str) -> None:
    if HEADLINE not in measures:
        raise InputError(f"{where}.measures: has no {HEADLINE}, which every result has; {_DAMAGED}")
    for name, fraction in measures.items():
        _check_fraction(fraction, f"{where}.measures.{name}")
    if interval.low > interval.high:
        raise InputError(f"{where}.interval: low {interval.low} is above high {interval.high}; {_DAMAGED}")


def _check_fraction(fraction: float, where: str) -> None:
    if not -_ROUNDING <= fraction <= 1 + _ROUNDING:
        raise InputError(f"{where}: must be within 0 and 1, got {fraction}; {_DAMAGED}")


SCHEMA = "quiver-results/2"
"""Name and version of the format, the value of ``schema`` in the file."""

FILE = "results.json"
"""The file whose presence says that a folder of results is complete."""

REPORTS = ("report.md", "report.html")
"""Reports that ``quiver evaluate`` writes beside the results."""

# Where results are made before they are published: a hidden folder inside the target.
_STAGE = ".unfinished"
_PLAN = "plan.json"
_FINISHED = "finished"
_LOCK = "lock"


def write_results(results: Results, folder: Path) -> Path:
    """Write ``results.json`` into an existing folder, whole or not at all; what it names must be there already.

    Returns:
        The file.
    """
    content = {"schema": SCHEMA, HEADLINE: results.headline, **asdict(results)}
    write_json(folder / FILE, content)
    return folder / FILE


def read_results(folder: str | Path) -> Results:
    """Read a folder of results and check that it is whole: format, types, headline, and the checksum of every file.

    Raises:
        InputError: There is no ``results.json`` (the evaluation did not finish, or its output is elsewhere), it is damaged or
            of another program, or a file it names is missing or has changed.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(f"{folder}: no {FILE} here: the evaluation did not finish, or wrote elsewhere; run quiver evaluate again")
    content = _content(path)
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        raise InputError(
            f"{path}: the schema is {schema!r}, this version reads {SCHEMA!r}; it is not a result of quiver evaluate, or of another version"
        )
    headline = content.pop(HEADLINE, None)
    results = decode(Results, content, str(path))
    check_results(results, str(path))
    if headline != results.headline:
        raise InputError(f"{path}: {HEADLINE} is {headline} but the collections say {results.headline}; the file was changed by hand")
    for collection in results.collections:
        for reference in _references(collection):
            _check(Path(folder), reference)
    return results


def _content(path: Path) -> dict[str, Any]:
    """The JSON object of a file, of which nothing else is known yet; empty where it is something else."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=partial(_refuse_constant, path))
        if "\\ud" in text.lower():  # half of a surrogate pair is legal JSON and no text: every report would fail on it
            json.dumps(content, ensure_ascii=False).encode("utf-8")
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON ({error.msg}); the file is damaged, run quiver evaluate again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8; the file is damaged, run quiver evaluate again") from error
    except (ValueError, RecursionError) as error:  # an unpaired surrogate, a number of 5,000 digits, a thousand brackets
        raise InputError(f"{path}: cannot be read ({str(error)[:80]}); the file is damaged, run quiver evaluate again") from error
    return content if isinstance(content, dict) else {}


class Stage:
    """Results that are being made: the private folder their files go into, and the collections that are finished.

    Attributes:
        folder: Where runs and scores by query are written, under the names that ``results.json`` gives them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._finished = folder / _FINISHED

    def keep(self, result: CollectionResult) -> None:
        """Note a collection as finished: after a kill it is not scored again."""
        write_json(self._finished / f"{result.key}.json", asdict(result))

    def finished(self, key: str, conditions: Mapping[str, object]) -> CollectionResult | None:
        """A collection that an evaluation with the same plan finished before it was stopped.

        Args:
            key: The collection with its split.
            conditions: Fields of the result with the values they would have now: the data's checksum, the policy. Under others the
                result is not this one.

        Returns:
            Its result, if it is there and its files are whole.
        """
        path = self._finished / f"{key}.json"
        if not path.is_file():
            return None
        try:
            result = decode(CollectionResult, _content(path), str(path))
            check_collection(result, str(path))
            for reference in _references(result):
                _check(self.folder, reference)
        except InputError as error:
            logger.warning("%s cannot be taken over, it is scored again (%s)", key, error)
            return None
        changed = [name for name, value in conditions.items() if getattr(result, name) != value]
        if changed:
            logger.warning("%s was finished under another %s, it is scored again", key, ", ".join(changed))
        return None if changed else result

    def any_finished(self) -> bool:
        """Whether there is something to take over."""
        return any(self._finished.glob("*.json"))


@contextmanager
def results_folder(folder: Path, plan: Mapping[str, object], *, overwrite: bool = False) -> Iterator[Stage]:
    """A private folder to write results into; its files appear in ``folder`` when the block ends without an error.

    ``results.json`` moves last, and an old one goes first: after a kill at any instruction a reader finds the old results,
    the new ones, or none, never a mixture. Whatever else the folder holds stays. What was finished when the block ends with an
    error, or the process is killed, waits in ``.unfinished`` for the next evaluation with an equal plan.

    Args:
        folder: Where the results will be.
        plan: Everything but the data that decides them, as JSON; another plan starts anew.
        overwrite: Replace the results that are there.

    Raises:
        InputError: ``refuse_existing`` has an objection, or the folder cannot be written.
    """
    refuse_existing(folder, overwrite=overwrite)
    created = not folder.exists()
    stage = Stage(folder / _STAGE)
    done = False
    try:
        with _locked(stage.folder):
            try:
                _prepare(stage, plan, overwrite=overwrite)
                yield stage
                _publish(stage.folder, folder)
                done = True
            finally:
                if done or not stage.any_finished():
                    _remove(stage.folder)
    finally:
        if created and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """The stage, made if it is not there, for one process alone; the lock goes with the process, however that ends."""
    lock = FileLock(root / _LOCK)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"{root.parent}: another evaluation is writing here; wait for it, or name another folder") from error
    except OSError as error:
        raise InputError(f"{root.parent}: cannot be written ({error.strerror})") from error
    try:
        if not (root / _LOCK).exists():  # the stage of another evaluation, which was cleared between the two steps
            raise InputError(f"{root.parent}: another evaluation was writing here until now; run this one again")
        yield
    finally:
        lock.release()


def _prepare(stage: Stage, plan: Mapping[str, object], *, overwrite: bool) -> None:
    """Go on with a stage of the same plan; start anew otherwise, but never at the price of what another has finished.

    Raises:
        InputError: Another plan has finished collections here and ``overwrite`` is off, or the folder cannot be written.
    """
    content = json.dumps(plan, indent=2, sort_keys=True)
    path = stage.folder / _PLAN
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before == content:
        logger.info("%s: going on with an evaluation that was stopped", stage.folder.parent)
        return
    if before is not None and stage.any_finished() and not overwrite:
        raise InputError(
            f"{stage.folder.parent}: holds an evaluation that was stopped, of other {_differing(before, plan)}; finish it by its own "
            "command, name another folder, or say overwrite to throw it away"
        )
    try:
        for entry in stage.folder.iterdir():
            if entry.name != _LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        (stage.folder / _FINISHED).mkdir()
    except OSError as error:
        raise InputError(f"{stage.folder.parent}: cannot be written ({error.strerror})") from error
    write_text(path, content)


def _differing(before: str, plan: Mapping[str, object]) -> str:
    """The parts of a plan that an older one has otherwise."""
    try:
        old = json.loads(before)
    except ValueError:
        return "settings"
    new = json.loads(json.dumps(plan))
    return ", ".join(name for name in new if not isinstance(old, dict) or old.get(name) != new[name])


def _remove(root: Path) -> None:
    """Clear a stage: out of the way in one step, so that the next evaluation never meets half of it."""
    gone = root.with_name(f"{root.name}-{uuid.uuid4().hex[:12]}")
    root.rename(gone)
    shutil.rmtree(gone)


def refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Say early that the output cannot go there.

    Raises:
        InputError: It is not a folder, or it holds results already and ``overwrite`` is off.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: cannot hold results, it is a file; name a folder")
    if (folder / FILE).exists() and not overwrite:
        raise InputError(f"{folder}: holds results already; name another folder, or say overwrite")


def _publish(stage: Path, folder: Path) -> None:
    old = _named_files(folder)
    (folder / FILE).unlink(missing_ok=True)
    sync_folder(folder)
    # What only the old results name, and the reports of them, would otherwise stand beside the new ones.
    for path in (*old, *(folder / name for name in REPORTS)):
        path.unlink(missing_ok=True)
    own = {stage / _PLAN, stage / _LOCK, *(stage / _FINISHED).iterdir()}
    files = sorted((path for path in stage.rglob("*") if path.is_file() and path not in own), key=lambda path: (path.name == FILE, path))
    for path in files:
        target = folder / path.relative_to(stage)
        target.parent.mkdir(exist_ok=True)
        path.replace(target)
        sync_folder(target.parent)


def _named_files(folder: Path) -> list[Path]:
    """The files that the results in a folder name; none where there are no sound results."""
    if not (folder / FILE).is_file():
        return []
    try:
        results = read_results(folder)
    except InputError:
        return []
    return [folder / reference.file for collection in results.collections for reference in _references(collection)]


def _references(collection: CollectionResult) -> Iterator[FileReference]:
    files = [collection.run, collection.per_query, collection.query_texts]
    files += [file for baseline in collection.baselines for file in (baseline.run, baseline.per_query)]
    yield from (reference for reference in files if reference is not None)


def _check(folder: Path, reference: FileReference) -> None:
    path = folder / reference.file
    if not path.is_file():
        raise InputError(f"{path}: {FILE} names this file, but it is missing; copy the whole folder, or run quiver evaluate again")
    if file_sha256(path) != reference.sha256:
        raise InputError(f"{path}: not the file that was scored, its sha256 differs from {FILE}; run quiver evaluate again")


def _refuse_constant(path: Path, name: str) -> float:
    raise InputError(f"{path} holds {name}, which is not JSON; the file is damaged, run quiver evaluate again")
