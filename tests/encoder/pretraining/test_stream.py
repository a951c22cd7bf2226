"""The batches of a phase: what stands where, what a mix reads, and that processes share one stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder.packing import pack_ids
from encoder.pretraining.corpus import Corpus, prepare_corpus
from encoder.pretraining.masking import special_ids
from encoder.pretraining.packing import SPECIAL
from encoder.pretraining.phases import make_tokenizer
from encoder.pretraining.sections import PretrainingRecipe
from encoder.pretraining.stream import PhaseStream, UpdateBatch, held_out_rows, mixed_pieces
from encoder.running.processes import Processes
from encoder.tokens import Tokenizer

MakeRecipe = Callable[..., PretrainingRecipe]


@pytest.fixture
def prepared(make_recipe: MakeRecipe, tmp_path: Path) -> tuple[PretrainingRecipe, Tokenizer, Corpus]:
    recipe = make_recipe()
    tokenizer = make_tokenizer(recipe)
    return recipe, tokenizer, prepare_corpus(recipe.data, tokenizer, tmp_path / "corpus")


def updates(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus], number: int, *, rank: int = 0, size: int = 1) -> list[UpdateBatch]:
    recipe, tokenizer, corpus = prepared
    return list(PhaseStream(recipe, number, corpus, tokenizer, Processes(rank, size)).updates())


def test_a_row_is_sequences_between_cls_and_sep_with_masks_over_words_alone(
    prepared: tuple[PretrainingRecipe, Tokenizer, Corpus],
) -> None:
    recipe, tokenizer, corpus = prepared
    special = special_ids(tokenizer)
    asked = 0
    for update in updates(prepared, 0):
        for row in update.rows:
            batch, labels = row.batch, row.labels
            assert batch.num_tokens == sum(piece.length + SPECIAL for piece in row.pieces) <= 4 * 24
            again = pack_ids([ids.tolist() for ids in batch.unpack(batch.ids)])
            assert again.offsets == batch.offsets
            assert torch.equal(again.cu_seqlens, batch.cu_seqlens)
            assert torch.equal(again.positions, batch.positions)
            assert (again.max_seqlen, again.rows) == (batch.max_seqlen, batch.rows)
            true = torch.where(labels >= 0, labels, batch.ids)
            for piece, ids in zip(row.pieces, batch.unpack(true), strict=True):
                body = corpus.train.ids[piece.offset : piece.offset + piece.length].tolist()
                assert ids.tolist() == [special["cls"], *body, special["sep"]]
            ends = torch.tensor([place for start, end in zip(batch.offsets, batch.offsets[1:], strict=False) for place in (start, end - 1)])
            assert (labels[ends] == -100).all()
            assert row.asked == int((labels >= 0).sum())
            asked += row.asked
    total = sum(update.tokens for update in updates(prepared, 0))
    assert 0.22 < asked / total < 0.33, "30% of what is neither [CLS] nor [SEP]"
    assert total >= recipe.phases[0].tokens


def test_processes_take_their_parts_of_one_stream(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
    alone = updates(prepared, 1)
    first, second = (updates(prepared, 1, rank=rank, size=2) for rank in range(2))
    assert len(alone) == len(first) == len(second) > 4
    for whole, *parts in zip(alone, first, second, strict=True):
        assert [part.tokens for part in parts] == [whole.tokens] * 2
        for number, row in enumerate(whole.rows):
            other = parts[number % 2].rows[number // 2]
            assert other.pieces == row.pieces
            assert torch.equal(other.batch.ids, row.batch.ids)
            assert torch.equal(other.labels, row.labels)


def test_it_goes_on_behind_any_update(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
    recipe, tokenizer, corpus = prepared
    whole = updates(prepared, 0)
    for place in (0, 3, len(whole) - 2):
        stream = PhaseStream(recipe, 0, corpus, tokenizer, Processes())
        stream.restore(whole[place].state)
        rest = list(stream.updates())
        assert len(rest) == len(whole) - place - 1
        for one, other in zip(rest, whole[place + 1 :], strict=True):
            assert [row.pieces for row in one.rows] == [row.pieces for row in other.rows]
            assert all(torch.equal(a.batch.ids, b.batch.ids) for a, b in zip(one.rows, other.rows, strict=True))


def test_a_mix_reads_its_sources_alone_and_each_as_often_as_it_says(
    prepared: tuple[PretrainingRecipe, Tokenizer, Corpus], make_recipe: MakeRecipe
) -> None:
    _, _, corpus = prepared
    border = int(corpus.train.ends[corpus.train.sources["code"] - 1])
    offsets, lengths, times = mixed_pieces(corpus.train, make_recipe().phases[1])
    assert Counter(times[offsets < border].tolist()).keys() == {0.5}
    assert Counter(times[offsets >= border].tolist()).keys() == {2.0}
    assert int(lengths.sum()) == int(corpus.train.ends[-1])
    prose = make_recipe("phases.1.mix=[]").phases[1]
    assert set(mixed_pieces(corpus.train, prose)[2].tolist()) == {1.0}
    alone = make_recipe(change=lambda raw: raw["phases"][1]["mix"].pop(0)).phases[1]
    offsets, lengths, times = mixed_pieces(corpus.train, alone)
    assert offsets.min() == border
    assert int(lengths.sum()) == int(corpus.train.ends[-1]) - border
    assert set(times.tolist()) == {2.0}


def test_held_out_rows_are_the_first_tokens_in_order(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
    recipe, _, corpus = prepared
    phase = recipe.phases[0]
    rows = held_out_rows(corpus.held_out, phase, most=200)
    pieces = [piece for row in rows for piece in row]
    assert [piece.serial for piece in pieces] == list(range(len(pieces)))
    assert all(sum(piece.length + SPECIAL for piece in row) <= phase.micro_batch * phase.context for row in rows)
    total = sum(piece.length + SPECIAL for piece in pieces)
    assert 200 - phase.context < total <= 200
    ids = np.concatenate([corpus.held_out.ids[piece.offset : piece.offset + piece.length] for piece in pieces])
    np.testing.assert_array_equal(ids, corpus.held_out.ids[: len(ids)])
    everything = held_out_rows(corpus.held_out, phase, most=10**9)
    assert sum(piece.length for row in everything for piece in row) == len(corpus.held_out.ids)
