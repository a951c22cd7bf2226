"""Which dtype a run is trained in, what it records, and what a resumed run does on another machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quiver.encoder import InputError
from quiver.encoder.files import write_json
from quiver.encoder.schema import Schema
from quiver.encoder.training.optimization import autocast, training_dtype, with_training_dtype
from quiver.encoder.training.processes import exact_float32
from quiver.encoder.training.recipe_file import TrainingDtype
from quiver.encoder.training.run_folder import RECIPE, recipe_changes


class Training(Schema):
    dtype: TrainingDtype = "auto"


class Recipe(Schema):
    training: Training


def recipe(dtype: TrainingDtype) -> Recipe:
    return Recipe(training=Training(dtype=dtype))


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "found"),
    [
        ("cpu", None, "auto", "float32"),
        ("cpu", None, "bfloat16", "bfloat16"),
        ("cuda", (7, 5), "auto", "float32"),
        ("cuda", (7, 5), "float32", "float32"),
        ("cuda", (8, 0), "auto", "bfloat16"),
        ("cuda:1", (9, 0), "auto", "bfloat16"),
        ("cuda", (9, 0), "float32", "float32"),
    ],
)
def test_a_gpu_with_bfloat16_trains_in_it(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int] | None, dtype: TrainingDtype, found: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: capability if asked == device else None)
    assert training_dtype(dtype, device) == found
    assert with_training_dtype(recipe(dtype), device).training.dtype == found


def test_a_gpu_without_bfloat16_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        InputError, match=r"training\.dtype: bfloat16 needs a GPU of compute capability 8\.0, this one has 7\.5; use float32"
    ):
        with_training_dtype(recipe("bfloat16"), "cuda")
    with caplog.at_level(logging.WARNING):
        with_training_dtype(recipe("auto"), "cuda")
        with_training_dtype(recipe("float32"), "cuda")
    assert caplog.messages == ["training in float32: bfloat16 needs a GPU of compute capability 8.0"]


@pytest.mark.parametrize("begun", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_resumed_run_keeps_its_dtype_on_another_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, begun: TrainingDtype, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    write_json(tmp_path / RECIPE, recipe(begun).model_dump())
    assert with_training_dtype(recipe("auto"), device, resumed=tmp_path).training.dtype == begun
    other = with_training_dtype(recipe("float32"), device, resumed=tmp_path)
    assert [path for path, *_ in recipe_changes(recipe(begun).model_dump(), other.model_dump())] == ["training.dtype"] * (
        begun != "float32"
    )


def test_a_run_in_bfloat16_is_not_resumed_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    write_json(tmp_path / RECIPE, recipe("bfloat16").model_dump())
    with pytest.raises(InputError, match=r"this one has 7\.5"):
        with_training_dtype(recipe("auto"), "cuda", resumed=tmp_path)


@pytest.mark.parametrize(("dtype", "product"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_products_run_in_the_dtype(dtype: TrainingDtype, product: torch.dtype) -> None:
    with autocast(dtype, torch.device("cpu")):
        assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == product


@pytest.fixture
def products() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("setting", ["high", *(["attribute"] if hasattr(torch.backends.cuda.matmul, "fp32_precision") else [])])
def test_float32_products_are_not_tf32_in_training_and_as_before_after_it(setting: str) -> None:
    if setting == "attribute":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(setting)
    with exact_float32():
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
