"""Flash attention: our calls against an emulation of the kernels' contract; on a GPU, the kernels against the definition."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, PackedBatch, init_weights, pack_ids
from quiver.encoder.attention import BACKENDS, attend, flash
from quiver.encoder.attention.dispatch import AttentionCall, choose_backend, describe, unsupported_reason


@dataclass
class Borders:
    """Where sequences begin and end, as every flash kernel is told.

    What follows is the kernels' contract in plain torch (flash_attn_varlen_func's docstring, flash-attn 2.8): a query at
    place i sees keys from i + n_k - n_q - left to i + n_k - n_q + right, both included, -1 for no limit; ALiBi takes
    slope * |i + n_k - n_q - j| off; cu_seqlens are int32; max_seqlen bounds the launch, so it must not be too small.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def pieces(
    q: Tensor, k: Tensor, v: Tensor, borders: Borders, *, left: int = -1, right: int = -1, slopes: Tensor | None = None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """For each sequence its queries, its keys and the weights between them, (H, n_q, n_k)."""
    for cu_seqlens, most, tokens in (
        (borders.cu_seqlens_q, borders.max_seqlen_q, len(q)),
        (borders.cu_seqlens_k, borders.max_seqlen_k, len(k)),
    ):
        assert cu_seqlens.dtype == torch.int32
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == tokens
        assert cu_seqlens.diff().max() <= most
    assert len(k) == len(v)
    q_borders, k_borders = borders.cu_seqlens_q.tolist(), borders.cu_seqlens_k.tolist()
    for q_start, q_end, k_start, k_end in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False):
        queries, keys = slice(q_start, q_end), slice(k_start, k_end)
        shift = (k_end - k_start) - (q_end - q_start)
        distance = torch.arange(k_end - k_start)[None] - torch.arange(q_end - q_start)[:, None] - shift  # (n_q, n_k)
        scores = torch.einsum("ihk,jhk->hij", q[queries], k[keys]) * q.shape[-1] ** -0.5
        if slopes is not None:
            assert slopes.dtype == torch.float32
            scores = scores - slopes.to(scores.dtype)[:, None, None] * distance.abs()
        hidden = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0))
        yield queries, keys, scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)


def attention(
    q: Tensor, k: Tensor, v: Tensor, borders: Borders, *, left: int = -1, right: int = -1, slopes: Tensor | None = None
) -> Tensor:
    outputs = pieces(q, k, v, borders, left=left, right=right, slopes=slopes)
    return torch.cat([torch.einsum("hij,jhk->ihk", weights, v[keys]) for _, keys, weights in outputs])


def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, borders: Borders, *, left: int, right: int) -> tuple[Tensor, Tensor, Tensor]:
    """By hand: inside an operator nothing is recorded."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys, weights in pieces(q, k, v, borders, left=left, right=right):
        received = torch.einsum("ihk,jhk->hij", grad[queries], v[keys])
        slope = weights * (received - (received * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dq[queries] = torch.einsum("hij,jhk->ihk", slope, k[keys])
        dk[keys] = torch.einsum("hij,ihk->jhk", slope, q[queries])
        dv[keys] = torch.einsum("hij,ihk->jhk", weights, grad[queries])
    return dq, dk, dv


@dataclass
class Calls:
    """What the emulated operator was called with."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def flash_operator_on_cpu() -> Iterator[Calls]:
    """torch's flash operators, forward and backward, for CPU tensors, while the context is open."""
    calls = Calls()

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        causal: bool,
        mask: bool,
        **rest: Any,
    ) -> tuple[Tensor, ...]:
        calls.forward.append({"dropout": dropout, "causal": causal, "mask": mask, **rest})
        output = attention(q, k, v, Borders(cu_q, cu_k, max_q, max_k), left=rest["window_size_left"], right=rest["window_size_right"])
        sums = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        return output, sums, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        dropout: float, causal: bool, seed: Tensor, unused: Tensor, **rest: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        del out, sums, seed, unused
        calls.backward.append({"dropout": dropout, "causal": causal, **rest})
        left, right = rest["window_size_left"], rest["window_size_right"]
        return gradients(grad, q, k, v, Borders(cu_q, cu_k, max_q, max_k), left=left, right=right)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls


