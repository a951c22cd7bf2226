"""Task heads on an encoder: masked language modelling, classification of sequences, answers as spans.

Heads of different families differ by values, not by class: the layer before the last matrix is one `TransformConfig`.

Shapes: B sequences, N packed tokens, n tokens of one sequence, D model width, V vocabulary, C labels, M masked tokens.
Source: ModernBERT, arXiv:2412.13663, sections 2.1 and 3; BERT, arXiv:1810.04805, sections 3.1 and 4; RoBERTa, arXiv:1907.11692; the
modules of the same tasks in transformers 5.3; Liger Kernel, arXiv:2410.10989, section 3.2 (gradients in the forward pass); Cut Cross-
Entropy, arXiv:2411.09009, section 3 (why the logits fill the memory).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quiver.encoder.config import EncoderConfig, InitMethod
from quiver.encoder.cpu.linear import compute_dtype
from quiver.encoder.layers import ACTIVATION_FUNCTIONS, make_norm, product_dtype, use_triton
from quiver.encoder.model import INIT_CUTOFF, Encoder, draw_matrix
from quiver.encoder.packing import PackedBatch, copy_to

HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATION_FUNCTIONS, "tanh": torch.tanh}
# Families in which every task puts its last matrix on the transform of the masked language model.
SHARED_TRANSFORM = ("modernbert", "quiver")


@dataclass(frozen=True)
class TransformConfig:
    """The layer between an encoder and a head's last matrix: dense matrix, activation, perhaps a norm."""

    bias: bool  # of the dense matrix
    activation: str  # a key of `HEAD_ACTIVATIONS`
    norm: bool  # whether a norm of the encoder's kind follows
    input_dropout: bool = False  # whether the classifier's dropout precedes this layer too (RoBERTa)

    def __post_init__(self) -> None:
        if self.activation not in HEAD_ACTIVATIONS:
            raise ValueError(f"a head's activation must be one of {', '.join(HEAD_ACTIVATIONS)}, got {self.activation!r}")


def masked_lm_transform(config: EncoderConfig) -> TransformConfig:
    """Return the family's transform before the decoder."""
    if config.family in SHARED_TRANSFORM:
        return TransformConfig(bias=False, activation="gelu", norm=True)
    # RoBERTa uses gelu here, whatever the activation of its layers.
    activation = "gelu" if config.family == "roberta" else config.activation
    return TransformConfig(bias=decoder_has_bias(config), activation=activation, norm=True)


def decoder_has_bias(config: EncoderConfig) -> bool:
    """Return whether the family's decoder has a bias; NomicBERT's follows the first matrix of its MLP."""
    return config.family != "nomicbert" or config.mlp_input_bias


def classifier_transform(config: EncoderConfig) -> TransformConfig:
    """Return the family's transform before the label matrix: BERT's pooler, unless the family has its own."""
    if config.family in SHARED_TRANSFORM:
        return masked_lm_transform(config)
    return TransformConfig(bias=True, activation="tanh", norm=False, input_dropout=config.family == "roberta")


def head_dropout(config: EncoderConfig) -> float:
    """Return the family's dropout before the label matrix, for a config.json that does not set it."""
    return 0.0 if config.family in SHARED_TRANSFORM else config.embedding_dropout


