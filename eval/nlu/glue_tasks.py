"""The eight GLUE tasks on which encoders are compared: columns, labels and measures. WNLI is left out, as in all such tables.

Column names and label numbers are those of the data set ``nyu-mll/glue`` on the Hugging Face Hub. A task's score is the number in Table 5
of the ModernBERT paper. The table does not name its measures. Judging by their values, its QQP scores are accuracies (except that of
GTE-en-MLM, about three points lower, which is the F1 of its own paper); MRPC is interpreted in the same way. For STS-B the release
computes Spearman's correlation.

Source: GLUE, arXiv:1804.07461, Table 1; ModernBERT, arXiv:2412.13663, Table 5 (appendix E.1), and the fine-tuning jobs of its release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TaskName = Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
"""Names of the tasks: their configurations in ``nyu-mll/glue``."""

Measure = Literal["matthews", "accuracy", "f1", "spearman", "pearson"]


@dataclass(frozen=True)
class GlueTask:
    """One task.

    Attributes:
        name: Configuration on the Hugging Face Hub.
        title: Name in tables.
        columns: Column of the text, or columns of the two texts.
        labels: Label names in the order of their numbers; empty if the label is a number from 0 to 5.
        measures: GLUE's measures; the first is the score.
        held_out: Labelled split that is scored.
    """

    name: TaskName
    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    measures: tuple[Measure, ...]
    held_out: str = "validation"

    @property
    def is_regression(self) -> bool:
        """Whether the label is a number instead of a class."""
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
"""Range of STS-B's similarities."""
