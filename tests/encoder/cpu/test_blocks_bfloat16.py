"""Blocks of bfloat16 matrices by compiled kernels, by AMX where there is one: exact sums, states, batch invariance, fallbacks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from quiver.encoder import Encoder, optimize_for_inference, pack_ids
from quiver.encoder.cpu.blocks import hidden_dtype, multiplies_bfloat16
from quiver.encoder.cpu.linear import PrepackedLinear
from quiver.encoder.cpu.support import amx_kernels_run, assume, kernels_available
from quiver.encoder.layers import Block
from tests.encoder.cpu.encoders import BIASES, POST, batch_of, by_operators, by_threads, encoder_of, is_compiled, run_as

HAS_PAIRS = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
pytestmark = pytest.mark.skipif(not (kernels_available() and HAS_PAIRS), reason="no numba, OpenMP threads or bfloat16 instruction here")

LENGTHS = (300, 1, 40, 129, 17)
CONFIGS: dict[str, dict[str, Any]] = {
    "modernbert": {},
    "bert": {"mlp": "plain", "positions": "absolute", "layer_types": ("global",) * 3, **POST, **BIASES},
    "nomicbert": {"activation": "silu", "layer_types": ("global",) * 3, **POST},
    "rmsnorm": {"norm": "rmsnorm", "activation": "relu"},
    "wide heads": {"hidden_size": 192, "rotary_fraction": 0.5},
    "one layer": {"layer_types": ("local",)},
}


@pytest.fixture(autouse=True)
def inference(two_threads: None) -> Iterator[None]:
    """Kernels multiply bfloat16 on every processor here, in several instructions where there is none for pairs."""
    del two_threads
    with torch.no_grad(), assume(amx_kernels_run=True, native_on_cpu=True):
        yield


def is_multiplied(encoder: Encoder) -> bool:
    """Tell whether kernels multiply the bfloat16 matrices of an encoder."""
    return multiplies_bfloat16(cast("list[Block]", list(encoder.layers)), encoder.config.hidden_size)


def half_of(**changes: Any) -> Encoder:
    """An encoder in bfloat16 whose widths pairs can have."""
    return encoder_of(**{"intermediate_size": 160, **changes}).bfloat16()


QUICK = ("modernbert", "bert", "one layer")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS])
def test_the_states_are_nearer_than_those_of_torch(name: str) -> None:
    """Hidden states are float32 between the products, which torch's are not."""
    encoder, batch = half_of(**CONFIGS[name]), batch_of(LENGTHS)
    found = encoder(batch)
    assert is_multiplied(encoder)
    assert found.dtype == torch.bfloat16
    exact = by_operators(lambda: copy.deepcopy(encoder).double()(batch))
    errors = [(each.double() - exact).square().mean().sqrt() for each in (found, by_operators(lambda: encoder(batch)))]
    assert errors[0] <= errors[1]
    # Of each text, too: an error of one that another hides is none of rounding's.
    for text in torch.split(torch.cat((found.double() - exact, exact), 1), list(LENGTHS)):
        distance, size = text.chunk(2, 1)
        assert distance.square().mean().sqrt() <= 0.03 * size.square().mean().sqrt()


@pytest.mark.parametrize(("width", "outputs"), [(32, 16), (96, 48), (416, 48), (1568, 16), (4096, 32)])
def test_sums_are_exact(width: int, outputs: int) -> None:
    """Integers that bfloat16 has, and whose sums float32 has, are multiplied as they are; a remainder of a block of steps too."""
    import numba
    import numpy as np

    from quiver.encoder.cpu import codegen
    from quiver.encoder.cpu.codegen import BFLOAT16, LANES
    from quiver.encoder.cpu.tiles import gather, narrow, product, store_rows

    @numba.njit
    def multiply(matrix: int, shape: tuple[int, int, int], rows: int, tile: int, out: int, result: int) -> None:
        tokens, columns, count = shape
        codegen.amx_begin(BFLOAT16, out)
        gather(rows, columns, tokens, columns, tile)
        narrow(BFLOAT16, tile, columns, 0)
        product(BFLOAT16, matrix, 0, count, columns, tile, out)
        codegen.amx_end(BFLOAT16)
        store_rows(out, count, tokens, 1.0, count, result)

    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-40, 41, (LANES - 1, width), generator=generator).float()
    weight = torch.randint(-40, 41, (outputs, width), generator=generator).bfloat16()
    bias = torch.arange(outputs).float()
    tile, out, result = torch.empty(width, LANES), torch.empty(outputs, LANES), torch.empty(LANES - 1, outputs)
    addresses = np.array([weight.data_ptr(), bias.data_ptr(), 0, 0], np.int64)
    shape = LANES - 1, width, outputs
    multiply(addresses.ctypes.data, shape, x.data_ptr(), tile.data_ptr(), out.data_ptr(), result.data_ptr())
    assert torch.equal(result.double(), x.double() @ weight.double().t() + bias)


def test_neither_threads_nor_neighbours_change_a_bit() -> None:
    encoder, batch = half_of(), batch_of((500, 300, 64))
    states = by_threads(encoder, batch)
    assert torch.equal(encoder(pack_ids([batch.ids[500:800].tolist()])), states[500:800])


