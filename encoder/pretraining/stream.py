"""Batches of a phase: sampled pieces packed into rows and masked; the next step is prepared while the current one is trained.

Every process draws the same stream and keeps its share of the rows of each step, so the steps do not depend on the number of processes.
The masks of a sequence depend only on the seed and on its number in the stream, not on its batch or process.

Shapes: B sequences of a row, N its tokens, n tokens of a sequence.
Source: BERT, arXiv:1810.04805, section 3.1 (80 % [MASK], 10 % a random token, 10 % unchanged); ModernBERT, arXiv:2412.13663, section 2.2.2
(30 % masked tokens, as in arXiv:2202.08005).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.heads import IGNORE_INDEX
from quiver.encoder.packing import PackedBatch, pack_ids
from quiver.encoder.pretraining.corpus import Corpus, Documents
from quiver.encoder.pretraining.packing import SPECIAL, Piece, PieceSampler, SequencePacker, Share, cut
from quiver.encoder.pretraining.phases import BatchWarmup, special_ids
from quiver.encoder.pretraining.recipe import PhaseSection, PretrainingRecipe
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.trainer import prefetch

MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that are replaced by [MASK] and by a random token; the other predicted tokens stay unchanged."""


class Masker:
    """Masks random tokens of sequences."""

    def __init__(self, tokenizer: Tokenizer, *, probability: float, seed: int) -> None:
        special = special_ids(tokenizer)
        self._mask = special["mask"]
        self._special = np.zeros(len(tokenizer), bool)
        self._special[list(special.values())] = True
        self._words = np.flatnonzero(~self._special)
        self._probability = probability
        self._seed = seed

    def __call__(self, ids: NDArray[Any], serial: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask a sequence: masked ids, (n,), and labels, (n,): the original id of each predicted token, -100 elsewhere."""
        # The key is the seed, the counter the sequence: Philox gives each its own range of 2**128 numbers, without the cost of seeding.
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=serial << 128))
        draw = generator.random(len(ids))
        draw[self._special[ids]] = 1.0  # never predicted
        seen = ids.astype(np.int64)
        labels = np.where(draw < self._probability, seen, IGNORE_INDEX)
        seen[draw < self._probability * MASKED] = self._mask
        random = (draw >= self._probability * MASKED) & (draw < self._probability * (MASKED + RANDOM))
        seen[random] = generator.choice(self._words, int(random.sum()))
        return seen, labels


@dataclass(frozen=True)
class MaskedRow:
    """A packed row of masked sequences."""

    pieces: list[Piece]  # the corpus pieces of the row
    batch: PackedBatch  # packed batch of the masked ids, N tokens
    labels: Tensor  # original ids of the predicted tokens, -100 elsewhere, (N,), in CPU memory
    masked: int  # number of predicted tokens


@dataclass(frozen=True)
class UpdateBatch:
    """The rows of one step."""

    # Rows of this process. If weights are sharded, all processes have equally many, some of them `empty_row`.
    rows: list[MaskedRow]
    count: int  # number of rows over all processes
    tokens: int  # number of tokens in the rows of all processes, special tokens included
    state: dict[str, Any]  # state of the stream after the step


def empty_row() -> MaskedRow:
    """A row of one token that is not predicted: its loss and gradients are zero."""
    return MaskedRow([], pack_ids([[0]]), torch.full((1,), IGNORE_INDEX), 0)


class RowMaker:
    """Makes masked rows from pieces."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer, masker: Masker) -> None:
        special = special_ids(tokenizer)
        self._first, self._last = special["cls"], special["sep"]
        self._ids = documents.ids
        self._masker = masker

    def __call__(self, pieces: list[Piece]) -> MaskedRow:
        """Mask and pack one or more pieces."""
        bodies = (self._ids[piece.offset : piece.offset + piece.length] for piece in pieces)
        whole = (np.concatenate([[self._first], body, [self._last]]).astype(np.int64) for body in bodies)
        sequences = [self._masker(ids, piece.serial) for ids, piece in zip(whole, pieces, strict=True)]
        lengths = [piece.length + SPECIAL for piece in pieces]
        offsets = (0, *accumulate(lengths))
        labels = np.concatenate([wanted for _, wanted in sequences])
        batch = PackedBatch(
            ids=torch.from_numpy(np.concatenate([seen for seen, _ in sequences])),
            cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
            offsets=offsets,
            max_seqlen=max(lengths),
            positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
            rows=tuple(range(len(pieces))),
        )
        return MaskedRow(pieces, batch, torch.from_numpy(labels), int((labels >= 0).sum()))


class PhaseStream:
    """Yields the batches of one phase, step by step; ``sampler`` draws its pieces."""

    def __init__(self, recipe: PretrainingRecipe, number: int, corpus: Corpus, tokenizer: Tokenizer, processes: Processes) -> None:
        self._phase, training = recipe.phases[number], recipe.training
        masker = Masker(tokenizer, probability=training.mask_probability, seed=training.seed)
        self._rows = RowMaker(corpus.train, tokenizer, masker)
        begun = number  # first of the unbroken series of phases that read the same pieces equally often
        while begun and (recipe.phases[begun - 1].context, recipe.phases[begun - 1].mix) == (self._phase.context, self._phase.mix):
            begun -= 1
        self._goes_on = begun < number
        shares, room = read_shares(corpus.train, self._phase), self._phase.context - SPECIAL
        self.sampler = PieceSampler(corpus.train.ends, shares, room=room, seed=(training.seed, begun))
        self._packer = SequencePacker(self.sampler.take, buffer=training.packing_buffer)
        self._warmup = BatchWarmup(self._phase)
        self._processes = processes
        self._even = training.sharding == "full"
        self._tokens = 0

    def follow(self, state: dict[str, Any]) -> None:
        """Continue from the end of the previous phase: pack its waiting pieces first and continue its sequence numbers.

        If both phases read the same pieces equally often, the pass over the corpus continues, so that no piece repeats before the pass is
        complete.
        """
        self._packer.restore(state["packer"])
        if self._goes_on:
            self.sampler.restore(state["sampler"])
        else:
            self.sampler.serial = state["sampler"]["serial"]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after a step of this phase."""
        self._packer.restore(state["packer"])
        self.sampler.restore(state["sampler"])
        self._tokens = state["tokens"]

    def updates(self) -> Iterator[UpdateBatch]:
        """Yield the remaining steps of the phase; a thread prepares the next step while the current one is trained."""
        return prefetch(self._updates())

    def _updates(self) -> Iterator[UpdateBatch]:
        phase, processes = self._phase, self._processes
        while self._tokens < phase.tokens:
            count = self._warmup.rows(self._tokens)
            rows = self._packer.rows(count, room=phase.micro_batch * phase.context)
            tokens = sum(piece.length + SPECIAL for row in rows for piece in row)
            self._tokens += tokens
            mine = [self._rows(row) for row in rows[processes.rank :: processes.size]]
            if self._even:
                mine += [empty_row()] * (-(-len(rows) // processes.size) - len(mine))
            state = {"packer": self._packer.state(), "sampler": self.sampler.state(), "tokens": self._tokens}
            yield UpdateBatch(mine, count, tokens, state)


def read_shares(documents: Documents, phase: PhaseSection) -> list[Share]:
    """Return the documents that a phase reads, source by source, and how often one pass reads their pieces."""
    times = {part.source: part.times for part in phase.mix} or dict.fromkeys(documents.sources, 1.0)
    lasts = accumulate(documents.sources.values())
    found = zip(documents.sources.items(), lasts, strict=True)
    return [Share(last - count, last, times[name]) for (name, count), last in found if name in times]


def held_out_rows(documents: Documents, phase: PhaseSection, *, longest: int, most: int) -> list[list[Piece]]:
    """Sample held-out text and cut it into rows of one micro-batch. Each phase gets the same text; sources keep their proportions.

    The sample is random, because the documents of a source are adjacent: the first documents would all be of one source. It consists of
    pieces of the longest context, which phases with a shorter context cut further.
    """
    offsets, lengths = cut(np.asarray(documents.ends), longest - SPECIAL)
    drawn = np.random.Generator(np.random.PCG64DXSM(0)).permutation(len(offsets))
    within = int(np.searchsorted(np.cumsum(lengths[drawn] + SPECIAL), most, side="right"))
    rows: list[list[Piece]] = []
    space = serial = 0
    for position in np.sort(drawn[: max(1, within)]).tolist():
        begin, end = int(offsets[position]), int(offsets[position] + lengths[position])
        for offset, length in zip(*cut(np.array([end]), phase.context - SPECIAL, begin=begin), strict=True):
            size = int(length) + SPECIAL
            if not rows or size > space:
                rows.append([])
                space = phase.micro_batch * phase.context
            rows[-1].append(Piece(int(offset), int(length), serial))
            space, serial = space - size, serial + 1
    return rows
