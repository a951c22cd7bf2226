"""Blocks of int8 matrices by compiled kernels: exact sums, the definition in double precision, batch invariance, other processors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, optimize_for_inference, pack_ids
from quiver.encoder.cpu.blocks import unsupported_reason
from quiver.encoder.cpu.linear import Linear, hadamard, hadamard_size, int8_levels
from quiver.encoder.cpu.support import assume, kernels_available
from tests.encoder.cpu.encoders import BIASES, POST, batch_of, by_operators, by_threads, encoder_of, is_compiled, run_as

pytestmark = [
    pytest.mark.skipif(not kernels_available(), reason="no numba, OpenMP threads or fused multiplications here"),
    pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="torch has no 8-bit kernels here"),
]

LENGTHS = (300, 1, 40, 129, 17)
CONFIGS: dict[str, dict[str, Any]] = {
    "modernbert": {},
    "bert": {"mlp": "plain", "positions": "absolute", "layer_types": ("global",) * 3, **POST, **BIASES},
    "nomicbert": {"activation": "silu", "layer_types": ("global",) * 3, **POST},
    "rmsnorm": {"norm": "rmsnorm", "activation": "relu"},
    "wide": {"hidden_size": 128, "num_heads": 4, "intermediate_size": 192},  # features are rotated 64 at a time
}


@pytest.fixture(autouse=True)
def inference(two_threads: None) -> Iterator[None]:
    del two_threads
    with torch.no_grad():
        yield


def rotation(width: int) -> Tensor:
    """A regular Hadamard matrix of the largest of 64, 16, 4 and 1 that divides a width, all along the diagonal: (D, D)."""
    size = next(each for each in (64, 16, 4, 1) if width % each == 0)
    matrix, four = torch.ones(1, 1, dtype=torch.float64), 1 - 2 * torch.eye(4, dtype=torch.float64).flip(0)
    while len(matrix) < size:
        matrix = torch.kron(four, matrix)
    return torch.block_diag(*[matrix] * (width // size))  # type: ignore[no-untyped-call]


class Defined(nn.Module):
    """What a product of integers is, in double precision."""

    def __init__(self, linear: Linear, levels: int) -> None:
        super().__init__()
        self.rotation = rotation(linear.in_features)
        # In float32: an integer of a weight that went to its neighbour would move all tokens.
        weight = hadamard(linear.weight.detach().float()) / hadamard_size(linear.in_features)
        self.scales = weight.abs().amax(1) / 127
        self.integers = (weight / self.scales[:, None]).round().double()
        self.bias = None if linear.bias is None else linear.bias.detach().double()
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.rotation.t()
        least = x.amin(1, keepdim=True)
        step = (x.amax(1, keepdim=True) - least) / self.levels
        near = ((x - least) / step).round() * step + least
        output = near @ self.integers.t() * self.scales.double()
        return output if self.bias is None else output + self.bias


def defined(encoder: Encoder, levels: int) -> Encoder:
    twin = copy.deepcopy(encoder).double()
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                plain = encoder.get_submodule(next(path for path, each in twin.named_modules() if each is child))
                assert isinstance(plain, Linear)
                setattr(module, name, Defined(plain, levels))
    return twin


def quantised(encoder: Encoder) -> Encoder:
    return optimize_for_inference(copy.deepcopy(encoder), precision="int8")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "wide" else ()) for name in CONFIGS])
def test_the_states_are_those_of_the_definition(name: str) -> None:
    # Two layers: one that reads what another has written.
    two: dict[str, Any] = {"layer_types": ("global", "local"), **CONFIGS[name]}
    encoder = encoder_of(**{**two, "layer_types": two["layer_types"][:2]})
    short = (5,) * 120
    batch = batch_of((*LENGTHS, *short))
    twin = quantised(encoder)
    found = twin(batch)
    assert is_compiled(twin, batch)
    with torch.enable_grad():
        exact = defined(encoder, int8_levels(twin.layers[0].attention.qkv))(batch).detach().float()
    plain = encoder(batch)
    # A number between two of the grid may go to the other one, which moves its token by a step, and a text by what it reads of it: of
    # 300 tokens some number always does, of five seldom one.
    distances = (found - exact).abs().amax(1) / exact.std()
    assert distances.max() < 0.25, distances.max()
    assert (found - exact).abs().mean() < (plain - exact).abs().mean() / 3
    apart = distances[-sum(short) :]
    assert apart.median() < 1e-5, apart.median()
    assert apart.mean() < ((plain - exact).abs().amax(1) / exact.std())[-sum(short) :].mean() / 3
    assert torch.nn.functional.cosine_similarity(found, plain).min() > 0.99


@pytest.mark.parametrize("name", CONFIGS)
def test_operators_multiply_the_same_integers(name: str) -> None:
    encoder, batch = quantised(encoder_of(**CONFIGS[name])), batch_of((5,) * 100)  # of so few tokens most are all on one side (above)
    found = encoder(batch)
    assert is_compiled(encoder, batch)
    distances = (by_operators(lambda: encoder(batch)) - found).abs().amax(1) / found.std()
    assert distances.median() < 1e-4, distances.median()
    assert distances.max() < 0.25, distances.max()


def test_neither_threads_nor_neighbours_change_a_bit() -> None:
    encoder, batch = quantised(encoder_of()), batch_of((500, 300, 64))
    states = by_threads(encoder, batch)
    ids = batch.ids.tolist()
    for part in (slice(500, 800), slice(800, 864)):
        assert torch.equal(encoder(pack_ids([ids[part]])), states[part])


@pytest.mark.parametrize("name", ["modernbert", "wide"])
def test_nan_stays_in_its_token(name: str) -> None:
    encoder = encoder_of(**CONFIGS[name], layer_types=("global",))
    with torch.no_grad():
        encoder.embeddings.tokens.weight[7, 3] = float("nan")
        encoder.embeddings.tokens.weight[8, 5] = float("inf")
    clean = [[1, 2, 3] * 90, [4, 5]]
    states = quantised(encoder)(pack_ids([*clean, [7], [8]]))
    assert is_compiled(quantised(encoder), pack_ids(clean))
    assert states[272:].isnan().all()
    assert torch.equal(states[:272], quantised(encoder)(pack_ids(clean)))


def test_more_int8_levels_than_kernels_support_are_left_to_pytorch() -> None:
    batch = batch_of(LENGTHS)
    with assume(int8_kernels_run=lambda levels: levels <= 127):
        with assume(has_vnni=False):
            coarse = quantised(encoder_of())
        assert is_compiled(coarse, batch)
        assert coarse(batch).isfinite().all()
        with assume(has_vnni=True):
            fine = quantised(encoder_of())
        assert unsupported_reason(list(fine.layers), torch.zeros(300, 96), None) == "8-bit integers up to 255"  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [16, 48, 64, 400, 4096])
def test_kernels_and_pytorch_rotate_to_the_same_bits(width: int) -> None:
    import numba

    from quiver.encoder.cpu.codegen import LANES, emitted
    from quiver.encoder.cpu.tiles import emit_hadamard

    def emit(code: Any, tile: Any, width: Any) -> None:
        emit_hadamard(code, code.numbers(tile), width)

    rotate = emitted(emit)

    @numba.njit
    def run(tile: int, width: int) -> None:
        rotate(tile, width)

    generator = torch.Generator().manual_seed(width)
    x = torch.randn(width, LANES, generator=generator) * 2.0 ** torch.randint(-40, 40, (width, LANES), generator=generator)
    expected = hadamard(x.t()).t()
    run(x.data_ptr(), width)
    assert torch.equal(x, expected)


EMULATED = """
import numba
import numpy as np
import torch
from quiver.encoder.cpu.codegen import INT8, LANES
from quiver.encoder.cpu.linear import Int8Matrix
from quiver.encoder.cpu.support import assume, kernel_int8_levels
from quiver.encoder.cpu.tiles import gather, narrow, product, store_rows
assert kernel_int8_levels() == 127, kernel_int8_levels()

