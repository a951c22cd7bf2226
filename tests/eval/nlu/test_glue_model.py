"""GLUE models: new and existing heads, truncation of pairs, and the order of predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quiver.encoder import Encoder, InputError, MaskedLM, Tokenizer, init_head, load_encoder, preset, save_encoder, save_head
from quiver.eval.nlu.fine_tuning import save_tokenizer
from quiver.eval.nlu.glue_tasks import TASKS
from quiver.eval.nlu.glue_training import lengths_kept, open_glue_model, predict, tokenise


def test_the_transform_of_the_masked_language_model_is_kept(small_encoder: Path, tmp_path: Path) -> None:
    pretrained = MaskedLM(load_encoder(small_encoder))
    init_head(pretrained, seed=9)
    save_head(pretrained, tmp_path)
    save_tokenizer(Tokenizer.from_pretrained(small_encoder), tmp_path)
    model, tokenizer = open_glue_model(tmp_path, TASKS["cola"], seed=1, pooling="mean")
    assert torch.equal(model.transform.dense.weight, pretrained.transform.dense.weight)
    assert torch.equal(model.out.weight, open_glue_model(small_encoder, TASKS["cola"], seed=1)[0].out.weight)
    assert model.pooling == "mean"
    assert tokenizer.settings["model_input_names"] == ["input_ids", "attention_mask"]


def test_bert_classifies_by_its_first_token(small_encoder: Path, tmp_path: Path) -> None:
    config = replace(preset("bert-base"), vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=("global",))
    save_encoder(Encoder(config), tmp_path)
    Tokenizer.from_pretrained(small_encoder).save(tmp_path)
    assert open_glue_model(tmp_path, TASKS["cola"], seed=1)[0].pooling == "cls"
    with pytest.raises(InputError, match=r"model\.pooling: must be cls for the family bert, got mean"):
        open_glue_model(tmp_path, TASKS["cola"], seed=1, pooling="mean")


@pytest.mark.parametrize("room", range(1, 12))
def test_the_longer_of_two_texts_is_truncated_first(room: int) -> None:
    for first in range(12):
        for second in range(12):
            kept = lengths_kept(first, second, room=room)
            assert sum(kept) == min(room, first + second)
            assert kept[0] <= first
            assert kept[1] <= second
            cut = [count < length for count, length in zip(kept, (first, second), strict=True)]
            if all(cut):
                assert abs(kept[0] - kept[1]) <= 1
            elif any(cut):
                assert kept[cut.index(True)] >= kept[cut.index(False)] - 1, "the one that is cut is still the longer"


def test_predictions_are_in_the_order_of_the_texts(small_encoder: Path) -> None:
    model, tokenizer = open_glue_model(small_encoder, TASKS["stsb"], seed=1)
    pairs = [("bird", "sea " * count) for count in (1, 9, 3, 20, 2)]
    sequences = tokenise(pairs, tokenizer, max_length=64).ids
    alone = torch.cat([predict(model, [ids]) for ids in sequences])
    model.train()
    torch.testing.assert_close(predict(model, sequences, batch_tokens=30), alone)
    assert model.training
