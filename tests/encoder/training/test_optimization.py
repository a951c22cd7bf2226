"""StableAdamW against a reference written from the published formulas, and which weights decay."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, InputError
from quiver.encoder.heads import MaskedLM
from quiver.encoder.training.optimization import (
    OptimizerName,
    OptimizerSettings,
    learning_rate_share,
    make_optimizer,
    require_optimizer,
    restore_optimizer,
    set_learning_rate,
)

pytest.importorskip("optimi")

RATE = 0.02


def settings(*, learning_rate: float = RATE, weight_decay: float = 0.0005) -> OptimizerSettings:
    return OptimizerSettings("stable_adamw", learning_rate, weight_decay, beta1=0.9, beta2=0.98, eps=1e-6)


class Reference:
    """StableAdamW, arXiv:2304.13013, algorithm 2, with debiased betas and decay by the learning rate's share of its peak; float64."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().double()
        self.mean = torch.zeros_like(self.weight)
        self.square = torch.zeros_like(self.weight)
        self.step = 0

    def update(self, gradient: Tensor, *, rate: float, share: float, decay: float) -> None:
        self.step += 1
        gradient = gradient.double()
        beta1, beta2 = (beta * (1 - beta ** (self.step - 1)) / (1 - beta**self.step) for beta in (0.9, 0.98))
        self.mean = beta1 * self.mean + (1 - beta1) * gradient
        self.square = beta2 * self.square + (1 - beta2) * gradient**2
        rms = (gradient**2 / self.square.clamp(min=1e-6**2)).mean().sqrt()
        clipped = rate / max(1.0, float(rms))
        self.weight = self.weight * (1 - clipped / (rate / share) * decay) if share else self.weight
        self.weight = self.weight - clipped * self.mean / (self.square.sqrt() + 1e-6)


def test_stable_adamw_equals_the_published_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    references = {name: Reference(weight) for name, weight in model.named_parameters()}
    optimizer = make_optimizer(settings(), model.parameters())
    for share in (0.1, 0.5, 1.0, 1.0, 0.7, 0.2, 0.001):
        scale = 50.0 if share == 0.7 else 1.0  # a gradient far above the clipping threshold
        for name, weight in model.named_parameters():
            weight.grad = scale * torch.randn_like(weight)
            decay = 0.0005 if weight.ndim == 2 else 0.0
            references[name].update(weight.grad, rate=RATE * share, share=share, decay=decay)
        set_learning_rate(optimizer, peak=RATE, share=share, weight_decay=0.0005)
        optimizer.step()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach().double(), references[name].weight, rtol=2e-5, atol=2e-6)


def test_decay_is_decoupled_from_the_rate_and_off_for_norms_and_biases() -> None:
    """With a negligible gradient, a matrix shrinks by the weight decay at any peak learning rate; vectors stay unchanged."""
    for peak in (1e-1, 1e-5):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        optimizer = make_optimizer(settings(learning_rate=peak, weight_decay=0.0009), model.parameters())
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        for share in (1.0, 0.5):
            set_learning_rate(optimizer, peak=peak, share=share, weight_decay=0.0009)
            optimizer.step()
        for name, weight in model.named_parameters():
            factor = (1 - 0.0009) * (1 - 0.5 * 0.0009) if weight.ndim == 2 else 1.0
            torch.testing.assert_close(weight.detach(), before[name] * factor)


def test_a_later_phase_has_its_own_weight_decay() -> None:
    model = nn.Linear(4, 4)
    optimizer = make_optimizer(settings(weight_decay=0.0), model.parameters())
    set_learning_rate(optimizer, peak=RATE, share=1.0, weight_decay=1e-5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-5, 0.0]


def test_an_optimizer_state_from_a_gpu_continues_on_a_cpu() -> None:
    """On a GPU the optimizer uses Triton kernels, records that in its state, and keeps a scratch tensor per weight."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4) for _ in range(2)]
    made = [make_optimizer(settings(), model.parameters()) for model in models]
    models[1].load_state_dict(models[0].state_dict())

    def step(place: int) -> None:
        for weight in models[place].parameters():
            weight.grad = torch.full_like(weight, 0.5)
        set_learning_rate(made[place], peak=RATE, share=1.0, weight_decay=0.0005)
        made[place].step()

    step(0)
    state = copy.deepcopy(made[0].state_dict())
    for group in state["param_groups"]:
        group["triton"] = True
    for held in state["state"].values():
        held |= {"kahan_comp": torch.zeros(1, dtype=torch.uint8), "mean_square": torch.zeros(1)}
    models[1].load_state_dict(models[0].state_dict())
    restore_optimizer(made[1], state)
    for place in range(2):
        step(place)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_matrices_of_a_masked_language_model_decay_and_vectors_do_not() -> None:
    config = EncoderConfig.modernbert(vocab_size=64, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=["global", "local"])
    model = MaskedLM(Encoder(config))
    decaying, others = (set(map(id, group["params"])) for group in make_optimizer(settings(), model.parameters()).param_groups)
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert decaying | others == set(names)
    assert {names[key] for key in others} == {name for name in names.values() if "norm" in name or name.endswith("bias")}


@pytest.mark.parametrize(("name", "package"), [("stable_adamw", "torch-optimi"), ("schedule_free_adamw", "schedulefree")])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: OptimizerName, package: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_optimizer("adamw")
    with pytest.raises(InputError, match=f"the optimizer {name} needs {package}: pip install {package}$"):
        require_optimizer(name)


@pytest.mark.parametrize(
    ("decay", "quarter"), [("linear", 0.75), ("cosine", 0.5 * (1 + math.cos(math.pi / 4))), ("one_minus_sqrt", 0.5), ("constant", 1.0)]
)
def test_each_shape_of_the_decay_has_its_share_at_a_quarter_and_ends_at_the_final_one(decay: str, quarter: float) -> None:
    shares = [learning_rate_share(done, warmup=2, decay_start=4, total=8, decay=decay, final=0.2) for done in (4, 5, 8, 9)]
    last = 1.0 if decay == "constant" else 0.2
    assert shares == pytest.approx([1.0, 0.2 + 0.8 * quarter, last, last])
