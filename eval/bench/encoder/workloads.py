"""The token sequences of the encoder benchmark: the paper's four synthetic sets, six for a CPU, and lengths given by hand.

The lengths of the paper's variable sets are its own, to the token: drawn from torch's generator on the CPU under seed 42,
truncated and clamped, they give Table 10's totals and extremes. A set of fewer documents is the beginning of the whole one.

Source: ModernBERT, arXiv:2412.13663, section 4 and appendix F.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import InputError

Document = TypeVar("Document")

PAPER_DOCUMENTS = 8_192
"""Documents of each of the paper's sets."""

LENGTH_SEED = 42
"""Seed of the paper's lengths."""

# Ids of the paper's random tokens; a smaller vocabulary gives fewer.
FIRST_ID = 100
LAST_ID = 16_000


@dataclass(frozen=True)
class LengthDistribution:
    """How long a set's documents are, in tokens.

    Attributes:
        mean: Mean of a normal distribution.
        deviation: Its standard deviation; 0 for a fixed length.
        shortest: Shorter draws are raised to this.
        longest: Longer draws are cut to this.
    """

    mean: int
    deviation: int
    shortest: int
    longest: int

    def draw(self, documents: int) -> tuple[int, ...]:
        """Lengths of the first ``documents`` documents."""
        generator = torch.Generator().manual_seed(LENGTH_SEED)
        # All are drawn, whatever is asked for: torch's generator gives other numbers for another count.
        drawn = torch.normal(float(self.mean), float(self.deviation), (PAPER_DOCUMENTS,), generator=generator)
        return tuple(drawn.clamp(self.shortest, self.longest).long()[:documents].tolist())


PAPER_SETS: Mapping[str, LengthDistribution] = {
    "fixed-512": LengthDistribution(512, 0, 512, 512),
    "variable-256": LengthDistribution(256, 64, 32, 512),
    "fixed-8192": LengthDistribution(8_192, 0, 8_192, 8_192),
    "variable-4096": LengthDistribution(4_096, 1_024, 16, 8_192),
}
"""Name -> the paper's set."""

CPU_TABLE = ("512x8", "variable-256x16", "512x2+32x14", "2048x2", "4096+2500", "8192")
"""Sets that a CPU gets through in a minute, in the notation of `parse_lengths`."""


@dataclass(frozen=True)
class Workload:
    """Documents to encode.

    Attributes:
        name: In tables and on the command line.
        lengths: Tokens of each document, in order.
    """

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all; padding is no token."""
        return sum(self.lengths)


def paper_workload(name: str, *, documents: int) -> Workload:
    """One of the paper's sets, or its beginning.

    Args:
        name: A key of `PAPER_SETS`.
        documents: How many of its documents, in 1..8,192.

    Raises:
        InputError: There is no such set, or it has not so many documents.

    Example:
        >>> paper_workload("variable-256", documents=3).lengths
        (379, 351, 313)
    """
    if name not in PAPER_SETS:
        raise InputError(f"unknown set {name!r}; there are {', '.join(PAPER_SETS)}, and lengths may be given as in 512x8 or 4096+2500")
    if not 1 <= documents <= PAPER_DOCUMENTS:
        raise InputError(f"{name} has {PAPER_DOCUMENTS:,} documents, {documents:,} cannot be taken")
    return Workload(name, PAPER_SETS[name].draw(documents))


_TERM = re.compile(r"(?P<what>.+?)(?:x(?P<count>\d+))?")


def parse_lengths(text: str) -> Workload:
    """Read lengths as people write them: terms joined by ``+``, each a number of tokens or a set's name, times a count.

    Args:
        text: ``512x8``, ``512x2+32x14``, ``4096+2500``, ``variable-256x16``; without ``x`` the count is 1.

    Raises:
        InputError: A term is neither, or a length or count is 0; names the term.

    Example:
        >>> parse_lengths("512x2+32x3").lengths
        (512, 512, 32, 32, 32)
    """
    lengths: list[int] = []
    for term in text.split("+"):
        found = _TERM.fullmatch(term.strip())
        if found is None:
            raise InputError(f"lengths {text!r}: a term is empty; write lengths as in 512x8, 512x2+32x14 or 4096+2500")
        what, count = found["what"], int(found["count"] or 1)
        if what in PAPER_SETS:
            lengths += paper_workload(what, documents=count).lengths
        elif re.fullmatch("[0-9]+", what) and int(what) and count:
            lengths += [int(what)] * count
        else:
            raise InputError(
                f"lengths {text!r}: {term!r} is not TOKENS, TOKENSxDOCUMENTS or SETxDOCUMENTS, such as 512x8 or variable-256x16"
            )
    return Workload(text, tuple(lengths))


def batch_documents(workload: Workload, *, batch_size: int | None, batch_tokens: int) -> int:
    """Documents of a batch, at least one: as asked for, or so many that batches of one size hold about ``batch_tokens`` tokens each.

    Example:
        >>> batch_documents(Workload("set", (300,) * 30), batch_size=None, batch_tokens=4000)  # 9,000 tokens: two batches
        15
    """
    documents = len(workload.lengths)
    if batch_size is not None:
        return min(batch_size, documents)
    return -(-documents // max(1, round(workload.tokens / batch_tokens)))


def batches(documents: Sequence[Document], size: int) -> list[Sequence[Document]]:
    """Neighbours in one batch, as the paper has it: nothing is sorted; the last batch may be smaller.

    Args:
        documents: Documents, or their lengths.
        size: Documents of a batch.

    Example:
        >>> batches([512, 32, 64], 2)
        [[512, 32], [64]]
    """
    return [documents[start : start + size] for start in range(0, len(documents), size)]


def random_documents(lengths: Sequence[int], config: EncoderConfig, *, seed: int) -> Iterator[list[int]]:
    """Random token ids, the padding token never among them: some models derive positions from it.

    Args:
        lengths: Tokens of each document.
        config: Gives the vocabulary.
        seed: Equal seeds give equal ids.

    Yields:
        One list a document.
    """
    size = config.vocab_size
    ids = np.arange(min(FIRST_ID, size // 2), min(LAST_ID, size))
    ids = ids[ids != config.pad_token_id]
    generator = np.random.default_rng(seed)
    for length in lengths:
        yield generator.choice(ids, length).tolist()
