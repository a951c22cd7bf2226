"""What is computed in which dtype and layout, by what processor it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quiver.encoder.cpu import support

CHECKS = (
    "_is_amx_tile_supported",
    "_init_amx",
    "_is_amx_fp16_supported",
    "_is_avx512_bf16_supported",
    "_is_avx512_supported",
    "_is_vnni_supported",
)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Answers are remembered, and those about other processors must not be."""
    asked = (
        support.is_intel,
        support.native_on_cpu,
        support.has_fast_bfloat16,
        support.has_amx,
        support.has_vnni,
        support.prefers_plain_weights,
    )
    for question in asked:
        question.cache_clear()
    yield
    for question in asked:
        question.cache_clear()


def become(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, *features: str) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: of this year\n")
    monkeypatch.setattr(support, "CPU_INFO", facts)
    for check in CHECKS:
        monkeypatch.setattr(torch.cpu, check, lambda has=check in features: has, raising=False)


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, features: tuple[str, ...], bfloat16: bool, float16: bool
) -> None:
    become(monkeypatch, tmp_path, vendor, *features)
    assert [support.native_on_cpu(dtype) for dtype in (torch.bfloat16, torch.float16)] == [bfloat16, float16]
    assert all(support.native_on_cpu(dtype) for dtype in (torch.float32, torch.float64))
    assert support.has_fast_bfloat16() == (vendor == "AuthenticAMD" and bfloat16)


@pytest.mark.parametrize(
    ("vendor", "features", "plain"),
    [
        ("GenuineIntel", ("_is_avx512_supported",), True),
        ("GenuineIntel", (), False),
        ("AuthenticAMD", ("_is_avx512_supported",), False),
    ],
)
def test_weights_stay_plain_where_mkl_is_at_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, features: tuple[str, ...], plain: bool
) -> None:
    become(monkeypatch, tmp_path, vendor, *features)
    assert support.prefers_plain_weights() == (plain and torch.backends.mkl.is_available())


def test_where_the_system_has_no_such_file_it_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(support, "CPU_INFO", tmp_path / "none")
    for name, intel in (
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", True),
        ("AMD64 Family 25, AuthenticAMD", False),
        ("", False),
    ):
        support.is_intel.cache_clear()
        monkeypatch.setattr(support.platform, "processor", lambda name=name: name)
        assert support.is_intel() == intel


def test_a_torch_without_the_checks_answers_safely(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in CHECKS:
        monkeypatch.delattr(torch.cpu, check, raising=False)
    assert not support.native_on_cpu(torch.bfloat16)
    assert not support.native_on_cpu(torch.float16)
    assert not support.prefers_plain_weights()
    assert not support.has_fast_bfloat16()


@pytest.mark.parametrize(
    ("features", "fourfold"),
    [(("_is_avx512_supported", "_is_vnni_supported"), True), (("_is_vnni_supported",), False), (("_is_avx512_supported",), False)],
)
def test_eight_bits_need_the_instruction_in_avx512(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: tuple[str, ...], fourfold: bool
) -> None:
    become(monkeypatch, tmp_path, "GenuineIntel", *features)
    assert support.has_vnni() == fourfold
