"""Workloads of the encoder benchmark: the paper's lengths, given lengths, batches, random token ids."""

from __future__ import annotations

import numpy as np
import pytest

from quiver.encoder import EncoderConfig, InputError
from quiver.eval.bench.encoder import (
    CPU_TABLE,
    PAPER_SETS,
    Workload,
    batch_documents,
    batches,
    paper_workload,
    parse_lengths,
    random_documents,
)
from quiver.eval.published import TABLE_10

CONFIG = EncoderConfig.modernbert(
    vocab_size=300, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], pad_token_id=150
)


@pytest.mark.parametrize("name", PAPER_SETS)
def test_sets_equal_the_papers_to_the_token(name: str) -> None:
    lengths = paper_workload(name, documents=8192).lengths
    told = TABLE_10[name]
    assert (len(lengths), sum(lengths), min(lengths), max(lengths)) == (told.documents, told.tokens, told.shortest, told.longest)


@pytest.mark.parametrize(("name", "mean", "deviation"), [("variable-256", 256, 64), ("variable-4096", 4096, 1024)])
def test_variable_lengths_are_normally_distributed(name: str, mean: int, deviation: int) -> None:
    lengths = np.array(paper_workload(name, documents=8192).lengths)
    np.testing.assert_allclose([lengths.mean(), lengths.std()], [mean, deviation], rtol=0.02)
    within = np.mean(abs(lengths - mean) < deviation)
    assert 0.66 < within < 0.70  # 68 % of a normal distribution lie within one standard deviation


def test_smaller_set_is_the_beginning_of_the_whole() -> None:
    whole = paper_workload("variable-4096", documents=8192).lengths
    assert paper_workload("variable-4096", documents=5).lengths == whole[:5]
    assert paper_workload("fixed-512", documents=3) == Workload("fixed-512", (512, 512, 512))


@pytest.mark.parametrize("documents", [0, 8193])
def test_number_of_documents_is_checked(documents: int) -> None:
    with pytest.raises(InputError, match=f"fixed-512 has 8,192 documents, got {documents:,}"):
        paper_workload("fixed-512", documents=documents)


def test_unknown_set_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown set 'fixed-64'; choose from fixed-512, variable-256, fixed-8192, variable-4096"):
        paper_workload("fixed-64", documents=1)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("8", (8,)),
        ("512x8", (512,) * 8),
        ("512x2+32x14", (512,) * 2 + (32,) * 14),
        ("4096+2500", (4096, 2500)),
        (" 4 + 5x2 ", (4, 5, 5)),
        ("variable-256x3+7", (379, 351, 313, 7)),
        ("fixed-512x2", (512, 512)),
    ],
)
def test_lengths_are_parsed(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == Workload(text, lengths)


@pytest.mark.parametrize("text", ["", "+", "512+", "512x", "x8", "0x4", "4x0", "a", "-3", "1.5", "512x8x2", "variable-100x3"])
def test_malformed_lengths_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="lengths "):
        parse_lengths(text)


def test_cpu_table_has_six_small_cases() -> None:
    sets = [parse_lengths(text) for text in CPU_TABLE]
    assert [len(each.lengths) for each in sets] == [8, 16, 16, 2, 2, 1]
    assert [each.tokens for each in sets] == [4096, sum(paper_workload("variable-256", documents=16).lengths), 1472, 4096, 6596, 8192]


@pytest.mark.parametrize(
    ("text", "tokens", "size"),
    [("512x64", 8192, 16), ("512x8", 8192, 8), ("4096+2500", 8192, 2), ("8192x4", 8192, 1), ("variable-256x32", 8192, 32), ("10x5", 1, 1)],
)
def test_batches_hold_about_batch_tokens(text: str, tokens: int, size: int) -> None:
    assert batch_documents(parse_lengths(text), batch_size=None, batch_tokens=tokens) == size


def test_batch_size_is_a_number_of_documents() -> None:
    assert batch_documents(parse_lengths("512x64"), batch_size=5, batch_tokens=8192) == 5
    assert batch_documents(parse_lengths("512x3"), batch_size=5, batch_tokens=8192) == 3


def test_batches_keep_the_order_and_lose_nothing() -> None:
    assert batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_random_ids_are_reproducible_and_never_padding() -> None:
    lengths = (500, 3, 2000)
    documents = list(random_documents(lengths, CONFIG, seed=1))
    assert tuple(map(len, documents)) == lengths
    ids = {token for document in documents for token in document}
    assert ids == set(range(100, 300)) - {150}  # the paper's first id, the vocabulary's last, no padding
    assert documents == list(random_documents(lengths, CONFIG, seed=1))
    assert documents != list(random_documents(lengths, CONFIG, seed=2))
