"""How each family stores the tensors of each task's head, and the class such a folder is opened with.

Source: the state dicts of the classes named here: ModernBERT, BERT and RoBERTa in transformers 5.3; ``bert_layers.py`` of
mosaicml/examples; ``modeling_hf_nomic_bert.py`` of nomic-ai/contrastors; ``modeling.py`` of Alibaba-NLP/new-impl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quiver.encoder.config import Family

Task = Literal["masked_lm", "classifier", "span_qa"]

# What config.json's auto_map calls a class of each task.
AUTO_CLASSES: dict[Task, str] = {
    "masked_lm": "AutoModelForMaskedLM",
    "classifier": "AutoModelForSequenceClassification",
    "span_qa": "AutoModelForQuestionAnswering",
}


@dataclass(frozen=True)
class HeadLayout:
    """How one family stores one task's head.

    Attributes:
        architecture: The class that opens such a folder in transformers or in the family's own code.
        modules: Our module names to theirs; ``{}`` is the encoder's prefix.
        tensors: Our names of tensors that have another name beside that of their module, which is the one that counts
            where a file has both.
    """

    architecture: str
    modules: Mapping[str, str]
    tensors: Mapping[str, str] = field(default_factory=dict)


_MODERNBERT = {"transform.dense": "head.dense", "transform.norm": "head.norm"}
_BERT = {"transform.dense": "cls.predictions.transform.dense", "decoder": "cls.predictions.decoder"}
_LAYER_NORM = {"transform.norm": "cls.predictions.transform.LayerNorm"}
_POOLER = {"transform.dense": "{}pooler.dense", "out": "classifier"}
_ROBERTA = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"}
_ROBERTA_CLASSIFIER = {"transform.dense": "classifier.dense", "out": "classifier.out_proj"}
_GTE = {"transform.dense": "lm_head.dense", "transform.norm": "lm_head.norm", "decoder": "lm_head.decoder"}

LAYOUTS: dict[Task, dict[Family, HeadLayout]] = {
    "masked_lm": {
        "modernbert": HeadLayout("ModernBertForMaskedLM", {**_MODERNBERT, "decoder": "decoder"}),
        "quiver": HeadLayout("QuiverForMaskedLM", {**_MODERNBERT, "decoder": "decoder"}),
        "bert": HeadLayout("BertForMaskedLM", {**_BERT, **_LAYER_NORM}, {"decoder.bias": "cls.predictions.bias"}),
        "mosaicbert": HeadLayout("BertForMaskedLM", {**_BERT, **_LAYER_NORM}),
        "nomicbert": HeadLayout("NomicBertForPreTraining", {**_BERT, "transform.norm": "cls.predictions.transform.layer_norm"}),
        "roberta": HeadLayout("RobertaForMaskedLM", _ROBERTA, {"decoder.bias": "lm_head.bias"}),
        "gte": HeadLayout("NewForMaskedLM", _GTE),
    },
    "classifier": {
        "modernbert": HeadLayout("ModernBertForSequenceClassification", {**_MODERNBERT, "out": "classifier"}),
        "quiver": HeadLayout("QuiverForSequenceClassification", {**_MODERNBERT, "out": "classifier"}),
        "bert": HeadLayout("BertForSequenceClassification", _POOLER),
        "mosaicbert": HeadLayout("BertForSequenceClassification", _POOLER),
        "nomicbert": HeadLayout("NomicBertForSequenceClassification", _POOLER),
        "roberta": HeadLayout("RobertaForSequenceClassification", _ROBERTA_CLASSIFIER),
        "gte": HeadLayout("NewForSequenceClassification", _POOLER),
    },
    "span_qa": {
        "modernbert": HeadLayout("ModernBertForQuestionAnswering", {**_MODERNBERT, "out": "classifier"}),
        "quiver": HeadLayout("QuiverForQuestionAnswering", {**_MODERNBERT, "out": "classifier"}),
        "bert": HeadLayout("BertForQuestionAnswering", {"out": "qa_outputs"}),
        "roberta": HeadLayout("RobertaForQuestionAnswering", {"out": "qa_outputs"}),
        "gte": HeadLayout("NewForQuestionAnswering", {"out": "qa_outputs"}),
    },
}
