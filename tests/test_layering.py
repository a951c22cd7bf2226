"""One arrow: encoder <- retrieval <- eval. Read from the imports of every file, lazy ones included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
COMPOSITION_ROOT = {
    Path(f"retrieval/cli/{name}.py")
    for name in (
        *("bench", "bench_index", "collections", "evaluation", "glue", "interchange", "mining", "planning", "positions"),
        *("pretraining", "qa", "reports", "sweep", "training"),
    )
}
PACKAGES = ("encoder", "retrieval", "eval")
FORBIDDEN = {"encoder": {"retrieval", "eval"}, "retrieval": {"eval"}, "eval": set()}
# The core runs without them: they may only be imported where the train or eval extra is asked for.
EXTRAS = {
    "transformers",
    "sentence_transformers",
    "pylate",
    "datasets",
    "accelerate",
    "optimi",
    "beir",
    "bm25s",
    "ir_measures",
    "pytrec_eval",
    "matplotlib",
    "jinja2",
    "ray",
    "qdrant_client",
    "lancedb",
    "langchain_core",
    "llama_index",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "pydantic",
}
TRAINING_MODULES = ("loop/trainer", "loop/watch", "student/build", "student/columns", "student/heads", "student/losses", "student/native")
SERVING_MODULES = ("application", "contract", "metrics", "problems", "schemas", "server")
SERVING = {Path(f"retrieval/serving/{name}.py") for name in SERVING_MODULES}
TRAINING = {Path(f"retrieval/training/{name}.py") for name in TRAINING_MODULES}

# Named after the library that each is for, and imported by whoever asks for it.
INTEROPERATION = {Path(f"retrieval/interoperation/{name}.py") for name in ("qdrant", "lance", "langchain", "llama_index")}


def imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def sources() -> list[Path]:
    return sorted(path.relative_to(REPOSITORY) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


def test_all_sources_are_seen() -> None:
    found = sources()
    assert len(found) >= 60
    assert {path.parts[0] for path in found} == set(PACKAGES)
    assert set(found) >= COMPOSITION_ROOT
    assert set(found) >= TRAINING | INTEROPERATION | SERVING


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_follow_the_arrow(path: Path) -> None:
    found = imports(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")))
    if path not in COMPOSITION_ROOT:
        assert not found & FORBIDDEN[path.parts[0]]


@pytest.mark.parametrize("path", sorted(set(sources()) - TRAINING - INTEROPERATION - SERVING), ids=str)
def test_the_core_imports_no_extra_at_its_top(path: Path) -> None:
    module = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    top = ast.Module([node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert not imports(top) & EXTRAS


def test_importing_the_packages_loads_no_extra() -> None:
    import subprocess
    import sys

    code = f"import sys, encoder, retrieval, eval; print(sorted({EXTRAS!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
