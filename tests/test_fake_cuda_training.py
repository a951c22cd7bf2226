"""A training step on a GPU that is not there: operators, dtypes and waits of the forward and the backward pass under bfloat16 autocast.

FakeTensorMode traces shapes. Autograd's engine cannot run on such tensors, because it asks the driver for a context of their device; so
`run_backward` calls the nodes of the graph one by one, as the engine does.
"""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, pack_ids
from quiver.encoder.attention import dispatch
from quiver.encoder.heads import IGNORE_INDEX, ClassifierPooling, MaskedLM, SequenceClassifier, SpanQA, linear_cross_entropy
from quiver.encoder.packing import copy_to
from quiver.encoder.training.optimization import OptimizerName, OptimizerSettings, autocast, make_optimizer, require_optimizer
from tests.fake_cuda import Operation, Trace, fake_batch, fake_h100

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

Kind = Literal["dense", "colbert"]

LAYERS, WIDTH = 4, 768


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """An H100 that is not there, and what runs on it."""
    found = Trace()
    fake_h100(monkeypatch, lambda name: found.current.append(Operation(name)))
    monkeypatch.setattr(nn.Module, "to", lambda module, *arguments: module)  # fake weights cannot be moved; they are where they belong
    yield found
    dispatch.choose_backend.cache_clear()


