"""Two processes of torchrun do the same steps as one, and stop and resume together."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quiver.encoder import InputError
from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.files import read_json
from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.recipe import PretrainingRecipe
from quiver.encoder.pretraining.run import pretrain
from tests.processes import imported_python

pytest.importorskip("optimi")

MakeRecipe = Callable[..., PretrainingRecipe]

WORKER = """
import json, logging, os, signal, sys
from pathlib import Path

from torch import distributed

from quiver.encoder.pretraining.recipe import load_pretraining_recipe
from quiver.encoder.pretraining.run import pretrain
from quiver.encoder.errors import RunStoppedError
from quiver.encoder.training.trainer import Callback

logging.getLogger("quiver.encoder.training.sharding").setLevel(logging.INFO)
logging.getLogger("quiver.encoder.training.sharding").addHandler(logging.StreamHandler())
folder = Path(sys.argv[1])
recipe = load_pretraining_recipe(folder / "two.json")
distributed.init_process_group("gloo")  # shared by all runs
pretrain(recipe, folder / "two")

settings = ["training.sharding=full", "training.gradient_checkpointing=true"]
pretrain(load_pretraining_recipe(folder / "two.json", settings), folder / "sharded")

class Signalled(Callback):
    def on_step(self, step):
        if step == 7 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # only one process receives the signal

for sharding in ("none", "full"):
    settings = ["model.attention_output_dropout=0.1", "training.averaging.ema_half_life=4", f"training.sharding={sharding}"]
    recipe = load_pretraining_recipe(folder / "two.json", settings)
    pretrain(recipe, folder / f"whole-{sharding}")
    try:
        pretrain(recipe, folder / f"half-{sharding}", callbacks=[Signalled()])
    except RunStoppedError as stopped:
        (folder / f"stopped-{sharding}-{distributed.get_rank()}").write_text(str(stopped.step))
    pretrain(recipe, folder / f"half-{sharding}", resume=True)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_like_one(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The batch-size warm-up begins at one row, so the second process has no row in the first steps."""
    recipe = make_recipe("model.attention_output_dropout=0")
    (tmp_path / "two.json").write_text(json.dumps(recipe.model_dump()))
    (tmp_path / "worker.py").write_text(WORKER)
    python = imported_python()
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, python, "worker.py", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]

    shares = re.findall(r"process \d holds ([\d,]+) of ([\d,]+) weights", done.stderr)
    assert len(shares) >= 2 * 2  # of two processes, in two phases
    assert all(int(own.replace(",", "")) < 0.55 * int(every.replace(",", "")) for own, every in shares)
    one = pretrain(recipe, tmp_path / "one")
    for kind in ("two", "sharded"):
        two = read_json(tmp_path / kind / "run.json")
        assert (one["processes"], two["processes"]) == (1, 2)
        assert one["corpus"] == two["corpus"]
        for key in ("steps", "tokens", "packing", "phases"):
            assert one["result"][key] == two["result"][key]
        seen = 0
        for key in ("loss", "grad_norm", "held_out_loss"):
            found, expected = (dict(record["result"]["curves"][key]) for record in (two, one))
            assert found == pytest.approx(expected, rel=1e-4), (kind, key)
            seen += len(expected)
        assert seen > 20
        weights = [load_head(MaskedLM, tmp_path / name / "model").state_dict() for name in ("one", kind)]
        for name, weight in weights[0].items():
            torch.testing.assert_close(weight, weights[1][name], rtol=1e-3, atol=1e-4)

    for sharding in ("none", "full"):
        steps = {(tmp_path / f"stopped-{sharding}-{rank}").read_text() for rank in range(2)}
        assert steps == {"8"}
        models = [(tmp_path / f"{name}-{sharding}" / "model" / "model.safetensors").read_bytes() for name in ("whole", "half")]
        assert models[0] == models[1], "with dropout: each process has random numbers of its own, and has them back"
    (tmp_path / "half-none" / "run.json").unlink()
    with pytest.raises(InputError, match="processes was 2, is 1"):
        pretrain(
            make_recipe("model.attention_output_dropout=0.1", "training.averaging.ema_half_life=4"), tmp_path / "half-none", resume=True
        )
