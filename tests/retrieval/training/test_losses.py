"""The losses of recipes, by hand and across processes: values computed from the vectors of search, and their gradients."""

from __future__ import annotations

import os
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.encoder.schema import validate
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import maxsim_packed
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.training import recipe as recipes
from quiver.retrieval.training.dataloader import Collator
from quiver.retrieval.training.recipe import RULES, Recipe
from tests.processes import imported_python

pytest.importorskip("pylate.models")

from quiver.retrieval.training.losses import LOSSES, RetrievalLoss, contrastive_scores, distillation_scores

WORDS = ["a", "bird", "has", "wings", "feathers", "and", "beak", "the", "window", "of", "local", "layer", "is", "wide"]
ROWS = [
    {
        "query": " ".join(WORDS[place : place + 3]),
        "document_1": " ".join(WORDS[place : place + 7]),
        "document_2": " ".join(WORDS[place % 4 :: 2]),
        "document_3": " ".join(WORDS[place % 3 :: 3]),
        "scores": [6.0 + place, 2.0, 3.0 - place],
    }
    for place in range(4)
]


def make_recipe(kind: str, loss: dict[str, Any], training: dict[str, Any] | None = None) -> Recipe:
    described = dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test")
    usual = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "warmup_ratio": 0, "scheduler": "linear", "weight_decay": 0}
    usual |= {"max_grad_norm": 1, "seed": 1, "dtype": "float32", "no_duplicates": False, "log_every": 1}
    model = {"dense": {"pooling": "mean", "normalize": True, "max_length": 24}, "colbert": {"colbert": {"dim": 8}}}[kind]
    data = {"train": "rows.jsonl"} | ({"score_fields": "scores"} if loss["name"] in recipes.DISTILLATION else {})
    raw = described | {
        "kind": kind,
        "model": {"init": "somewhere", **model},
        "data": data,
        "loss": loss,
        "training": usual | (training or {}),
    }
    recipe, problems = validate(Recipe, raw, RULES)
    assert recipe is not None, problems
    return recipe


def read_by(name: str, **settings: Any) -> dict[str, Any]:
    """Settings of a loss, without those that it does not use."""
    return {"name": name, **{setting: value for setting, value in settings.items() if name in recipes.LOSSES_BY_SETTING[setting]}}


def make_model(kind: str, **settings: Any) -> BiEncoder | ColBERT:
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 2, vocab_size=300, max_length=64)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=["global", "local"], window=8, max_positions=64
    )
    encoder = init_weights(Encoder(config), seed=5).eval()
    with torch.no_grad():
        encoder.embeddings.tokens.weight.mul_(20)  # texts of a model as it is drawn are all but alike
    if kind == "dense":
        return BiEncoder.from_parts(encoder, tokenizer, replace(ModelFolder("dense", Path(), max_length=24, normalize=True), **settings))
    torch.manual_seed(3)
    colbert = replace(ColBERTSettings(query_length=10, document_length=24), **settings)
    return ColBERT.from_parts(encoder, tokenizer, ModelFolder("colbert", Path(), projections=(Projection(16, 8),), colbert=colbert))


@dataclass(frozen=True)
class Trained:
    """A model with the loss and the collator of a recipe."""

    recipe: Recipe
    model: BiEncoder | ColBERT
    processes: int = 1

    @cached_property
    def loss(self) -> RetrievalLoss:
        return RetrievalLoss(self.recipe, self.model, processes=self.processes)

    @property
    def module(self) -> torch.nn.Module:
        return self.loss.model

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        section = self.recipe.loss
        return Collator(self.model, merge_documents=section.name == "distillation", minmax=section.teacher_scores == "minmax")(rows)


def loss_of(trained: Trained, rows: list[dict[str, Any]]) -> torch.Tensor:
    value: torch.Tensor = trained.loss(trained.collate(rows))
    return value


def gradients_of(trained: Trained, rows: list[dict[str, Any]]) -> tuple[float, list[torch.Tensor]]:
    trained.module.zero_grad()
    value = loss_of(trained, rows)
    value.backward()
    return value.item(), [weight.grad.clone() for weight in trained.module.parameters() if weight.grad is not None]