def run_backward(loss: Tensor) -> dict[Tensor, Tensor]:
    """The gradients of a loss by weight; autograd's graph is walked in this thread."""
    root = loss.grad_fn
    assert root is not None
    waiting: Counter[Any] = Counter()
    seen, stack = {root}, [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None:
                waiting[node] += 1
                if node not in seen:
                    seen.add(node)
                    stack.append(node)
    received: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    received[root][0] = torch.ones_like(loss)
    found, ready = {}, [root]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            gradients = received.pop(node, {})
            if hasattr(node, "variable"):
                found[node.variable] = gradients[0]
                continue
            for (below, place), gradient in zip(*_applied(node, gradients), strict=True):
                if gradient is not None:
                    shape = below._input_metadata[place].shape
                    gradient = gradient if gradient.shape == shape else gradient.sum_to_size(shape)  # of a bias
                    earlier = received[below].get(place)
                    received[below][place] = gradient if earlier is None else earlier + gradient
                waiting[below] -= 1
                if not waiting[below]:
                    ready.append(below)
    return found


def _applied(node: Any, gradients: dict[int, Tensor]) -> tuple[list[tuple[Any, int]], list[Tensor | None]]:
    """Call a node; the nodes below it and their gradients."""
    inputs: list[Tensor | None] = [gradients.get(place) for place in range(len(node._input_metadata))]
    edges = [(below, place) for below, place in node.next_functions if below is not None]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        outputs = node(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return edges, [output for output, (below, _) in zip(outputs, node.next_functions, strict=True) if below is not None]
    shapes = node._input_metadata
    full = [
        torch.zeros(shape.shape, dtype=shape.dtype, device=shape.device) if one is None else one
        for one, shape in zip(inputs, shapes, strict=True)
    ]
    outputs = node.apply(*full)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return edges, [output for output, needed in zip(outputs, node.needs_input_grad, strict=True) if needed]


def config(tokenizer: Tokenizer) -> EncoderConfig:
    kinds = ["global" if layer % 3 == 0 else "local" for layer in range(LAYERS)]
    return EncoderConfig.modernbert(
        vocab_size=len(tokenizer), hidden_size=WIDTH, num_heads=12, intermediate_size=1152, layer_types=kinds, max_positions=512
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.train(["some words to train a vocabulary"], vocab_size=330)
    for prefix in ("[Q] ", "[D] "):
        made.add_token(prefix)
    return made


def conversions(where: list[Operation], to: torch.dtype) -> Counter[tuple[int, ...]]:
    """Copies of large tensors into another dtype, by shape."""
    found = (one for one in where if one.name == "_to_copy" and one.inputs[0][0] != one.outputs[0][0] == to)
    return Counter(one.outputs[0][1] for one in found if len(one.outputs[0][1]) > 1)


Step = Callable[[Trace, Tokenizer, FakeTensorMode], tuple[nn.Module, int]]
"""Traces a step; returns the trained module and the number of tokens that go through it."""


def traced(trace: Trace, module: nn.Module, loss: Callable[[], Tensor]) -> None:
    module.train()
    with trace:
        value = loss()
        assert (value.shape, value.dtype, value.device.type) == ((), torch.float32, "cuda")
        trace.current = trace.backward
        gradients = run_backward(value)
    weights = list(module.parameters())
    assert {id(weight) for weight in gradients} == {id(weight) for weight in weights}
    assert all((gradient.shape, gradient.dtype) == (weight.shape, torch.float32) for weight, gradient in gradients.items())


def masked_lm(trace: Trace, tokenizer: Tokenizer, mode: FakeTensorMode) -> tuple[nn.Module, int]:
    with unset_fake_temporarily():
        packed = pack_ids([[7] * length for length in (300, 20, 77)])
        labels = torch.where(torch.arange(397) % 3 == 0, 5, IGNORE_INDEX)
        positions, words = (labels != IGNORE_INDEX).nonzero().squeeze(1), labels[labels != IGNORE_INDEX]
    with torch.device("cuda"):
        model = MaskedLM(Encoder(config(tokenizer)))

    def loss() -> Tensor:
        # As MaskedLM.forward does after it has looked at the labels on the host, whose values are not known here.
        batch = fake_batch(mode, packed).to("cuda")
        with autocast("bfloat16", torch.device("cuda")):
            hidden = model.encoder(batch)
            states = model.transform(hidden.index_select(0, copy_to("cuda", mode.from_tensor(positions))[0]))
            return linear_cross_entropy(states, model.decoder_weight, model.decoder.bias, copy_to("cuda", mode.from_tensor(words))[0]).loss

    traced(trace, model, loss)
    return model, 397


def classifier(pooling: ClassifierPooling) -> Step:
    def step(trace: Trace, tokenizer: Tokenizer, mode: FakeTensorMode) -> tuple[nn.Module, int]:
        with unset_fake_temporarily():
            packed = pack_ids([[7] * length for length in (300, 20, 77)])
        with torch.device("cuda"):
            model = SequenceClassifier(Encoder(config(tokenizer)), 5, pooling=pooling)

        def loss() -> Tensor:
            batch, labels = fake_batch(mode, packed).to("cuda"), copy_to("cuda", torch.zeros(3, dtype=torch.int64))[0]
            with autocast("bfloat16", torch.device("cuda")):
                return model.loss(model(batch), labels)

        traced(trace, model, loss)
        return model, 397

    return step


def span_qa(trace: Trace, tokenizer: Tokenizer, mode: FakeTensorMode) -> tuple[nn.Module, int]:
    with unset_fake_temporarily():
        packed = pack_ids([[7] * length for length in (300, 20, 77)])
    with torch.device("cuda"):
        model = SpanQA(Encoder(config(tokenizer)))

    def loss() -> Tensor:
        batch, places = fake_batch(mode, packed).to("cuda"), copy_to("cuda", torch.zeros(3, dtype=torch.int64))[0]
        with autocast("bfloat16", torch.device("cuda")):
            return model.loss(model(batch), batch, places, places)

    traced(trace, model, loss)
    return model, 397


def retrieval(kind: Kind, overrides: Sequence[str], columns: tuple[int, ...]) -> Step:
    def step(trace: Trace, tokenizer: Tokenizer, mode: FakeTensorMode) -> tuple[nn.Module, int]:
        from quiver.retrieval.models.batches import Projection
        from quiver.retrieval.models.biencoder import BiEncoder
        from quiver.retrieval.models.colbert import ColBERT
        from quiver.retrieval.models.options import ModelFolder
        from quiver.retrieval.training.dataloader import COLUMNS, LABEL, TEXTS
        from quiver.retrieval.training.losses import RetrievalLoss
        from quiver.retrieval.training.recipe import load_recipe

        recipe = load_recipe(f"docstrings-{kind}", ["training.dtype=bfloat16", *overrides])
        lengths = [32 if kind == "colbert" and text < columns[0] else 40 + text for text in range(sum(columns))]
        attended = [20 if length == 32 else length for length in lengths]  # query expansion is not attended to
        with unset_fake_temporarily():
            packed = pack_ids([[7] * length for length in lengths], key_lengths=attended)
        with torch.device("cuda"):
            encoder = Encoder(config(tokenizer))
            projections = (Projection(WIDTH, 128),) if kind == "colbert" else ()
        settings = ModelFolder(kind, encoder_folder=Path(), max_length=128, projections=projections, normalize=True)
        model = (
            ColBERT.from_parts(encoder, tokenizer, settings) if kind == "colbert" else BiEncoder.from_parts(encoder, tokenizer, settings)
        )
        loss = RetrievalLoss(recipe, model)

        def value() -> Tensor:
            inputs: dict[str, Any] = {TEXTS: fake_batch(mode, packed).to("cuda"), COLUMNS: columns}
            if recipe.data.score_fields:
                inputs[LABEL] = copy_to("cuda", torch.empty(columns[0], columns[1] // columns[0]))[0]
            result: Tensor = loss(inputs)
            return result

        traced(trace, loss.model, value)
        return loss.model, sum(lengths)

    return step


STEPS: dict[str, Step] = {
    "mlm": masked_lm,
    "classifier": classifier("cls"),
    "classifier, mean": classifier("mean"),
    "span_qa": span_qa,
    "mnrl": retrieval("dense", ("loss.name=mnrl",), (8, 8, 8)),
    "distillation": retrieval("colbert", ("loss.name=distillation", "data.score_fields=scores"), (5, 20)),
}


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest, trace: Trace, tokenizer: Tokenizer) -> tuple[nn.Module, int]:
    if request.param in ("mnrl", "distillation"):
        pytest.importorskip("sentence_transformers")
    if request.param == "distillation":
        pytest.importorskip("pylate.losses")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return STEPS[request.param](trace, tokenizer, mode)


@pytest.mark.usefixtures("step")
def test_attention_is_flash_forward_and_backward(trace: Trace) -> None:
    for where, name in ((trace.forward, "_flash_attention_forward"), (trace.backward, "_flash_attention_backward")):
        attention = Counter(one.name for one in where if "attention" in one.name)
        assert set(attention) == {name}
        assert attention[name] % LAYERS == 0
        [dtypes] = {frozenset(dtype for dtype, shape, _ in one.inputs if len(shape) == 3) for one in where if one.name == name}
        assert dtypes == {torch.bfloat16}


@pytest.mark.usefixtures("step")
def test_no_operator_waits_for_the_device(trace: Trace) -> None:
    assert trace.waits == []


def test_a_weight_is_converted_once_and_its_gradient_once(trace: Trace, step: tuple[nn.Module, int]) -> None:
    module, _ = step
    matrices = Counter(tuple(one.weight.shape) for one in module.modules() if isinstance(one, nn.Linear))
    table = next(tuple(one.weight.shape) for one in module.modules() if isinstance(one, nn.Embedding))
    if isinstance(module, MaskedLM):
        matrices[table] += 1  # the matrix of the decoder
    weights = {tuple(weight.shape) for weight in module.parameters() if weight.ndim > 1}
    forward, backward = conversions(trace.forward, torch.bfloat16), conversions(trace.backward, torch.float32)
    assert {shape: count for shape, count in forward.items() if shape in weights} == matrices
    matrices.pop(table, None)  # the loss sums the gradient of the decoder in float32
    assert {shape: count for shape, count in backward.items() if shape in weights} == matrices


def test_the_walk_of_the_graph_gives_the_gradients_of_autograd() -> None:
    """On a CPU, with real numbers: all that the traces show of the backward pass rests on it."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["some words"], vocab_size=300)
    model = MaskedLM(Encoder(replace(config(tokenizer), num_heads=2, hidden_size=32, intermediate_size=48)))
    labels = torch.where(torch.arange(30) % 3 == 0, 5, IGNORE_INDEX)

    def loss() -> Tensor:
        result: Tensor = model(pack_ids([[7] * 10, [8] * 20]), labels).loss
        return result

    loss().backward()  # type: ignore[no-untyped-call]
    found = run_backward(loss())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[weight], weight.grad, msg=name)


@pytest.mark.parametrize("name", ["adamw", "stable_adamw", "schedule_free_adamw"])
def test_clipping_and_the_optimizer_step_do_not_wait(trace: Trace, tokenizer: Tokenizer, name: OptimizerName) -> None:
    try:
        require_optimizer(name)
    except InputError as missing:
        pytest.skip(str(missing))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"):
            model = MaskedLM(Encoder(config(tokenizer)))
        optimizer = make_optimizer(OptimizerSettings(name, 1e-3, 0.01), model.parameters())
        if callable(train := getattr(optimizer, "train", None)):
            train()
        for _ in range(2):
            for weight in model.parameters():
                weight.grad = torch.empty_like(weight)
            trace.forward.clear()
            with trace:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    assert trace.waits == []
    launched = Counter(one.name for one in trace.forward)
    weights = len(list(model.parameters()))
    if name == "adamw":
        assert launched["_fused_adamw"] == 2  # matrices decay, vectors do not
    elif name == "stable_adamw":
        assert launched["_stableadamw_update_kernel"] == weights
    else:
        assert 0 < sum(count for each, count in launched.items() if each.startswith("_foreach")) < weights
