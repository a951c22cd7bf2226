"""Flash attention: our calls against an emulation of the kernels' contract; on a GPU, the kernels against the definition."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
    slope * |i + n_k - n_q - j| off; cu_seqlens are int32; max_seqlen bounds the launch, so it must not be too small. flash-attn 2 and
    PyTorch's copy drop the limit of a side that is not below max_seqlen_k, also where more queries than keys make it matter
    (mha_varlen_fwd in csrc/flash_attn/flash_api.cpp).
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float


def pieces(
    q: Tensor, k: Tensor, v: Tensor, borders: Borders, *, left: int = -1, right: int = -1, slopes: Tensor | None = None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """For each sequence its queries, its keys and the weights between them, (H, n_q, n_k)."""
    left, right = (-1 if side >= borders.max_seqlen_k else side for side in (left, right))
    for cu_seqlens, most, tokens in (
        (borders.cu_seqlens_q, borders.max_seqlen_q, len(q)),
        (borders.cu_seqlens_k, borders.max_seqlen_k, len(k)),
    ):
        assert cu_seqlens.dtype == torch.int32
        assert cu_seqlens[0] == 0
        assert cu_seqlens[-1] == tokens or (cu_seqlens is borders.cu_seqlens_k and cu_seqlens[-1] < tokens)  # keys that nobody reads
        assert cu_seqlens.diff().max() <= most
    assert len(k) == len(v)
    assert q.shape[-1] % 8 == 0
    q_borders, k_borders = borders.cu_seqlens_q.tolist(), borders.cu_seqlens_k.tolist()
    for q_start, q_end, k_start, k_end in zip(q_borders, q_borders[1:], k_borders, k_borders[1:], strict=False):
        queries, keys = slice(q_start, q_end), slice(k_start, k_end)
        shift = (k_end - k_start) - (q_end - q_start)
        distance = torch.arange(k_end - k_start)[None] - torch.arange(q_end - q_start)[:, None] - shift  # (n_q, n_k)
        scores = torch.einsum("ihk,jhk->hij", q[queries], k[keys]) * borders.scale
        if slopes is not None:
            assert slopes.dtype == torch.float32
            scores = scores - slopes.to(scores.dtype)[:, None, None] * distance.abs()
        hidden = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0))
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        yield queries, keys, weights * ~hidden.all(-1, keepdim=True)  # a row of the mask that is all zero gives zeros


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
        slope = weights * (received - (received * weights).sum(-1, keepdim=True)) * borders.scale
        dq[queries] = torch.einsum("hij,jhk->ihk", slope, k[keys])
        dk[keys] = torch.einsum("hij,ihk->jhk", slope, q[queries])
        dv[keys] = torch.einsum("hij,ihk->jhk", weights, grad[queries])
    return dq, dk, dv


@dataclass
class Calls:
    """What the emulated operator was called with."""

    forward: list[dict[str, Any]] = field(default_factory=list)
    backward: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Queries, keys and values of each forward pass."""


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
        calls.tensors.append((q, k, v))
        output = attention(
            q, k, v, Borders(cu_q, cu_k, max_q, max_k, rest["scale"]), left=rest["window_size_left"], right=rest["window_size_right"]
        )
        sums = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        return output, sums, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        dropout: float, causal: bool, seed: Tensor, unused: Tensor, **rest: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        del out, sums, seed, unused
        calls.backward.append({"dropout": dropout, "causal": causal, **rest})
        left, right = rest["window_size_left"], rest["window_size_right"]
        return gradients(grad, q, k, v, Borders(cu_q, cu_k, max_q, max_k, rest["scale"]), left=left, right=right)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls


LENGTHS = [(1,), (64, 65), (5, 40, 1, 129, 12), (30, 30, 30)]


def batch_of(lengths: tuple[int, ...], key_lengths: tuple[int, ...] | None = None) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths], key_lengths=key_lengths)