def without_scores(rows: list[dict[str, Any]] = ROWS) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "scores"} for row in rows]


def dense_scores(model: BiEncoder) -> torch.Tensor:
    """Dot products of queries and documents, (4 queries, 3 documents per row, 4 rows)."""
    queries = model.encode_query([row["query"] for row in ROWS])
    documents = np.stack([model.encode_document([row[f"document_{place}"] for row in ROWS]) for place in (1, 2, 3)])
    return torch.from_numpy(np.einsum("qd,prd->qpr", queries, documents))


def late_scores(model: ColBERT) -> torch.Tensor:
    """MaxSim scores of queries and documents, (4 queries, 3 documents per row, 4 rows)."""
    queries = model.encode_query([row["query"] for row in ROWS])
    scores = []
    for place in (1, 2, 3):
        documents = model.encode_document([row[f"document_{place}"] for row in ROWS])
        offsets = np.cumsum([0, *map(len, documents)])
        scores.append(torch.from_numpy(maxsim_packed(queries, np.concatenate(documents), offsets)))
    return torch.stack(scores, dim=1)


def test_every_loss_of_a_recipe_exists() -> None:
    assert set(LOSSES) == {name for names in recipes.LOSSES_BY_KIND.values() for name in names}
    assert len(LOSSES) == 7


