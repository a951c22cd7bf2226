"""Invalid input: queries of a wrong width or number type, and models and documents with values that no file can store."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import BuildOptions, Filter, IndexReader, build_index, open_index
from quiver.retrieval.index.dense import codec as lists
from quiver.retrieval.index.tokens import segment as token_segments
from quiver.retrieval.records import DenseEncoding, Document, TokenEncoding

ENGINES = ["exact-dense", "pq-dense", "ivf-dense", "faiss-dense", "exact-tokens", "ivf-tokens"]


def built(engine: str, path: Path, faults: ModuleType) -> IndexReader:
    documents = [Document(f"d{number:02d}", f"w{number} w{number % 7} w{number % 3}", "", {"n": number}) for number in range(40)]
    faults.build(path, engine, documents)
    return open_index(path)


def queries_for(index: IndexReader, faults: ModuleType) -> Any:
    return faults.ENGINES[index.kind].model.encode_texts(["w1 w2", "w30 w4"], "query").vectors


@pytest.mark.parametrize("engine", ENGINES)
def test_queries_are_searched_as_float32_whatever_they_are(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    index = built(engine, tmp_path / "i", faults)
    dense = index.manifest.model.kind == "dense"
    halves = queries_for(index, faults)
    halves = halves.astype(np.float16) if dense else [query.astype(np.float16) for query in halves]
    singles = halves.astype(np.float32) if dense else [query.astype(np.float32) for query in halves]
    for preset in ("exact", "balanced"):
        wanted = index.search(singles, 5, effort=preset)
        every_second = np.repeat(singles, 2, axis=1)[:, ::2] if dense else [np.repeat(query, 2, axis=1)[:, ::2] for query in singles]
        doubles = singles.astype(np.float64) if dense else [query.astype(np.float64) for query in singles]
        for other in (halves, doubles, every_second, list(singles)):
            found = index.search(other, 5, effort=preset)
            assert found.ids == wanted.ids
            for mine, theirs in zip(found.scores, wanted.scores, strict=True):
                assert mine.dtype == np.float32
                np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(index.scores(halves[0], ["d01", "d30"]), index.scores(singles[0], ["d01", "d30"]))


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_of_a_query_that_does_not_fit_are_refused(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    """The compiled loops read as many numbers as the query is wide, whatever lies behind a code."""
    index = built(engine, tmp_path / "i", faults)
    (query, *_) = queries_for(index, faults)
    wide = np.concatenate([query, query], axis=-1)
    with pytest.raises(ValueError, match="must have the shape"):
        index.scores(wide, ["d01"])
    with pytest.raises(ValueError, match="is not finite"):
        index.scores(np.full_like(query, np.nan), ["d01"])
    with pytest.raises(ValueError, match="is not finite"):
        index.scores(np.full(query.shape, 1e300), ["d01"])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unknown_preset_is_refused(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    index = built(engine, tmp_path / "i", faults)
    wrong: Any = "balance"
    with pytest.raises(InputError, match="unknown search effort 'balance'"):
        index.search(queries_for(index, faults), 3, effort=wrong)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_index_without_references_is_freed(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    """Its lists are hundreds of megabytes, of which Python's search for circles knows nothing."""
    index = built(engine, tmp_path / "i", faults)
    index.search(queries_for(index, faults), 3, effort=faults.ENGINES[engine].narrow)
    index.search(queries_for(index, faults), 3, filter=Filter.parse(["n<20"]), effort="fast")
    gc.disable()
    try:
        watched = [weakref.ref(index), weakref.ref(index.segments[0]), weakref.ref(index.segments[0].vectors)]
        del index
        assert [each() for each in watched] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("engine", "module", "name"), [("ivf-tokens", token_segments, "FastScanLists"), ("ivf-dense", lists, "FastScanLists")]
)
def test_threads_that_search_first_make_the_lists_once(
    engine: str, module: ModuleType, name: str, tmp_path: Path, faults: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, make, made = built(engine, tmp_path / "i", faults), getattr(module, name), []
    queries, search_params = queries_for(index, faults), faults.ENGINES[engine].narrow

    def slow(*arguments: Any, **named: Any) -> Any:
        made.append(threading.get_ident())
        time.sleep(0.2)
        return make(*arguments, **named)

    slow.nbytes = make.nbytes  # type: ignore[attr-defined]
    monkeypatch.setattr(module, name, slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(index.search(queries, 2, effort=search_params).ids)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(found) == 4
    assert all(each == found[0] for each in found)


class HalfPrecision:
    """A model that gives what its matrices were computed in."""

    def __init__(self, model: Any) -> None:
        self.model, self.card = model, model.card

    def encode_texts(self, texts: Any, role: Any, *, progress: bool = False) -> Any:
        encoding = self.model.encode_texts(texts, role, progress=progress)
        if isinstance(encoding, DenseEncoding):
            return replace(encoding, vectors=encoding.vectors.astype(np.float16))
        return replace(encoding, vectors=[each.astype(np.float16) for each in encoding.vectors])


class Rounded(HalfPrecision):
    """The same numbers as float32."""

    def encode_texts(self, texts: Any, role: Any, *, progress: bool = False) -> Any:
        encoding = super().encode_texts(texts, role, progress=progress)
        if isinstance(encoding, DenseEncoding):
            return replace(encoding, vectors=encoding.vectors.astype(np.float32))
        return replace(encoding, vectors=[each.astype(np.float32) for each in encoding.vectors])


@pytest.mark.parametrize("engine", ["exact-dense", "pq-dense", "exact-tokens", "ivf-tokens"])
def test_a_model_of_half_precision_makes_the_index_of_its_numbers(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    options = BuildOptions(engine, faults.ENGINES[engine].settings, calibrate=False)
    documents = [Document(f"d{number}", f"w{number} w{number % 5}") for number in range(30)]
    model = faults.ENGINES[engine].model
    half, single = (build_index(documents, kind(model), tmp_path / kind.__name__, options=options) for kind in (HalfPrecision, Rounded))
    assert [entry.files for entry in half.manifest.segments] == [entry.files for entry in single.manifest.segments]


class Long:
    """A model of one vector a token, a million times as long as those of others."""

    def __init__(self, model: Any, factor: float) -> None:
        self.model, self.card, self.factor = model, model.card, np.float32(factor)

    def encode_texts(self, texts: Any, role: Any, *, progress: bool = False) -> TokenEncoding:
        encoding = self.model.encode_texts(texts, role, progress=progress)
        return replace(encoding, vectors=[self.factor * each for each in encoding.vectors])


def test_token_vectors_that_half_precision_cannot_hold_are_refused(tmp_path: Path, faults: ModuleType) -> None:
    documents = [Document(f"d{number}", f"w{number} w{number % 5} w{number % 3}") for number in range(60)]
    options = BuildOptions("ivf-tokens", {"centroids": 4}, calibrate=False)
    with pytest.raises(InputError, match="too large for quantized codes; use the engine exact-tokens"):
        build_index(documents, Long(faults.TOKENS, 1e6), tmp_path / "i", options=options)


def test_a_query_that_is_too_long_is_no_damage(tmp_path: Path, faults: ModuleType) -> None:
    index = built("ivf-tokens", tmp_path / "i", faults)
    query = [1e38 * each for each in queries_for(index, faults)]
    for effort in ("exact", faults.ENGINES["ivf-tokens"].narrow):
        with pytest.raises(ValueError, match="do not fit into float32"):
            index.search(query, 3, effort=effort)
    with pytest.raises(ValueError, match="do not fit into float32"):
        index.scores(query[0], ["d01"])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Document("b", "half \ud800 a pair"), "document 'b': the text contains an unpaired surrogate"),
        (Document("\udc00", "text"), r"the id '\\udc00' of a document contains an unpaired surrogate"),
        (Document("b", "text", "", {"n": float("inf")}), "document 'b': .*'n'"),
        (Document("b", "text", "", {"n": {1, 2}}), "document 'b': .*'n'"),  # type: ignore[dict-item]
    ],
)
@pytest.mark.parametrize("once", [True, False])
def test_documents_that_cannot_be_written_are_refused_before_encoding(
    tmp_path: Path, word_sum: Any, document: Document, message: str, once: bool
) -> None:
    documents = [Document("a", "text"), document]
    with pytest.raises(InputError, match=message):
        build_index(iter(documents) if once else documents, word_sum, tmp_path / "i")
    assert word_sum.calls == []
    assert list(tmp_path.iterdir()) == []
