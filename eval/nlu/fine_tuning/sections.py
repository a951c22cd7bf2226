"""Recipe sections of a fine-tuning that do not depend on the task: meaning, unit and bounds of each setting.

Source: BERT, arXiv:1810.04805, appendix A.3, for the usual values; ModernBERT, arXiv:2412.13663, appendix E.1, and the fine-tuning jobs of
its release for the settings of GLUE.
"""

from __future__ import annotations

from typing import Literal

from quiver.encoder.schema import Field, TextSchema


class UpdatesSection(TextSchema):
    """Settings that are chosen per task: epochs, batch size, learning rate, evaluation."""

    epochs: float = Field(gt=0)
    """Number of passes over all examples, unless the run stops early."""
    batch_size: int = Field(ge=1)
    """Examples per update."""
    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate; BERT: 2e-5 to 5e-5."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    """Weight decay of matrices and embeddings; norms and biases have none. ``training.decoupled_decay`` selects its scaling."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Updates between evaluations, each with a checkpoint; null for the end of each epoch. The last update always has both."""


class FineTuningSection(TextSchema):
    """Optimiser, schedule, precision, logging and checkpoints."""

    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the updates in which the learning rate rises from zero; it then falls linearly to zero."""
    decoupled_decay: bool = False
    """Scaling of the weight decay. False, as in AdamW: ``weight_decay`` times the learning rate. True, as in the optimiser of ModernBERT's
    release: ``weight_decay`` times the learning rate's share of its peak."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """L2 norm to which gradients are clipped; null for no clipping."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay rate of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay rate of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the root of the mean of squares."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without improvement; null to run to the end. Does not change the schedule."""
    seed: int = Field(default=12, ge=0, le=2**32 - 1)
    """Random seed of the head's weights, the order of the examples and dropout."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of the forward and backward pass; weights and optimiser state stay float32."""
    log_every: int = Field(default=10, ge=1)
    """Updates between lines of the log."""
    save_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints, in addition to those at evaluations; null for none."""
    keep_checkpoints: int = Field(default=1, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one."""