@pytest.mark.parametrize("normalize", [True, False])
def test_dense_losses_by_hand(normalize: bool) -> None:
    """Cross-entropy over all documents of the batch, squared margins and divergences, from the vectors that search would use."""
    model = make_model("dense", normalize=normalize, similarity="cosine" if normalize else "dot")
    assert isinstance(model, BiEncoder)
    scores = dense_scores(model)
    own = torch.stack([scores[row, :, row] for row in range(4)])  # each query with its own three documents
    teacher = torch.tensor([row["scores"] for row in ROWS])
    margins = (own[:, :1] - own[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
    log_teacher = (teacher / 2).log_softmax(1)
    expected = {
        "mnrl": F.cross_entropy(7 * scores.flatten(1), torch.arange(4)),
        "cached_mnrl": F.cross_entropy(7 * scores.flatten(1), torch.arange(4)),
        "margin_mse": margins.square().mean(),
        "kl": (log_teacher.exp() * (log_teacher - (own / 2).log_softmax(1))).sum(1).mean() * 4,
    }
    for name, value in expected.items():
        trained = Trained(make_recipe("dense", read_by(name, scale=7, temperature=2, mini_batch_size=3)), model)
        found = loss_of(trained, ROWS if name in recipes.DISTILLATION else without_scores())
        torch.testing.assert_close(found.detach(), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("expansion", [True, False])
def test_colbert_losses_by_hand(expansion: bool) -> None:
    model = make_model("colbert", query_expansion=expansion)
    assert isinstance(model, ColBERT)
    scores = late_scores(model)
    own = torch.stack([scores[row, :, row] for row in range(4)])
    low, high = own.amin(1, keepdim=True), own.amax(1, keepdim=True)
    log_teacher = torch.tensor([row["scores"] for row in ROWS]).log_softmax(1)
    log_student = ((own - low) / (high - low)).log_softmax(1)
    contrast = F.cross_entropy(scores.flatten(1) / 0.5, torch.arange(4))
    expected = {
        "contrastive": contrast,
        "cached_contrastive": contrast,
        "distillation": (log_teacher.exp() * (log_teacher - log_student)).sum(1).mean(),
    }
    for name, value in expected.items():
        trained = Trained(make_recipe("colbert", read_by(name, temperature=0.5, mini_batch_size=3)), model)
        found = loss_of(trained, ROWS if name in recipes.DISTILLATION else without_scores())
        torch.testing.assert_close(found.detach(), value, atol=1e-5, rtol=1e-5)


CACHED = [("dense", "mnrl", {}), ("dense", "mnrl", {"matryoshka_dims": [16, 4]}), ("colbert", "contrastive", {})]


@pytest.mark.parity
@pytest.mark.parametrize("name", ["contrastive", "distillation"])
@pytest.mark.parametrize("query_mask", [False, True])
@pytest.mark.parametrize("document_mask", [False, True])
def test_scores_and_gradients_of_a_colbert_are_pylates(name: str, query_mask: bool, document_mask: bool) -> None:
    """Also of equal similarities, of which one wins, of negative ones beside padding, and of a document without tokens."""
    scores = pytest.importorskip("pylate.scores")
    theirs, ours = {
        "contrastive": (scores.ColBERTScores(), contrastive_scores),
        "distillation": (scores.colbert_kd_scores, distillation_scores),
    }[name]
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(3, 4, 5, generator=generator), torch.randn(3, 2, 6, 5, generator=generator)
    documents[:, :, 3] = documents[:, :, 1]
    documents[1] = -queries[1, 0] - 0.1
    masks = {
        "queries_mask": torch.rand(3, 4, generator=generator) > 0.3 if query_mask else None,
        "documents_mask": torch.rand(3, 2, 6, generator=generator) > 0.5 if document_mask else None,
    }
    if document_mask:
        masks["documents_mask"][0, 0] = False
    outcomes = []
    for function in (theirs, ours):
        leaves = [queries.clone().requires_grad_(), documents.clone().requires_grad_()]
        found = function(*leaves, **masks)
        outcomes.append([found, *torch.autograd.grad((found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum(), leaves)])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("kind", "name", "others"), CACHED)
def test_a_cached_loss_equals_the_plain_loss(kind: str, name: str, others: dict[str, Any]) -> None:
    """Losses and gradients are equal for every mini-batch size."""
    model = make_model(kind)
    plain = Trained(make_recipe(kind, {"name": name, **others}), model)
    loss, gradients = gradients_of(plain, without_scores())
    assert len(gradients) > 10
    for size in (1, 3, 4):
        cached = Trained(make_recipe(kind, {"name": f"cached_{name}", "mini_batch_size": size, **others}), model)
        found, theirs = gradients_of(cached, without_scores())
        assert found == pytest.approx(loss, abs=1e-5)
        for one, two in zip(gradients, theirs, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_rows_with_fewer_documents_have_fewer_negatives(kind: str) -> None:
    """Cross-entropy over the documents that are there, by hand; an absent one has no share in loss or gradient."""
    model = make_model(kind)
    scores = dense_scores(model) if isinstance(model, BiEncoder) else late_scores(model)
    absent = [(2, 0), (1, 2), (2, 2)]  # place among the row's documents, row
    for place, row in absent:
        scores[:, place, row] = -torch.inf
    rows = [dict(row) for row in without_scores()]
    for place, row in absent:
        rows[row][f"document_{place + 1}"] = None
    expected = F.cross_entropy((7 * scores if kind == "dense" else scores / 0.5).flatten(1), torch.arange(4))
    plain, cached = ("mnrl", "cached_mnrl") if kind == "dense" else ("contrastive", "cached_contrastive")
    found = {}
    for name in (plain, cached):
        trained = Trained(make_recipe(kind, read_by(name, scale=7, temperature=0.5, mini_batch_size=3)), model)
        batch = trained.collate(rows)
        assert batch["columns"] == (4, 4, 4, 4)
        loss, found[name] = gradients_of(trained, rows)
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        assert all(bool(gradient.isfinite().all()) for gradient in found[name])
    for one, two in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)
    counted = Collator(model)
    counted(rows)
    assert counted.counts["texts"] == 16 - len(absent)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "others"),
    [
        *((kind, name, {}) for kind, names in recipes.LOSSES_BY_KIND.items() for name in names),
        ("dense", "mnrl", {"matryoshka_dims": [16, 8]}),
        ("dense", "cached_mnrl", {"matryoshka_dims": [16, 8]}),
    ],
)
def test_a_loss_runs_as_many_backward_passes_as_it_says(kind: str, name: str, others: dict[str, Any], checkpointing: bool) -> None:
    """The trainer reduces gradients in the last of them: with fewer than it says nothing overlaps, with more it stops."""
    recipe = make_recipe(kind, read_by(name, mini_batch_size=3) | others, {"gradient_checkpointing": checkpointing})
    trained, added = Trained(recipe, make_model(kind)), Counter[int]()
    trained.module.train()
    for number, weight in enumerate(trained.module.parameters()):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: added.update([number]))
    inputs = trained.collate(ROWS if name in recipes.DISTILLATION else without_scores())
    trained.loss(inputs).backward()
    assert set(added.values()) == {trained.loss.backward_passes(inputs)}
    assert (trained.loss.backward_passes(inputs) > 1) is name.startswith("cached")


