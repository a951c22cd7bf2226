"""Wheel and sdist work without any extra, hints name extras that exist, and the README renders on a package index."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from quiver import BiEncoder
from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.models.options import ModelFolder
from tests.environments import REPOSITORY, bare_environment, extras, pyproject

FOLDERS = ("encoder", "retrieval", "eval", "quiver")


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]


def test_each_hint_names_an_extra_that_exists() -> None:
    known, found = extras(), 0
    for path in [*sources(), REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]:
        for names in re.findall(r"(?:quiver-retrieval|-e '?\.)\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            found += 1
            assert set(names.split(",")) <= set(known), f"{path}: {names}"
    assert found > 15


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quiver_setup", REPOSITORY / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_of_a_package_index_has_no_relative_link() -> None:
    made = setup_script()
    assert doctest.testmod(made).failed == 0
    text = made.index_readme((REPOSITORY / "README.md").read_text(encoding="utf-8"), made.repository(pyproject()))
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
    assert "<!--" not in text


# Runs commands in one process, as each would spend seconds to import torch; prints command, exit status and standard error of each.
RUN = """
import contextlib, io, json, sys
from quiver.cli.main import main
for line in sys.argv[1:]:
    sys.argv, output, error, status = ["quiver", *line.split()], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as stop:
            status = stop.code or 0
    print(json.dumps([line, status, error.getvalue()]))
"""

# What a command says without the libraries of an extra. Options that it needs to come so far are given.
WITHOUT_EXTRAS = {
    "serve index": "serve",
    "mcp index": "mcp",
    "evaluate --model bm25 --data data --out o": "eval",
    "train quickstart --out o": "train",
    "export model --layout onnx --out o": "interop",
    "index build page.pdf --model model --out o": "files",
    "index build data --model model --out o --executor ray": "ray",
    "teacher-scores rows.jsonl --teacher cross --out o": "train",
}


@pytest.mark.slow
def test_wheel_and_sdist_work_in_an_environment_without_extras(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in tracked:
        if not name.startswith("tests/") and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    build = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"

    def built(kind: str, folder: Path) -> Path:
        done = subprocess.run([sys.executable, "-c", build, kind, str(tmp_path)], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return tmp_path / done.stdout.split()[-1]

    if tuple(map(int, metadata.version("setuptools").split(".")[:2])) < (77, 0):
        pytest.skip("setuptools 77 builds the wheel")
    sdist = built("build_sdist", source)
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "unpacked")
    wheel = built("build_wheel", next((tmp_path / "unpacked").iterdir()))
    python, site = bare_environment(tmp_path / "environment")
    with zipfile.ZipFile(wheel) as packed_wheel:
        names = packed_wheel.namelist()
        packed_wheel.extractall(site)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"quiver", "quiver_retrieval"}
    described = metadata.Distribution.at(next(site.glob("quiver_retrieval-*.dist-info"))).metadata
    assert "](docs/" not in described.get_payload()
    assert described["Description-Content-Type"] == "text/markdown"

    work = tmp_path / "work"
    work.mkdir()
    tokenizer = Tokenizer.train(["owls have wings", "trout have fins", "which animal has wings"], vocab_size=300, max_length=64)
    layers = {"num_heads": 2, "intermediate_size": 48, "layer_types": ["global"], "max_positions": 64}
    encoder = init_weights(Encoder(EncoderConfig.modernbert(vocab_size=300, hidden_size=32, **layers)), seed=1)
    BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", work / "model", max_length=16)).save_pretrained(work / "model")
    (work / "data" / "qrels").mkdir(parents=True)
    (work / "data" / "corpus.jsonl").write_text('{"_id": "owl", "text": "owls have wings"}\n{"_id": "trout", "text": "trout have fins"}\n')
    (work / "data" / "queries.jsonl").write_text('{"_id": "q", "text": "which animal has wings"}\n')
    (work / "data" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\towl\t1\n")
    (work / "rows.jsonl").write_text('{"query": "wings", "positive": "owls have wings"}\n')
    (work / "page.pdf").write_bytes(b"%PDF-1.4")
    (work / "cross").mkdir()
    (work / "cross" / "config.json").write_text('{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}')
    environment = {**os.environ, "QUIVER_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}

    lines = ["--version", "--help", "validate quickstart", "index build data --model model --out index", "search index wings"]
    lines += ["index build data --model bm25 --out words", "search words wings"]
    command = [python, "-c", RUN, *lines, *WITHOUT_EXTRAS]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=True, timeout=300)
    said = {line: (status, error) for line, status, error in map(json.loads, done.stdout.splitlines())}
    for line in lines:
        assert said[line][0] == 0, f"{line}: {said[line][1]}"
    for line, extra in WITHOUT_EXTRAS.items():
        status, error = said[line]
        assert status == 2, f"{line}: {error}"
        [message] = error.splitlines()
        assert f"pip install 'quiver-retrieval[{extra}]'" in message, f"{line}: {message}"
    assert not (work / "o").exists()
