"""Training on windows, heads drawn and kept, longer positions; recipes and their problems."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from encoder import Encoder, EncoderConfig, InputError, SpanQA, Tokenizer, init_head, init_weights, preset, save_encoder, save_span_qa
from encoder.files import read_json, write_json
from encoder.position_extension import interpolate_positions
from encoder.running.recipe_file import RecipeError, find_recipe
from eval.nlu.answering import answer_questions
from eval.nlu.qa_recipe import KINDS, QaTrainingSection, load_qa_recipe
from eval.nlu.qa_results import score_predictions
from eval.nlu.qa_training import open_span_qa, save_qa_model, train_windows, warn_of_token_types
from eval.nlu.questions import Answer, Question
from eval.nlu.windows import LabelledWindow, WindowSettings, labelled_windows
from retrieval.biencoder import BiEncoder
from retrieval.model_folder import ModelFolder

WORDS = ["bird", "sea", "wing", "stone", "tree", "river", "cloud", "field", "road", "lamp"]
SETTINGS = WindowSettings(max_length=24, overlap=6, max_question_length=4, max_answer_length=4)


def numbers(seed: int, count: int, *, words: int) -> list[Question]:
    """Lines of words with one number, which is the answer."""
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


def training(**changes: object) -> QaTrainingSection:
    section = QaTrainingSection(epochs=4, batch_size=8, learning_rate=3e-3, log_every=10)
    return replace(section, **changes)


def windows_of(questions: list[Question], tokenizer: Tokenizer) -> list[LabelledWindow]:
    return list(labelled_windows(questions, tokenizer, SETTINGS))


def test_a_model_learns_to_answer_across_windows(tokenizer: Tokenizer) -> None:
    """Lines of three windows each; the answer is in one of them, the others say that there is none."""
    held_out = numbers(2, 40, words=30)
    model = small_model()
    before = score_predictions(held_out, answer_questions(model, tokenizer, held_out, SETTINGS), tokenizer, "squad_v1")
    trained = train_windows(model, windows_of(numbers(1, 80, words=30), tokenizer), training())
    after = score_predictions(held_out, answer_questions(model, tokenizer, held_out, SETTINGS), tokenizer, "squad_v1")
    assert before.scores.exact < 0.3
    assert after.scores.exact > 0.9
    assert after.windows >= 2 * len(held_out)
    assert trained.losses[-1][1] < 0.2 * trained.losses[0][1]
    assert not model.training


def test_training_is_the_same_twice_and_its_steps_are_counted(tokenizer: Tokenizer) -> None:
    windows = windows_of(numbers(1, 7, words=30), tokenizer)
    results = []
    for _ in range(2):
        model = small_model()
        torch.manual_seed(5)
        results.append((train_windows(model, windows, training(epochs=1.5, batch_size=4, log_every=2)), model.state_dict()))
    (first, state), (second, again) = results
    per_epoch = -(-len(windows) // 4)
    assert first.steps == round(1.5 * per_epoch)
    assert [step for step, _ in first.losses] == [*range(2, first.steps, 2), first.steps]
    assert first.losses == second.losses
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert sum(len(one.window.ids) for one in windows) <= first.tokens <= 2 * sum(len(one.window.ids) for one in windows)


def test_a_loss_that_is_not_finite_ends_the_run(tokenizer: Tokenizer) -> None:
    model = small_model()
    with torch.no_grad():
        model.out.weight.fill_(torch.inf)
    with pytest.raises(InputError, match=r"training\.learning_rate: loss .* not finite"):
        train_windows(model, windows_of(numbers(1, 7, words=30), tokenizer), training())


def test_an_encoder_gets_a_head_and_a_head_is_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_encoder(small_model().encoder, tmp_path / "encoder")
    save_span_qa(small_model(), tmp_path / "qa")
    for folder in ("encoder", "qa"):
        tokenizer.save(tmp_path / folder)
    first, again, other = (open_span_qa(tmp_path / "encoder", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.out.weight, again.out.weight)
    assert not torch.equal(first.out.weight, other.out.weight)
    with pytest.raises(InputError, match="not complete"):
        open_span_qa(tmp_path / "encoder", seed=None)
    assert torch.equal(open_span_qa(tmp_path / "qa", seed=None)[0].out.weight, small_model().out.weight)


def test_other_peoples_token_types_are_warned_of(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    config = replace(preset("bert-base"), vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=("global",))
    model = SpanQA(Encoder(config))
    save_span_qa(model, tmp_path / "theirs")
    names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save(tmp_path / "theirs")
    settings = tmp_path / "theirs" / "tokenizer_config.json"
    write_json(settings, read_json(settings) | {"model_input_names": names})
    warn_of_token_types(*open_span_qa(tmp_path / "theirs", seed=None), "theirs")
    assert "theirs: was trained with two token types" in caplog.text
    caplog.clear()
    save_qa_model(model, Tokenizer.from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    warn_of_token_types(*open_span_qa(tmp_path / "ours", seed=None), "ours")
    assert caplog.text == ""


@pytest.mark.parametrize("head", [True, False])
def test_positions_are_extended_before_training(tmp_path: Path, tokenizer: Tokenizer, head: bool) -> None:
    config = replace(
        preset("bert-base"), vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=("global",), max_positions=64
    )
    model = SpanQA(init_weights(Encoder(config), seed=1))
    init_head(model, seed=7)
    if head:
        save_span_qa(model, tmp_path / "old")
    else:  # of a model of sentence-transformers the encoder is taken
        BiEncoder(model.encoder, tokenizer, ModelFolder("dense", tmp_path, max_length=32)).save(tmp_path / "old")
    tokenizer.save(tmp_path / "old")
    longer, told = open_span_qa(tmp_path / "old", seed=7, extend=2)
    assert longer.encoder.config.max_positions == 128 == told.max_length
    table = "embeddings.positions.weight"
    assert torch.equal(longer.encoder.state_dict()[table], interpolate_positions(model.encoder.state_dict()[table], 2))
    assert torch.equal(longer.out.weight, model.out.weight)
    save_span_qa(small_model(), tmp_path / "rope")
    tokenizer.save(tmp_path / "rope")
    with pytest.raises(InputError, match="no position embeddings but rope"):
        open_span_qa(tmp_path / "rope", seed=7, extend=2)


@pytest.mark.parametrize(("name", "length", "factor"), [("qa_korquad_512", 512, 1), ("qa_korquad_1024", 1024, 2)])
def test_the_shipped_recipes(name: str, length: int, factor: int) -> None:
    recipe = load_qa_recipe(name)
    assert (recipe.windows.max_length, recipe.model.extend_positions) == (length, factor)
    assert recipe.data.official == "korquad_v1"
    assert recipe.name == name
    assert find_recipe(name, KINDS).name == f"{name}.yaml"
    # They differ in nothing else that is trained with.
    other = load_qa_recipe("qa_korquad_512")
    assert (recipe.training, recipe.data) == (other.training, other.data)
    assert replace(recipe.windows, max_length=512) == other.windows


def test_a_recipes_problems_are_all_told() -> None:
    with pytest.raises(RecipeError) as caught:
        load_qa_recipe("qa_korquad_512", ["windows.max_answer_length=129", "training.epochs=0", "data.official=squad", "model.dropout=1"])
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "model.dropout",
        "data.official",
        "training.epochs",
        "windows.overlap",
    ]
