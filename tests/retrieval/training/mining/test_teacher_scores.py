"""Teacher scores: computed by hand and by the libraries, for rows of texts and of ids, and after a kill."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quiver.encoder import InputError
from quiver.retrieval.training.mining import teacher_scores
from quiver.retrieval.training.mining.job_folder import WORK
from quiver.retrieval.training.mining.teacher_scores import CrossEncoderTeacher, Ensemble, VectorTeacher, load_teacher, min_max, score_rows
from quiver.retrieval.training.recipe import DataSection
from tests.retrieval.executors import Backwards

TEXTS = [f"w{first} w{second} w{first + second}" for first in range(6) for second in range(7)]
ROWS: list[dict[str, Any]] = [
    {"query": f"w{row % 5} w{row % 7}", "positive": TEXTS[row], "negatives": [TEXTS[(row * step) % 42] for step in range(2, 2 + row % 4)]}
    for row in range(30)
]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def section(path: Path, **fields: Any) -> DataSection:
    return DataSection(train=(str(path),), **{"document_fields": ("positive", "negatives"), **fields})


def similarity(model: Any, query: str, document: str) -> float:
    left, right = (model.encode_texts([text], "query").vectors[0].astype(np.float64) for text in (query, document))
    product = left @ right.T
    return float(product if product.ndim == 0 else product.max(axis=1).sum())


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of ten pairs at most."""
    monkeypatch.setattr(teacher_scores, "PAIRS_PER_PART", 10)


@pytest.mark.parametrize("kind", ["word_sum", "word_by_word"])
def test_scores_are_the_similarity_of_each_pair(kind: str, request: pytest.FixtureRequest, tmp_path: Path, small_parts: None) -> None:
    model = request.getfixturevalue(kind)
    path = write_lines(tmp_path / "rows.jsonl", [{**row, "kept": [1, None], "scores": [0]} for row in ROWS])
    record = score_rows(section(path), VectorTeacher(model), tmp_path / "out")
    rows = read_lines(tmp_path / "out" / "train.jsonl.gz")
    assert [{**row, "scores": 0} for row in rows] == [{**row, "kept": [1, None], "scores": 0} for row in ROWS]
    expected = [[similarity(model, row["query"], text) for text in (row["positive"], *row["negatives"])] for row in ROWS]
    for row, scores in zip(rows, expected, strict=True):
        assert row["scores"] == pytest.approx(scores, rel=1e-6, abs=1e-6)
    result = record["result"]
    assert (result["rows"], result["pairs"]) == (30, sum(map(len, expected)))
    assert result["positive_first"] == sum(scores[0] >= max(scores) for scores in expected)
    assert result["mean_scores"]["positive"] == pytest.approx(np.mean([scores[0] for scores in expected]), abs=1e-5)
    assert result["mean_scores"]["others"] == pytest.approx(np.mean([one for scores in expected for one in scores[1:]]), abs=1e-5)
    assert (result["lowest"], result["highest"]) == pytest.approx((min(map(min, expected)), max(map(max, expected))), abs=1e-6)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["scoring.json", "train.jsonl.gz"]