def test_nan_stays_in_its_text() -> None:
    encoder = half_of()
    encoder.embeddings.tokens.weight[7] = torch.nan
    clean = [[5] * 129, [6] * 131]
    states = encoder(pack_ids([clean[0], [7] * 133, clean[1]]))
    assert states[129:262].isnan().all()
    assert torch.equal(torch.cat((states[:129], states[262:])), encoder(pack_ids(clean)))


def test_prepacked_and_plain_matrices_give_one_result() -> None:
    encoder, batch = half_of(), batch_of((300, 20))
    prepacked = optimize_for_inference(copy.deepcopy(encoder))
    assert all(matrix.rows() for matrix in prepacked.modules() if isinstance(matrix, PrepackedLinear))
    assert torch.equal(prepacked(batch), encoder(batch))
    assert torch.equal(prepacked.state_dict()["layers.0.attention.qkv.weight"], encoder.state_dict()["layers.0.attention.qkv.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 144},
        {"hidden_size": 64, "num_heads": 4, "positions": "absolute"},
        {"positions": "alibi", "layer_types": ("global",) * 2},
        {"norm_position": "parallel"},
    ],
    ids=str,
)
def test_unsupported_configurations_run_by_pytorch_in_bfloat16(changes: dict[str, Any]) -> None:
    encoder, batch = half_of(**changes), batch_of((300,))
    assert not is_compiled(encoder, batch)
    layers, width = list(encoder.layers), encoder.config.hidden_size
    assert hidden_dtype(layers, batch, torch.bfloat16, width, None) == torch.bfloat16  # type: ignore[arg-type]
    with assume(bfloat16_kernels_run=False):  # attention by PyTorch in both
        found = encoder(batch)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, by_operators(lambda: encoder(batch)), atol=0.02, rtol=0)  # RoPE may round the other way


def test_gradients_are_torchs() -> None:
    encoder = half_of()
    with torch.enable_grad():
        encoder(batch_of((300,)))[:, 0].float().sum().backward()
    assert encoder.layers[0].attention.qkv.weight.grad.isfinite().all()  # type: ignore[union-attr,operator]


STATES = """
import hashlib, sys
import torch
from quiver.encoder import Encoder, EncoderConfig, optimize_for_inference, init_weights, pack_ids
from quiver.encoder.cpu import codegen
from quiver.encoder.cpu.support import assume
assert codegen.amx_is_native() is (sys.argv[1] == "amx")
torch.set_num_threads(2)
config = EncoderConfig.modernbert(
    vocab_size=300, hidden_size=192, num_heads=3, intermediate_size=320, layer_types=["global", "local"], max_positions=400, window=32
)
batch = pack_ids([list(range(290)), [1, 2, 3], list(range(100))])
with torch.no_grad(), assume(amx_kernels_run=True):
    encoder = optimize_for_inference(init_weights(Encoder(config), seed=1), precision="int8")
    print(hashlib.sha256(encoder(batch).numpy().tobytes()).hexdigest())
    torch.save(init_weights(Encoder(config), seed=1).bfloat16()(batch).float(), sys.argv[2])
"""


@pytest.mark.skipif(not amx_kernels_run(), reason="this processor has no AMX")
def test_amx_gives_what_other_instructions_give(tmp_path: Path) -> None:
    """Sums of integers to the bit, those of bfloat16 to its rounding."""
    from quiver.encoder.cpu.support import cpu_features

    features = cpu_features()
    digests, states = [], []
    for name in ("amx", "none"):
        of_name = [each for each in features if name == "amx" or "amx" not in each]
        digests.append(run_as(STATES, "skylake-avx512", ",".join(of_name), name, str(tmp_path / name)))
        states.append(torch.load(tmp_path / name))
    assert digests[0] == digests[1]
    assert (states[0] - states[1]).square().mean().sqrt() < 4e-3 * states[1].std()


ASSEMBLED = """
from llvmlite import binding, ir
from quiver.encoder.cpu.support import assume
assumed = assume(has_amx=True)
assumed.__enter__()
from quiver.encoder.cpu import codegen
from quiver.encoder.cpu.codegen import BYTE, LONG, BFLOAT16, INT8, Code, amx_is_native
assert amx_is_native()
for width in (16, 8):
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * 6), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    rows, stride, count, columns, tile, out = function.args
    codegen.amx_product(Code(builder), ir.Constant(ir.IntType(width), 0), rows, stride, (count, columns), tile, out, add=False)
    builder.ret_void()
    features = "+avx512f,+amx-tile,+amx-bf16,+amx-int8"
    machine = binding.Target.from_default_triple().create_target_machine(cpu="x86-64", features=features)
    text = machine.emit_assembly(binding.parse_assembly(str(module)))
    print(*(line.split("#")[0].strip() for line in text.splitlines() if "tdp" in line or "tilezero" in line), sep="; ")
"""


def test_instructions_of_a_processor_with_amx() -> None:
    """What this processor may not run is at least the right instruction: weights, which have signs, come before numbers without one."""
    lines = run_as(ASSEMBLED, "x86-64", "+avx512f,+avx512bw,+avx512vl,+avx2,+fma,+amx-tile,+amx-bf16,+amx-int8").splitlines()
    for line, name in zip(lines, ("tdpbf16ps", "tdpbsud"), strict=True):
        # AT&T's notation has the total last and the rows before it.
        expected = [f"{name}\t%tmm{3 + lane}, %tmm{register}, %tmm{lane}" for register in (6, 7, 6) for lane in range(3)]
        assert [each for each in line.split("; ") if "tdp" in each] == expected
