"""Span QA training: windows, new and existing heads, extended positions, and recipes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, SpanQA, Tokenizer, init_head, init_weights, preset, save_encoder, save_head
from quiver.encoder.files import read_json, write_json
from quiver.encoder.pretraining.position_extension import interpolate_positions
from quiver.encoder.training.recipe_file import find_recipe
from quiver.eval.nlu.answers import answer_questions, score_predictions
from quiver.eval.nlu.qa_training import open_span_qa, read_sets, train_qa
from quiver.eval.nlu.questions import Answer, Question, WindowSettings, divide_questions
from quiver.eval.nlu.recipes import QA_KINDS, FineTuningSection, QaDataSection, QaModelSection, QaRecipe, UpdatesSection, load_qa_recipe
from quiver.eval.sweep import make_grid
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.options import ModelFolder

WORDS = ["bird", "sea", "wing", "stone", "tree", "river", "cloud", "field", "road", "lamp"]
SETTINGS = WindowSettings(max_length=24, overlap=6, max_question_length=4, max_answer_length=4)


def numbers(seed: int, count: int, *, words: int) -> list[Question]:
    """Questions over lines of words with one number, which is the answer."""
    generator = random.Random(seed)
    questions = []
    for place in range(count):
        line = generator.choices(WORDS, k=words)
        where, answer = generator.randrange(words), str(generator.randrange(10, 100))
        line[where] = answer
        start = len(" ".join(line[:where])) + (where > 0)
        questions.append(Question(f"{seed}-{place}", "number?", " ".join(line), (Answer(answer, start),)))
    return questions


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([" ".join(WORDS) + " number?"] * 3, vocab_size=384, max_length=64)


def small_model() -> SpanQA:
    config = EncoderConfig.modernbert(
        vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "global"], max_positions=64
    )
    model = SpanQA(init_weights(Encoder(config), seed=1))
    init_head(model, seed=1)
    return model


def squad(path: Path, questions: list[Question]) -> str:
    """Write questions to a file."""
    paragraphs = [
        {
            "context": one.context,
            "qas": [
                {"id": one.id, "question": one.text, "answers": [{"text": each.text, "answer_start": each.start} for each in one.answers]}
            ],
        }
        for one in questions
    ]
    write_json(path, {"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]})
    return str(path)


@pytest.fixture
def make_recipe(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., QaRecipe]:
    """A recipe whose lines have three windows each: one contains the answer, the others are labelled as without answer."""
    config = small_model().encoder.config
    save_encoder(init_weights(Encoder(replace(config, embedding_dropout=0.01)), seed=1), tmp_path / "encoder")
    tokenizer.save(tmp_path / "encoder")
    files = {name: squad(tmp_path / f"{name}.json", numbers(seed, count, words=30)) for name, seed, count in SETS}

    def make(*, epochs: float = 4, **training: Any) -> QaRecipe:
        return QaRecipe(
            **dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test"),
            kind="span_qa",
            model=QaModelSection(init=str(tmp_path / "encoder")),
            data=QaDataSection(**files, official="squad_v1"),
            windows=SETTINGS,
            updates=UpdatesSection(epochs=epochs, batch_size=8, learning_rate=3e-3),
            training=FineTuningSection(**training),
        )

    return make


SETS = (("train", 1, 80), ("test", 2, 40), ("development", 3, 20))


def test_a_model_learns_to_answer_across_windows(make_recipe: Callable[..., QaRecipe], tmp_path: Path, tokenizer: Tokenizer) -> None:
    recipe, out, held_out = make_recipe(epochs=8), tmp_path / "out", numbers(2, 40, words=30)
    first, _ = open_span_qa(recipe.model.init, seed=12)
    before = score_predictions(held_out, answer_questions(first, tokenizer, held_out, SETTINGS), tokenizer, "squad_v1")
    after = train_qa(recipe, out)
    assert before.scores.exact < 0.3
    assert after.scores.exact > 0.9
    assert after.windows >= 2 * len(held_out)
    result = read_json(out / "run.json")["result"]
    assert result["losses"][-1][1] < 0.2 * result["losses"][0][1]
    # The model is the best of eight epochs by F1 on the development questions.
    marks = {line["step"]: line["f1"] for line in result["development"]}
    assert len(marks) == 8
    assert marks[result["best_step"]] == max(marks.values())
    assert set(read_json(out / "run.json")["sha256"]) == {str(tmp_path / f"{name}.json") for name, *_ in SETS}


def test_a_question_in_two_sets_is_refused(make_recipe: Callable[..., QaRecipe], tmp_path: Path) -> None:
    recipe = make_recipe()
    data = recipe.data
    for changes, complaint in (
        ({"test": data.train}, "80 test questions are also training questions"),
        ({"development": data.train}, "80 development questions are also training questions"),
        ({"development": data.test}, "40 test questions are also development questions"),
    ):
        with pytest.raises(InputError, match=complaint):
            train_qa(recipe.replace(data=data.replace(**changes)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_encoder_gets_a_new_head_and_an_existing_head_is_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_encoder(small_model().encoder, tmp_path / "encoder")
    save_head(small_model(), tmp_path / "qa")
    for folder in ("encoder", "qa"):
        tokenizer.save(tmp_path / folder)
    first, again, other = (open_span_qa(tmp_path / "encoder", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.out.weight, again.out.weight)
    assert not torch.equal(first.out.weight, other.out.weight)
    with pytest.raises(InputError, match="is incomplete"):
        open_span_qa(tmp_path / "encoder", seed=None)
    assert torch.equal(open_span_qa(tmp_path / "qa", seed=None)[0].out.weight, small_model().out.weight)


@pytest.mark.parametrize("head", [True, False])
def test_positions_are_extended_before_training(tmp_path: Path, tokenizer: Tokenizer, head: bool) -> None:
    config = replace(
        preset("bert-base"), vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=("global",), max_positions=64
    )
    model = SpanQA(init_weights(Encoder(config), seed=1))
    init_head(model, seed=7)
    if head:
        save_head(model, tmp_path / "old")
    else:  # from a sentence-transformers model, the encoder is used
        BiEncoder.from_parts(model.encoder, tokenizer, ModelFolder("dense", tmp_path, max_length=32)).save_pretrained(tmp_path / "old")
    tokenizer.save(tmp_path / "old")
    longer, opened = open_span_qa(tmp_path / "old", seed=7, extend=2)
    assert longer.encoder.config.max_positions == 128 == opened.max_length
    table = "embeddings.positions.weight"
    assert torch.equal(longer.encoder.state_dict()[table], interpolate_positions(model.encoder.state_dict()[table], 2))
    assert torch.equal(longer.out.weight, model.out.weight)
    save_head(small_model(), tmp_path / "rope")
    tokenizer.save(tmp_path / "rope")
    with pytest.raises(InputError, match="no table of position embeddings to extend"):
        open_span_qa(tmp_path / "rope", seed=7, extend=2)


def test_attention_dropout_is_set_by_the_recipe(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """All other settings come from the checkpoint."""
    config = replace(
        preset("bert-base"), vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=("global",), max_positions=64
    )
    model = SpanQA(init_weights(Encoder(config), seed=1))
    init_head(model, seed=7)
    save_head(model, tmp_path / "qa")
    tokenizer.save(tmp_path / "qa")
    as_it_came, _ = open_span_qa(tmp_path / "qa", seed=None)
    changed, opened = open_span_qa(tmp_path / "qa", seed=None, attention_dropout=0.0)
    assert as_it_came.encoder.config.attention_dropout == 0.1
    assert changed.encoder.config == replace(as_it_came.encoder.config, attention_dropout=0.0)
    assert opened.max_length == Tokenizer.from_pretrained(tmp_path / "qa").max_length
    state = as_it_came.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in changed.state_dict().items())
    save_head(small_model(), tmp_path / "modernbert")
    tokenizer.save(tmp_path / "modernbert")
    with pytest.raises(
        InputError, match=r"model\.attention_dropout: not supported by this model"
    ):  # its config.json has one setting for both
        open_span_qa(tmp_path / "modernbert", seed=7, attention_dropout=0.3)
    assert load_qa_recipe("qa-korquad", ["model.attention_dropout="]).model.attention_dropout is None


def test_the_shipped_recipe_follows_the_paper_and_its_comparison_changes_only_the_windows() -> None:
    recipe = load_qa_recipe("qa-korquad")
    assert find_recipe("qa-korquad", QA_KINDS).name == "qa-korquad.yaml"
    assert (recipe.data.official, recipe.data.shares, recipe.windows.paragraphs) == ("korquad_v1", (9, 1), "head")
    grid = make_grid("qa-korquad-lengths")
    found = {run.name: run.recipe for run in grid.runs}
    assert list(found) == ["512-head", "512-windows", "512-head-tail", "1024"]
    for one in found.values():
        assert isinstance(one, QaRecipe)
        assert (one.updates, one.training, one.data) == (recipe.updates, recipe.training, recipe.data)
        assert one.windows.max_length == 512 * one.model.extend_positions


def test_one_file_is_divided_into_the_sets_of_a_run(make_recipe: Callable[..., QaRecipe], tmp_path: Path) -> None:
    """The sizes are those of the paper's Table 1, the parts are disjoint, and no test file is needed with three parts."""
    for count, shares, sizes in (
        (60_407, (9, 1), [54_366, 6_041]),
        (340_088, (8, 1, 1), [272_070, 34_009, 34_009]),
        (100_268, (8, 1, 1), [80_214, 10_027, 10_027]),
        (276_198, (9, 1), [248_578, 27_620]),
    ):
        assert [len(part) for part in divide_questions([Question(str(key), "", "", ()) for key in range(count)], shares)] == sizes
    questions = numbers(1, 80, words=30)
    recipe = make_recipe(epochs=0.1)
    data = recipe.data.replace(development=None, test=None, split="8:1:1")
    sets = read_sets(data)
    assert [len(part) for part in (sets.train, sets.development, sets.test)] == [64, 8, 8]
    assert sorted(one.id for part in (sets.train, sets.development, sets.test) for one in part) == sorted(one.id for one in questions)
    squad(Path(data.train), questions[::-1])
    assert {one.id for one in read_sets(data).test} == {one.id for one in sets.test}
    both = read_sets(recipe.data.replace(development=None, split="9:1", limit=5))
    assert [len(part) for part in (both.train, both.development, both.test)] == [5, 8, 40]
    train_qa(recipe.replace(data=data, windows=SETTINGS.replace(paragraphs="head-tail")), tmp_path / "out")
    assert read_json(tmp_path / "out" / "results.json")["scores"]["questions"] == 8
    squad(Path(data.train), questions[:5])
    with pytest.raises(InputError, match=r"too few questions to divide by data\.split: 8:1:1"):
        read_sets(data)
