"""Enlarging: tiled tensors against a reference written from the published formulas, entry by entry; heads, odd ratios, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, InputError, MaskedLM, init_head, init_weights, optimize_for_inference, pack_ids, preset
from quiver.encoder.pretraining.tiling import enlarge, enlarge_masked_lm, tile


def modernbert(layers: int, width: int, heads: int, intermediate: int, *, vocabulary: int = 20) -> EncoderConfig:
    return EncoderConfig.modernbert(
        vocab_size=vocabulary,
        hidden_size=width,
        num_heads=heads,
        intermediate_size=intermediate,
        layer_types=["local" if layer % 3 else "global" for layer in range(layers)],
        max_positions=64,
    )


# The published formulas, with slow loops over every entry.


def reference_tile(old: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """new[r, c] = old[(r - ro) mod h, (c - co) mod w] with ro = (H - h) // 2 and co = (W - w) // 2; one axis likewise."""
    new = np.zeros(shape, np.float32)
    offsets = [int((larger - smaller) / 2) for larger, smaller in zip(shape, old.shape, strict=True)]
    for place in np.ndindex(*shape):
        new[place] = old[tuple((at - offset) % size for at, offset, size in zip(place, offsets, old.shape, strict=True))]
    return new


def reference_parts(old: NDArray[np.float32], shape: tuple[int, ...], parts: int) -> NDArray[np.float32]:
    """Each of so many row chunks on its own, one after the other."""
    rows = len(old) // parts
    chunk = (shape[0] // parts, *shape[1:])
    return np.concatenate([reference_tile(old[part * rows : (part + 1) * rows], chunk) for part in range(parts)])


def reference_edges(old: NDArray[np.float32], edges: NDArray[np.float32]) -> NDArray[np.float32]:
    """The release's center_weights: random values, in whose centre the old ones are written."""
    new = edges.copy()
    corner = [(larger - smaller) // 2 for larger, smaller in zip(new.shape, old.shape, strict=True)]
    new[tuple(slice(start, start + size) for start, size in zip(corner, old.shape, strict=True))] = old
    return new


def reference_layer(layer: int, old: int, new: int) -> int:
    """Gopher: the quotient to the nearest whole number, of two as near the even one."""
    twice = 2 * layer * old
    low, rest = divmod(twice, 2 * new)
    return low if rest < new or (rest == new and low % 2 == 0) else low + 1


@pytest.mark.parametrize(
    ("old", "new"), [((4,), (7,)), ((5,), (8,)), ((3, 4), (4, 11)), ((5, 4), (3, 2)), ((2, 3), (9, 20)), ((3, 3), (3, 3))]
)
def test_any_shape_is_tiled_as_the_formula_says(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    tensor = torch.arange(float(np.prod(old))).reshape(old)
    np.testing.assert_array_equal(tile(tensor, new).numpy(), reference_tile(tensor.numpy(), new))


def test_base_to_large_is_the_published_map_entry_by_entry() -> None:
    """All tensors of 22 layers of 768 with 12 heads made to 28 of 1,024 with 16, at an eighth of the head width and of the MLP."""
    small, large = modernbert(22, 96, 12, 144), modernbert(28, 128, 16, 328)
    parent = init_weights(Encoder(small), seed=1)
    child = enlarge(parent, large, shared=False)
    old = {name: tensor.numpy() for name, tensor in parent.state_dict().items()}
    parts = {"attention.qkv.weight": 3, "mlp.up.weight": 2}
    seen = set()
    for name, tensor in child.state_dict().items():
        source, kind = name, name
        if name.startswith("layers."):
            _, layer, kind = name.split(".", 2)
            source = f"layers.{reference_layer(int(layer), 22, 28)}.{kind}"
        if source not in old:
            assert source == "layers.0.attention_norm.weight"
            assert bool((tensor == 1).all())
            continue
        seen.add(source)
        # Loops over every entry are slow: for four layers and all that stands outside; `tile`, which the test above checks, for the others.
        count, shape = parts.get(kind, 1), tuple(tensor.shape)
        if name.startswith("layers.") and int(layer) not in (0, 3, 7, 27):
            chunks = torch.from_numpy(old[source]).chunk(count)
            expected = torch.cat([tile(chunk, (shape[0] // count, *shape[1:])) for chunk in chunks]).numpy()
        else:
            expected = reference_parts(old[source], shape, count)
        np.testing.assert_array_equal(tensor.numpy(), expected, err_msg=name)
    assert seen == old.keys()


def test_values_may_come_from_the_edge_or_lie_in_the_centre_of_random_ones() -> None:
    small, large = modernbert(2, 16, 2, 24), modernbert(3, 40, 5, 60)
    parent = MaskedLM(init_weights(Encoder(small), seed=1))
    init_head(parent, seed=2)
    edge, centre, again = (
        enlarge_masked_lm(parent, large, shared=False, tiling=tiling, seed=seed, method="normal").state_dict()
        for tiling, seed in (("from-edge", 7), ("random-edges", 7), ("random-edges", 8))
    )
    random = MaskedLM(init_weights(Encoder(large), seed=7, method="normal"))
    init_head(random, seed=8, method="normal")
    old, drawn = parent.state_dict(), random.state_dict()
    for name, axes in (
        ("encoder.embeddings.tokens.weight", None),
        ("encoder.layers.2.mlp.down.weight", None),
        ("encoder.layers.2.mlp_norm.weight", None),
        ("encoder.layers.2.mlp.up.weight", ((2, 24, 16), (2, 60, 40))),
        ("encoder.layers.2.attention.qkv.weight", ((3, 2, 2, 4, 16), (3, 5, 2, 4, 40))),
        ("transform.dense.weight", None),
    ):
        source = old[name.replace("layers.2", "layers.1")]
        shape, larger = axes or (source.shape, edge[name].shape)
        parts, initial = source.reshape(shape).numpy(), drawn[name].reshape(larger).numpy()
        repeated = parts[np.ix_(*(np.arange(size) % before for size, before in zip(larger, shape, strict=True)))]
        np.testing.assert_array_equal(edge[name].reshape(larger).numpy(), repeated, err_msg=name)
        np.testing.assert_array_equal(centre[name].reshape(larger).numpy(), reference_edges(parts, initial), err_msg=name)
        assert torch.equal(centre[name], again[name]) == (source.ndim == 1), name
    shared = enlarge_masked_lm(parent, large, tiling="random-edges", seed=7, method="normal").state_dict()
    assert all(torch.equal(shared[name], centre[name]) for name in shared), "nothing is there twice"


def test_layers_that_differ_at_the_beginning_are_tiled_from_such_layers_alone() -> None:
    small, large = (
        replace(modernbert(layers, 16, 2, 24), family="quiver", initial_layers=1, initial_mlp="plain", initial_rotary=False)
        for layers in (3, 6)
    )
    old = init_weights(Encoder(small), seed=1).layers
    new = enlarge(init_weights(Encoder(small), seed=1), large).layers
    origins = [next(at for at, layer in enumerate(old) if torch.equal(layer.mlp.down.weight, made.mlp.down.weight)) for made in new]
    assert origins == [0, 1, 1, 2, 2, 2]
    with pytest.raises(InputError, match="layer_types is"):
        enlarge(Encoder(replace(small, initial_layers=3)), replace(large, initial_layers=3))


def head_of(tensor: Tensor, config: EncoderConfig, part: int, head: int) -> Tensor:
    """The rows of one head's queries, keys or values."""
    start = part * config.hidden_size + head * config.head_width
    return tensor[start : start + config.head_width]


def test_a_head_stays_whole_where_their_number_grows_by_an_odd_one() -> None:
    small, large = modernbert(1, 16, 2, 24), modernbert(1, 40, 5, 24)
    parent = init_weights(Encoder(small), seed=1)
    child = enlarge(parent, large, shared=False)
    old, new = (model.state_dict()["layers.0.attention.qkv.weight"] for model in (parent, child))
    out_old, out_new = (model.state_dict()["layers.0.attention.out.weight"] for model in (parent, child))
    for head in range(5):
        source = (head - 1) % 2
        for part in range(3):
            assert torch.equal(head_of(new, large, part, head), tile(head_of(old, small, part, source), (8, 40)))
        assert torch.equal(out_new[:, head * 8 : head * 8 + 8], tile(out_old[:, source * 8 : source * 8 + 8], (40, 8)))


def test_halves_that_rope_rotates_together_stay_pairs_in_wider_heads() -> None:
    small, large = modernbert(1, 16, 2, 24), modernbert(1, 24, 2, 24)  # heads of 8 to heads of 12
    parent = init_weights(Encoder(small), seed=1)
    child = enlarge(parent, large, shared=False)
    old, new = (model.state_dict()["layers.0.attention.qkv.weight"] for model in (parent, child))
    for head in range(2):
        ours, theirs = head_of(new, large, 0, head), head_of(old, small, 0, head)
        for pair in range(6):
            for half in range(2):
                source = (pair - 1) % 4 + half * 4
                assert torch.equal(ours[pair + half * 6], tile(theirs[source], (24,)))


@pytest.mark.parametrize("name", ["bert-base", "roberta-base", "mosaicbert-base", "gte-en-mlm-base"])
def test_other_families_biases_positions_and_heads_are_tiled_too(name: str) -> None:
    small = replace(
        preset(name), vocab_size=20, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=("global",) * 2, max_positions=8
    )
    large = replace(small, hidden_size=32, num_heads=4, intermediate_size=40, layer_types=("global",) * 3)
    parent = MaskedLM(init_weights(Encoder(small), seed=1))
    init_head(parent, seed=2)
    with torch.no_grad():
        for parameter in parent.parameters():
            if parameter.ndim == 1:
                parameter.normal_(generator=torch.Generator().manual_seed(len(parameter)))
    child = enlarge_masked_lm(parent, large, shared=False)
    old, new = parent.state_dict(), child.state_dict()
    assert torch.equal(new["decoder.bias"], old["decoder.bias"])
    assert torch.equal(new["transform.dense.weight"], tile(old["transform.dense.weight"], (32, 32)))
    assert torch.equal(new["transform.norm.bias"], tile(old["transform.norm.bias"], (32,)))
    assert torch.equal(new["encoder.embeddings.norm.bias"], tile(old["encoder.embeddings.norm.bias"], (32,)))
    qkv = new["encoder.layers.2.attention.qkv.bias"].numpy()
    np.testing.assert_array_equal(qkv, reference_parts(old["encoder.layers.1.attention.qkv.bias"].numpy(), (96,), 3))
    if small.positions == "absolute":
        positions = "encoder.embeddings.positions.weight"
        assert torch.equal(new[positions], tile(old[positions], (len(old[positions]), 32)))


def test_an_equal_size_is_a_copy_and_the_parent_is_left_alone() -> None:
    config = modernbert(3, 16, 2, 24)
    parent = MaskedLM(init_weights(Encoder(config), seed=1)).to(torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in parent.state_dict().items()}
    child = enlarge_masked_lm(parent, config)
    state = child.state_dict()
    assert state.keys() == before.keys()
    assert all(state[name].dtype == torch.bfloat16 and torch.equal(state[name], before[name]) for name in before)
    with torch.no_grad():
        child.encoder.embeddings.tokens.weight.zero_()
    assert torch.equal(parent.encoder.embeddings.tokens.weight, before["encoder.embeddings.tokens.weight"])


def test_what_is_more_than_a_size_is_refused() -> None:
    small = modernbert(2, 16, 2, 24)
    parent = Encoder(small)
    for changes, told in (
        ({"vocab_size": 32}, "vocab_size is 20 and would be 32"),
        ({"qkv_bias": True}, "qkv_bias is False and would be True"),
        ({"mlp": "plain", "norm_position": "parallel"}, "norm_position is 'pre' and would be 'parallel'"),
    ):
        with pytest.raises(InputError, match=told):
            enlarge(parent, replace(modernbert(3, 32, 4, 48), **changes))
    absolute = replace(small, family="quiver", positions="absolute")
    with pytest.raises(InputError, match="max_positions is 64 and would be 128"):
        enlarge(Encoder(absolute), replace(absolute, max_positions=128))
    packed = Encoder(small).eval()
    optimize_for_inference(packed)
    with pytest.raises(InputError, match="packed for inference"):
        enlarge(packed, modernbert(3, 32, 4, 48))


@pytest.mark.parametrize("family", ["modernbert-base", "bert-base", "gte-en-mlm-base", "nomicbert"])
def test_copies_that_share_compute_what_the_parent_computes(family: str) -> None:
    """Where every value is there twice, norms see what they saw: the larger model is the smaller one."""
    small = replace(preset(family), vocab_size=40, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=("global",) * 3)
    large = replace(small, hidden_size=32, num_heads=4, intermediate_size=48)
    parent = MaskedLM(init_weights(Encoder(small), seed=3)).eval()
    init_head(parent, seed=4)
    with torch.no_grad():
        for weight in parent.parameters():  # norms and biases too
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    batch = pack_ids([[1, 2, 3, 4, 5], [6, 7]])
    edge = enlarge_masked_lm(parent, large, tiling="from-edge")
    with torch.no_grad():
        torch.testing.assert_close(edge.logits(batch, torch.arange(7)), parent.logits(batch, torch.arange(7)), atol=1e-4, rtol=1e-4)
    child = enlarge_masked_lm(parent, large)
    with torch.no_grad():
        torch.testing.assert_close(child.encoder(batch), tile(parent.encoder(batch), (7, 32)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(child.logits(batch, torch.arange(7)), parent.logits(batch, torch.arange(7)), atol=1e-4, rtol=1e-4)
    plain = enlarge_masked_lm(parent, large, shared=False)
    with torch.no_grad():
        assert (plain.encoder(batch) - tile(parent.encoder(batch), (7, 32))).abs().max() > 0.1


def test_a_matrix_adds_up_each_input_once_where_widths_are_no_multiples() -> None:
    small, large = modernbert(1, 48, 3, 72), modernbert(1, 64, 4, 164)
    parent = init_weights(Encoder(small), seed=1)
    old, new = (model.layers[0].mlp.down.weight.detach() for model in (parent, enlarge(parent, large)))
    x = torch.randn(72, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(new @ tile(x, (164,)), tile(old @ x, (64,)))