LENGTHS = [(1,), (64, 65), (5, 40, 1, 129, 12), (30, 30, 30)]
KEY_LENGTHS = {(1,): (1,), (64, 65): (64, 3), (5, 40, 1, 129, 12): (2, 40, 1, 7, 11), (30, 30, 30): (1, 2, 30)}


def batch_of(lengths: tuple[int, ...], key_lengths: tuple[int, ...] | None = None) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths], key_lengths=key_lengths)


def heads(batch: PackedBatch, *, width: int = 8, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """q, k and v as views of one packed product, as the encoder has them."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(batch.num_tokens, 3, 2, width, generator=generator).to(device, dtype).requires_grad_()
    return [qkv, *qkv.unbind(1)]


def compare(name: str, batch: PackedBatch, window: int | None, slopes: Tensor | None = None) -> None:
    """A backend's output and gradients are the definition's."""
    weight = torch.randn(batch.num_tokens, 2, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for backend in (name, "reference"):
        qkv, q, k, v = heads(batch)
        mixed = BACKENDS[backend](q, k, v, batch, window, slopes, 0.0)
        results.append((mixed.detach(), *torch.autograd.grad((mixed * weight).sum(), qkv)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


TORCHS = [
    "aten_flash",
]


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 2, 64])
def test_torchs_kernels_are_called_right(name: str, lengths: tuple[int, ...], window: int | None) -> None:
    with flash_operator_on_cpu() as calls:
        compare(name, batch_of(lengths), window)
    assert len(calls.forward) == len(calls.backward) == 1
    assert calls.forward[0]["causal"] is calls.forward[0]["mask"] is calls.backward[0]["causal"] is False
    side = -1 if window is None else window // 2
    for call in calls.forward + calls.backward:
        assert (call["window_size_left"], call["window_size_right"], call["dropout"]) == (side, side, 0.0)


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_tokens_that_only_read(name: str, lengths: tuple[int, ...]) -> None:
    batch = batch_of(lengths, KEY_LENGTHS[lengths])
    with flash_operator_on_cpu():
        compare(name, batch, None)
        places = batch.memo.get("keys")
        compare(name, batch, None)
    assert batch.memo.get("keys") is places  # made once a batch


def test_dropout_reaches_the_kernel_and_its_backward_pass() -> None:
    batch = batch_of((5, 9))
    with flash_operator_on_cpu() as calls:
        _, q, k, v = heads(batch)
        flash.attend_aten_flash(q, k, v, batch, None, None, 0.25).sum().backward()
    assert calls.forward[0]["dropout"] == calls.backward[0]["dropout"] == 0.25


Recorded = list[dict[str, object]]


def flash_attn_2(recorded: Recorded) -> Callable[..., Tensor]:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        recorded.append({"dropout_p": dropout_p, "causal": causal})
        borders = Borders(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attention(q, k, v, borders, left=window_size[0], right=window_size[1], slopes=alibi_slopes)

    return flash_attn_varlen_func


def flash_attn_3(recorded: Recorded) -> Callable[..., tuple[Tensor, Tensor]]:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        qv: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        recorded.append({"causal": causal})
        borders = Borders(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attention(q, k, v, borders, left=window_size[0], right=window_size[1]), q.new_empty(0)

    return flash_attn_varlen_func


def flash_attn_4(recorded: Recorded) -> Callable[..., tuple[Tensor, Tensor]]:
    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        recorded.append({"causal": causal})
        assert qv is None
        assert -1 not in window_size  # None stands for no limit
        borders = Borders(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        left, right = (-1 if side is None else side for side in window_size)
        return attention(q, k, v, borders, left=left, right=right), q.new_empty(0)

    return flash_attn_varlen_func


PACKAGES = {"flash_attn_2": flash_attn_2, "flash_attn_3": flash_attn_3, "flash_attn_4": flash_attn_4}


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 8])
def test_packages_are_called_right(name: str, lengths: tuple[int, ...], window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: Recorded = []
    monkeypatch.setattr(flash, "package_function", {name: PACKAGES[name](recorded)}.__getitem__)
    compare(name, batch_of(lengths), window)
    compare(name, batch_of(lengths, KEY_LENGTHS[lengths]), None)
    assert [call["causal"] for call in recorded] == [False, False]


def test_flash_attn_2_has_alibi_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: Recorded = []
    monkeypatch.setattr(flash, "package_function", {"flash_attn_2": flash_attn_2(recorded)}.__getitem__)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)  # as a model in double precision would have them
    for window in (None, 8):
        compare("flash_attn_2", batch_of((5, 40)), window, slopes)
    batch = batch_of((5, 40))
    _, q, k, v = heads(batch)
    flash.attend_flash_attn_2(q, k, v, batch, None, slopes, 0.1)
    assert [call["dropout_p"] for call in recorded] == [0.0, 0.0, 0.1]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "is installed, but cannot be used: undefined symbol"),
        ("x = 1", "is installed, but cannot be used: module 'flash_attn_interface' has no attribute"),
        ("import a_part_of_it_that_is_missing", "is installed, but one of its dependencies is missing: No module named 'a_part_of_it"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    flash.package_function.cache_clear()
    with caplog.at_level(logging.WARNING, logger="quiver.encoder.attention.flash"):
        assert flash.package_function("flash_attn_3") is None
        assert flash.package_function("flash_attn_3") is None
    flash.package_function.cache_clear()
    sys.modules.pop("flash_attn_interface", None)
    assert len(caplog.records) == 1
    assert message in caplog.text


def test_an_installed_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("def flash_attn_varlen_func(window_size=None): return 3")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(flash.PACKAGES, "flash_attn_2", "no_such_package.interface")
    for cache in (flash.package_function, flash.installed):
        cache.cache_clear()
    assert "flash_attn_3" in flash.installed()
    assert "flash_attn_2" not in flash.installed()
    assert flash.package_function("flash_attn_3")() == 3
    assert not caplog.records  # what nobody installed is nobody's problem
    for cache in (flash.package_function, flash.installed):
        cache.cache_clear()
    sys.modules.pop("flash_attn_interface", None)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def half_precision(batch: PackedBatch, width: int, window: int | None, backend: str, *, slopes: Tensor | None = None) -> list[Tensor]:
    """A backend's output and gradient in bfloat16; skips where this machine lacks it."""
    qkv, q, k, v = heads(batch, width=width, dtype=torch.bfloat16, device="cuda")
    reason = unsupported_reason(backend, describe(q, batch, window=window, slopes=slopes, gradients=True))
    if reason:
        pytest.skip(f"{backend}: {reason}")
    mixed = attend(q, k, v, batch, window, slopes=slopes, backend=backend)
    weight = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(2)).to(mixed)
    return [mixed.detach(), *torch.autograd.grad((mixed * weight).sum(), qkv)]


