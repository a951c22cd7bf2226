"""Score the rows of a training file with teachers: the same rows, each with a score per document, from which a student learns.

    OUT/train.jsonl.gz    the rows with the field ``scores``
    OUT/scoring.json      the teacher, the settings and statistics of the scores; written last

Rows are scored in parts that are saved: a killed run resumes and writes the same files. Of several teachers each scores all rows before the
next one starts. The scores of a cross-encoder are logits.

Shapes: R rows, n_r documents of row r, B pairs of a part, T texts (of an ensemble: teachers).
Source of min-max normalized teacher scores: JaColBERTv2.5, arXiv:2407.20750.
"""

from __future__ import annotations

import hashlib
import json
import platform
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from quiver.encoder.checkpoints.checkpoint import base_folder, has_safetensors, local_folder, read_weights, weight_files
from quiver.encoder.errors import InputError, first_line, import_for
from quiver.encoder.files import atomic_file, file_sha256
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.data.embedding_store import KeyTable, open_embedding_store, text_keys
from quiver.retrieval.models.batches import BatchSize, Copies
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions
from quiver.retrieval.models.pretrained import check_device, check_is_model, default_device, is_cross_encoder
from quiver.retrieval.records import IN_PROCESS, DenseModel, Dtype, Executor, TokenModel
from quiver.retrieval.training.data.prepare import SCORES, IdNumbering, TableWriter, TextColumn, blocks
from quiver.retrieval.training.data.sources import Example, encode_text, read_whole
from quiver.retrieval.training.mining.job_folder import Job, open_job
from quiver.retrieval.training.mining.searchers import PairScores
from quiver.retrieval.training.recipe import DataSection


