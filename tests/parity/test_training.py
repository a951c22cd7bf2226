"""Training against plain sentence-transformers and PyLate: the same rows, the same initial weights, the same losses step by step.

Their side is theirs throughout: transformers' padded encoder, their modules, their collator, their loss. Ours is what a recipe
gives. Both are optimised by one loop of AdamW with warm-up-free linear decay and clipped gradients, and each step's loss is
compared; after twenty of them, a gradient that was off by a little would show.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import Tokenizer
from quiver.encoder.schema import validate
from quiver.retrieval.training import run as training_run
from quiver.retrieval.training.dataloader import Collator
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import DISTILLATION, RULES, Recipe
from tests.parity.encoders import random_model, special_ids

sentence_transformers = pytest.importorskip("sentence_transformers")
pylate_models = pytest.importorskip("pylate.models")
pytestmark = pytest.mark.parity

from datasets import Dataset  # noqa: E402
from pylate import losses as pylate_losses  # noqa: E402
from pylate.utils import ColBERTCollator  # noqa: E402
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses  # noqa: E402
from sentence_transformers.data_collator import SentenceTransformerDataCollator  # noqa: E402
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer  # noqa: E402
from sentence_transformers.util import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score  # noqa: E402

from quiver.retrieval.training.losses import RetrievalLoss  # noqa: E402

STEPS, FEW, ROWS = 20, 6, 5
"""Steps of a test of one loss, steps of a test of its combinations, rows per batch."""
RATE = 3e-4
"""Peak learning rate. MaxSim has corners: where two tokens are all but equal, rounding decides which of them learns from a step,
and a step of 1e-3 is then large enough to be seen in the losses."""
SENTENCE = "a bird has wings, feathers and beak! the window of a local layer is wide: late (interaction) sums similarities"
WORDS = SENTENCE.split()


def text(generator: random.Random, low: int, high: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(low, high)))


def make_batches(documents: int, *, steps: int = FEW) -> list[list[dict[str, Any]]]:
    """Rows with short queries, documents of all lengths, and teacher scores."""
    generator = random.Random(7)
    return [
        [
            {
                "query": text(generator, 2, 9),
                **{f"document_{place}": text(generator, 3, 40) for place in range(1, documents + 1)},
                "scores": [generator.uniform(-3, 9) for _ in range(documents)],
            }
            for _ in range(ROWS)
        ]
        for _ in range(steps)
    ]


def make_recipe(
    kind: str, *, model: dict[str, Any], loss: dict[str, Any], training: dict[str, Any], data: dict[str, Any] | None = None
) -> Recipe:
    """A recipe; without ``data`` it names a file that is not read."""
    described = dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test")
    shown = {
        "epochs": 1, "batch_size": ROWS, "learning_rate": 1e-3, "warmup_ratio": 0, "scheduler": "linear", "weight_decay": 0.01,
        "max_grad_norm": 1, "seed": 1, "dtype": "float32", "no_duplicates": False, "log_every": 1,
    }  # fmt: skip
    data = data or {"train": "rows.jsonl"} | ({"score_fields": "scores"} if loss["name"] in DISTILLATION else {})
    raw = described | {"kind": kind, "model": model, "data": data, "loss": loss, "training": shown | training}
    recipe, problems = validate(Recipe, raw, RULES)
    assert recipe is not None, problems
    return recipe


def saved_encoder(folder: Path, family: str) -> Path:
    """A random encoder with a small vocabulary, as transformers writes it."""
    tokenizer = Tokenizer.train([SENTENCE] * 3, vocab_size=512, max_length=128)
    tokenizer.save(folder)
    special = special_ids(tokenizer)
    if family == "modernbert":
        sizes = {"hidden_size": 48, "intermediate_size": 64, "max_position_embeddings": 256, "local_attention": 16, **special}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": special["pad_token_id"]}
    random_model(family, folder, seed=11, **sizes)
    return folder


def of_families(names: Iterable[str], *, every: Container[str]) -> list[Any]:
    """The losses of ModernBERT, and of BERT. A loss sees vectors: of BERT, all but those in ``every`` are left out of CI."""
    # Losses in parts take long; the tests of poolings and readings have them for fewer steps.
    parts = {name: pytest.mark.slow if name.startswith("cached_") else () for name in names}
    found = [pytest.param("modernbert", name, id=f"modernbert-{name}", marks=parts[name]) for name in names]
    marks = {name: pytest.mark.slow if name in every else pytest.mark.exhaustive for name in names}
    return found + [pytest.param("bert", name, id=f"bert-{name}", marks=mark) for name, mark in marks.items()]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pre-norm with windows and rotary positions; post-norm with absolute positions, biases and token types."""
    return saved_encoder(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_encoder(tmp_path_factory.mktemp("base"), "modernbert")


Batch = tuple[Any, ...]
"""Arguments of a loss: features of each column and labels, or a batch of our collator."""


class Ours:
    """The model of a recipe with its loss and its collator."""

    def __init__(self, recipe: Recipe) -> None:
        self.model = build_model(recipe, [])
        self.loss = RetrievalLoss(recipe, self.model)
        self.module = self.loss.model
        training = recipe.training
        self.collator = Collator(self.model, max_length=training.max_length, merge_documents=recipe.loss.name == "distillation")

    def batches(self, rows: Sequence[list[dict[str, Any]]]) -> list[Batch]:
        return [(self.collator(batch),) for batch in rows]


def train(
    model: torch.nn.Module, loss: torch.nn.Module, batches: Sequence[Batch], *, accumulation: int = 1, clip: float = 1.0
) -> Iterator[float]:
    """Train, and yield the loss of each batch; a step is done after every ``accumulation`` batches."""
    model.train()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches) // accumulation)
    for number, batch in enumerate(batches, start=1):
        value = loss(*batch)
        (value / accumulation).backward()
        yield value.item()
        if number % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def collected(batch: dict[str, torch.Tensor]) -> Batch:
    """A library collator's batch in the form that its trainer passes to the loss."""
    return SentenceTransformerTrainer.collect_features(None, batch)


