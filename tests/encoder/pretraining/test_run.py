"""Whole runs: files, refusals before the first step, and equality of a killed and resumed run with an uninterrupted one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiver.encoder import InputError, Tokenizer, load_encoder
from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.errors import RunStoppedError
from quiver.encoder.files import read_json
from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining import phases, task
from quiver.encoder.pretraining.corpus import open_corpus
from quiver.encoder.pretraining.phases import first_model
from quiver.encoder.pretraining.recipe import PretrainingRecipe
from quiver.encoder.pretraining.run import average_checkpoints, prepare, pretrain
from quiver.encoder.pretraining.task import STATES, PretrainingTask, Session
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.run_folder import LOG, Checkpoints, read_log
from quiver.encoder.training.trainer import Callback, Progress, load_train_state

pytest.importorskip("optimi")

MakeRecipe = Callable[..., PretrainingRecipe]

TIMES = ("seconds", "tokens_per_second", "flops_per_second")
"""Keys of the log that no two runs share."""


class Killed(BaseException):
    """Simulates a kill: no code catches it."""


class At(Callback):
    """Calls a function in a step, after the optimizer step and before anything is logged or saved."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self._step = step
        self._action = action

    def on_step(self, step: int) -> None:
        if step == self._step:
            self._action()


def die() -> None:
    raise Killed


def pretrain_until(step: int, recipe: PretrainingRecipe, out: Path) -> None:
    """Run until a kill in a step, before that step is logged or saved."""
    with pytest.raises(Killed):
        pretrain(recipe, out, callbacks=[At(step, die)])


