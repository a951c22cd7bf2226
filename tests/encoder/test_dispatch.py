"""Which attention is chosen, for every kind of call, on a machine without a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from quiver.encoder import InputError, PackedBatch, pack_ids
from quiver.encoder.attention import AttentionCall, attend, choose_backend, dispatch
from quiver.encoder.attention.dispatch import describe, unsupported_reason

TORCH = frozenset({"aten_flash"})
ALL = TORCH | {"flash_attn_2", "flash_attn_3", "flash_attn_4"}
HERE = frozenset({"compiled"})
STRIPPED = frozenset(("flash_attn_3", feature) for feature in ("gradients", "windows", "dtype float16"))
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


def call(**changes: Any) -> AttentionCall:
    """Inference in bfloat16 on a Hopper with nothing but torch installed, but for the changes."""
    return AttentionCall("cuda", torch.bfloat16, capability=HOPPER, installed=TORCH)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "aten_flash"),
        ({"local": True}, "aten_flash"),
        ({"dtype": torch.float16}, "aten_flash"),
        ({"gradients": True, "local": True}, "aten_flash"),
        ({"gradients": True, "dropout": True}, "aten_flash"),
        ({"capability": (7, 5)}, "packed"),
        ({"dtype": torch.float32}, "packed"),
        ({"dtype": torch.float64, "gradients": True}, "packed"),
        ({"device_type": "cpu", "dtype": torch.float32}, "packed"),
        ({"device_type": "cpu"}, "packed"),
        ({"device_type": "cpu", "dtype": torch.float32, "installed": HERE}, "compiled"),
        ({"device_type": "cpu", "dtype": torch.float32, "installed": HERE, "gradients": True}, "compiled"),
        ({"device_type": "cpu", "dtype": torch.float32, "installed": HERE, "dropout": True}, "packed"),
        ({"device_type": "cpu", "dtype": torch.float32, "installed": HERE, "slopes": True}, "packed"),
        ({"device_type": "cpu", "dtype": torch.float32, "installed": HERE, "head_width": 24}, "packed"),
        ({"device_type": "cpu", "dtype": torch.bfloat16, "installed": HERE}, "compiled"),
        ({"device_type": "cpu", "dtype": torch.bfloat16, "installed": HERE, "gradients": True}, "compiled"),
        ({"device_type": "cpu", "dtype": torch.bfloat16, "installed": HERE, "head_width": 48}, "packed"),
        ({"device_type": "cpu", "dtype": torch.float32, "installed": HERE, "head_width": 48}, "compiled"),
        ({"device_type": "cpu", "dtype": torch.float16, "installed": HERE}, "packed"),
        ({"dtype": torch.float32, "installed": HERE}, "packed"),  # on CUDA
        ({"device_type": "mps", "dtype": torch.float16}, "packed"),
        ({"installed": frozenset()}, "packed"),
        ({"head_width": 256}, "aten_flash"),
        ({"head_width": 256, "gradients": True}, "packed"),
        ({"head_width": 192, "gradients": True}, "aten_flash"),
        ({"head_width": 264}, "packed"),
        ({"head_width": 26}, "aten_flash"),
        ({"deterministic": True, "gradients": True}, "aten_flash"),
        ({"slopes": True}, "packed"),
        ({"slopes": True, "installed": ALL}, "flash_attn_2"),
        ({"slopes": True, "gradients": True, "dropout": True, "installed": ALL}, "flash_attn_2"),
        ({"slopes": True, "local": True, "installed": ALL}, "flash_attn_2"),
        ({"key_lengths": True, "local": True}, "aten_flash"),
        ({"installed": ALL, "key_lengths": True}, "flash_attn_4"),
        ({"installed": ALL, "key_lengths": True, "local": True}, "flash_attn_3"),
        ({"installed": ALL, "key_lengths": True, "local": True, "slopes": True}, "flash_attn_2"),
        ({"installed": ALL}, "flash_attn_4"),
        ({"installed": ALL, "gradients": True, "local": True}, "flash_attn_4"),
        ({"installed": ALL, "capability": BLACKWELL}, "flash_attn_4"),
        ({"installed": ALL, "capability": AMPERE}, "aten_flash"),
        ({"installed": ALL, "head_width": 160}, "flash_attn_3"),
        ({"installed": ALL, "dropout": True}, "aten_flash"),
        ({"installed": TORCH | {"flash_attn_2"}}, "aten_flash"),
        ({"installed": TORCH | {"flash_attn_3"}}, "flash_attn_3"),
        ({"installed": TORCH | {"flash_attn_3"}, "capability": BLACKWELL}, "aten_flash"),
        ({"installed": TORCH | {"flash_attn_3"}, "missing": STRIPPED}, "flash_attn_3"),
        ({"installed": TORCH | {"flash_attn_3"}, "missing": STRIPPED, "local": True}, "aten_flash"),
        ({"installed": TORCH | {"flash_attn_3"}, "missing": STRIPPED, "gradients": True}, "aten_flash"),
        ({"installed": TORCH | {"flash_attn_3"}, "missing": STRIPPED, "dtype": torch.float16}, "aten_flash"),
        ({"installed": ALL, "missing": STRIPPED, "local": True}, "flash_attn_4"),
    ],
    # Not str: sets print in another order in each process, and the processes of one run must agree on names.
    ids=lambda value: value if isinstance(value, str) else ",".join(sorted(value)),
)
def test_the_choice(changes: dict[str, Any], name: str) -> None:
    assert choose_backend(call(**changes)) == name
    assert unsupported_reason(name, call(**changes)) is None


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("aten_flash", {"device_type": "cpu"}, "it needs a CUDA device"),
        ("flash_attn_2", {}, "it is not installed"),
        ("aten_flash", {"capability": (7, 5)}, "compute capability 7.5"),
        ("aten_flash", {"dtype": torch.float32}, "dtype float32"),
        ("aten_flash", {"head_width": 300}, "head width 300 (up to 256)"),
        ("aten_flash", {"head_width": 200, "gradients": True}, "head width 200 (up to 192)"),
        ("compiled", {"device_type": "cpu", "installed": HERE, "head_width": 24}, "head width 24 (multiples of 32 to 256)"),
        ("flash_attn_4", {"installed": ALL, "dropout": True}, "dropout"),
        ("aten_flash", {"slopes": True}, "ALiBi"),
        ("flash_attn_4", {"installed": ALL, "local": True, "key_lengths": True}, "windows with key lengths"),
        ("flash_attn_3", {"installed": ALL, "missing": STRIPPED}, None),
        ("flash_attn_3", {"installed": ALL, "missing": STRIPPED, "gradients": True}, "this build has no gradients"),
        ("flash_attn_3", {"installed": ALL, "missing": STRIPPED, "local": True}, "this build has no windows"),
        ("flash_attn_3", {"installed": ALL, "missing": STRIPPED, "dtype": torch.float16}, "this build has no dtype float16"),
        ("reference", {"device_type": "cpu"}, None),
    ],
)
def test_what_stands_in_the_way(name: str, changes: dict[str, Any], reason: str | None) -> None:
    assert unsupported_reason(name, call(**changes)) == reason


def test_each_choice_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    choose_backend.cache_clear()
    with caplog.at_level(logging.INFO, logger="quiver.encoder.attention.dispatch"):
        for _ in range(3):
            choose_backend(call(head_width=260, local=True))
            choose_backend(call(gradients=True))
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cuda in bfloat16, head width 260, local: using packed, because flash attention is not usable "
        "(head width 260 (up to 256))",
        "attention on cuda in bfloat16, head width 64, gradients: using aten_flash",
    ]


def test_an_override_is_taken_where_it_can_be(caplog: pytest.LogCaptureFixture) -> None:
    choose_backend.cache_clear()
    assert choose_backend(call(), "packed") == "packed"
    assert not caplog.records
    assert choose_backend(call(), "flash_attn_4") == "aten_flash"
    assert "QUIVER_ATTENTION=flash_attn_4 does not support this attention (it is not installed); using aten_flash" in caplog.text
    with pytest.raises(InputError, match=r"QUIVER_ATTENTION must be one of aten_flash, .*reference, got 'flash'"):
        choose_backend(call(), "flash")


def spy(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int | None]:
    """Record the windows a backend is called with."""
    windows: list[int | None] = []

    def backend(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, window: int | None, slopes: Tensor | None, dropout: float) -> Tensor:
        windows.append(window)
        return q

    monkeypatch.setitem(dispatch.BACKENDS, name, backend)
    return windows


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, x = pack_ids([[1, 2]]), torch.ones(2, 1, 8)
    called = spy(monkeypatch, "reference")
    attend(x, x, x, batch, None)
    assert not called
    monkeypatch.setenv("QUIVER_ATTENTION", "reference")
    attend(x, x, x, batch, None)
    assert len(called) == 1
    monkeypatch.setenv("QUIVER_ATTENTION", "sdpa")
    with pytest.raises(InputError, match="got 'sdpa'"):
        attend(x, x, x, batch, None)


def test_a_backend_given_by_name_must_support_the_call() -> None:
    batch, x = pack_ids([[1, 2]]), torch.ones(2, 1, 8)
    with pytest.raises(ValueError, match="attention backend aten_flash does not support this call: it needs a CUDA device"):
        attend(x, x, x, batch, None, backend="aten_flash")


def test_a_call_is_described_by_its_tensors() -> None:
    q = torch.ones(6, 2, 16, dtype=torch.bfloat16)
    batch = pack_ids([[1, 2, 3], [4, 5, 6]], key_lengths=[1, 3])
    found = describe(q, batch, window=2, slopes=torch.ones(2), dropout=0.1, gradients=True)
    assert found == AttentionCall(
        "cpu", torch.bfloat16, head_width=16, gradients=True, dropout=True, slopes=True, key_lengths=True, local=True
    )
    assert describe(torch.ones(3, 1, 8), pack_ids([[1, 2], [3]])) == AttentionCall("cpu", torch.float32, head_width=8)


def test_gradients_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def choose(call: AttentionCall, override: str | None) -> str:
        seen.append(call.gradients)
        return "packed"

    monkeypatch.setattr(dispatch, "choose_backend", choose)
    batch, x, leaf = pack_ids([[1, 2]]), torch.ones(2, 1, 8), torch.ones(2, 1, 8, requires_grad=True)
    attend(x, x, x, batch, None)
    attend(x, x, leaf, batch, None)
    with torch.no_grad():
        attend(leaf, leaf, leaf, batch, None)
    assert seen == [False, True, False]
