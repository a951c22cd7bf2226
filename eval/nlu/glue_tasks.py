"""The eight tasks of GLUE that encoders are compared on: columns, labels, measures. WNLI is left out, as in every such table.

Column names and the numbers of the labels are those of the data set ``nyu-mll/glue`` on the hub. A score is the one number that Table 5 of
the ModernBERT paper has for a task. The table does not name its measures. By their size its QQP figures are accuracies (GTE-en-MLM's, some
three points below the others, are F1, as in its own paper), and MRPC is read the same way; for STS-B the release measures Spearman's
correlation.

Source: GLUE, arXiv:1804.07461, Table 1; ModernBERT, arXiv:2412.13663, Table 5 (appendix E.1), and the fine-tuning jobs of its release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TaskName = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
"""As the hub calls their configurations."""

Measure = Literal["matthews", "accuracy", "f1", "spearman", "pearson"]


@dataclass(frozen=True)
class GlueTask:
    """One task.

    Attributes:
        name: Of its configuration on the hub.
        title: As tables have it.
        columns: The text, or the two texts that belong together.
        labels: Names of the labels in the order of their numbers; empty where a number from 0 to 5 is asked for.
        measures: GLUE's; the first is the score.
        held_out: The split with labels that is scored.
    """

    name: TaskName
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    measures: tuple[Measure, ...]
    held_out: str = "validation"

    @property
    def is_regression(self) -> bool:
        """Whether a number is asked for, not a label."""
        return not self.labels


_ENTAILS = ("entailment", "not_entailment")

TASKS: Mapping[TaskName, GlueTask] = {
    task.name: task
    for task in (
        GlueTask("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), ("matthews",)),
        GlueTask("sst2", "SST-2", ("sentence",), ("negative", "positive"), ("accuracy",)),
        GlueTask("mrpc", "MRPC", ("sentence1", "sentence2"), ("not_equivalent", "equivalent"), ("accuracy", "f1")),
        GlueTask("stsb", "STS-B", ("sentence1", "sentence2"), (), ("spearman", "pearson")),
        GlueTask("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), ("accuracy", "f1")),
        GlueTask(
            "mnli", "MNLI", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ("accuracy",), "validation_matched"
        ),
        GlueTask("qnli", "QNLI", ("question", "sentence"), _ENTAILS, ("accuracy",)),
        GlueTask("rte", "RTE", ("sentence1", "sentence2"), _ENTAILS, ("accuracy",)),
    )
}
"""Name -> task, in the order of Table 5."""

SIMILARITY = (0.0, 5.0)
"""The range of STS-B's numbers."""