def test_teacher_scores_are_scaled_if_the_recipe_says_so() -> None:
    model = make_model("colbert")
    scaled = [
        {**row, "scores": [(score - min(row["scores"])) / (max(row["scores"]) - min(row["scores"])) for score in row["scores"]]}
        for row in ROWS
    ]
    asked = Trained(make_recipe("colbert", {"name": "distillation", "teacher_scores": "minmax"}), model)
    plain = Trained(make_recipe("colbert", {"name": "distillation"}), model)
    torch.testing.assert_close(loss_of(asked, ROWS), loss_of(plain, scaled))
    assert loss_of(plain, ROWS).item() != pytest.approx(loss_of(asked, ROWS).item(), abs=1e-2)


def test_matryoshka_widths_must_fit() -> None:
    recipe = make_recipe("dense", {"name": "mnrl", "matryoshka_dims": [12, 4]})
    with pytest.raises(InputError, match=r"loss\.matryoshka_dims: the first must be 16, the width of the model's vectors, got 12"):
        RetrievalLoss(recipe, make_model("dense"))
    recipe = make_recipe("dense", {"name": "mnrl", "matryoshka_dims": [16, 4]})
    with pytest.raises(InputError, match=r"loss\.matryoshka_dims: requires model\.normalize: true"):
        RetrievalLoss(recipe, make_model("dense", normalize=False, similarity="dot"))


def test_documents_are_padded_to_their_limit_if_processes_exchange_them() -> None:
    model = make_model("colbert")
    recipe = make_recipe("colbert", {"name": "contrastive", "gather_across_devices": True})
    batch = Collator(model)(without_scores())
    widths = []
    for processes in (1, 2):
        _, *documents = RetrievalLoss(recipe, model, processes=processes).model.columns(batch["texts"], batch["columns"], one_pass=False)
        widths.append({column["input_ids"].shape[1] for column in documents})
    assert max(widths[0]) < 24
    assert widths[1] == {24}


GATHERED = [("dense", "mnrl"), ("dense", "cached_mnrl"), ("colbert", "contrastive"), ("colbert", "cached_contrastive")]


def gathered(kind: str, name: str, *, processes: int = 1) -> Trained:
    return Trained(make_recipe(kind, read_by(name, mini_batch_size=3, gather_across_devices=True)), make_model(kind), processes)


def one_of_two(out: Path) -> None:
    """Work of one of two processes: half of the rows; the mean of losses and gradients is saved by the first process."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    means = {}
    for kind, name in GATHERED:
        value, gradients = gradients_of(gathered(kind, name, processes=2), without_scores(ROWS[2 * dist.get_rank() :][:2]))
        for place, tensor in enumerate([torch.tensor([value]), *gradients]):
            dist.all_reduce(tensor)
            means[f"{name} {place}"] = tensor / 2
    if dist.get_rank() == 0:
        save_file(means, out)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_gathered_documents_equal_one_process(tmp_path: Path) -> None:
    """Two processes with half of the rows each have the loss and gradients of one process with all rows."""
    call = "import importlib.util as u, pathlib, sys; s = u.spec_from_file_location('them', sys.argv[1]); m = u.module_from_spec(s); "
    call += "sys.modules['them'] = m; s.loader.exec_module(m); m.one_of_two(pathlib.Path(sys.argv[2]))"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [imported_python(), "-c", call, __file__, str(tmp_path / "means")], env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in ("0", "1")
    ]
    assert [process.wait(timeout=300) for process in started] == [0, 0]
    means = load_file(tmp_path / "means")
    for kind, name in GATHERED:
        value, gradients = gradients_of(gathered(kind, name), without_scores())
        assert len(gradients) > 10
        for number, expected in enumerate([torch.tensor([value]), *gradients]):
            torch.testing.assert_close(means[f"{name} {number}"], expected, atol=1e-5, rtol=1e-4)