def rows_for(name: str, documents: int, *, steps: int = FEW) -> list[list[dict[str, Any]]]:
    """Batches for a loss, with scores only for distillation losses."""
    batches = make_batches(documents, steps=steps)
    return batches if name in DISTILLATION else without_scores(batches)


def without_scores(rows: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [[{key: value for key, value in row.items() if key != "scores"} for row in batch] for batch in rows]


def assert_same_losses(found: Iterator[float], expected: Iterator[float], *, steps: int = FEW) -> None:
    pairs = list(zip(found, expected, strict=True))
    assert len(pairs) == steps
    torch.testing.assert_close(*(torch.tensor(values) for values in zip(*pairs, strict=True)), atol=1e-4, rtol=0)
    values = [value for value, _ in pairs]
    assert max(values) - min(values) > 1e-3, "the losses must not stand still"


def plain_dense(base: Path, folder: Path, *, pooling: str, normalize: bool, dense: bool = False, **prompt: Any) -> SentenceTransformer:
    """A sentence-transformers model around transformers' encoder, saved as the starting model of the recipe."""
    first = Transformer(str(base), max_seq_length=48, model_args={"attn_implementation": "sdpa"})
    width = first.get_word_embedding_dimension()
    torch.manual_seed(3)
    modules = [first, Pooling(width, pooling_mode=pooling, **prompt)]
    modules += [Dense(width, 24), Dense(24, 20, bias=False)] if dense else []
    model = SentenceTransformer(
        modules=[*modules, *([Normalize()] if normalize else [])], similarity_fn_name="cosine" if normalize else "dot", device="cpu"
    )
    model.save_pretrained(str(folder))
    return model


def our_dense(folder: Path, loss: dict[str, Any], *, pooling: str = "mean", normalize: bool = True, **settings: Any) -> Ours:
    training = settings.pop("training", {})
    model = {"init": str(folder), "pooling": pooling, "normalize": normalize, "max_length": 48, **settings}
    recipe = make_recipe("dense", model=model, loss=loss, training=training)
    return Ours(recipe)


DENSE_LOSSES: dict[str, Callable[[SentenceTransformer], torch.nn.Module]] = {
    "mnrl": lambda model: losses.MultipleNegativesRankingLoss(model, scale=15.0),
    "cached_mnrl": lambda model: losses.CachedMultipleNegativesRankingLoss(model, scale=15.0, mini_batch_size=4),
    "margin_mse": lambda model: losses.MarginMSELoss(model, similarity_fct=pairwise_cos_sim),
    "kl": lambda model: losses.DistillKLDivLoss(model, similarity_fct=pairwise_cos_sim, temperature=0.5),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mnrl": {"scale": 15},
    "cached_mnrl": {"scale": 15, "mini_batch_size": 4},
    "margin_mse": {},
    "kl": {"temperature": 0.5},
}


def their_dense(model: SentenceTransformer, rows: Sequence[list[dict[str, Any]]], **options: Any) -> list[Batch]:
    collator = SentenceTransformerDataCollator(tokenize_fn=model.tokenize, **options)
    return [collected(collator(batch)) for batch in rows]


def compare_dense(ours: Ours, theirs: SentenceTransformer, loss: torch.nn.Module, rows: Sequence[Any], *, steps: int = FEW) -> None:
    assert_same_losses(train(ours.module, ours.loss, ours.batches(rows)), train(theirs, loss, their_dense(theirs, rows)), steps=steps)


@pytest.mark.parametrize(("family", "name"), of_families(DENSE_LOSSES, every=("mnrl", "cached_mnrl")), indirect=["family"])
def test_dense_losses(family: Path, tmp_path: Path, name: str) -> None:
    theirs = plain_dense(family, tmp_path / "start", pooling="mean", normalize=True)
    ours = our_dense(tmp_path / "start", {"name": name, **SETTINGS[name]})
    rows = rows_for(name, 3, steps=STEPS)
    compare_dense(ours, theirs, DENSE_LOSSES[name](theirs), rows, steps=STEPS)


@pytest.mark.parametrize("name", DENSE_LOSSES)
def test_matryoshka(base: Path, tmp_path: Path, name: str) -> None:
    theirs = plain_dense(base, tmp_path / "start", pooling="mean", normalize=True)
    dims = [48, 16, 8]
    loss = losses.MatryoshkaLoss(theirs, DENSE_LOSSES[name](theirs), dims)
    ours = our_dense(tmp_path / "start", {"name": name, **SETTINGS[name], "matryoshka_dims": dims})
    rows = rows_for(name, 3)
    compare_dense(ours, theirs, loss, rows)


@pytest.mark.parametrize("name", ["mnrl", "cached_mnrl"])
@pytest.mark.parametrize(("pooling", "normalize"), [("cls", True), ("mean", False), ("cls", False)])
def test_poolings_and_similarities(base: Path, tmp_path: Path, name: str, pooling: str, normalize: bool) -> None:
    theirs = plain_dense(base, tmp_path / "start", pooling=pooling, normalize=normalize)
    similarity = cos_sim if normalize else dot_score
    scale = 15.0 if normalize else 0.5
    kinds = {"mnrl": losses.MultipleNegativesRankingLoss, "cached_mnrl": losses.CachedMultipleNegativesRankingLoss}
    loss = kinds[name](theirs, scale=scale, similarity_fct=similarity)
    ours = our_dense(tmp_path / "start", {"name": name, "scale": scale}, pooling=pooling, normalize=normalize)
    rows = without_scores(make_batches(2))
    compare_dense(ours, theirs, loss, rows)


def test_a_dot_product_is_distilled_as_it_is_searched(base: Path, tmp_path: Path) -> None:
    theirs = plain_dense(base, tmp_path / "start", pooling="mean", normalize=False)
    ours = our_dense(tmp_path / "start", {"name": "margin_mse"}, normalize=False)
    rows = make_batches(3)
    loss = losses.MarginMSELoss(theirs, similarity_fct=pairwise_dot_score)
    found, expected = (
        list(train(*side)) for side in ((ours.module, ours.loss, ours.batches(rows)), (theirs, loss, their_dense(theirs, rows)))
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-5)  # the losses are in the hundreds


@pytest.mark.parametrize("name", ["mnrl", "cached_mnrl"])
def test_dense_modules_are_trained(base: Path, tmp_path: Path, name: str) -> None:
    theirs = plain_dense(base, tmp_path / "start", pooling="mean", normalize=True, dense=True)
    ours = our_dense(tmp_path / "start", {"name": name, **SETTINGS[name]})
    rows = without_scores(make_batches(2))
    before = [projection.linear.weight.detach().clone() for projection in ours.model.settings.projections]
    compare_dense(ours, theirs, DENSE_LOSSES[name](theirs), rows)
    assert len(before) == 2
    for old, projection in zip(before, ours.model.settings.projections, strict=True):
        assert (projection.linear.weight - old).abs().max() > 1e-3


PROMPTS = {"query": "the best window: ", "document": "wings of a "}


@pytest.mark.parametrize("include", [True, False], ids=["pooled", "not pooled"])
@pytest.mark.parametrize("name", ["mnrl", "cached_mnrl"])
def test_prompts(base: Path, tmp_path: Path, name: str, include: bool) -> None:
    """The library's cached loss removes the prompt from the mask before its second pass, so ours is compared with its plain loss."""
    theirs = plain_dense(base, tmp_path / "start", pooling="mean", normalize=True, include_prompt=include)
    ours = our_dense(
        tmp_path / "start", {"name": name, **SETTINGS[name]}, query_prompt=PROMPTS["query"], document_prompt=PROMPTS["document"]
    )
    rows = without_scores(make_batches(2))
    batches = their_dense(
        theirs,
        rows,
        prompts={column: PROMPTS["query" if column == "query" else "document"] for column in rows[0][0]},
        include_prompt_lengths=not include,
        all_special_ids=set(theirs.tokenizer.all_special_ids),
    )
    loss = losses.MultipleNegativesRankingLoss(theirs, scale=15.0)
    assert_same_losses(train(ours.module, ours.loss, ours.batches(rows)), train(theirs, loss, batches))


def test_gradient_checkpointing_and_a_shorter_length(base: Path, tmp_path: Path) -> None:
    theirs = plain_dense(base, tmp_path / "start", pooling="mean", normalize=True)
    theirs.max_seq_length = 20
    ours = our_dense(tmp_path / "start", {"name": "mnrl", "scale": 15}, training={"max_length": 20, "gradient_checkpointing": True})
    rows = without_scores(make_batches(2))
    compare_dense(ours, theirs, DENSE_LOSSES["mnrl"](theirs), rows)
    assert ours.collator.counts["truncated"] > 30
    assert ours.model.max_length == 48


COLBERT = {"query_length": 16, "document_length": 60, "dim": 24}
READINGS: dict[str, dict[str, Any]] = {
    "attended expansion": {"attend_to_expansion": True},
    "no expansion": {"query_expansion": False},
    "no prefix, no skiplist": {"query_prefix": "", "document_prefix": "", "skiplist": "none"},
    "far expansion": {"query_length": 60},  # further from the text than the window reaches
}
PYLATE_NAMES = {"attend_to_expansion": "attend_to_expansion_tokens", "query_expansion": "do_query_expansion", "skiplist": "skiplist_words"}


def plain_colbert(base: Path, folder: Path, settings: dict[str, Any]) -> Any:
    """A PyLate model around transformers' encoder, saved as the starting model of the recipe."""
    named = {PYLATE_NAMES.get(key, key): [] if value == "none" else value for key, value in (COLBERT | settings).items() if key != "dim"}
    torch.manual_seed(12)
    model = pylate_models.ColBERT(str(base), embedding_size=24, device="cpu", model_kwargs={"attn_implementation": "sdpa"}, **named)
    model.save_pretrained(str(folder))
    return model


def our_colbert(folder: Path, loss: dict[str, Any], settings: dict[str, Any], training: dict[str, Any] | None = None) -> Ours:
    recipe = make_recipe("colbert", model={"init": str(folder), "colbert": COLBERT | settings}, loss=loss, training=training or {})
    return Ours(recipe)


def their_colbert(model: Any, rows: Sequence[list[dict[str, Any]]], *, merged: bool) -> list[Batch]:
    if merged:
        rows = [
            [
                {"query": row["query"], "documents": [row[key] for key in row if key.startswith("document_")], "scores": row["scores"]}
                for row in batch
            ]
            for batch in rows
        ]
    collator = ColBERTCollator(tokenize_fn=model.tokenize)
    return [collected(collator(batch)) for batch in rows]


COLBERT_LOSSES: dict[str, Callable[[Any], torch.nn.Module]] = {
    "contrastive": lambda model: pylate_losses.Contrastive(model, temperature=0.5),
    # PyLate's plain one here too, whose gradients ours promises: see `MeanCachedContrastive`.
    "cached_contrastive": lambda model: pylate_losses.Contrastive(model, temperature=0.5),
    "distillation": lambda model: pylate_losses.Distillation(model),
}
COLBERT_SETTINGS: dict[str, dict[str, Any]] = {
    "contrastive": {"temperature": 0.5},
    "cached_contrastive": {"temperature": 0.5, "mini_batch_size": 4},
    "distillation": {},
}


def compare_colbert(base: Path, folder: Path, name: str, reading: dict[str, Any], *, documents: int, steps: int) -> None:
    theirs = plain_colbert(base, folder, reading)
    ours = our_colbert(folder, {"name": name, **COLBERT_SETTINGS[name]}, reading)
    rows = rows_for(name, documents, steps=steps)
    batches = their_colbert(theirs, rows, merged=name == "distillation")
    assert_same_losses(train(ours.module, ours.loss, ours.batches(rows)), train(theirs, COLBERT_LOSSES[name](theirs), batches), steps=steps)


@pytest.mark.parametrize(("family", "name"), of_families(COLBERT_LOSSES, every=("contrastive", "cached_contrastive")), indirect=["family"])
def test_colbert_losses(family: Path, tmp_path: Path, name: str) -> None:
    compare_colbert(family, tmp_path / "start", name, {}, documents=3, steps=STEPS)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("name", COLBERT_LOSSES)
def test_colbert_readings(base: Path, tmp_path: Path, name: str, reading: str) -> None:
    # Of two scores the larger is 1 and the smaller 0 after min-max, whatever they were: three are the least to learn from.
    compare_colbert(base, tmp_path / "start", name, READINGS[reading], documents=3 if name == "distillation" else 1, steps=FEW)


def test_distillation_of_scores_as_they_are(base: Path, tmp_path: Path) -> None:
    theirs = plain_colbert(base, tmp_path / "start", {})
    ours = our_colbert(tmp_path / "start", {"name": "distillation", "student_scores": "as_they_are"}, {})
    rows = make_batches(3)
    loss = pylate_losses.Distillation(theirs, normalize_scores=False)
    assert_same_losses(train(ours.module, ours.loss, ours.batches(rows)), train(theirs, loss, their_colbert(theirs, rows, merged=True)))


@pytest.mark.parametrize("name", COLBERT_LOSSES)
def test_colbert_accumulation_and_a_shorter_length(base: Path, tmp_path: Path, name: str) -> None:
    theirs = plain_colbert(base, tmp_path / "start", {})
    theirs.document_length = 24
    ours = our_colbert(
        tmp_path / "start", {"name": name, **COLBERT_SETTINGS[name]}, {}, training={"max_length": 24, "gradient_checkpointing": True}
    )
    rows = rows_for(name, 3)
    assert_same_losses(
        train(ours.module, ours.loss, ours.batches(rows), accumulation=2),
        train(theirs, COLBERT_LOSSES[name](theirs), their_colbert(theirs, rows, merged=name == "distillation"), accumulation=2),
    )
    assert ours.model.settings.colbert.document_length == 60


class PlainTrainer(SentenceTransformerTrainer):
    """The library's trainer, which also records each loss unrounded."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.losses: list[float] = []

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(*given, **named)
        self.losses.append(loss.item())
        return loss


RUNS = {
    "mnrl": ("dense", lambda model: losses.MultipleNegativesRankingLoss(model)),
    "kl": ("dense", lambda model: losses.DistillKLDivLoss(model, similarity_fct=pairwise_cos_sim)),
    "contrastive": ("colbert", lambda model: pylate_losses.Contrastive(model)),
    "distillation": ("colbert", lambda model: pylate_losses.Distillation(model)),
}


@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        ("mnrl", 1),
        pytest.param("mnrl", 2, marks=pytest.mark.slow),
        # Scores come with the rows in both kinds; a loss and the accumulation know nothing of each other.
        pytest.param("distillation", 1, marks=pytest.mark.slow),
        pytest.param("contrastive", 1, marks=pytest.mark.slow),
        pytest.param("kl", 1, marks=pytest.mark.exhaustive),
        pytest.param("distillation", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_whole_run_is_that_of_the_plain_library(base: Path, tmp_path: Path, name: str, accumulation: int) -> None:
    """Order of the rows, warm-up, decay, clipping, accumulation: `quiver train` against the library's own trainer for 20 steps.

    With accumulation nothing is clipped: the libraries divide the gradient by ``accumulation`` twice, see docs/decisions.md.
    """
    kind, make_loss = RUNS[name]
    rows = [row for batch in rows_for(name, 3, steps=STEPS // 2) for row in batch]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "start"
    if kind == "dense":
        theirs = plain_dense(base, folder, pooling="mean", normalize=True)
        model: dict[str, Any] = {"pooling": "mean", "normalize": True, "max_length": 48}
    else:
        theirs = plain_colbert(base, folder, {})
        model = {"colbert": COLBERT}
    epochs, clip = 2 * accumulation, 1.0 if accumulation == 1 else 1e6
    settings = {"accumulation": accumulation, "max_grad_norm": clip}
    training = {"epochs": epochs, "learning_rate": RATE, "warmup_ratio": 0.2, "seed": 5, **settings}
    scored = {"score_fields": ["scores"]} if name in DISTILLATION else {}
    data = {"train": str(tmp_path / "rows.jsonl"), "document_fields": [f"document_{place}" for place in (1, 2, 3)], **scored}
    recipe = make_recipe(kind, model={"init": str(folder), **model}, loss={"name": name}, training=training, data=data)
    found = [loss for _, loss in training_run.train(recipe, tmp_path / "out")["result"]["losses"]]

    columns = {key: [row[key] for row in rows] for key in rows[0]}
    if name == "distillation":
        columns = {
            "query": columns["query"],
            "documents": [[row[key] for key in data["document_fields"]] for row in rows],
            "scores": columns["scores"],
        }
    trainer = PlainTrainer(
        model=theirs,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "theirs"),
            num_train_epochs=epochs,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=ROWS,
            learning_rate=RATE,
            warmup_steps=4,
            weight_decay=0.01,
            max_grad_norm=clip,
            seed=5,
            dataloader_drop_last=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict(columns),
        loss=make_loss(theirs),
        **({"data_collator": ColBERTCollator(tokenize_fn=theirs.tokenize)} if kind == "colbert" else {}),
    )
    theirs.model_card_data.widget = [{"text": ""}]  # else the card draws examples from the data
    trainer.train()
    expected = torch.tensor(trainer.losses).view(-1, accumulation).mean(dim=1)
    assert len(found) == len(expected) == STEPS
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