def test_each_text_is_encoded_once(word_sum: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    score_rows(section(path), VectorTeacher(word_sum), tmp_path / "out", cache=tmp_path / "cache")
    counts = Counter((role, text) for role, texts in word_sum.calls for text in texts)
    assert set(counts.values()) == {1}
    used = {("query", row["query"]) for row in ROWS} | {("document", text) for row in ROWS for text in (row["positive"], *row["negatives"])}
    assert set(counts) == used
    word_sum.calls.clear()
    score_rows(section(path), VectorTeacher(word_sum), tmp_path / "again", cache=tmp_path / "cache")
    assert not word_sum.calls


class Watched(VectorTeacher):
    """Teacher that records when its scorer is opened and closed."""

    def __init__(self, model: Any, name: str, events: list[str]) -> None:
        super().__init__(model)
        self.name, self.events = name, events

    @contextmanager
    def scorer(self, data: Any, *, cache: Any, progress: bool) -> Iterator[Any]:
        self.events.append(f"{self.name} opens")
        with super().scorer(data, cache=cache, progress=progress) as score:
            yield score
        self.events.append(f"{self.name} closes")


class LastPartFirst(VectorTeacher):
    """Teacher that returns parts in another order, as workers may."""

    @contextmanager
    def scorer(self, data: Any, *, cache: Any, progress: bool) -> Iterator[Any]:
        with super().scorer(data, cache=cache, progress=progress) as score:
            yield lambda parts, advance: iter([*score(parts, advance)][::-1])


def test_scores_of_several_teachers_are_combined(word_sum: Any, word_by_word: Any, tmp_path: Path, small_parts: None) -> None:
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    both = [VectorTeacher(word_sum), LastPartFirst(word_by_word)]
    for number, teacher in enumerate(both):
        score_rows(section(path), teacher, tmp_path / f"alone{number}")
    alone = [[row["scores"] for row in read_lines(tmp_path / f"alone{number}" / "train.jsonl.gz")] for number in range(2)]
    each = [[np.array(scores, np.float32) for scores in rows] for rows in alone]
    record = score_rows(section(path), Ensemble(both, [10, 0.5]), tmp_path / "weighed")
    for row, one, other in zip(read_lines(tmp_path / "weighed" / "train.jsonl.gz"), *each, strict=True):
        assert row["scores"] == pytest.approx(10 * one + 0.5 * other, rel=1e-5)
    teacher = record["teacher"]
    assert (teacher["kind"], teacher["weights"]) == ("ensemble", (10, 0.5))
    assert [member["fingerprint"] for member in teacher["members"]] == [word_sum.card.fingerprint, word_by_word.card.fingerprint]
    shared = score_rows(section(path), Ensemble(both), tmp_path / "shared")
    assert shared["teacher"]["weights"] is None
    for row, *members in zip(read_lines(tmp_path / "shared" / "train.jsonl.gz"), *each, strict=True):
        assert row["scores"] == pytest.approx(np.mean([min_max(scores) for scores in members], axis=0), abs=1e-6)


@pytest.mark.parametrize("weights", [None, [1.0, 1.0]])
def test_a_non_finite_score_of_one_teacher_is_refused(
    weights: Any, word_sum: Any, word_by_word: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Broken(VectorTeacher):
        @contextmanager
        def scorer(self, data: Any, *, cache: Any, progress: bool) -> Iterator[Any]:
            with super().scorer(data, cache=cache, progress=progress) as score:

                def broken(parts: Any, advance: Any) -> Iterator[Any]:
                    for number, scores in score(parts, advance):
                        scores[5:7] = np.nan, np.inf
                        yield number, scores

                yield broken

    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(InputError, match=r"rows.jsonl: row 3: the teacher's score is not finite"):
        score_rows(section(path), Ensemble([VectorTeacher(word_sum), Broken(word_by_word)], weights), tmp_path / "out")
    with pytest.raises(InputError, match="the weighted scores overflow float32"):
        score_rows(section(path), Ensemble([VectorTeacher(word_sum), VectorTeacher(word_by_word)], [1e300, 1]), tmp_path / "big")
    assert min_max(np.array([-3e38, 3e38, 0], np.float32)).tolist() == [0, 1, 0.5]
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_several_teachers_resume_where_they_were_stopped(word_sum: Any, word_by_word: Any, tmp_path: Path, small_parts: None) -> None:
    class Stopping(VectorTeacher):
        @contextmanager
        def scorer(self, data: Any, *, cache: Any, progress: bool) -> Iterator[Any]:
            with super().scorer(data, cache=cache, progress=progress) as score:

                def twice(parts: Any, advance: Any) -> Iterator[Any]:
                    for calls, part in enumerate(score(parts, advance)):
                        if calls == 2:
                            raise KeyboardInterrupt
                        yield part

                yield twice

    path, first = write_lines(tmp_path / "rows.jsonl", ROWS), VectorTeacher(word_sum)
    with pytest.raises(KeyboardInterrupt):
        score_rows(section(path), Ensemble([first, Stopping(word_by_word)], [1, 2]), tmp_path / "out")
    kept = len([*(tmp_path / "out" / WORK).glob("*.part")])
    word_sum.calls.clear()
    assert kept > 4
    with pytest.raises(InputError, match="other settings: teacher was"):
        score_rows(section(path), Ensemble([VectorTeacher(word_by_word), first], [1, 2]), tmp_path / "out")
    with pytest.raises(InputError, match="scores overflow float32; run the command again with smaller weights"):
        score_rows(section(path), Ensemble([first, VectorTeacher(word_by_word)], [1e308, 2]), tmp_path / "out")
    events: list[str] = []
    score_rows(section(path), Ensemble([first, Watched(word_by_word, "second", events)], [1, 2]), tmp_path / "out")
    assert not word_sum.calls  # it had scored all before the second began
    assert not events  # other weights need no other scores
    score_rows(section(path), Ensemble([first, VectorTeacher(word_by_word)], [1, 2]), tmp_path / "whole")
    assert (tmp_path / "out" / "train.jsonl.gz").read_bytes() == (tmp_path / "whole" / "train.jsonl.gz").read_bytes()


@pytest.mark.parametrize(
    ("count", "weights", "message"),
    [
        (1, None, "at least two teachers, got 1"),
        (2, [1.0], "1 weights for 2 teachers"),
        (2, [1.0, float("nan")], "positive numbers, got 1, nan"),
        (2, [1.0, 0.0], "positive numbers, got 1, 0"),
        (3, None, "given twice"),
    ],
)
def test_invalid_ensembles_are_refused(count: int, weights: Any, message: str, word_sum: Any, word_by_word: Any) -> None:
    with pytest.raises(InputError, match=message):
        Ensemble([VectorTeacher(model) for model in (word_sum, word_by_word, word_sum)[:count]], weights)


@pytest.mark.parametrize("as_text", [False, True], ids=["lists", "lists as text"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_ids_are_scored(as_text: bool, suffix: str, word_sum: Any, tmp_path: Path, small_parts: None) -> None:
    """Rows as in lightonai/ms-marco-en-bge, and as in the later data set, which stores lists as text."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(name: str, rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            parquet.write_table(arrow.Table.from_pylist(rows), path)
            return path
        return write_lines(path, rows)

    queries = write("queries", [{"query_id": 100 + number, "text": f"w{number} w{number + 1}"} for number in range(8)])
    documents = write("documents", [{"document_id": number, "text": text} for number, text in enumerate(TEXTS)])
    lists = [[(row + step * 5) % 42 for step in range(6)] for row in range(12)]
    rows = write("rows", [{"query_id": 100 + row % 8, "document_ids": str(ids) if as_text else ids} for row, ids in enumerate(lists)])
    given = section(
        rows, format="ids", query_field="query_id", document_fields=("document_ids",), queries=str(queries), documents=str(documents)
    )
    record = score_rows(given, VectorTeacher(word_sum), tmp_path / "out")
    found = read_lines(tmp_path / "out" / "train.jsonl.gz")
    for place, (row, ids) in enumerate(zip(found, lists, strict=True)):
        expected = [similarity(word_sum, f"w{place % 8} w{place % 8 + 1}", TEXTS[number]) for number in ids]
        assert row["scores"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert row["document_ids"] == (str(ids) if as_text else ids)
    assert record["result"]["pairs"] == 72
    asked = {text for role, texts in word_sum.calls if role == "document" for text in texts}
    assert asked == {TEXTS[number] for ids in lists for number in ids}  # and not the whole of documents


def test_an_id_without_a_text_is_an_error(word_sum: Any, tmp_path: Path) -> None:
    queries = write_lines(tmp_path / "queries.jsonl", [{"query_id": 1, "text": "w1"}])
    documents = write_lines(tmp_path / "documents.jsonl", [{"document_id": 1, "text": "w1"}])
    rows = write_lines(tmp_path / "rows.jsonl", [{"query_id": 1, "document_ids": [1]}, {"query_id": 1, "document_ids": [1, 7, 8]}])
    given = section(
        rows, format="ids", query_field="query_id", document_fields=("document_ids",), queries=str(queries), documents=str(documents)
    )
    with pytest.raises(InputError, match=r"rows.jsonl:2: document '7' is not in .*documents.jsonl; in all 2 ids"):
        score_rows(given, VectorTeacher(word_sum), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "a", "positive": "b"}], "rows.jsonl:1: no field 'negatives'"),
        (
            [{"query": "a", "positive": "b", "negatives": []}, {"query": "a", "positive": "", "negatives": []}],
            "rows.jsonl:2: the field 'positive'",
        ),
        ([{"query": "a", "positive": "b", "negatives": [3]}], "rows.jsonl:1: the field 'negatives' must hold text, got 3"),
    ],
)
def test_malformed_rows_are_refused(rows: list[Any], message: str, word_sum: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match=message):
        score_rows(section(path), VectorTeacher(word_sum), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_field_that_is_not_json_is_refused(word_sum: Any, tmp_path: Path) -> None:
    """The error occurs before anything is scored."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"query": "w1", "positive": "w2", "picture": None}, {"query": "w1", "positive": "w2", "picture": b"\x00"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"rows.parquet:2: a field cannot be written as JSON"):
        score_rows(section(tmp_path / "rows.parquet", document_fields=("positive",)), VectorTeacher(word_sum), tmp_path / "out")
    assert not word_sum.calls
    assert not (tmp_path / "out").exists()


@pytest.fixture
def cross_encoder(tmp_path: Path) -> Path:
    """A BERT of two layers with one score, as sentence-transformers saves it."""
    return make_cross_encoder(tmp_path / "cross-encoder", labels=1)


def make_cross_encoder(folder: Path, *, labels: int, seed: int = 7) -> Path:
    transformers = pytest.importorskip("transformers")
    words = sorted({word for text in TEXTS for word in text.split()})
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=5 + len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=24,
        num_labels=labels,
        initializer_range=0.4,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=24).save_pretrained(folder)
    return folder


def logits(folder: Path, pairs: list[tuple[str, str]]) -> NDArray[np.float32]:
    """Scores by transformers, one pair at a time."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        found = [model(**tokenizer(*pair, truncation=True, return_tensors="pt")).logits[0, 0].item() for pair in pairs]
    return np.array(found, np.float32)


def test_a_cross_encoder_gives_logits(cross_encoder: Path, tmp_path: Path, small_parts: None) -> None:
    pytest.importorskip("sentence_transformers")
    teacher = load_teacher(str(cross_encoder))
    assert isinstance(teacher, CrossEncoderTeacher)
    assert teacher.description["kind"] == "cross-encoder"
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    record = score_rows(section(path), teacher, tmp_path / "out")
    found = [score for row in read_lines(tmp_path / "out" / "train.jsonl.gz") for score in row["scores"]]
    expected = logits(cross_encoder, [(row["query"], text) for row in ROWS for text in (row["positive"], *row["negatives"])])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert max(found) > 1 or min(found) < 0  # no sigmoid
    assert record["teacher"]["fingerprint"] == load_teacher(str(cross_encoder)).description["fingerprint"]


@pytest.mark.parametrize(("pairs", "fitting", "sizes"), [(None, 99, {32, 9}), (3, 99, {3, 1}), (None, 20, {16, 9}), (0, 99, {1})])
def test_a_cross_encoder_scores_in_batches_that_fit(
    cross_encoder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pairs: int | None,
    fitting: int,
    sizes: set[int],
) -> None:
    library = pytest.importorskip("sentence_transformers")
    seen: list[int] = []
    predict = library.CrossEncoder.predict

    def limited(model: Any, pairs: Sequence[tuple[str, str]], **options: Any) -> Any:
        if len(pairs) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(len(pairs))
        return predict(model, pairs, **options)

    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    length = load_teacher(str(cross_encoder)).description["max_length"] or 512
    teacher = load_teacher(str(cross_encoder), batch_tokens=None if pairs is None else max(1, pairs * length))
    monkeypatch.setattr(library.CrossEncoder, "predict", limited)
    score_rows(section(path), teacher, tmp_path / "out")
    monkeypatch.undo()
    found = [score for row in read_lines(tmp_path / "out" / "train.jsonl.gz") for score in row["scores"]]
    texts = [(row["query"], text) for row in ROWS for text in (row["positive"], *row["negatives"])]
    np.testing.assert_allclose(found, logits(cross_encoder, texts), atol=1e-5)
    assert set(seen) == sizes
    assert sum(seen) == len(texts) == 73
    assert caplog.text.count("going on with") == (fitting < 32)


def test_workers_score_pairs_with_a_cross_encoder(cross_encoder: Path, tmp_path: Path, small_parts: None) -> None:
    pytest.importorskip("sentence_transformers")
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    score_rows(section(path), load_teacher(str(cross_encoder)), tmp_path / "here")
    teacher = load_teacher(str(cross_encoder), executor=Backwards())
    score_rows(section(path), teacher, tmp_path / "there")
    rows, others = (read_lines(tmp_path / name / "train.jsonl.gz") for name in ("here", "there"))
    assert [row["query"] for row in rows] == [row["query"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row["scores"] == pytest.approx(other["scores"], abs=1e-6)
    change_json(cross_encoder / "config.json", hidden_act="relu")  # a worker finds another model than this process
    with pytest.raises(InputError, match="has other files than on the first machine"):
        score_rows(section(path), teacher, tmp_path / "changed")


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_fingerprint_of_a_cross_encoder_covers_everything_that_affects_scores(cross_encoder: Path) -> None:
    pytest.importorskip("sentence_transformers")

    def fingerprint() -> str:
        return str(load_teacher(str(cross_encoder)).description["fingerprint"])

    seen = [fingerprint()]
    (cross_encoder / "README.md").write_text("a card")
    assert fingerprint() == seen[0]
    change_json(cross_encoder / "tokenizer_config.json", model_max_length=12)
    seen.append(fingerprint())
    change_json(cross_encoder / "config.json", hidden_act="relu")
    seen.append(fingerprint())
    change_json(cross_encoder / "tokenizer.json", normalizer=None)
    seen.append(fingerprint())
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder)
    (cross_encoder / "model.safetensors").unlink()
    for value in (0.0, 1.0):  # weights in the format of old
        torch.nn.init.constant_(model.classifier.bias, value)
        torch.save(model.state_dict(), cross_encoder / "pytorch_model.bin")
        seen.append(fingerprint())
    assert len(set(seen)) == 6


def test_unsuitable_cross_encoders_are_refused(cross_encoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    with pytest.raises(InputError, match="the cross-encoder has 3 classes"):
        load_teacher(str(make_cross_encoder(tmp_path / "three", labels=3)))
    with pytest.raises(InputError, match="sentence-transformers chooses the dtype of a cross-encoder; leave out dtype int8"):
        load_teacher(str(cross_encoder), dtype="int8")
    (cross_encoder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match="sentence-transformers cannot load this model"):
        load_teacher(str(cross_encoder))