def within_bfloat16(found: list[Tensor], batch: PackedBatch, width: int, window: int | None, *, slopes: Tensor | None = None) -> None:
    """Output and gradient are the definition's in float64 on the same numbers, to a few roundings of the largest."""
    qkv = heads(batch, width=width, dtype=torch.bfloat16)[0].detach().double().requires_grad_()
    mixed = BACKENDS["reference"](*qkv.unbind(1), batch.to("cpu"), window, None if slopes is None else slopes.cpu(), 0.0)
    weight = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(2)).bfloat16().double()
    for value, expected in zip(found, [mixed.detach(), *torch.autograd.grad((mixed * weight).sum(), qkv)], strict=True):
        assert (value.double().cpu() - expected).abs().max() <= 2**-6 * expected.abs().max()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", ["aten_flash", "flash_attn_2", "flash_attn_4", "packed"])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("window", [None, 2, 128])
def test_kernels_are_the_definition(backend: str, width: int, window: int | None) -> None:
    batch = batch_of((1, 63, 64, 65, 129, 700)).to("cuda")
    within_bfloat16(half_precision(batch, width, window, backend), batch, width, window)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", ["aten_flash", "flash_attn_2", "flash_attn_4", "packed"])
def test_kernels_with_tokens_that_only_read(backend: str) -> None:
    batch = batch_of((40, 7, 129), (5, 7, 100)).to("cuda")
    within_bfloat16(half_precision(batch, 64, None, backend), batch, 64, None)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", ["flash_attn_2", "packed"])