@numba.njit
def multiply(matrix, rows, tile, out, levels):
    gather(rows, 128, LANES, 128, tile)
    narrow(INT8, tile, 128, levels)
    product(INT8, matrix, 0, 48, 128, tile, out)
    store_rows(out, 48, LANES, 1.0, 48, rows)

generator = torch.Generator().manual_seed(1)
x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((LANES, 128), (48, 128), (48,)))
with assume(has_vnni=False):
    matrix = Int8Matrix(weight, bias, plain_layout=True)
addresses = np.array([each.data_ptr() for each in (matrix.weight, matrix.bias, matrix.scales, matrix.ones)], np.int64)
tile, out, rows = torch.empty(128, LANES), torch.empty(48, LANES), x.clone()
multiply(addresses.ctypes.data, rows.data_ptr(), tile.data_ptr(), out.data_ptr(), 127)
expected = matrix(x)
distances = (rows.flatten()[: expected.numel()].view_as(expected) - expected).abs().amax(1) / expected.std()
assert distances.median() < 1e-5 and distances.max() < 0.05, distances
"""


@pytest.mark.slow
@pytest.mark.parametrize("features", ["+avx2,+fma", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx2,+fma"])
def test_processors_without_the_instruction(features: str) -> None:
    if "+avx512f" in features and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this processor has no AVX-512")
    run_as(EMULATED, "skylake-avx512" if "+avx512f" in features else "haswell", features)


ASSEMBLED = """
import sys
from llvmlite import binding, ir
from quiver.encoder.cpu.codegen import INTS, WIDTH, Code
from quiver.encoder.cpu.support import kernel_int8_levels
module = ir.Module()
function = ir.Function(module, ir.FunctionType(INTS, [INTS] * 3), "quads")
builder = ir.IRBuilder(function.append_basic_block())
total, signed, unsigned = function.args  # in registers 0, 1 and 2
builder.ret(Code(builder).add_quads(signed, unsigned, total))
machine = binding.Target.from_default_triple().create_target_machine(cpu="x86-64", features=sys.argv[1])
print(kernel_int8_levels(), machine.emit_object(binding.parse_assembly(str(module))).hex())
"""


@pytest.mark.parametrize(
    ("features", "reach", "code"),
    [
        # vpdpbusd %zmm1, %zmm2, %zmm0: Intel's manual has the unsigned factor second and the signed one third, the total first.
        ("+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx2,+fma", 255, "62f26d4850c1"),
        # The same of %ymm in the shorter encoding, which is all that these processors have.
        pytest.param("+avxvnni,+avx2,+fma", 255, "c4e26d50c1", marks=pytest.mark.slow),
        pytest.param("+avx2,+fma", 127, "c4e26d04", marks=pytest.mark.slow),  # vpmaddubsw of %ymm2 and another
        pytest.param("+avx512f,+avx512bw,+avx512vl,+avx2,+fma", 127, "62f26d4804", marks=pytest.mark.slow),
    ],
)
def test_instructions_of_other_processors(features: str, reach: int, code: str) -> None:
    """What this processor may not run is at least the right instruction, and its operands are in their places."""
    reached, made = run_as(ASSEMBLED, "x86-64", features, features).split()
    assert int(reached) == reach
    assert code in made