class Transform(nn.Module):
    """Dense matrix, activation and optionally a norm over D."""

    def __init__(self, config: EncoderConfig, transform: TransformConfig) -> None:
        super().__init__()
        self.config = transform
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=transform.bias)
        self.norm = make_norm(config) if transform.norm else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, D) to (n, D)."""
        output: Tensor = self.norm(HEAD_ACTIVATIONS[self.config.activation](self.dense(hidden)))
        return output


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
ClassifierPooling = Literal["cls", "mean"]

# Label of a token that does not count in the loss; the usual convention.
IGNORE_INDEX = -100


class Decoder(nn.Module):
    """The matrix from hidden states to vocabulary logits, (V, D): its own ``weight``, or None for the token embedding; and its bias."""

    def __init__(self, config: EncoderConfig, *, bias: bool, tied: bool) -> None:
        super().__init__()
        size, width = config.vocab_size, config.hidden_size
        self.weight = None if tied else nn.Parameter(torch.empty(size, width).normal_(std=width**-0.5))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None


class MaskedLMLoss(NamedTuple):
    """The loss of a masked batch."""

    loss: Tensor  # mean cross entropy over the masked tokens, a float32 scalar; with a z-loss their sum
    z_loss: Tensor  # the part of the loss that is the z-loss, without a gradient
    correct: Tensor  # number of masked tokens whose id has the highest logit (of equal ones the lowest id); NaN with gradients
    masked: int  # number of masked tokens, M; the weight of this loss in a mean over batches


class MaskedLM(nn.Module):
    """An encoder that predicts masked tokens. Logits are computed for the masked tokens only, a chunk at a time.

    The layer before the decoder, and whether that has a bias, are by default the family's. ``tied``: its matrix is the token embedding.

    Example:
        >>> import torch
        >>> from quiver.encoder import Encoder, EncoderConfig, MaskedLM
        >>> from quiver.encoder.packing import pack_ids
        >>> config = EncoderConfig.modernbert(
        ...     vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"])
        >>> model, batch = MaskedLM(Encoder(config)), pack_ids([[1, 2, 3], [4, 5]])
        >>> model(batch, torch.tensor([-100, 7, -100, -100, 9])).masked
        2
        >>> model.logits(batch, torch.tensor([1, 4])).shape
        torch.Size([2, 64])
    """

    def __init__(
        self, encoder: Encoder, *, transform: TransformConfig | None = None, decoder_bias: bool | None = None, tied: bool = True
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.transform = Transform(encoder.config, transform or masked_lm_transform(encoder.config))
        self.decoder = Decoder(encoder.config, bias=decoder_has_bias(encoder.config) if decoder_bias is None else decoder_bias, tied=tied)

    @property
    def decoder_weight(self) -> Tensor:
        """The matrix from hidden states to vocabulary logits, (V, D)."""
        return self.encoder.embeddings.tokens.weight if self.decoder.weight is None else self.decoder.weight

    def forward(self, batch: PackedBatch, labels: Tensor, *, z_loss: float = 0.0) -> MaskedLMLoss:
        """Return the loss of a masked batch, and the number of its masked tokens; if there are none, zero, with a gradient of zeros.

        Labels are the original id of each token, or -100 if it does not count, (N,) int64; a ValueError if another one, or another shape.
        Labels on the host need no synchronization with the device, and are checked against the vocabulary. ``z_loss`` is the factor of the
        z-loss, see `linear_cross_entropy`.
        """
        if labels.shape != batch.ids.shape:
            raise ValueError(f"labels must be (N,) like the batch's ids, {tuple(batch.ids.shape)}, got {tuple(labels.shape)}")
        positions = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        words = labels[positions]
        vocabulary = self.encoder.config.vocab_size
        if words.device.type == "cpu" and len(words) and not 0 <= words.min() <= words.max() < vocabulary:
            raise ValueError(f"a label must be {IGNORE_INDEX} or 0..{vocabulary - 1}, got {words.min()}..{words.max()}")
        positions, words = copy_to(self.encoder.device, positions, words)
        found = linear_cross_entropy(self._states(batch, positions), self.decoder_weight, self.decoder.bias, words, z_loss=z_loss)
        return MaskedLMLoss(*found, len(words))

    def logits(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        """Return logits of the tokens at some positions in the packed batch, (M,) int64: (M, V) in the dtype of the weights."""
        return F.linear(self._states(batch, positions), self.decoder_weight, self.decoder.bias)

    def _states(self, batch: PackedBatch, positions: Tensor) -> Tensor:
        hidden = self.encoder(batch)
        states: Tensor = self.transform(hidden.index_select(0, positions.to(hidden.device, non_blocking=True)))  # (M, D)
        return states


# A chunk has as many rows as the matrix has columns, so its logits are as large as the matrix, which is in memory anyway with its gradient.
# With fewer rows than this the products are no longer limited by arithmetic.
MIN_ROWS = 128


class CrossEntropy(NamedTuple):
    """Cross entropy of rows of logits, (C,) each, or their means and sums; only the loss has a gradient."""

    loss: Tensor  # cross entropy plus z-loss; the mean of the rows is a scalar in float32 or better
    z_loss: Tensor  # the z-loss in it; of rows the squared logarithm of the softmax's denominator, without the factor
    correct: Tensor  # rows whose label has the highest logit, the first of equal ones; NaN where gradients are computed: nobody asks there


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, z_loss: float = 0.0) -> CrossEntropy:
    """Mean cross entropy of ``softmax(hidden @ weight.T + bias)``, (M, D) by (V, D), and labels (M,).

    Products use the dtype of the inputs (autocast's dtype under autocast; float32 on a CPU that only emulates half precision), everything
    else float32 or better. The gradients are computed together with the loss, so only one backward pass is possible: a second one
    (``retain_graph``) and a derivative of the gradient raise torch's RuntimeError. Without rows it is zero, with gradients of zero.

    ``z_loss`` times the mean square of the logarithm of the softmax's denominator is added (PaLM, arXiv:2204.02311, section 5): it keeps
    the logits from drifting.
    """
    found = _LinearCrossEntropy.apply(hidden, weight, bias, labels, z_loss, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return CrossEntropy(*found)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float, differentiable: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = compute_dtype(hidden.device, product_dtype(hidden))
        exact = torch.promote_types(dtype, torch.float32)
        # Sums over chunks stay unscaled until the end: in float16 a gradient without the loss scale, which only the backward pass knows,
        # would underflow.
        grads = [
            torch.zeros_like(x, dtype=exact) if differentiable and needed and x is not None else None
            for x, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        with torch.autocast(hidden.device.type, enabled=False):
            casts = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
            loss, squares, correct = _sum_losses(*casts, labels, grads, exact, z_loss)
        ctx.share = 1 / max(len(hidden), 1)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.save_for_backward(*grads)
        found = loss * ctx.share, squares * (z_loss * ctx.share), correct
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        del others
        scale = upstream * ctx.share
        # In place: a second copy of the matrix's gradient would be the largest tensor of the whole step. torch detects the change of a
        # saved tensor and refuses a second backward pass.
        grads = [None if grad is None else grad.mul_(scale).to(dtype) for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *grads, None, None, None


def _sum_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, grads: list[Tensor | None], exact: torch.dtype, z_loss: float
) -> list[Tensor]:
    """Return the sums of all rows' `CrossEntropy`; the gradients of the loss are added to ``grads`` (of hidden, weight, bias)."""
    grad_hidden, grad_weight, grad_bias = grads
    sums = [torch.zeros((), dtype=exact, device=hidden.device) for _ in CrossEntropy._fields]
    rows = max(weight.shape[1], MIN_ROWS)
    differentiable = any(grad is not None for grad in grads)
    for start in range(0, len(hidden), rows):
        chunk, target = hidden[start : start + rows], labels[start : start + rows]
        # The derivative of a row's loss with respect to its logits: its probabilities, minus one at the label.
        found, slope = _cross_entropy(F.linear(chunk, weight, bias), target, exact, z_loss, differentiable=differentiable)
        for total, each in zip(sums, found, strict=True):
            total += each.sum()
        if grad_bias is not None:
            grad_bias += slope.sum(0, dtype=exact)
        slope = slope.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[start : start + rows] = slope @ weight
        if grad_weight is not None:
            if grad_weight.dtype == slope.dtype:
                grad_weight.addmm_(slope.T, chunk)  # no second tensor of this size
            else:
                grad_weight += slope.T @ chunk
    return sums


def _cross_entropy(
    logits: Tensor, labels: Tensor, exact: torch.dtype, z_loss: float, *, differentiable: bool
) -> tuple[CrossEntropy, Tensor]:
    """Values of the rows of logits, (C, V), which may be overwritten, and the losses' derivatives by them if ``differentiable``."""
    if use_triton(logits):
        from quiver.encoder.gpu import triton_tokens

        found = triton_tokens.cross_entropy_(logits, labels.contiguous(), z_loss=z_loss, differentiable=differentiable)
        return CrossEntropy(*found), logits
    target = labels[:, None]
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=exact)
    loss = -log_probabilities.gather(1, target)[:, 0]
    log_sum = loss + logits.gather(1, target)[:, 0]
    losses, squares = loss + z_loss * log_sum.square(), log_sum.square()
    if not differentiable:
        return CrossEntropy(losses, squares, (logits.argmax(1) == labels).to(exact)), logits
    slope = log_probabilities.exp_()
    if z_loss:
        slope *= (1 + 2 * z_loss * log_sum)[:, None]
    slope.scatter_add_(1, target, torch.full_like(target, -1, dtype=exact))
    return CrossEntropy(losses, squares, torch.full_like(loss, math.nan)), slope


def _mean_of_tokens(hidden: Tensor, batch: PackedBatch) -> Tensor:
    lengths = batch.cu_seqlens.to(hidden.device).diff().long()
    # float32: in half precision a sum over thousands of tokens stops growing long before its end.
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    sums = torch.segment_reduce(exact, "sum", lengths=lengths, axis=0, unsafe=True)  # the check would read the lengths from the device
    return (sums / lengths[:, None]).to(hidden.dtype)


CLASSIFIER_POOLINGS: dict[ClassifierPooling, Callable[[Tensor, PackedBatch], Tensor]] = {
    "cls": lambda hidden, batch: hidden[batch.cu_seqlens[:-1].to(hidden.device).long()],
    "mean": _mean_of_tokens,
}
"""Hidden states (N, D) and their batch to one vector per sequence, (B, D)."""


class SequenceClassifier(nn.Module):
    """An encoder that gives each sequence C scores; with C = 1 one number.

    ``pooling`` gives the vector of a sequence: its first token, or the mean of its tokens. ``problem_type`` says how labels are read; by
    default as a regression if C is 1, otherwise by their dtype: integers name one label, floating-point numbers are yes or no for each
    label. Dropout before the label matrix, and the layer before that, are by default the family's. ``label_names``, one per label, are
    written to config.json.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_labels: int,
        *,
        pooling: ClassifierPooling = "cls",
        problem_type: ProblemType | None = None,
        dropout: float | None = None,
        transform: TransformConfig | None = None,
        label_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if num_labels < 1:
            raise ValueError(f"num_labels must be >= 1, got {num_labels}")
        if pooling not in CLASSIFIER_POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(CLASSIFIER_POOLINGS)}, got {pooling!r}")
        if problem_type is not None and problem_type not in get_args(ProblemType):
            raise ValueError(f"problem_type must be one of {', '.join(get_args(ProblemType))}, got {problem_type!r}")
        if label_names is not None and len(label_names) != num_labels:
            raise ValueError(f"label_names must hold {num_labels} names, got {len(label_names)}")
        self.encoder = encoder
        self.num_labels = num_labels
        self.pooling: ClassifierPooling = pooling
        self.problem_type = problem_type
        self.label_names = None if label_names is None else tuple(label_names)
        self.transform = Transform(encoder.config, transform or classifier_transform(encoder.config))
        self.dropout = nn.Dropout(head_dropout(encoder.config) if dropout is None else dropout)
        self.out = nn.Linear(encoder.config.hidden_size, num_labels)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return (B, C) scores in the dtype of the weights."""
        pooled = CLASSIFIER_POOLINGS[self.pooling](self.encoder(batch), batch)
        if self.transform.config.input_dropout:
            pooled = self.dropout(pooled)
        scores: Tensor = self.out(self.dropout(self.transform(pooled)))
        return scores

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch of scores (B, C), in float32: cross entropy, binary cross entropy per label, or squared error.

        Labels are (B,) int64 for a single label; (B, C) floating-point 0 or 1 for several; (B, C), or (B,) if C is 1, for regression; a
        ValueError if their shape does not fit.
        """
        problem: ProblemType = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        if self.num_labels == 1:
            problem = "regression"
        problem = self.problem_type or problem
        expected = scores.shape[:1] if problem == "single_label_classification" else scores.shape
        if problem == "regression" and self.num_labels == 1:
            labels = labels.reshape(-1, 1)
        if labels.shape != expected:
            raise ValueError(f"labels of {problem} must be {tuple(expected)}, got {tuple(labels.shape)}")
        exact = torch.promote_types(scores.dtype, torch.float32)
        # Outside autocast, which would convert some of these losses back to half precision.
        with torch.autocast(scores.device.type, enabled=False):
            return PROBLEMS[problem](scores.to(exact), labels.to(scores.device))


PROBLEMS: dict[ProblemType, Callable[[Tensor, Tensor], Tensor]] = {
    "single_label_classification": lambda scores, labels: F.cross_entropy(scores, labels.long()),
    "multi_label_classification": lambda scores, labels: F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype)),
    "regression": lambda scores, labels: F.mse_loss(scores, labels.to(scores.dtype)),
}
"""Scores (B, C) and labels to a mean loss."""


class SpanLogits(NamedTuple):
    """Start and end logits of each packed token, (N,) each."""

    start: Tensor
    end: Tensor


class SpanQA(nn.Module):
    """An encoder that finds the span of a text that answers a question; question and text are one sequence. See `best_spans`.

    ``transform`` is the layer before the last matrix, by default ModernBERT's, or none for families without one; ``dropout`` lies between
    the two, by default the family's.
    """

    def __init__(self, encoder: Encoder, *, dropout: float | None = None, transform: TransformConfig | None = None) -> None:
        super().__init__()
        config = encoder.config
        self.encoder = encoder
        if transform is None and config.family in SHARED_TRANSFORM:
            transform = masked_lm_transform(config)
        self.transform: Transform | None = None if transform is None else Transform(config, transform)
        self.dropout = nn.Dropout(head_dropout(config) if dropout is None else dropout)
        self.out = nn.Linear(config.hidden_size, 2)

    def forward(self, batch: PackedBatch) -> SpanLogits:
        """Return start and end logits of N tokens, in the dtype of the weights."""
        hidden = self.encoder(batch)
        if self.transform is not None:
            hidden = self.dropout(self.transform(hidden))
        start, end = self.out(hidden).unbind(-1)
        return SpanLogits(start, end)

    def loss(self, logits: SpanLogits, batch: PackedBatch, starts: Tensor, ends: Tensor) -> Tensor:
        """Mean of the cross entropies of start and end, each under a softmax over the tokens of its own sequence.

        The softmax of transformers includes a batch's padding; without padding the losses are equal. ``starts`` and ``ends`` are the first
        and last token of each answer, counted from the start of its sequence, (B,) int64, or a ValueError. A position outside the sequence
        (a truncated answer) does not count.
        """
        if starts.shape != (len(batch),) or ends.shape != (len(batch),):
            raise ValueError(f"starts and ends must be ({len(batch)},), got {tuple(starts.shape)} and {tuple(ends.shape)}")
        return (position_loss(logits.start, batch, starts) + position_loss(logits.end, batch, ends)) / 2


Head: TypeAlias = MaskedLM | SequenceClassifier | SpanQA


def init_head(head: Head, *, seed: int, method: InitMethod = "full_megatron") -> None:
    """Initialise the weights of a head, in place, as `init_weights`; its encoder is not changed. Equal seeds give equal weights.

    ModernBERT's, full_megatron, are truncated normals whose width depends on what follows: the encoder's initial width before a tied
    decoder, that divided by sqrt(2 L) before a label matrix, and D ** -0.5 for a last matrix. Other families use the encoder's initial
    width everywhere.

    Source: ModernBERT's training code (full_megatron): prediction head "in", pooling head "out", last matrices "final_out".
    """
    config = head.encoder.config
    generator = torch.Generator().manual_seed(seed)
    inner = last = config.initializer_range
    if config.family in SHARED_TRANSFORM:
        last = config.hidden_size**-0.5
        inner /= 1 if isinstance(head, MaskedLM) else math.sqrt(2 * config.num_layers)
    for name, weight in head.named_parameters():
        if name.startswith("encoder."):
            continue
        if weight.ndim == 2 and method != "full_megatron":
            draw_matrix(weight, method, config, generator)
        elif weight.ndim == 2:
            std = inner if name.startswith("transform.") else last
            nn.init.trunc_normal_(weight, std=std, a=-INIT_CUTOFF * std, b=INIT_CUTOFF * std, generator=generator)
        elif name.endswith("norm.weight"):
            nn.init.ones_(weight)
        else:
            nn.init.zeros_(weight)


class Span(NamedTuple):
    """A span of one sequence."""

    start: int  # first token
    end: int  # last token, inside the span
    score: float  # start logit plus end logit


def position_loss(logits: Tensor, batch: PackedBatch, places: Tensor) -> Tensor:
    """Mean cross entropy of one token per sequence, (B,) int64, under a softmax over the sequence's tokens, of logits (N,).

    A token outside its sequence does not count; zero, with a gradient, if none does.
    """
    device = logits.device
    starts, lengths = batch.cu_seqlens[:-1].to(device).long(), batch.cu_seqlens.to(device).diff().long()
    places = places.to(device)
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sequence = torch.repeat_interleave(torch.arange(len(batch), device=device), lengths, output_size=batch.num_tokens)
    peaks = values.new_full((len(batch),), -torch.inf).scatter_reduce(0, sequence, values.detach(), "amax")
    sums = values.new_zeros(len(batch)).index_add(0, sequence, (values - peaks[sequence]).exp())
    counts = (places >= 0) & (places < lengths)
    chosen = values[starts + places.where(counts, 0)]
    losses = (sums.log() + peaks - chosen).where(counts, 0)
    return losses.sum() / counts.sum().clamp(min=1)


def best_spans(
    start: Tensor,
    end: Tensor,
    batch: PackedBatch,
    *,
    max_answer_length: int,
    n_best: int = 1,
    allowed: Sequence[tuple[int, int]] | None = None,
) -> list[list[Span]]:
    """Find the spans of each sequence with the highest sum of start and end logit; exact.

    Logits are (N,); ``max_answer_length`` is in tokens. ``allowed`` is for each sequence the range of tokens that a span may use, (first,
    stop) with 0 <= first <= stop <= n; by default the whole sequence.

    Returns:
        At most ``n_best`` spans per sequence, best first; of equal ones the earlier start comes first, then the earlier end. Empty where
        ``allowed`` is empty.

    Raises:
        ValueError: A length or number is below 1, a range lies outside its sequence, the number of ranges differs from the number of
            sequences, or a logit is NaN.

    Example:
        >>> import torch
        >>> from quiver.encoder import best_spans, pack_ids
        >>> start, end = torch.tensor([0.0, 3.0, 1.0, 5.0]), torch.tensor([9.0, 1.0, 2.0, 0.0])
        >>> best_spans(start, end, pack_ids([[7, 7, 7], [7]]), max_answer_length=2)
        [[Span(start=0, end=0, score=9.0)], [Span(start=0, end=0, score=5.0)]]
    """
    if max_answer_length < 1 or n_best < 1:
        raise ValueError(f"max_answer_length and n_best must be >= 1, got {max_answer_length} and {n_best}")
    ranges = [(0, length) for length in batch.lengths] if allowed is None else allowed
    if len(ranges) != len(batch):
        raise ValueError(f"allowed must hold one range per sequence, {len(batch)}, got {len(ranges)}")
    starts, ends = (logits.detach().to("cpu", torch.float64).numpy() for logits in (start, end))
    if np.isnan(starts).any() or np.isnan(ends).any():
        raise ValueError("start and end logits must not contain NaN")
    found = []
    for row, ((first, stop), offset, length) in enumerate(zip(ranges, batch.offsets, batch.lengths, strict=False)):
        if not 0 <= first <= stop <= length:
            raise ValueError(f"sequence {row}: allowed must lie in 0..{length}, got ({first}, {stop})")
        window = slice(offset + first, offset + stop)
        best = _best_spans_of_one(starts[window], ends[window], min(max_answer_length, stop - first), n_best)
        found.append([Span(first + begin, first + last, score) for begin, last, score in best])
    return found


def _best_spans_of_one(start: NDArray[np.float64], end: NDArray[np.float64], longest: int, n_best: int) -> list[tuple[int, int, float]]:
    """Return first token, last token and score of the best spans of one stretch of tokens."""
    if not longest:
        return []
    # No span ends beyond the stretch: its score is -inf there and is dropped.
    behind = np.concatenate([end, np.full(longest - 1, -np.inf)])
    # Row i holds the scores of the spans from i to i, i + 1, ...
    scores = (start[:, None] + np.lib.stride_tricks.sliding_window_view(behind, longest)).ravel()
    # All spans that tie with the last one wanted are considered, so that ties are resolved by position.
    last = len(scores) - min(n_best, len(scores))
    places = np.flatnonzero((scores >= np.partition(scores, last)[last]) & (scores > -np.inf))
    places = places[np.argsort(-scores[places], kind="stable")][:n_best]
    return [(place // longest, place // longest + place % longest, float(scores[place])) for place in places.tolist()]
