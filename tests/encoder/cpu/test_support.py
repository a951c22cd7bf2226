"""Dtypes and layouts that are chosen on each kind of CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from quiver.encoder.cpu import support
from quiver.encoder.cpu.support import assume

CHECKS = (
    "_is_amx_tile_supported",
    "_init_amx",
    "_is_amx_fp16_supported",
    "_is_avx512_bf16_supported",
    "_is_avx512_supported",
    "_is_vnni_supported",
)


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Answers PyTorch's checks as on another CPU, given its vendor and features."""
    with ExitStack() as stack:

        def make(vendor: str, *features: str) -> None:
            stack.enter_context(assume(is_intel=vendor == "GenuineIntel"))
            for check in CHECKS:
                monkeypatch.setattr(torch.cpu, check, lambda has=check in features: has, raising=False)

        yield make


@pytest.mark.parametrize(
    ("vendor", "features", "bfloat16", "float16"),
    [
        ("GenuineIntel", (), False, False),
        ("GenuineIntel", ("_is_avx512_supported", "_is_avx512_bf16_supported"), False, False),
        ("GenuineIntel", ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_init_amx"), True, False),
        ("GenuineIntel", ("_is_avx512_bf16_supported", "_is_amx_tile_supported"), False, False),  # a system that keeps it to itself
        ("GenuineIntel", ("_is_amx_tile_supported", "_init_amx", "_is_amx_fp16_supported"), True, True),
        ("AuthenticAMD", ("_is_avx512_bf16_supported",), True, False),
        ("AuthenticAMD", (), False, False),
    ],
)
def test_half_precision_is_native_where_it_is_faster(
    become: Callable[..., None], vendor: str, features: tuple[str, ...], bfloat16: bool, float16: bool
) -> None:
    become(vendor, *features)
    assert [support.native_on_cpu(dtype) for dtype in (torch.bfloat16, torch.float16)] == [bfloat16, float16]
    assert all(support.native_on_cpu(dtype) for dtype in (torch.float32, torch.float64))
    assert support.has_fast_bfloat16() == (vendor == "AuthenticAMD" and bfloat16)


@pytest.mark.parametrize(
    ("vendor", "features", "plain"),
    [("GenuineIntel", ("_is_avx512_supported",), True), ("GenuineIntel", (), False), ("AuthenticAMD", ("_is_avx512_supported",), False)],
)
def test_weights_stay_plain_where_mkl_is_fastest(become: Callable[..., None], vendor: str, features: tuple[str, ...], plain: bool) -> None:
    become(vendor, *features)
    assert support.prefers_plain_weights() == (plain and torch.backends.mkl.is_available())


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_linux_names_the_vendor(tmp_path: Path, vendor: str) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: of this year\n")
    assert support.is_intel(cpu_info) == (vendor == "GenuineIntel")


def test_kernels_run_bfloat16_where_it_is_fast() -> None:
    found = []
    for fast, tiles in ((True, False), (False, False), (False, True)):
        with assume(has_fast_bfloat16=fast, amx_kernels_run=tiles, kernels_run=True):
            found.append(support.bfloat16_kernels_run())
    assert found == ["+avx512bf16" in support.cpu_features(), False, True]


def test_assumed_answers_end_with_the_context_and_unknown_questions_are_refused() -> None:
    before = support.has_vnni(), support.native_on_cpu(torch.bfloat16)
    with assume(has_vnni=not before[0]):
        with assume(has_amx=True, native_on_cpu=lambda dtype: dtype == torch.float16):
            assert (support.has_vnni(), support.has_amx()) == (not before[0], True)
            assert [support.native_on_cpu(dtype) for dtype in (torch.bfloat16, torch.float16)] == [False, True]
        assert support.has_vnni() is not before[0]
    assert (support.has_vnni(), support.native_on_cpu(torch.bfloat16)) == before
    with pytest.raises(ValueError, match=r"must be one of is_intel, .*, got has_wings"), assume(has_wings=True):
        pass


@pytest.mark.parametrize(
    ("features", "fourfold"),
    [(("_is_avx512_supported", "_is_vnni_supported"), True), (("_is_vnni_supported",), False), (("_is_avx512_supported",), False)],
)
def test_eight_bits_need_the_instruction_in_avx512(become: Callable[..., None], features: tuple[str, ...], fourfold: bool) -> None:
    become("GenuineIntel", *features)
    assert support.has_vnni() == fourfold
