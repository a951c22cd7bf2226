"""A CUDA device that is not there: FakeTensorMode carries shapes and devices, and `Trace` records what would run on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quiver.encoder import PackedBatch

# Operators that make or describe tensors without a kernel.
WITHOUT_KERNEL = frozenset(("view", "reshape", "unbind", "slice", "select", "flatten", "unsqueeze", "expand", "transpose", "t", "split"))
WITHOUT_KERNEL |= {"chunk", "narrow", "alias", "detach", "permute", "as_strided", "empty", "empty_like", "new_empty", "device"}
WITHOUT_KERNEL |= {"promote_types"}
# Operators that make the host wait for the device.
WAITING = frozenset(("_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2"))
COPIES = ("to", "_to_copy", "copy")
# PyTorch calls these for every norm and projection; they do nothing where dtypes are equal, and nothing in evaluation.
WITHOUT_EFFECT: dict[str, Callable[[Any, Any], bool]] = {
    "to": lambda inputs, output: inputs[0].dtype == output.dtype and inputs[0].device == output.device,
    "dropout": lambda inputs, output: len(inputs) == 1,
}


def copy_name(source: Tensor, target: Tensor, args: Any, kwargs: Any, pinned: list[Any]) -> str | None:
    """What a copy between host and device is: it waits if nothing asked for the contrary, or if the memory of the host is not pinned."""
    if source.device == target.device:
        return None
    non_blocking = kwargs.get("non_blocking", False) or any(each is True for each in args)
    host = source if source.device.type == "cpu" else target
    if not non_blocking or all(host.untyped_storage()._cdata != storage._cdata for storage in pinned):
        return "blocking copy"
    return "upload" if host is source else "download"


@dataclass(frozen=True)
class Operation:
    """An operator or kernel, with the dtype, shape and device of its tensors.

    Attributes:
        copy: What a copy between host and device is, `copy_name`.
        waits: Whether the host waits for the device.
        launches: Whether a kernel or a copy is launched.
    """

    name: str
    inputs: list[tuple[torch.dtype, tuple[int, ...], str]] = field(default_factory=list)
    outputs: list[tuple[torch.dtype, tuple[int, ...], str]] = field(default_factory=list)
    copy: str | None = None
    waits: bool = False
    launches: bool = True


class Trace(TorchDispatchMode):
    """The operations of a run in order, of a forward and a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Operation] = []
        self.backward: list[Operation] = []
        self.current = self.forward
        self.pinned: list[Any] = []  # memory of the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func).split(".")[1].rstrip("_") if str(func).count(".") else str(func)
        given, made = ([each for each in tree_leaves(part) if isinstance(each, Tensor)] for part in ((args, kwargs), result))
        inputs, outputs = ([(each.dtype, tuple(each.shape), each.device.type) for each in part] for part in (given, made))
        if name == "empty" and kwargs.get("pin_memory"):
            self.pinned.append(made[0].untyped_storage())
        copy = copy_name(given[-1], made[0], args, kwargs, self.pinned) if name in COPIES and given and made else None
        idle = name in WITHOUT_EFFECT and bool(made) and WITHOUT_EFFECT[name](given, made[0])
        waits = name in WAITING and any(device == "cuda" for *_, device in inputs)
        waits |= copy == "blocking copy" and made[0].numel() > 0
        waits |= name == "segment_reduce" and not kwargs.get("unsafe")  # it reads the lengths to check them
        waits |= name == "index" and any(dtype == torch.bool for dtype, *_ in inputs[1:])  # it counts them
        launches = name not in WITHOUT_KERNEL and not idle and any(device != "cpu" for *_, device in (*inputs, *outputs))
        self.current.append(Operation(name, inputs, outputs, copy, waits, launches))
        return result

    def clear(self) -> None:
        self.forward.clear()
        self.backward.clear()

    @property
    def names(self) -> list[str]:
        """Operators and kernels that are launched, and copies."""
        return [each.copy or each.name for each in (*self.forward, *self.backward) if each.launches]

    @property
    def waits(self) -> list[str]:
        """What makes the host wait."""
        return [each.copy or each.name for each in (*self.forward, *self.backward) if each.waits]

    @property
    def attention(self) -> set[str]:
        """The attention operators."""
        return {name for name in self.names if "attention" in name or name in ("softmax", "_softmax", "bmm", "matmul", "baddbmm")}

    @property
    def casts(self) -> list[tuple[int, ...]]:
        """Shapes of the large tensors that were copied to another dtype."""
        copies = (each for each in self.forward if each.name in COPIES and each.inputs and each.outputs and each.copy is None)
        return [each.outputs[0][1] for each in copies if each.inputs[-1][0] != each.outputs[0][0] and len(each.inputs[-1][1]) > 1]


def fake_h100(monkeypatch: pytest.MonkeyPatch, launched: Callable[[str], object]) -> None:
    """Make PyTorch and Triton believe in an H100 until the end of a test, with a call for each kernel of Triton."""
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", lambda kernel, *args, grid, warmup, **options: launched(kernel.fn.__name__))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    # Autocast asks for both before it is enabled.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments: True)


def fake_batch(mode: FakeTensorMode, batch: PackedBatch) -> PackedBatch:
    """A batch on the host as packing makes it, of shapes alone."""
    tensors = {name: mode.from_tensor(getattr(batch, name)) for name in ("ids", "cu_seqlens", "positions")}
    return replace(batch, **tensors, memo={})
