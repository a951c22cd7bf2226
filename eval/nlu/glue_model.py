"""Classifiers for GLUE: open a model with its tokenizer and a new output layer, tokenise texts, predict labels.

One text becomes ``[CLS] text [SEP]`` and a pair ``[CLS] first [SEP] second [SEP]``, with the tokenizer's own special tokens. If a pair is
too long, the longer text is truncated, or both to half of the space if both are longer than that. There are no token types: the model
distinguishes the texts by the tokens between them.

Shapes: B sequences, C labels, n examples.
Source: BERT, arXiv:1810.04805, section 3; transformers' truncation ``longest_first``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.errors import InputError
from quiver.encoder.heads import SHARED_TRANSFORM, ClassifierPooling, SequenceClassifier, init_head
from quiver.encoder.packing import pack
from quiver.encoder.tokenizer import TokenizedTexts, Tokenizer
from quiver.eval.nlu.fine_tuning.start import encoder_folder
from quiver.eval.nlu.glue_tasks import GlueTask

# Token budget of a batch. Longer sequences are allowed: a batch holds at least one.
BATCH_TOKENS = 16_384


def open_glue_model(
    source: str | Path, task: GlueTask, *, seed: int, pooling: ClassifierPooling | None = None
) -> tuple[SequenceClassifier, Tokenizer]:
    """Open a model for training on a task.

    The output layer is always initialized anew, even if the model is a classifier already. The layers between it and the encoder are
    loaded, and initialized only if the model has none. ModernBERT's release does the same when it continues from MNLI to RTE, MRPC and
    STS-B.

    Args:
        source: Folder or hub id of an encoder with its tokenizer, with or without a head. Of a sentence-transformers model, the encoder is
            used.
        task: Task with the labels.
        seed: Random seed of the new weights.
        pooling: Pooling of the token vectors; None for that of config.json.

    Raises:
        InputError: The source is not a model, has no tokenizer, or its family does not support the pooling.
    """
    folder = encoder_folder(source)
    tokenizer = Tokenizer.from_pretrained(folder)
    opened = load_head(SequenceClassifier, folder, num_labels=len(task.labels) or 1, pooling=pooling, new_head_seed=seed)
    family = opened.encoder.config.family
    if opened.pooling != "cls" and family not in SHARED_TRANSFORM:
        raise InputError(f"model.pooling: a {family} classifies by its first token; set it to cls")
    model = SequenceClassifier(
        opened.encoder,
        opened.num_labels,
        pooling=opened.pooling,
        problem_type="regression" if task.is_regression else "single_label_classification",
        dropout=opened.dropout.p,
        transform=opened.transform.config,
        label_names=task.labels or None,
    )
    init_head(model, seed=seed)
    model.transform.load_state_dict(opened.transform.state_dict())
    return model.eval(), tokenizer


def tokenise(texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, *, max_length: int) -> TokenizedTexts:
    """Tokenise texts or pairs of texts.

    Args:
        texts: All single texts or all pairs; at least one.
        tokenizer: Tokenizer; it also provides the special tokens.
        max_length: Maximum tokens per sequence, special tokens included; must exceed their number.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"] * 2, vocab_size=320)
        >>> tokenised = tokenise([("a bird has", "a bird"), ("a bird", "a")], tokenizer, max_length=6)
        >>> [len(ids) for ids in tokenised.ids], tokenised.truncated
        ([6, 6], [True, False])
    """
    if len(texts[0]) == 1:
        return tokenizer.encode([text for (text,) in texts], max_length=max_length)
    template = tokenizer.pair_template()
    room = max_length - len(template.before) - len(template.between) - len(template.behind)
    first, second = (tokenizer.encode_bare([pair[place] for pair in texts]) for place in (0, 1))
    sequences = []
    for one, other in zip(first, second, strict=True):
        kept = lengths_kept(len(one), len(other), room=room)
        head, tail = (_cut(ids, count, tokenizer.truncation_side) for ids, count in zip((one, other), kept, strict=True))
        sequences.append([*template.before, *head, *template.between, *tail, *template.behind])
    return TokenizedTexts(sequences, [len(one) + len(other) > room for one, other in zip(first, second, strict=True)])


def lengths_kept(first: int, second: int, *, room: int) -> tuple[int, int]:
    """Number of tokens to keep of each of two texts that share ``room`` tokens; the longer text is truncated first.

    Example:
        >>> lengths_kept(3, 20, room=10), lengths_kept(20, 30, room=9), lengths_kept(4, 4, room=10)
        ((3, 7), (4, 5), (4, 4))
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def _cut(ids: list[int], count: int, side: str) -> list[int]:
    return ids[:count] if side == "right" else ids[len(ids) - count :]


def predict(model: SequenceClassifier, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Predict labels or similarities.

    Args:
        model: Model to run; it is in evaluation mode during the call, and its mode is restored afterwards.
        sequences: Token ids of n sequences, special tokens included.

    Returns:
        Label numbers with the highest score, (n,) int64; for a model with one label the score itself, (n,) float32. On the CPU.
    """
    scores = torch.empty(len(sequences), model.num_labels)
    longest = max(map(len, sequences), default=0)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in pack(sequences, max_tokens=max(BATCH_TOKENS, longest)):
                scores[list(batch.rows)] = model(batch).float().cpu()
    finally:
        model.train(was_training)
    return scores[:, 0] if model.num_labels == 1 else scores.argmax(dim=1)