def test_kernels_with_alibi(backend: str) -> None:
    batch = batch_of((64, 5, 200)).to("cuda")
    slopes = torch.tensor([0.5, 0.25], device="cuda")
    within_bfloat16(half_precision(batch, 64, None, backend, slopes=slopes), batch, 64, None, slopes=slopes)


@pytest.mark.gpu
@needs_cuda
def test_inference_kernels_of_flash_attn_3() -> None:
    batch = batch_of((64, 5, 700)).to("cuda")
    with torch.no_grad():
        _, q, k, v = heads(batch, width=64, dtype=torch.bfloat16, device="cuda")
        if reason := unsupported_reason("flash_attn_3", describe(q, batch)):
            pytest.skip(f"flash_attn_3: {reason}")
        torch.testing.assert_close(
            attend(q, k, v, batch, None, backend="flash_attn_3"), attend(q, k, v, batch, None, backend="aten_flash"), atol=2e-2, rtol=2e-2
        )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("key_lengths", [None, (30, 100)])
def test_a_forward_pass_never_waits_for_the_device(key_lengths: tuple[int, ...] | None) -> None:
    config = EncoderConfig.modernbert(
        vocab_size=64, hidden_size=128, num_heads=2, intermediate_size=96, layer_types=["global", "local"], window=1024, max_positions=512
    )
    encoder = init_weights(Encoder(config), seed=0).to("cuda", torch.bfloat16).eval()
    sequences = [[1] * 30, [2] * 200]
    with torch.inference_mode():
        encoder(pack_ids(sequences, key_lengths=key_lengths))  # kernels are compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            states = encoder(pack_ids(sequences, key_lengths=key_lengths))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert states.isfinite().all()


def test_a_release_that_takes_other_arguments_is_passed_over_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flash-attn 2.8.3 has a flash_attn.cute whose function takes no max_seqlen_*; on a Hopper torch's own kernel is chosen then."""

    def early(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, window_size: Any = (None, None)) -> Any:
        raise AssertionError("called without what it needs")

    def present(q: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, window_size: Any) -> Any:
        return q

    for function, usable in ((early, False), (present, True)):
        module = ModuleType("flash_attn.cute.interface")
        module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
        with monkeypatch.context() as patched, caplog.at_level("WARNING"):
            for name in ("flash_attn", "flash_attn.cute"):
                patched.setitem(sys.modules, name, ModuleType(name))
            patched.setitem(sys.modules, "flash_attn.cute.interface", module)
            for cache in (flash.package_function, flash.installed):
                cache.cache_clear()
            caplog.clear()
            names = flash.installed() | flash.installed()
            warned = [record for record in caplog.records if "does not accept max_seqlen_q, max_seqlen_k" in record.message]
            assert ("flash_attn_4" in names) == usable
            assert len(warned) == (not usable)
            hopper = AttentionCall("cuda", torch.bfloat16, capability=(9, 0), gradients=True, installed=names | {"aten_flash"})
            assert choose_backend(hopper, "flash_attn_4") == ("flash_attn_4" if usable else choose_backend(hopper))
            assert usable or choose_backend(hopper) != "flash_attn_4"
    for cache in (flash.package_function, flash.installed):
        cache.cache_clear()
