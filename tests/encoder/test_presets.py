"""Presets: the published sizes, and an error that lists the names."""

from __future__ import annotations

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError
from quiver.encoder.presets import PRESETS, preset

# Parameters of the encoder, in millions as they were published, and what of the published number is no part of the encoder.
PUBLISHED = {
    "modernbert-base": (149, 0),  # arXiv:2412.13663
    "modernbert-large": (395, 0),
    "ettin-17m": (17, 0),  # arXiv:2507.11412: the names are the sizes
    "ettin-32m": (32, 0),
    "ettin-68m": (68, 0),
    "ettin-150m": (150, 0),
    "ettin-400m": (400, 0),
    "ettin-1b": (1000, 0),
    "gte-modernbert-base": (149, 0),  # its model card
    "granite-embedding-english-r2": (149, 0),  # arXiv:2508.21085
    "granite-embedding-small-english-r2": (47, 0),
    "mmbert-small": (140, 0),  # arXiv:2509.06888
    "mmbert-base": (307, 0),
    "bert-base": (110, 768 * 768 + 768),  # arXiv:1810.04805: with the pooler
    "bert-large": (340, 1024 * 1024 + 1024),
    "roberta-base": (125, 768 * 768 + 768),  # arXiv:1907.11692; fairseq's README
    "roberta-large": (355, 1024 * 1024 + 1024),
    "minilm-l6": (22.7, 384 * 384 + 384),  # model card of all-MiniLM-L6-v2
    "mosaicbert-base": (137, 0),  # model card of gte-en-mlm-large, as is the next
    "mosaicbert-large": (434, 0),
    "nomicbert": (137, 0),  # arXiv:2402.01613
    "gte-en-mlm-base": (137, 0),  # the same model card; the large one with its masked-LM head
    "gte-en-mlm-large": (435, 1024 * 1024 + 3 * 1024 + 30_528),
}
# Where the checkpoint's own count is known it is exact: transformers' BertModel and RobertaModel less their poolers.
EXACT = {
    "modernbert-base": 149_014_272,
    "bert-base": 109_482_240 - 590_592,
    "bert-large": 335_141_888 - 1_049_600,
    "roberta-base": 124_645_632 - 590_592,
    "roberta-large": 355_359_744 - 1_049_600,
    "minilm-l6": 22_713_216 - 147_840,
}


def parameters(config: EncoderConfig) -> int:
    with torch.device("meta"):
        return Encoder(config).num_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_are_the_published_ones(name: str) -> None:
    millions, head = PUBLISHED[name]
    assert (parameters(preset(name)) + head) / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_sizes_are_exact_where_the_count_is_known(name: str, count: int) -> None:
    assert parameters(preset(name)) == count


def test_thetas_and_lengths() -> None:
    figures = {name: (c.global_theta, c.local_theta, c.max_positions) for name in PRESETS if (c := preset(name)).positions == "rope"}
    assert figures["modernbert-base"] == figures["gte-modernbert-base"] == (160_000, 10_000, 8192)
    assert figures["ettin-17m"] == (160_000, 160_000, 7999)
    assert figures["mmbert-small"] == (160_000, 160_000, 8192)
    assert figures["granite-embedding-small-english-r2"] == (80_000, 10_000, 8192)
    assert figures["nomicbert"][0] == 1000
    assert (figures["gte-en-mlm-base"][0], figures["gte-en-mlm-large"][0]) == (500_000, 160_000)
    assert preset("roberta-base").position_offset == 2


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(InputError, match=r"unknown preset 'bert-huge'; choose one of modernbert-base, .*, gte-en-mlm-large$"):
        preset("bert-huge")