def heads(batch: PackedBatch, *, width: int = 8, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    """q, k and v as views of one packed product, as the encoder has them."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(batch.num_tokens, 3, 2, width, generator=generator).to(device, dtype).requires_grad_()
    return [qkv, *qkv.unbind(1)]


def compare(name: str, batch: PackedBatch, window: int | None, slopes: Tensor | None = None, *, width: int = 8) -> None:
    """A backend's output and gradients are the definition's."""
    weight = torch.randn(batch.num_tokens, 2, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for backend in (name, "reference"):
        qkv, q, k, v = heads(batch, width=width)
        mixed = BACKENDS[backend](q, k, v, batch, window, slopes, 0.0)
        results.append((mixed.detach(), *torch.autograd.grad((mixed * weight).sum(), qkv)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 2, 64])
@pytest.mark.parametrize("width", [8, 6, 13])
def test_torchs_kernel_is_called_right(lengths: tuple[int, ...], window: int | None, width: int) -> None:
    with flash_operator_on_cpu() as calls:
        compare("aten_flash", batch_of(lengths), window, width=width)
    assert len(calls.forward) == len(calls.backward) == 1
    assert calls.forward[0]["causal"] is calls.forward[0]["mask"] is calls.backward[0]["causal"] is False
    side = -1 if window is None else window // 2
    for call in calls.forward + calls.backward:
        assert (call["window_size_left"], call["window_size_right"], call["dropout"]) == (side, side, 0.0)


# Expansions before, between and after plain sequences, shorter and longer than a window, and texts of one token.
EXPANDED = [
    ((1,), (1,)),
    ((2,), (1,)),
    ((64, 65), (64, 3)),
    ((5, 40, 1, 129, 12), (2, 40, 1, 7, 12)),
    ((30, 30, 30), (1, 2, 30)),
    ((32, 128, 160, 300), (9, 31, 1, 300)),
    ((300, 32, 7, 128, 200), (300, 5, 7, 100, 200)),
]


@pytest.mark.parametrize("lengths", EXPANDED, ids=str)
@pytest.mark.parametrize("window", [None, 2, 16, 64])
def test_tokens_that_only_read(lengths: tuple[tuple[int, ...], tuple[int, ...]], window: int | None) -> None:
    batch = batch_of(*lengths)
    with flash_operator_on_cpu():
        compare("aten_flash", batch, window)
        parts = batch.memo.get("flash_parts")
        compare("aten_flash", batch, window)
    assert batch.memo.get("flash_parts") is parts  # made once a batch


def test_dropout_reaches_the_kernel_and_its_backward_pass() -> None:
    batch = batch_of((5, 9))
    with flash_operator_on_cpu() as calls:
        _, q, k, v = heads(batch)
        BACKENDS["aten_flash"](q, k, v, batch, None, None, 0.25).sum().backward()
    assert calls.forward[0]["dropout"] == calls.backward[0]["dropout"] == 0.25


FACTS = json.loads(Path(__file__).with_name("flash_attn_signatures.json").read_text())
"""Arguments of flash_attn_varlen_func in releases of flash-attn, taken from their sources."""


@dataclass(frozen=True)
class Release:
    """One release of flash-attn: the backend that calls it, and the signature of its function."""

    backend: str
    release: str
    file: str
    parameters: list[list[Any]]
    build_flags: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.backend} of {self.release}"

    @property
    def signature(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        defaults = {name: tuple(value) if isinstance(value, list) else value for name, *values in self.parameters for value in values}
        return inspect.Signature(
            [inspect.Parameter(name, kind, default=defaults.get(name, inspect.Parameter.empty)) for name, *_ in self.parameters]
        )

    def function(self, calls: list[dict[str, Any]]) -> Callable[..., Any]:
        """The function with the release's signature and the contract of all of them; records its arguments."""
        signature = self.signature

        def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)  # what the release would not accept raises
            bound.apply_defaults()
            given = bound.arguments
            calls.append(given)
            if self.backend == "flash_attn_4":  # None stands for no limit
                assert -1 not in given["window_size"]
            left, right = (-1 if side is None else side for side in given["window_size"])
            assert not given["causal"]
            borders = Borders(*(given[name] for name in BORDERS), given["softmax_scale"])
            q, k, v = (given[name] for name in "qkv")
            output = attention(q, k, v, borders, left=left, right=right, slopes=given.get("alibi_slopes"))
            # Releases that cannot be asked for log-sum-exps always return them.
            return output if "return_attn_probs" in given else (output, q.new_empty(0))

        flash_attn_varlen_func.__signature__ = signature  # type: ignore[attr-defined]
        return flash_attn_varlen_func


