"""The batches of a phase: pieces sampled, packed into rows, masked; the next update's made while the last is trained on.

Every process draws the whole stream and takes its part of each update's rows, so that any number of them does the same updates.

Shapes: B sequences of a row, N its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.packing import PackedBatch
from quiver.encoder.pretraining.corpus import Corpus, Documents
from quiver.encoder.pretraining.masking import Masker, special_ids
from quiver.encoder.pretraining.packing import SPECIAL, Piece, SequencePacker
from quiver.encoder.pretraining.sampler import PieceSampler, Share, cut
from quiver.encoder.pretraining.schedule import BatchWarmup
from quiver.encoder.pretraining.sections import PhaseSection, PretrainingRecipe
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.processes import Processes


@dataclass(frozen=True)
class MaskedRow:
    """What goes through the model at once.

    Attributes:
        pieces: Of the corpus.
        batch: Their masked ids, N tokens.
        labels: The word where it is asked for, else -100, (N,), on the host.
        asked: How many are.
    """

    pieces: list[Piece]
    batch: PackedBatch
    labels: Tensor
    asked: int


@dataclass(frozen=True)
class UpdateBatch:
    """What an update is done with.

    Attributes:
        rows: This process's.
        count: Rows over all processes.
        tokens: Tokens of all rows.
        room: Tokens that they could have held.
        state: Of the stream behind it.
    """

    rows: list[MaskedRow]
    count: int
    tokens: int
    room: int
    state: dict[str, Any]


class RowMaker:
    """Makes masked rows of pieces.

    Args:
        documents: Where the pieces lie.
        tokenizer: Gives [CLS] and [SEP].
        masker: Masks.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, masker: Masker) -> None:
        special = special_ids(tokenizer)
        self._first, self._last = special["cls"], special["sep"]
        self._ids = documents.ids
        self._masker = masker

    def __call__(self, pieces: list[Piece]) -> MaskedRow:
        """One row of at least one piece."""
        masked = [self._masker(self._sequence(piece), piece.serial) for piece in pieces]
        lengths = [piece.length + SPECIAL for piece in pieces]
        offsets = (0, *accumulate(lengths))
        labels = np.concatenate([asked for _, asked in masked])
        batch = PackedBatch(
            ids=torch.from_numpy(np.concatenate([seen for seen, _ in masked])),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
            offsets=offsets,
            max_seqlen=max(lengths),
            positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
            rows=tuple(range(len(pieces))),
        )
        return MaskedRow(pieces, batch, torch.from_numpy(labels), int((labels >= 0).sum()))

    def _sequence(self, piece: Piece) -> NDArray[np.int64]:
        body = self._ids[piece.offset : piece.offset + piece.length]
        return np.concatenate([[self._first], body, [self._last]]).astype(np.int64)


class PhaseStream:
    """The updates of one phase.

    Args:
        recipe: Its seed, mix and packing.
        number: Of the phase.
        corpus: What is read.
        tokenizer: Of the model.
        processes: Of the run.
    """

    def __init__(self, recipe: PretrainingRecipe, number: int, corpus: Corpus, tokenizer: Tokenizer, processes: Processes) -> None:
        self._phase, training = recipe.phases[number], recipe.training
        masker = Masker(tokenizer, probability=training.mask_probability, seed=training.seed)
        self._rows = RowMaker(corpus.train, tokenizer, masker)
        begun = _begun_in(recipe.phases, number)
        self._goes_on = begun < number
        shares, room = read_shares(corpus.train, self._phase), self._phase.context - SPECIAL
        self._sampler = PieceSampler(corpus.train.ends, shares, room=room, seed=(training.seed, begun))
        self._packer = SequencePacker(self._sampler.take, buffer=training.packing_buffer)
        self._warmup = BatchWarmup(self._phase)
        self._processes = processes
        self._tokens = 0

    def follow(self, state: dict[str, Any]) -> None:
        """Begin behind the phase before: with what it left waiting, and the numbers behind its last.

        Where that read the same pieces, its pass goes on, so that what it has not read comes before anything is read again.
        """
        self._packer.restore(state["packer"])
        if self._goes_on:
            self._sampler.restore(state["sampler"])
        else:
            self._sampler.serial = state["sampler"]["serial"]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind an update of this phase."""
        self._packer.restore(state["packer"])
        self._sampler.restore(state["sampler"])
        self._tokens = state["tokens"]

    def updates(self) -> Iterator[UpdateBatch]:
        """The updates that are left until the phase has read its tokens, each made while the one before it is done."""
        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(self._next)
            while (update := coming.result()) is not None:
                coming = thread.submit(self._next)
                yield update

    def _next(self) -> UpdateBatch | None:
        phase, processes = self._phase, self._processes
        if self._tokens >= phase.tokens:
            return None
        count = self._warmup.rows(self._tokens)
        room = phase.micro_batch * phase.context
        rows = self._packer.rows(count, room=room)
        tokens = sum(piece.length + SPECIAL for row in rows for piece in row)
        self._tokens += tokens
        mine = [self._rows(row) for row in rows[processes.rank :: processes.size]]
        state = {"packer": self._packer.state(), "sampler": self._sampler.state(), "tokens": self._tokens}
        return UpdateBatch(mine, count, tokens, count * room, state)


def read_shares(documents: Documents, phase: PhaseSection) -> list[Share]:
    """The documents that a phase reads, by source, and how often a pass holds their pieces.

    Args:
        documents: Of all sources.
        phase: Its mix; sources that it does not name are left out.
    """
    times = {part.source: part.times for part in phase.mix} or dict.fromkeys(documents.sources, 1.0)
    lasts = accumulate(documents.sources.values())
    found = zip(documents.sources.items(), lasts, strict=True)
    return [Share(last - count, last, times[name]) for (name, count), last in found if name in times]


def _begun_in(phases: Sequence[PhaseSection], number: int) -> int:
    """The first of the phases up to this one that read the same pieces equally often."""
    while number and (phases[number - 1].context, phases[number - 1].mix) == (phases[number].context, phases[number].mix):
        number -= 1
    return number


def held_out_rows(documents: Documents, phase: PhaseSection, *, longest: int, most: int) -> list[list[Piece]]:
    """Held-out text in rows of one micro-batch: the same in every phase, and of each source its share.

    What is read is a sample of all held-out documents, for those of one source lie side by side: the first would be of one kind. It is
    drawn by pieces of the longest context, which shorter ones cut further.

    Args:
        documents: Those that are held out.
        phase: Its context and micro-batch.
        longest: Context of the run's last phase.
        most: Tokens in all, special tokens counted as in pieces of the longest context; at least one piece is read.
    """
    offsets, lengths = cut(np.asarray(documents.ends), longest - SPECIAL)
    drawn = np.random.Generator(np.random.PCG64DXSM(0)).permutation(len(offsets))
    within = int(np.searchsorted(np.cumsum(lengths[drawn] + SPECIAL), most, side="right"))
    rows: list[list[Piece]] = []
    space = serial = 0
    for place in np.sort(drawn[: max(1, within)]).tolist():
        begin, end = int(offsets[place]), int(offsets[place] + lengths[place])
        for offset, length in zip(*cut(np.array([end]), phase.context - SPECIAL, begin=begin), strict=True):
            size = int(length) + SPECIAL
            if not rows or size > space:
                rows.append([])
                space = phase.micro_batch * phase.context
            rows[-1].append(Piece(int(offset), int(length), serial))
            space, serial = space - size, serial + 1
    return rows