@dataclass(frozen=True)
class ScoringData:
    """Rows to score."""

    texts: TextColumn
    queries: NDArray[np.int64]
    documents: NDArray[np.int64]
    ends: NDArray[np.int64]
    lines: Path  # the rows as lines of JSON, without scores
    sha256: str

    def __len__(self) -> int:
        return len(self.queries)

    def pairs(self, rows: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of query and document of every pair of a slice of rows, (B,) each."""
        counts = np.diff(self.ends[rows.start : rows.stop + 1])
        documents = self.documents[self.ends[rows.start] : self.ends[rows.stop]]
        return np.repeat(self.queries[rows], counts), documents


def read_scoring_data(section: DataSection, folder: Path) -> ScoringData:
    """Read the rows of a data section and their texts."""
    queries, documents, ends = array("q"), array("q"), array("q", [0])
    digest, lines = hashlib.sha256(), folder / "rows.jsonl"
    with TableWriter(folder) as writer, lines.open("xb") as file:

        def examples() -> Iterator[Example]:
            for example, row in read_whole(section, all_columns=True):
                fields = {name: value for name, value in row.items() if name != SCORES}
                try:
                    line = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8")
                except (TypeError, ValueError) as error:
                    reason = f"a field cannot be written as JSON ({error}); remove it from the file"
                    raise InputError(f"{example.location}: {reason}") from error
                digest.update(line + b"\n")
                file.write(line + b"\n")
                yield example

        number = _number_ids if section.format == "ids" else _number_texts
        for query, of_row in number(section, examples(), writer):
            queries.append(query)
            documents.extend(of_row)
            ends.append(len(documents))
        if not len(queries):
            raise InputError(f"{', '.join(section.train)}: no rows")
        of_queries, of_documents, of_rows = (np.array(each, np.int64) for each in (queries, documents, ends))
        for each in (of_queries, of_documents, of_rows):
            digest.update(each.tobytes())
        for block in blocks(np.unique(np.concatenate([of_queries, of_documents])).tolist()):
            digest.update(b"".join(writer.digests(block)))
    return ScoringData(TextColumn(folder / "texts.arrow"), of_queries, of_documents, of_rows, lines, digest.hexdigest())


def _number_texts(_section: DataSection, examples: Iterator[Example], writer: TableWriter) -> Iterator[tuple[int, list[int]]]:
    """Write each distinct text once; yield the numbers of the query and the documents of each row."""
    known = KeyTable()
    for block in blocks(examples):
        locations = {text: example.location for example in block for text in (example.query, *example.documents)}
        texts = list(locations)
        keys = text_keys(texts)
        numbers = known.find(keys)
        new = np.flatnonzero(numbers < 0)
        numbers[new] = [writer.add_text(encode_text(locations[texts[number]], texts[number])) for number in new.tolist()]
        known.add(keys[new], numbers[new])
        of = dict(zip(texts, numbers.tolist(), strict=True))
        yield from ((of[example.query], [of[text] for text in example.documents]) for example in block)


def _number_ids(section: DataSection, examples: Iterator[Example], writer: TableWriter) -> Iterator[tuple[int, list[int]]]:
    """Write all texts that have an id; yield the numbers of the query and the documents of each row."""
    ids = IdNumbering.of_section(section, writer, lambda steps: None)
    for block in blocks(examples):
        for example, query, numbers in ids.look_up(block):
            if flaw := ids.flaw(example, query, numbers[0]):
                raise InputError(f"{example.location}: {flaw}")
            yield query, numbers
    ids.close()


# Pairs per forward pass of a cross-encoder, and the length that it is counted with if it sets no maximum.
_BATCH = {"cpu": 32, "cuda": 256}
_PAIR_TOKENS = 512

# Files besides the weights that transformers and sentence-transformers read of a cross-encoder: configurations and tokenizers.
_SETTINGS = ("*.json", "*/config.json", "*.txt", "*.model", "adapter_model.*")

Scorer: TypeAlias = Callable[[Mapping[int, slice], Advance], Iterator[tuple[int, NDArray[np.float32]]]]
"""Scores the rows that it was made for: gets parts by number, and yields each number and the scores of its B pairs, in any order."""


class Teacher(Protocol):
    """A model that scores pairs."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Description for ``scoring.json``; teachers of equal ``fingerprint`` give equal scores."""

    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> AbstractContextManager[Scorer]:
        """Open a scorer of the rows."""


class VectorTeacher:
    """A bi-encoder or ColBERT model; the score is the similarity used for search.

    ColBERT vectors take 4 bytes times width times tokens on disk: 80 GB for 2 million passages of 80 tokens and width 128.
    """

    def __init__(self, model: DenseModel | TokenModel, executor: Executor = IN_PROCESS) -> None:
        self._model = model
        self._executor = executor
        card = model.card
        self.description: Mapping[str, Any] = {"kind": card.kind, "source": card.source, "fingerprint": card.fingerprint}

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """Encode the distinct texts of the rows, into a temporary embedding store if there is no folder for it."""
        with open_embedding_store(cache, self._executor) as store:
            queries, documents = np.unique(data.queries), np.unique(data.documents)
            texts = [(data.texts[number] for number in numbers.tolist()) for numbers in (queries, documents)]
            encoded = store.encode(self._model, texts[0], "query", total=len(queries), progress=progress)
            found = store.encode(self._model, texts[1], "document", total=len(documents), progress=progress)
            pair_scores = PairScores(encoded, found)

            def score(parts: Mapping[int, slice], advance: Advance) -> Iterator[tuple[int, NDArray[np.float32]]]:
                for number, part in parts.items():
                    of_queries, of_documents = data.pairs(part)
                    scores = pair_scores(np.searchsorted(queries, of_queries), np.searchsorted(documents, of_documents))
                    advance(len(scores))
                    yield number, scores

            yield score


class CrossEncoderTeacher:
    """A cross-encoder, run by sentence-transformers."""

    def __init__(self, source: str, *, device: str, batch_tokens: int | None = None, executor: Executor = IN_PROCESS) -> None:
        folder = local_folder(source)
        self._source, self._batch_tokens, self._executor = source, batch_tokens, executor
        self._model = _load_cross_encoder(source, device)
        labels = int(self._model.config.num_labels)
        if labels != 1:
            raise InputError(f"{source}: the cross-encoder has {labels} classes; a teacher must return one score per pair")
        length = self._model.max_length
        self.description: Mapping[str, Any] = {
            "kind": "cross-encoder",
            "source": source,
            "max_length": length,
            "fingerprint": _hash_cross_encoder(source, folder, length),
        }

    @contextmanager
    def scorer(self, data: ScoringData, *, cache: Path | None, progress: bool) -> Iterator[Scorer]:
        """Score the pairs of the rows; nothing is cached."""
        del cache, progress
        threads = self._executor.threads(torch.get_num_threads())
        here = Path(self._source)
        source = str(here.resolve()) if here.is_dir() else self._source  # a worker may have another working directory
        loaded = None if self._executor.remote else self._model
        task = _ScoringTask(source, str(self.description["fingerprint"]), threads, self._batch_tokens, loaded)

        def score(parts: Mapping[int, slice], advance: Advance) -> Iterator[tuple[int, NDArray[np.float32]]]:
            pairs = (_Pairs(number, *(tuple(data.texts.take(side)) for side in data.pairs(part))) for number, part in parts.items())
            with closing(self._executor.run(task, pairs, threads=threads, advance=advance)) as results:
                for read, scores in results:
                    yield read.number, scores

        yield score


@dataclass(frozen=True)
class _Pairs:
    """Texts of a part's B pairs."""

    number: int
    queries: tuple[str, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class _ScoringTask:
    """Score pairs with a loaded cross-encoder, or with one that the worker loads."""

    source: str
    fingerprint: str
    threads: int
    batch_tokens: int | None
    model: Any = None

    def open(self, advance: Advance) -> Callable[[_Pairs], NDArray[np.float32]]:
        if self.model is not None:
            return _PairScorer(self.model, self.batch_tokens, advance)
        torch.set_num_threads(self.threads)
        model = _load_cross_encoder(self.source, default_device())
        found = _hash_cross_encoder(self.source, local_folder(self.source), model.max_length)
        if found != self.fingerprint:
            raise InputError(
                f"{self.source}: the model on {platform.node()} has other files than on the first machine; all machines need the same files"
            )
        return _PairScorer(model, self.batch_tokens, advance)


def _load_cross_encoder(source: str, device: str) -> Any:
    library = import_for("a cross-encoder", "sentence_transformers", "'quiver-retrieval[train]'")
    folder = local_folder(source)
    if not has_safetensors(base := base_folder(folder)):
        read_weights(base)  # explains in one line why a pickle is refused
    try:
        return library.CrossEncoder(str(folder), device=device)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{source}: sentence-transformers cannot load this model ({first_line(error)})") from error


class _PairScorer:
    """Scores pairs with a loaded cross-encoder; a batch that does not fit into memory is halved once."""

    def __init__(self, model: Any, batch_tokens: int | None, advance: Advance) -> None:
        self._model, self._advance = model, advance
        self._length = int(model.max_length or _PAIR_TOKENS)
        device = torch.device(model.device)
        self._size = BatchSize(device, batch_tokens or self._length * _BATCH.get(device.type, _BATCH["cpu"]))

    def __call__(self, pairs: _Pairs) -> NDArray[np.float32]:
        texts = list(zip(pairs.queries, pairs.documents, strict=True))
        # Pairs of similar length share a batch, since the library pads a batch to its longest pair.
        order = np.argsort([len(query) + len(document) for query, document in texts], kind="stable")
        scores = np.empty(len(texts), np.float32)
        first = 0
        while first < len(order):
            rows = order[first : first + max(1, self._size.tokens // self._length)]
            options = {"batch_size": len(rows), "activation_fn": torch.nn.Identity(), "show_progress_bar": False}
            try:
                # As a tensor: the library copies every score by itself to make an array.
                found = self._model.predict([texts[row] for row in rows.tolist()], convert_to_tensor=True, **options)
                scores[rows] = found.float().cpu().numpy()
            except torch.OutOfMemoryError:
                self._size.halve(len(rows) * self._length)
                Copies(self._size.device).release()
                continue
            first += len(rows)
            self._advance(len(rows))
        return scores


def load_teacher(
    source: str,
    *,
    dtype: Dtype | None = None,
    device: str | None = None,
    batch_tokens: int | None = None,
    options: ModelOptions = FOLDERS_SETTINGS,
    executor: Executor = IN_PROCESS,
) -> Teacher:
    """Load a teacher from a folder or the Hub; its configuration decides the kind."""
    check_teacher(source, dtype=dtype, options=options)
    if not is_cross_encoder(local_folder(source)):
        return VectorTeacher(load_model(source, dtype=dtype, device=device, batch_tokens=batch_tokens, options=options), executor)
    return CrossEncoderTeacher(source, device=check_device(device or default_device()), batch_tokens=batch_tokens, executor=executor)


def check_teacher(source: str, *, dtype: Dtype | None = None, options: ModelOptions = FOLDERS_SETTINGS) -> None:
    """Check a teacher without loading its weights."""
    check_is_model(source)
    if (dtype, options) == (None, FOLDERS_SETTINGS) or not is_cross_encoder(local_folder(source)):
        return
    if dtype is not None:
        raise InputError(f"{source}: sentence-transformers chooses the dtype of a cross-encoder; leave out dtype {dtype}")
    raise InputError(f"{source}: a cross-encoder has no prompts and one length, that of its folder; leave out lengths, prompts and width")


def _hash_cross_encoder(source: str, folder: Path, max_length: int | None) -> str:
    """Hash of everything that affects a cross-encoder's scores: weights, configuration, tokenizer and maximum length."""
    weights = set(weight_files(base_folder(folder)))
    if missing := sorted(path.name for path in weights if not path.is_file()):
        raise InputError(f"{source}: {', '.join(missing)} is missing")
    files = sorted(weights | {path for pattern in _SETTINGS for path in folder.glob(pattern)})
    sums = {str(path.relative_to(folder) if path.is_relative_to(folder) else path.name): file_sha256(path) for path in files}
    return hashlib.sha256(json.dumps([sums, max_length]).encode()).hexdigest()


class Ensemble:
    """Teachers whose scores are combined.

    Teachers of different kinds have different scales: cosines up to 1, ColBERT scores up to the number of query tokens, logits. Scores are
    summed with given weights, or averaged after min-max normalization per row. For teachers that were trained with a softmax over
    documents, suitable weights are the scale of that softmax divided by the number of teachers: the sum is the mean of their logits.
    """

    def __init__(self, members: Sequence[Teacher], weights: Sequence[float] | None = None) -> None:
        check_weights(len(members), weights)
        described = [dict(member.description) for member in members]
        prints = [member["fingerprint"] for member in described]
        for position, one in enumerate(prints):
            if one in prints[:position]:
                raise InputError(f"{described[position]['source']}: is given twice as a teacher; use weights to increase its share")
        self.members = tuple(members)
        self.weights = None if weights is None else tuple(weights)
        digest = hashlib.sha256(json.dumps(prints).encode()).hexdigest()
        about = {"kind": "ensemble", "members": described, "weights": self.weights, "fingerprint": digest}
        self.description: Mapping[str, Any] = about

    def together(self, scores: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Combine the teachers' scores of a row, T finite arrays (n,), to (n,); infinite if the weights are too large."""
        if self.weights is None:
            together: NDArray[np.float64] = np.mean([min_max(one) for one in scores], axis=0)
        else:
            with np.errstate(over="ignore"):  # the caller refuses infinite scores
                together = np.array(self.weights) @ np.array(scores, np.float64)
        return together


def check_weights(teachers: int, weights: Sequence[float] | None) -> None:
    """Check the weights of an ensemble."""
    if teachers < 2:
        raise InputError(f"an ensemble needs at least two teachers, got {teachers}")
    if weights is not None and len(weights) != teachers:
        raise InputError(f"got {len(weights)} weights for {teachers} teachers; pass one weight per teacher, in their order")
    if weights is not None and not all(isfinite(weight) and weight > 0 for weight in weights):
        raise InputError(f"weights of teachers must be positive numbers, got {', '.join(f'{weight:g}' for weight in weights)}")


def min_max(scores: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale the scores of a row, (n,), to 0..1; all zero if they are equal.

    Example:
        >>> min_max(np.array([1.0, 3.0, 2.0], np.float32)).tolist()
        [0.0, 1.0, 0.5]
    """
    exact = scores.astype(np.float64)  # the difference may overflow float32
    low, high = exact.min(), exact.max()
    return (exact - low) / (high - low) if high > low else np.zeros_like(exact)


SCHEMA = "quiver-scoring/1"
RECORD, ROWS = "scoring.json", "train.jsonl.gz"  # files of a finished run
PAIRS_PER_PART = 4096  # pairs per part: less than a minute of a small cross-encoder on two CPU cores

NORMALIZATIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {"none": lambda scores: scores, "min-max": min_max}
"""Normalizations of a row's scores."""


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
    """Score the rows of a source into a folder; returns the content of ``scoring.json``."""
    if normalize not in NORMALIZATIONS:
        raise InputError(f"normalize must be one of {', '.join(NORMALIZATIONS)}, got {normalize!r}")
    members = teacher.members if isinstance(teacher, Ensemble) else (teacher,)
    # Without the weights: scores are saved before weighting, so that a run can resume with other weights.
    named = {"train", "format", "query_field", "document_fields"}
    by_id = {"queries", "documents", "query_id_field", "document_id_field", "text_field"}
    rows = section.model_dump(include=named | by_id)  # the settings that decide which texts are scored
    settings = {"teacher": teacher.description["fingerprint"], "normalize": normalize, "rows": rows}
    with open_job(out, RECORD, SCHEMA, settings=settings, overwrite=overwrite) as job:
        with progress_bar("reading", 1, enabled=progress):
            data = read_scoring_data(section, job.scratch("texts"))
        job.agree({"data": data.sha256})
        parts, pairs = _split_parts(data.ends), int(data.ends[-1])
        for position, member in enumerate(members):
            first = position * len(parts)  # each teacher's parts follow those of the previous one
            missing = {number - first: parts[number - first] for number in job.missing(range(first, first + len(parts)))}
            if not missing:
                continue
            with member.scorer(data, cache=cache, progress=progress) as score:
                label = "scoring" if len(members) == 1 else f"scoring, teacher {position + 1} of {len(members)}"
                with progress_bar(label, pairs, enabled=progress) as advance:
                    advance(pairs - sum(int(data.ends[part.stop] - data.ends[part.start]) for part in missing.values()))
                    for number, scores in score(missing, advance):
                        if not np.isfinite(scores).all():
                            pair = int(data.ends[parts[number].start]) + int(np.isfinite(scores).argmin())
                            row = int(np.searchsorted(data.ends, pair, side="right"))
                            raise InputError(f"{', '.join(section.train)}: row {row}: the teacher's score is not finite")
                        job.save(first + number, np.ascontiguousarray(scores, "<f4").tobytes())
        with progress_bar("writing", len(data), enabled=progress) as advance:
            scores_by_row = _combine_scores(job, parts, data.ends, teacher, members=len(members))
            result = _write_scored_rows(data, scores_by_row, out, NORMALIZATIONS[normalize], advance)
        content = {**settings, "teacher": dict(teacher.description), "data": {"sha256": data.sha256}, "result": result}
        return job.finish(content, command)


def _split_parts(ends: NDArray[np.int64]) -> list[slice]:
    """Slices of rows with at most ``PAIRS_PER_PART`` pairs, but at least one row."""
    parts: list[slice] = []
    first, rows = 0, len(ends) - 1
    while first < rows:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + PAIRS_PER_PART, side="right")) - 1)
        parts.append(slice(first, last))
        first = last
    return parts


def _combine_scores(
    job: Job, parts: list[slice], ends: NDArray[np.int64], teacher: Teacher | Ensemble, *, members: int
) -> Iterator[NDArray[np.float64]]:
    """Scores of each row, in order."""
    for number, part in enumerate(parts):
        inner = ends[part.start + 1 : part.stop] - ends[part.start]
        kept = [np.frombuffer(job.read(position * len(parts) + number), "<f4") for position in range(members)]
        for scores in zip(*(np.split(one, inner) for one in kept), strict=True):
            together = teacher.together(scores) if isinstance(teacher, Ensemble) else scores[0].astype(np.float64)
            if not np.abs(together).max() <= np.finfo(np.float32).max:
                raise InputError("the weighted scores overflow float32; run the command again with smaller weights")
            yield together


def _write_scored_rows(
    data: ScoringData,
    scores: Iterator[NDArray[np.float64]],
    out: Path,
    normalize: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    advance: Advance,
) -> dict[str, Any]:
    """Write the rows with their scores; return statistics for ``scoring.json``."""
    best, positives, everything, lowest, highest = 0, 0.0, 0.0, np.inf, -np.inf
    with atomic_file(out / ROWS) as file, data.lines.open("rb") as lines:
        for line, raw in zip(lines, scores, strict=True):
            values = [float(f"{score:.9g}") for score in normalize(raw).tolist()]
            file.write(b'%s, "%s": %s}\n' % (line.removesuffix(b"}\n"), SCORES.encode(), json.dumps(values).encode()))
            best += bool(raw.argmax() == 0)
            positives += float(raw[0])
            everything += float(raw.sum(dtype=np.float64))
            lowest, highest = min(lowest, float(raw.min())), max(highest, float(raw.max()))
            advance(1)
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
