"""The settings of a fine-tuning that do not depend on what is learnt, as recipes have them: what each means, its unit, its bounds.

Source: BERT, arXiv:1810.04805, appendix A.3, for the usual values; ModernBERT, arXiv:2412.13663, appendix E.1, and the fine-tuning jobs of
its release for what GLUE is fine-tuned with.
"""

from __future__ import annotations

from typing import Literal

from quiver.encoder.schema import Field, TextSchema


class UpdatesSection(TextSchema):
    """How many updates, of how many examples, at what rate: what is chosen anew for every task."""

    epochs: float = Field(gt=0)
    """Passes over all examples, if nothing stops the run before."""
    batch_size: int = Field(ge=1)
    """Examples of an update."""
    learning_rate: float = Field(gt=0, le=1)
    """Peak of the schedule; BERT: 2e-5 to 5e-5."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    """Of matrices and embeddings; norms and biases have none. What it is a share of, ``training.decoupled_decay`` says."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Updates from one score and checkpoint to the next; null for the end of each epoch. The last update always has both."""


class FineTuningSection(TextSchema):
    """How it is trained, and what is kept on the way."""

    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the updates over which the learning rate rises from zero; then it falls to zero in a line."""
    decoupled_decay: bool = False
    """What an update takes off a weight is ``weight_decay`` times the learning rate, as AdamW has it (false), or times its share of the
    peak alone (true), as the optimiser of ModernBERT's release has it."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """L2 norm that the gradient is clipped to; null to leave it as it is."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's share of the old mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's share of the old mean of squares."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean of squares."""
    patience: int | None = Field(default=None, ge=1)
    """Scores in a row that are no better than the best before the run stops; null for its end. The schedule is that of the whole."""
    seed: int = Field(default=12, ge=0, le=2**32 - 1)
    """Of the head's weights, the order of the examples and dropout."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the forward and backward pass; weights and optimiser state stay float32."""
    log_every: int = Field(default=10, ge=1)
    """Updates from one line of the log to the next."""
    save_every: int | None = Field(default=None, ge=1)
    """Updates from one checkpoint to the next, beside those where the model is scored."""
    keep_checkpoints: int = Field(default=1, ge=1)
    """The newest that stay, beside the best."""