BORDERS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
RELEASES = [Release(**each) for each in FACTS["releases"]]
USABLE = [each for each in RELEASES if {*BORDERS} <= {name for name, *_ in each.parameters}]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Function that makes releases importable; returns the calls of all of them."""
    caches = (flash.package_function, flash.installed, flash.missing)

    def make(*releases: Release) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for each in releases:
            parts = flash.PACKAGES[each.backend].split(".")
            modules = [ModuleType(".".join(parts[: end + 1])) for end in range(len(parts))]
            modules[-1].flash_attn_varlen_func = each.function(calls)  # type: ignore[attr-defined]
            for module in modules:
                monkeypatch.setitem(sys.modules, module.__name__, module)
            if each.build_flags:
                config = ModuleType("flash_attn_config")
                config.CONFIG = {"build_flags": each.build_flags}  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, "flash_attn_config", config)
        for cache in caches:
            cache.cache_clear()
        return calls

    yield make
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


Install = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize("release", USABLE, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 8])
def test_packages_are_called_right(release: Release, lengths: tuple[int, ...], window: int | None, install: Install) -> None:
    calls = install(release)
    assert release.backend in flash.installed()
    compare(release.backend, batch_of(lengths), window)
    compare(release.backend, batch_of(lengths), window, width=6)
    for expanded in EXPANDED[:4]:
        compare(release.backend, batch_of(*expanded), window)
    assert not any(call["deterministic"] for call in calls)


@pytest.mark.parametrize("release", USABLE, ids=str)
def test_a_deterministic_backward_pass_is_asked_for(release: Release, install: Install) -> None:
    calls, batch = install(release), batch_of((5, 40))
    _, q, k, v = heads(batch)
    for mode, warn_only in ((True, False), (True, True), (False, False)):
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        try:
            BACKENDS[release.backend](q, k, v, batch, None, None, 0.0)
            assert describe(q, batch, gradients=True).deterministic is calls[-1]["deterministic"] is (mode and not warn_only)
            assert not describe(q, batch).deterministic  # inference is deterministic anyway
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_release_without_deterministic_gradients_is_not_asked_for_them(install: Install) -> None:
    [release] = [each for each in USABLE if each.backend == "flash_attn_2"]
    install(replace(release, parameters=[each for each in release.parameters if each[0] != "deterministic"]))
    assert flash.missing() == {("flash_attn_2", "deterministic gradients")}
    call = AttentionCall("cuda", torch.bfloat16, capability=(9, 0), slopes=True, installed=flash.installed(), missing=flash.missing())
    assert choose_backend(call._replace(gradients=True)) == "flash_attn_2"
    assert (
        unsupported_reason("flash_attn_2", call._replace(gradients=True, deterministic=True)) == "this build has no deterministic gradients"
    )


def test_a_build_of_flash_attn_3_says_what_it_lacks(install: Install) -> None:
    official, stripped = [each for each in USABLE if each.backend == "flash_attn_3"]
    install(official)
    assert flash.missing() == frozenset()
    install(stripped)
    assert flash.missing() == {("flash_attn_3", "gradients")}
    flags = dict.fromkeys(stripped.build_flags, True)
    install(replace(stripped, build_flags=flags))
    lacks = {"gradients", "windows", "dtype float16", "sequences of different lengths"}
    assert flash.missing() == {("flash_attn_3", feature) for feature in lacks}


def test_flash_attn_2_has_alibi_and_dropout(install: Install) -> None:
    [release] = [each for each in USABLE if each.backend == "flash_attn_2"]
    calls = install(release)
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)  # as a model in double precision would have them
    for window in (None, 8):
        compare("flash_attn_2", batch_of((5, 40)), window, slopes)
        for expanded in EXPANDED:
            compare("flash_attn_2", batch_of(*expanded), window, slopes)
    calls.clear()
    batch = batch_of((5, 40))
    _, q, k, v = heads(batch)
    BACKENDS["flash_attn_2"](q, k, v, batch, None, slopes, 0.1)
    assert [call["dropout_p"] for call in calls] == [0.1]


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
@pytest.mark.parametrize("backend", [*flash.KERNELS, "packed"])
@pytest.mark.parametrize("width", [26, 32, 64, 96, 128])
@pytest.mark.parametrize("window", [None, 2, 128])
def test_kernels_are_the_definition(backend: str, width: int, window: int | None) -> None:
    batch = batch_of((1, 63, 64, 65, 129, 700)).to("cuda")
    within_bfloat16(half_precision(batch, width, window, backend), batch, width, window)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", [*flash.KERNELS, "packed"])
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("window", [None, 16, 128])
def test_kernels_with_tokens_that_only_read(backend: str, width: int, window: int | None) -> None:
    batch = batch_of((40, 7, 129, 300, 32, 200), (5, 7, 100, 1, 31, 200)).to("cuda")
    within_bfloat16(half_precision(batch, width, window, backend), batch, width, window)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", ["flash_attn_2", "packed"])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("key_lengths", [None, (20, 5, 7)])
def test_kernels_with_alibi(backend: str, window: int | None, key_lengths: tuple[int, ...] | None) -> None:
    batch = batch_of((64, 5, 200), key_lengths).to("cuda")
    slopes = torch.tensor([0.5, 0.25], device="cuda")
    within_bfloat16(half_precision(batch, 64, window, backend, slopes=slopes), batch, 64, window, slopes=slopes)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("backend", flash.KERNELS)
@pytest.mark.parametrize("window", [None, 128])
def test_deterministic_gradients_are_equal_in_every_run(backend: str, window: int | None) -> None:
    batch = batch_of((1000, 3000, 40, 900), (1000, 3000, 9, 900)).to("cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [half_precision(batch, 64, window, backend) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("backend", flash.KERNELS)
def test_kernels_without_a_backward_pass(backend: str, window: int | None) -> None:
    batch = batch_of((64, 5, 700)).to("cuda")
    with torch.no_grad():
        _, q, k, v = heads(batch, width=64, dtype=torch.bfloat16, device="cuda")
        if reason := unsupported_reason(backend, describe(q, batch, window=window)):
            pytest.skip(f"{backend}: {reason}")
        found, expected = (attend(q, k, v, batch, window, backend=name) for name in (backend, "packed"))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


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


def test_a_release_that_takes_other_arguments_is_passed_over_and_said_once(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """flash-attn 2.8.3 has a flash_attn.cute whose function takes no max_seqlen_*; on a Hopper torch's own kernel is chosen then."""
    [early] = [each for each in RELEASES if each not in USABLE]
    [present] = [each for each in USABLE if each.backend == "flash_attn_4"]
    for release in (early, present):
        usable = release is present
        install(release)
        caplog.clear()
        with caplog.at_level("WARNING"):
            names = flash.installed() | flash.installed()
        warned = [record for record in caplog.records if "does not accept max_seqlen_q, max_seqlen_k" in record.message]
        assert ("flash_attn_4" in names) == usable
        assert len(warned) == (not usable)
        hopper = AttentionCall("cuda", torch.bfloat16, capability=(9, 0), gradients=True, installed=names | {"aten_flash"})
        assert choose_backend(hopper, "flash_attn_4") == ("flash_attn_4" if usable else choose_backend(hopper))
        assert usable or choose_backend(hopper) != "flash_attn_4"
