"""How many of the toolkit's own files a cold command enters: what one has to read to follow it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quiver

PACKAGES = ("encoder", "retrieval", "eval", "quiver")
# A file counts if one of its functions is called; imports alone do not.
ENTERED = """
import sys
from pathlib import Path
entered = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 2:
        entered.add(frame.f_code.co_filename)
sys.setprofile(note)
from quiver.cli.main import main
try:
    main()
finally:
    sys.setprofile(None)
    Path({notes!r}).write_text("\\n".join(entered))
"""
# These numbers may only fall; a processor without compiled kernels enters fewer.
MOST = {"index build": 45, "search": 36, "evaluate": 55, "train": 56}


def files_of(command: str, notes: Path) -> list[str]:
    """The files that a command enters in a process of its own, below the checkout."""
    code = ENTERED.format(notes=str(notes))
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True, text=True, cwd=notes.parent, check=False)
    assert done.returncode == 0, done.stderr
    root = Path(str(quiver.__file__)).resolve().parents[1]
    paths = [Path(name).resolve() for name in notes.read_text().splitlines()]
    below = [path.relative_to(root) for path in paths if path.is_relative_to(root)]
    return sorted(path.as_posix() for path in below if path.parts[0] in PACKAGES)


@pytest.mark.slow
def test_cold_commands_enter_few_files(data: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    rows = [{"query": f"birds {number}", "positive": f"a text about {number}"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "name": "small", "kind": "dense", "model": {"init": str(model)}, "loss": {"name": "mnrl"},
        "data": {"train": str(tmp_path / "rows.jsonl"), "document_fields": ["positive"]},
        "training": {
            "epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "warmup_ratio": 0.1, "weight_decay": 0.01, "max_grad_norm": 1.0, "seed": 7,
            "scheduler": "linear", "no_duplicates": False, "log_every": 1, "dtype": "float32",
        },
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    data = data.rename(tmp_path / "own")  # no published collection has this name
    commands = {
        "index build": f"index build {data} --model {model} --no-progress --out {tmp_path / 'i'}",
        "search": f"search {tmp_path / 'i'} birds",
        "evaluate": f"evaluate --data {data} --model {model} --out {tmp_path / 'e'} --no-progress --no-cache",
        "train": f"train {tmp_path / 'recipe.json'} --out {tmp_path / 't'} --no-progress --device cpu",
    }
    # The first process on a machine compiles the kernels of encoders, and enters the modules that generate them.
    files_of(f"{commands['index build']}-first", tmp_path / "notes")
    entered = {name: files_of(command, tmp_path / "notes") for name, command in commands.items()}
    counts = {name: len(files) for name, files in entered.items()}
    sys.stdout.write(f"\n  files entered: {counts}\n")
    assert all(counts[name] <= most for name, most in MOST.items()), counts
    assert "quiver/cli/search.py" in entered["search"]
    assert not any(name.startswith(("eval/", "retrieval/training")) for name in entered["search"] + entered["index build"])