def without_times(lines: list[Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def model_bytes(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def test_a_run_saves_a_trained_model(whole_run: Path) -> None:
    out, record = whole_run, read_json(whole_run / "run.json")
    result = record["result"]
    assert (record["command"], result["average"]) == ("quiver pretrain ...", True)
    assert record["schema"] == "quiver-run/pretraining-1"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["begun.json", "checkpoints", "corpus", "log.jsonl", "model", "recipe.json", "run.json", "tokenizer"]
    )
    assert result["curves"]["held_out_loss"][-1][1] < result["curves"]["held_out_loss"][0][1] - 0.5
    assert result["tokens"] >= 5000
    assert 0.95 < result["packing"] <= 1
    flops, tokens = (dict(result["curves"][key]) for key in ("flops_per_second", "tokens_per_second"))
    assert flops.keys() == tokens.keys()
    assert {flops[step] / tokens[step] > 6 * 2 * (4 * 16 * 16 + 3 * 16 * 24) for step in flops} == {True}, "matrices alone are so many"
    assert [phase["name"] for phase in result["phases"]] == ["short", "long"]
    assert result["phases"][1]["last_step"] == result["steps"]
    rates = dict(result["curves"]["learning_rate"])
    assert 0 < rates[2] < 5e-3
    assert max(rates.values()) == 5e-3
    assert rates[result["steps"]] < 1e-3
    assert [size for _, size in result["curves"]["batch_size"]][:1] == [4]
    assert {size for _, size in result["curves"]["batch_size"]} == {4, 8, 12, 6}
    encoder = load_encoder(out / "model")
    assert (encoder.config.max_positions, encoder.config.global_theta) == (48, 160_000.0)
    assert len(Tokenizer.from_pretrained(out / "model")) == 320


def test_a_frequency_bias_starts_at_the_entropy_of_the_tokens(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    # With weights of 1e-4 the logits equal the bias, so the first loss is the entropy of the tokens, not the logarithm of their number.
    losses = {}
    for bias in ("zeros", "frequencies"):
        recipe = make_recipe(f"model.decoder_bias={bias}", "model.init_std=1e-4", "training.log_every=1")
        pretrain_until(2, recipe, tmp_path / bias)
        losses[bias] = read_log(tmp_path / bias / LOG)[0]["loss"]
    ids = open_corpus(tmp_path / "zeros" / "corpus").train.ids
    counts = np.bincount(ids, minlength=320)
    special = [Tokenizer.from_pretrained(tmp_path / "zeros" / "tokenizer").special_id(name) for name in ("cls", "sep")]
    words = np.delete(counts, special)
    words = words[words > 0]
    chances = words / counts.sum()
    entropy = -(words / words.sum() * np.log(chances)).sum()
    assert losses["zeros"] == pytest.approx(np.log(320), abs=0.01)
    assert losses["frequencies"] == pytest.approx(entropy, abs=0.2)
    with pytest.raises(InputError, match=r"model.decoder_bias: the weights of somewhere have their own"):
        make_recipe("model.decoder_bias=frequencies", "model.init=somewhere", "model.tokenizer=somewhere")


def test_a_full_disk_raises_oserror_and_the_run_can_be_resumed(
    make_recipe: MakeRecipe, tmp_path: Path, whole_run: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    recipe, out = make_recipe("training.averaging.ema_half_life=4"), tmp_path / "out"
    with ExitStack() as filled, pytest.raises(OSError, match="File too large") as caught:
        pretrain(recipe, out, callbacks=[At(8, lambda: filled.enter_context(full_disk(10_000)))])
    assert str(caught.value.filename).startswith(str(out / "checkpoints"))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000004"]
    assert pretrain(recipe, out, resume=True)["result"]["resumed_at"] == [4]
    assert model_bytes(out) == model_bytes(whole_run)


@pytest.mark.parametrize("fatal", [3, 7, 16, 22])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_run(make_recipe: MakeRecipe, tmp_path: Path, fatal: int, whole_run: Path) -> None:
    """Kills before the first checkpoint, in phase 1, at its end, in phase 2; dropout, warm-ups and moving average continue."""
    recipe = make_recipe("training.averaging.ema_half_life=4")
    out = tmp_path / "out"
    pretrain_until(fatal, recipe, out)
    record = pretrain(recipe, out, resume=True)
    whole = read_json(whole_run / "run.json")
    assert model_bytes(out) == model_bytes(whole_run)
    assert without_times(read_log(out / LOG)) == without_times(read_log(whole_run / LOG))
    saved = max((step for step in (4, 8, 12, 15, 16, 20) if step < fatal), default=0)
    assert record["result"]["resumed_at"] == [saved]
    assert whole["result"]["resumed_at"] == []
    same = ("steps", "tokens", "packing", "phases", "kept_steps")
    assert [record["result"][key] for key in same] == [whole["result"][key] for key in same]


def test_sigterm_finishes_the_step_and_saves(make_recipe: MakeRecipe, tmp_path: Path, whole_run: Path) -> None:
    recipe, out = make_recipe("training.averaging.ema_half_life=4"), tmp_path / "out"
    with pytest.raises(RunStoppedError) as stopped:
        pretrain(recipe, out, callbacks=[At(6, lambda: os.kill(os.getpid(), signal.SIGTERM))])
    assert stopped.value.step == 7, "the step after the signal is the last"
    assert (out / "checkpoints" / f"step-{stopped.value.step:06d}" / "seal.json").is_file()
    assert not (out / "run.json").exists()
    pretrain(recipe, out, resume=True)
    assert model_bytes(out) == model_bytes(whole_run)


@pytest.mark.parametrize("with_last", [True, False])
def test_the_model_averages_the_best_checkpoints_and_the_last(make_recipe: MakeRecipe, tmp_path: Path, with_last: bool) -> None:
    """The last one, here the best of all, does not count among the best where it is averaged anyway: two best make three models."""
    recipe = make_recipe(
        *("training.averaging.best=2", f"training.averaging.with_last={str(with_last).lower()}"),
        *("training.evaluate_every=2", "training.keep_checkpoints=1", "training.save_every="),
    )
    result = pretrain(recipe, tmp_path / "out")["result"]
    begin, last = result["phases"][0]["last_step"], result["steps"]
    ranked = [int(step) for _, step in sorted((loss, step) for step, loss in result["curves"]["held_out_loss"] if step > begin)]
    assert ranked[0] == last
    before = [step for step in ranked if step != last]
    kept = [*before[:2], last] if with_last else ranked[:2]
    assert result["kept_steps"] == sorted(kept)
    folders = [tmp_path / "out" / "checkpoints" / f"step-{step:06d}" for step in sorted(kept)]
    mean, found = average_checkpoints(folders), load_head(MaskedLM, tmp_path / "out" / "model")
    states = [load_head(MaskedLM, folder).state_dict() for folder in folders]
    for name, weight in found.state_dict().items():
        assert torch.equal(weight, mean.state_dict()[name])
        torch.testing.assert_close(weight, torch.stack([state[name] for state in states]).mean(0))


def test_fewer_checkpoints_than_asked_for_are_averaged_with_a_warning(
    make_recipe: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = pretrain(make_recipe("training.averaging.best=3", "training.evaluate_every=10"), tmp_path / "out")["result"]
    assert len(result["kept_steps"]) < 4
    assert "checkpoints before the last one, not 3; lower training.evaluate_every" in caplog.text


def test_all_checkpoints_are_kept_if_asked_for(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    result = pretrain(make_recipe("training.keep=all", "training.keep_checkpoints=1"), tmp_path / "out")["result"]
    expected = sorted({*range(4, result["steps"], 4), *(phase["last_step"] for phase in result["phases"])})
    assert Checkpoints(tmp_path / "out" / "checkpoints").steps() == expected


def test_a_z_loss_is_trained_and_logged(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The first loss is larger by the z-loss; a resumed run logs the same values."""
    overrides = ("training.log_every=1", "model.attention_output_dropout=0")
    pretrain_until(6, make_recipe("training.z_loss=0.1", *overrides), tmp_path / "with")
    pretrain_until(3, make_recipe(*overrides), tmp_path / "without")
    lines, plain = read_log(tmp_path / "with" / LOG), read_log(tmp_path / "without" / LOG)
    assert "z_loss" not in plain[0]
    assert lines[0]["z_loss"] == pytest.approx(0.1 * np.log(320) ** 2, rel=0.01)
    assert lines[0]["loss"] == pytest.approx(plain[0]["loss"] + lines[0]["z_loss"], rel=1e-5)
    assert lines[4]["z_loss"] < lines[0]["z_loss"]
    record = pretrain(make_recipe("training.z_loss=0.1", *overrides), tmp_path / "with", resume=True)
    assert record["result"]["curves"]["z_loss"][:5] == [[line["step"], line["z_loss"]] for line in lines if "z_loss" in line][:5]


def test_the_last_checkpoint_of_each_phase_is_kept(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A larger model starts from the checkpoint of the first phase, which is no longer among the newest at the end."""
    record = pretrain(make_recipe("training.keep_checkpoints=1", "training.save_every=2"), tmp_path / "out")
    ends = [phase["last_step"] for phase in record["result"]["phases"]]
    assert ends[1] - ends[0] > 4
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in ends]
    assert load_head(MaskedLM, tmp_path / "out" / "checkpoints" / f"step-{ends[0]:06d}").encoder.config.global_theta == 10_000


def test_the_moving_average_continues_across_phases(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """An average with a very long half-life stays at the initial weights, although both phases change the weights."""
    recipe = make_recipe("training.averaging.ema_half_life=1e6")
    record = pretrain(recipe, tmp_path / "out")
    first = first_model(recipe, Tokenizer.from_pretrained(tmp_path / "out" / "tokenizer")).state_dict()
    last = load_head(MaskedLM, tmp_path / "out" / "checkpoints" / f"step-{record['result']['steps']:06d}").state_dict()
    for name, weight in load_head(MaskedLM, tmp_path / "out" / "model").state_dict().items():
        torch.testing.assert_close(weight, first[name], rtol=0, atol=1e-5)
        assert (last[name] - first[name]).abs().max() > 1e-3, name


def test_a_nan_loss_stops_the_run_before_the_step(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = phases.in_form

    def poisoned(*arguments: Any, **others: Any) -> Any:
        model = real(*arguments, **others)
        with torch.no_grad():
            model.encoder.embeddings.tokens.weight[40:] = float("nan")
        return model

    monkeypatch.setattr(task, "in_form", poisoned)  # called when the second phase begins
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"loss is nan at step 16; the batch was saved to .*step-000016: .*lower phases\.1\.learning_rate"):
        pretrain(make_recipe(), out)
    kept = json.loads((out / "nonfinite" / "step-000016" / "batch.json").read_text())
    assert {"offset", "length", "serial", "masked_text"} == set(kept["batches"][0]["rows"][0])
    assert "[CLS]" in kept["batches"][0]["rows"][0]["masked_text"]
    assert read_log(out / LOG)[-1]["step"] == 15


def test_waiting_pieces_of_a_phase_are_the_first_of_the_next(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Both phases together read every piece of the stream once, except those that wait at the end."""
    recipe, out = make_recipe(), tmp_path / "out"
    prepare(recipe, out)
    tokenizer = Tokenizer.from_pretrained(out / "tokenizer")
    session = Session(recipe, out, Checkpoints(out / "checkpoints"), open_corpus(out / "corpus"), tokenizer, Processes(), "cpu")
    learned = PretrainingTask(session, Progress())
    read: list[int] = []
    more, step = True, 0
    while more:
        for batches in learned.steps():
            read.extend(example["serial"] for batch in batches for example in batch.examples)
            learned.after_step(step := step + 1)
        more = learned.next_phase()
    assert len(learned.phase_ends) == 2
    assert len(read) == len(set(read))
    missing = set(range(max(read) + 1)) - set(read)
    (tmp_path / "state").mkdir()
    learned.save(tmp_path / "state", Progress(), [])
    waiting = {int(row[2]) for row in load_train_state(tmp_path / "state", STATES).state["stream"]["packer"]["waiting"].tolist()}
    assert missing <= waiting


def test_a_run_that_cannot_start_leaves_no_files(make_recipe: MakeRecipe, tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    (texts / "code.jsonl").write_text('{"text": ""}\n')
    (texts / "prose.txt").write_text(" \n \n")
    with pytest.raises(InputError, match="is empty"):
        pretrain(make_recipe(), out)
    assert not out.exists()
    (texts / "prose.txt").write_bytes(b"a line\nbroken \xff\n")
    with pytest.raises(InputError, match=r"prose\.txt:2: not UTF-8"):
        pretrain(make_recipe(), out)
    assert not out.exists()


def test_folders_that_contain_other_runs_or_files_are_refused(make_recipe: MakeRecipe, tmp_path: Path, whole_run: Path) -> None:
    recipe = make_recipe("training.averaging.ema_half_life=4")
    with pytest.raises(InputError, match="already contains a run; choose another --out"):
        pretrain(recipe, whole_run)
    with pytest.raises(InputError, match="contains no run to resume"):
        pretrain(recipe, tmp_path / "new", resume=True)
    pretrain_until(6, recipe, tmp_path / "half")
    other = make_recipe("training.averaging.ema_half_life=4", "phases.1.learning_rate=1e-4", "training.log_every=1")
    with pytest.raises(InputError, match=r"data of the interrupted run; phases\.1\.learning_rate was 0\.003, is 0\.0001$"):
        pretrain(other, tmp_path / "half", resume=True)


def test_a_run_cannot_be_resumed_with_another_corpus(make_recipe: MakeRecipe, tmp_path: Path, texts: Path) -> None:
    recipe, out = make_recipe(), tmp_path / "out"
    pretrain_until(6, recipe, out)
    shutil.rmtree(out / "corpus")
    with (texts / "prose.txt").open("a") as file:
        file.write("one more line of it\n")
    with pytest.raises(InputError, match=r"data of the interrupted run; corpus\.counts\.prose\.train\.documents was \d+, is \d+"):
        pretrain(recipe, out, resume=True)
