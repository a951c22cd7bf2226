"""The order of the packages, read from every import of every source file, those inside functions and under TYPE_CHECKING included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# A package imports from its own line and from those above it; the longest name that fits a module decides.
LAYERS = (
    ("encoder",),
    ("retrieval.options", "retrieval.records", "retrieval.cache", "retrieval.display"),
    ("retrieval.index.kernels", "retrieval.cluster.executors"),
    ("retrieval.data",),
    ("retrieval.models", "retrieval.data.embedding_store"),
    ("retrieval.index",),
    ("retrieval.search",),
    ("retrieval.training", "retrieval.serving", "retrieval.cluster", "retrieval.integrations", "retrieval.planning"),
    ("eval",),
    ("cli",),
)
# The core runs without them: what imports one when it is itself imported is imported by whoever asks for it.
EXTRAS = (
    "transformers sentence_transformers pylate datasets accelerate optimi beir bm25s ir_measures pytrec_eval matplotlib jinja2 ray "
    "langchain_core llama_index onnx onnxscript onnxruntime fastapi fastapi_offline starlette uvicorn prometheus_client"
)
NEEDS_EXTRA = tuple(f"retrieval/{name}" for name in ("serving/", "integrations/", "cluster/", "training/losses", "training/pylate"))


def modules() -> dict[str, Path]:
    """Dotted name below ``quiver.`` -> its file."""
    found = {}
    for package in ("encoder", "retrieval", "eval", "quiver"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
            found[name.removeprefix("quiver.")] = path
    return found


MODULES = modules()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported; of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def own_imports() -> dict[str, set[str]]:
    """Module -> the own modules that it imports; a package counts where a name is imported from its ``__init__``."""
    graph = {}
    for module, path in MODULES.items():
        tree = parsed(path)
        names = {name.removeprefix("quiver.") for name in imported(tree) if name.startswith("quiver.")} & set(MODULES)
        packages = {name for name in names if MODULES[name].name == "__init__.py"}
        graph[module] = names - {module} - {package for package in packages if any(name.startswith(f"{package}.") for name in names)}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reached = {}
    for start in graph:
        seen, stack = set(), list(graph[start])
        while stack:
            if (module := stack.pop()) not in seen:
                seen.add(module)
                stack += graph[module]
        reached[start] = seen
    groups = {tuple(sorted(other for other in reached[start] if start in reached[other])) for start in graph if start in reached[start]}
    return [list(group) for group in sorted(groups)]


def layer(module: str) -> int:
    """Place of a module's package in `LAYERS`; packages without modules of their own are everywhere."""
    found = [(len(name), place) for place, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")]
    assert found or MODULES[module].name == "__init__.py", f"{module}: give it a place in LAYERS"
    return max(found)[1] if found else 0


def test_modules_import_only_from_packages_above_them() -> None:
    graph = own_imports()
    assert len(graph) > 100
    assert sorted(f"{one} imports {other}" for one, others in graph.items() for other in others if layer(other) > layer(one)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert circles(own_imports()) == []


def test_core_modules_import_no_extra_at_the_top() -> None:
    against = []
    for path in MODULES.values():
        name = path.relative_to(REPOSITORY).as_posix()
        tree = parsed(path)
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        roots = {each.partition(".")[0] for each in imported(top)}
        assert not roots & {"encoder", "retrieval", "eval"}, f"{name}: own packages are imported as quiver.*"
        if found := roots & set(EXTRAS.split()) and not name.startswith(NEEDS_EXTRA):
            against.append(f"{name}: {found}")
    assert not against


def test_importing_the_public_names_loads_no_extra() -> None:
    code = (
        "import sys, quiver, quiver.encoder, quiver.retrieval, quiver.eval\n"
        "for package in (quiver, quiver.encoder, quiver.retrieval, quiver.eval):\n"
        "    [getattr(package, name) for name in package.__all__]\n"
        f"print(sorted(set({EXTRAS.split()!r}) & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
