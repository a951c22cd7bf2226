"""The batches of a phase: layout of rows, the mix, and the split of one stream over processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder.packing import pack_ids
from quiver.encoder.pretraining.corpus import Corpus, open_corpus, prepare_corpus
from quiver.encoder.pretraining.packing import SPECIAL, Piece, Share
from quiver.encoder.pretraining.phases import make_tokenizer, special_ids
from quiver.encoder.pretraining.recipe import PretrainingRecipe
from quiver.encoder.pretraining.stream import PhaseStream, UpdateBatch, held_out_rows, read_shares
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.processes import Processes

MakeRecipe = Callable[..., PretrainingRecipe]


@pytest.fixture
def prepared(make_recipe: MakeRecipe, tmp_path: Path) -> tuple[PretrainingRecipe, Tokenizer, Corpus]:
    recipe = make_recipe()
    tokenizer = make_tokenizer(recipe)
    prepare_corpus(recipe.data, tokenizer, tmp_path / "corpus")
    return recipe, tokenizer, open_corpus(tmp_path / "corpus")


def updates(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus], number: int, *, rank: int = 0, size: int = 1) -> list[UpdateBatch]:
    recipe, tokenizer, corpus = prepared
    return list(PhaseStream(recipe, number, corpus, tokenizer, Processes(rank, size)).updates())


def test_a_row_holds_sequences_between_cls_and_sep_with_masked_words(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
    recipe, tokenizer, corpus = prepared
    special = special_ids(tokenizer)
    masked = 0
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
            assert row.masked == int((labels >= 0).sum())
            masked += row.masked
    total = sum(update.tokens for update in updates(prepared, 0))
    assert 0.22 < masked / total < 0.33, "30% of the tokens other than [CLS] and [SEP]"
    assert total >= recipe.phases[0].tokens


def test_processes_read_disjoint_parts_of_one_stream(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
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


def test_a_restored_stream_continues_after_any_step(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
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


def test_a_mix_reads_only_its_sources_as_often_as_specified(
    prepared: tuple[PretrainingRecipe, Tokenizer, Corpus], make_recipe: MakeRecipe
) -> None:
    _, _, corpus = prepared
    code, prose = corpus.train.sources["code"], corpus.train.sources["prose"]
    assert code + prose == len(corpus.train)
    assert read_shares(corpus.train, make_recipe().phases[1]) == [Share(0, code, 0.5), Share(code, code + prose, 2.0)]
    both = make_recipe("phases.1.mix=[]").phases[1]
    assert read_shares(corpus.train, both) == [Share(0, code, 1.0), Share(code, code + prose, 1.0)]
    alone = make_recipe(change=lambda raw: raw["phases"][1]["mix"].pop(0)).phases[1]
    assert read_shares(corpus.train, alone) == [Share(code, code + prose, 2.0)]


def read_by(stream: PhaseStream) -> list[int]:
    """Offsets of all pieces that a phase reads."""
    return [piece.offset for update in stream.updates() for row in update.rows for piece in row.pieces]


def test_a_phase_with_the_same_pieces_continues_the_pass(
    prepared: tuple[PretrainingRecipe, Tokenizer, Corpus], make_recipe: MakeRecipe
) -> None:
    """The phases differ only in the learning rate: no piece repeats within the pass, and the order is that of one long phase."""
    _, tokenizer, corpus = prepared

    def split(raw: dict[str, Any]) -> None:
        short = raw["phases"][0] | {"warmup_tokens": 0, "batch_warmup_tokens": 0}
        raw["phases"] = [short | {"tokens": 1200}, short | {"tokens": 1200, "learning_rate": 1e-3}, raw["phases"][1]]

    recipe = make_recipe(change=split)
    first = PhaseStream(recipe, 0, corpus, tokenizer, Processes())
    read, state = [], None
    for update in first.updates():
        read += [piece.offset for row in update.rows for piece in row.pieces]
        state = update.state
    assert state is not None
    second = PhaseStream(recipe, 1, corpus, tokenizer, Processes())
    second.follow(state)
    assert set(read).isdisjoint(rest := read_by(second))
    long = make_recipe("phases.0.tokens=2400", change=split)
    expected = read_by(PhaseStream(long, 0, corpus, tokenizer, Processes()))
    assert (read + rest)[: len(expected)] == expected
    assert len(expected) > len(read)
    third = PhaseStream(recipe, 2, corpus, tokenizer, Processes())
    third.follow(state)
    assert third.sampler.state() == {"passes": 0, "window": 0, "position": 0, "serial": state["sampler"]["serial"]}


def held_out_text(rows: list[list[Piece]]) -> list[int]:
    """Positions of the held-out tokens that the rows contain, in ascending order."""
    return [place for row in rows for piece in row for place in range(piece.offset, piece.offset + piece.length)]


def test_held_out_rows_are_the_same_text_in_every_phase(prepared: tuple[PretrainingRecipe, Tokenizer, Corpus]) -> None:
    recipe, _, corpus = prepared
    texts = []
    for phase in recipe.phases:
        rows = held_out_rows(corpus.held_out, phase, longest=48, most=200)
        pieces = [piece for row in rows for piece in row]
        assert [piece.serial for piece in pieces] == list(range(len(pieces)))
        assert max(piece.length for piece in pieces) <= phase.context - SPECIAL
        assert all(sum(piece.length + SPECIAL for piece in row) <= phase.micro_batch * phase.context for row in rows)
        texts.append(held_out_text(rows))
    assert texts[0] == texts[1]
    assert texts[0] == sorted(set(texts[0]))
    assert 200 - 48 < len(texts[0]) + SPECIAL * len(pieces) <= 200
    everything = held_out_rows(corpus.held_out, recipe.phases[0], longest=48, most=10**9)
    assert held_out_text(everything) == list(range(len(corpus.held_out.ids)))
