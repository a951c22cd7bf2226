"""One arrow: encoder <- retrieval <- eval <- quiver. Read from the imports of every file, lazy ones included."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("encoder", "retrieval", "eval", "quiver")
FORBIDDEN = {"encoder": {"retrieval", "eval", "cli"}, "retrieval": {"eval", "cli"}, "eval": {"cli"}, "quiver": set()}
# The core runs without them: they may only be imported where the train, eval, serve, ray or interop extra is asked for.
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
}
TRAINING_MODULES = ("losses", "pylate_losses")
SERVING_MODULES = ("application", "metrics", "schemas", "server")
SERVING = {Path(f"retrieval/serving/{name}.py") for name in SERVING_MODULES}
TRAINING = {Path(f"retrieval/training/{name}.py") for name in TRAINING_MODULES}

# Named after the library that each is for, and imported by whoever asks for it.
INTEGRATIONS = {Path(f"retrieval/integrations/{name}.py") for name in ("qdrant", "lance", "langchain", "llama_index")}


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of all imported modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_packages(names: set[str]) -> set[str]:
    """``encoder`` of ``quiver.encoder.model``; names outside Quiver are left out."""
    return {name.split(".")[1] for name in names if name.startswith("quiver.")}


def sources() -> list[Path]:
    return sorted(path.relative_to(REPOSITORY) for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))


def test_all_sources_are_seen() -> None:
    found = sources()
    assert len(found) >= 60
    assert {path.parts[0] for path in found} == set(PACKAGES)
    assert set(found) >= TRAINING | INTEGRATIONS | SERVING


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_follow_the_arrow(path: Path) -> None:
    found = imports(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")))
    assert not own_packages(found) & FORBIDDEN[path.parts[0]]
    assert not {name.partition(".")[0] for name in found} & {"encoder", "retrieval", "eval"}, "imported as quiver.*"


@pytest.mark.parametrize("path", sorted(set(sources()) - TRAINING - INTEGRATIONS - SERVING), ids=str)
def test_core_modules_import_no_extra_at_the_top(path: Path) -> None:
    module = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"))
    top = ast.Module([node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert not {name.partition(".")[0] for name in imports(top)} & EXTRAS


@pytest.mark.parametrize("path", [path for path in sources() if path.parts[:2] in (("retrieval", "index"), ("retrieval", "data"))], ids=str)
def test_index_and_data_do_not_import_the_cluster(path: Path) -> None:
    found = imports(ast.parse((REPOSITORY / path).read_text(encoding="utf-8")))
    assert not any(name.startswith("quiver.retrieval.cluster") for name in found), "executors implement quiver.retrieval.records.Executor"


def test_importing_the_public_names_loads_no_extra() -> None:
    code = (
        "import sys, quiver, quiver.encoder, quiver.retrieval, quiver.eval\n"
        "for package in (quiver, quiver.encoder, quiver.retrieval, quiver.eval):\n"
        "    [getattr(package, name) for name in package.__all__]\n"
        f"print(sorted({EXTRAS!r} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
