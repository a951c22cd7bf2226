"""Cross entropy over a vocabulary in chunks: torch's result and gradients, and never a matrix of all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder.cpu.support import assume
from quiver.encoder.heads import MIN_ROWS
from quiver.encoder.heads import linear_cross_entropy as with_parts
from tests.largest_tensor import LargestTensor

WIDTH, VOCABULARY = 16, 96


def problem(rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    )
    return hidden, weight, bias, torch.randint(VOCABULARY, (rows,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), labels)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    return with_parts(hidden, weight, bias, labels).loss


@pytest.mark.parametrize("rows", [1, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, 3 * MIN_ROWS])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_are_torchs(rows: int, with_bias: bool) -> None:
    *inputs, labels = problem(rows)
    inputs[2] = inputs[2] if with_bias else None  # type: ignore[call-overload]
    wanted = [x for x in inputs if x is not None]
    found, expected = linear_cross_entropy(*inputs, labels), plain(*inputs, labels)
    torch.testing.assert_close(found, expected)
    # Scaled, as gradient accumulation and loss scaling do it.
    torch.testing.assert_close(torch.autograd.grad(found * 7, wanted), torch.autograd.grad(expected * 7, wanted))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [1e-5, 0.1])
def test_the_z_loss_and_its_gradients_are_autograds(factor: float, dtype: torch.dtype) -> None:
    *inputs, labels = problem(2 * MIN_ROWS + 1, dtype)
    found = with_parts(*inputs, labels, z_loss=factor)
    expected = factor * torch.logsumexp(F.linear(*inputs), dim=1).square().mean()
    assert expected > 0.9 * factor
    torch.testing.assert_close(found.z_loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.loss, plain(*inputs, labels) + expected, rtol=1e-5, atol=0)
    wanted = torch.autograd.grad((plain(*inputs, labels) + expected) * 7, inputs)
    torch.testing.assert_close(torch.autograd.grad(found.loss * 7, inputs), wanted, rtol=1e-5, atol=1e-6)
    assert not found.z_loss.requires_grad


def test_rows_are_correct_where_the_label_is_the_first_of_the_highest_logits() -> None:
    *inputs, labels = problem(300)
    with torch.no_grad():
        logits = F.linear(*inputs)
        labels[:100] = logits[:100].argmax(1)
        assert with_parts(*inputs, labels).correct == (logits.argmax(1) == labels).sum() >= 100
        equal = torch.ones(3, 1), torch.ones(2, 1), None, torch.tensor([0, 1, 0])
        assert with_parts(*equal).correct == 2
    assert with_parts(*inputs, labels).correct.isnan(), "not counted in training"


@pytest.fixture(params=[True, False], ids=["native half", "emulated half"])
def native(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both kinds of processor, whichever this one is."""
    with assume(native_on_cpu=lambda dtype: bool(request.param) or dtype == torch.float32):
        yield


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_torch(dtype: torch.dtype) -> None:
    exact = problem(400)
    plain(*exact).backward()
    errors = {}
    for name, function in {"ours": linear_cross_entropy, "torch": plain}.items():
        *inputs, labels = problem(400, dtype)
        loss = function(*inputs, labels)
        loss.backward()
        errors[name] = [(x.grad.double() - y.grad).norm().item() for x, y in zip(inputs, exact[:3], strict=True)]
        if name == "ours":
            assert loss.dtype == torch.float32
            assert [x.grad.dtype for x in inputs] == [dtype] * 3
    for ours, torchs in zip(errors["ours"], errors["torch"], strict=True):
        assert ours <= 1.25 * torchs


@pytest.mark.usefixtures("native")
def test_small_gradients_survive_float16_with_a_loss_scale() -> None:
    rows, scale = 20_000, 2.0**12
    *inputs, labels = problem(rows, torch.float16)
    (linear_cross_entropy(*inputs, labels) * scale).backward()
    *exact, labels = problem(rows)
    plain(*exact, labels).backward()
    assert exact[0].grad.abs().median() < torch.finfo(torch.float16).tiny
    for found, expected in zip(inputs, exact, strict=True):
        assert (found.grad.double() / scale - expected.grad).norm() < 2e-3 * expected.grad.norm()


def test_without_gradients_only_the_loss_is_computed() -> None:
    *inputs, labels = problem(300)
    with torch.no_grad():
        loss = linear_cross_entropy(*inputs, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(*inputs, labels).detach())


def test_no_rows_give_a_zero_with_zero_gradients() -> None:
    *inputs, labels = problem(0)
    loss = linear_cross_entropy(*inputs, labels)
    assert loss.item() == 0
    loss.backward()
    for x in inputs:
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_a_second_backward_pass_is_refused() -> None:
    *inputs, labels = problem(20)
    loss = linear_cross_entropy(*inputs, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def largest(function: Callable[..., Tensor], rows: int) -> int:
    inputs = problem(rows)
    with LargestTensor() as mode:
        function(*inputs).backward()
    return mode.elements


def test_memory_does_not_grow_with_the_rows() -> None:
    assert largest(plain, 10 * MIN_ROWS) == 10 * MIN_ROWS * VOCABULARY  # the measure sees what it should
    assert largest(linear_cross_entropy, 2 * MIN_ROWS) == MIN_ROWS * VOCABULARY
    # At this number of rows the inputs' own gradient, M x D, is the largest.
    assert largest(linear_cross_entropy, 10 * MIN_ROWS) == max(MIN_ROWS * VOCABULARY, 10 * MIN_ROWS * WIDTH)
