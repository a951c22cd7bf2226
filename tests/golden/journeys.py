"""How far data travels: own files and functions that a call of the toolkit enters, own modules that an import loads, time of --help.

    python journeys.py [--only encode] [--json] [--work FOLDER]

Every journey runs in a process of its own under ``sys.setprofile`` (and ``threading.setprofile``) on a toy model. A file counts when a
function that is written in it is called; a function counts once, however often it is called. Lambdas, comprehensions and the bodies of
modules and classes count with ``--all-frames`` only. The journey is made once before it is measured, so that what runs when a module is
imported does not count; with ``--cold`` it does.

QUIVER_DATA names the folder of the collections; names and folders that may change stand in ``interface.py``.
"""

# ruff: noqa: T201 - scripts that print

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fixtures
from interface import OWN_PACKAGES, PACKAGE, arguments, environment, executable, name


def checkout() -> Path:
    """The folder that holds the packages."""
    import importlib

    found = importlib.import_module(PACKAGE.partition(".")[0])
    return Path(next(iter(found.__path__))).resolve().parent


class Entered:
    """Collects the code objects of own files that are called in a block, in any thread."""

    def __init__(self, root: Path, *, all_frames: bool) -> None:
        self._places = tuple(f"{root / package}{os.sep}" for package in OWN_PACKAGES)
        self._all = all_frames
        self._seen: set[CodeType] = set()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._seen.add(frame.f_code)

    def __enter__(self) -> Entered:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def found(self) -> list[tuple[str, str]]:
        """(file, function) of each, sorted."""
        kept = set()
        for code in self._seen:
            if not code.co_filename.startswith(self._places):
                continue
            is_function = not code.co_name.startswith("<") and code.co_flags & inspect.CO_OPTIMIZED  # bodies of classes are not optimised
            if not self._all and not is_function:
                continue
            kept.add((code.co_filename, f"{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}"))
        return sorted(kept)


# ---- The journeys. Each prepares itself, and gives what is measured.


def encode(work: Path) -> Callable[[], object]:
    """BiEncoder.encode of two texts."""
    model = name("BiEncoder")(fixtures.tiny_biencoder(work))
    return lambda: model.encode_texts(["a bird has wings", "which animal has wings and flies over the sea"], "query")


def _command(command: str, *positional: object, **options: object) -> Callable[[], object]:
    """A command of the command line, in this process."""
    main, words = name("main"), arguments(command, *positional, **options)

    def run() -> None:
        sys.argv = ["quiver", *words]
        output, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: PTH123, SIM115
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{words}: exit status {stop.code}") from stop
        finally:
            sys.stdout = output

    return run


def _small(work: Path) -> Path:
    corpus = fixtures.corpus(work, 60, 10, words=30)

    def judge() -> None:
        (corpus / "qrels").mkdir(exist_ok=True)
        asked = {row["_id"] for row in fixtures.read_lines(corpus / "queries.jsonl")}
        known = {row["_id"] for row in fixtures.read_lines(corpus / "corpus.jsonl")}
        pairs = [(query, each) for query, found in fixtures.judged("test").items() if query in asked for each in found if each in known]
        lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{each}\t1" for query, each in pairs)]
        (corpus / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")

    judge()
    return corpus


def _index(work: Path) -> Path:
    out = work / "journey-index"
    if not out.is_dir():
        _command("index build", _small(work), model=fixtures.tiny_biencoder(work), out=out)()
    return out


def search(work: Path) -> Callable[[], object]:
    """Quiver search: a text on the folder of an index."""
    return _command("search", _index(work), "vitamin D and bones", k=5)


def build(work: Path) -> Callable[[], object]:
    """Quiver index build of 60 documents."""
    return _command("index build", _small(work), model=fixtures.tiny_biencoder(work), out=work / "journey-built", overwrite=True)


def evaluate(work: Path) -> Callable[[], object]:
    """Quiver evaluate on 60 documents, BM25 beside."""
    count = itertools.count()

    def run() -> None:  # each time with an empty cache, so that vectors are computed and kept
        cache, out = work / f"journey-vectors-{next(count)}", work / "journey-results"
        _command("evaluate", model=fixtures.tiny_biencoder(work), data=_small(work), out=out, cache=cache, overwrite=True)()

    return run


def train(work: Path) -> Callable[[], object]:
    """Quiver train: two updates of a dense model."""
    raw = json.loads(fixtures.retriever_recipe(work, "mnrl").read_text())
    raw["training"] |= {"max_steps": 2}
    recipe = fixtures.write_json(work / "journey-recipe.json", raw)
    return _command("train", recipe, out=work / "journey-run", overwrite=True)


def encode_api(work: Path) -> Callable[[], object]:
    """BiEncoder.from_pretrained and encode."""
    folder = fixtures.tiny_biencoder(work)
    return lambda: name("BiEncoder")(folder).encode_texts(["a bird has wings"], "query")


def search_api(work: Path) -> Callable[[], object]:
    """open_index and search from Python: a text on the folder of an index."""
    folder = _index(work)

    def run() -> object:
        index = name("open_index")(folder)
        model = name("BiEncoder")(fixtures.tiny_biencoder(work))
        return index.search(model.encode_query(["vitamin D and bones"]), k=5)

    return run


def build_api(work: Path) -> Callable[[], object]:
    """build_index from Python."""

    def run() -> object:
        model = name("BiEncoder")(fixtures.tiny_biencoder(work))
        return name("build_index")(_small(work), model, work / "journey-built-api", overwrite=True)

    return run


def evaluate_api(work: Path) -> Callable[[], object]:
    """Evaluate from Python."""

    def run() -> object:
        model = name("BiEncoder")(fixtures.tiny_biencoder(work))
        return name("evaluate")(model, _small(work), out=work / "journey-results-api", overwrite=True)

    return run


def train_api(work: Path) -> Callable[[], object]:
    """load_recipe and train_recipe from Python: two updates of a dense model."""
    raw = json.loads(fixtures.retriever_recipe(work, "mnrl").read_text())
    raw["training"] |= {"max_steps": 2}
    recipe = fixtures.write_json(work / "journey-recipe.json", raw)

    def run() -> object:
        return name("train_recipe")(name("load_recipe")(recipe), work / "journey-run-api", overwrite=True)

    return run


JOURNEYS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "encode": encode,
    "search": search,
    "index build": build,
    "evaluate": evaluate,
    "train": train,
    "encode (load, Python)": encode_api,
    "search (Python)": search_api,
    "index build (Python)": build_api,
    "evaluate (Python)": evaluate_api,
    "train (Python)": train_api,
}


def travel(journey: str, work: Path, *, all_frames: bool, cold: bool) -> list[tuple[str, str]]:
    """What a journey enters, in this process."""
    run = JOURNEYS[journey](work)
    if not cold:
        run()
    entered = Entered(checkout(), all_frames=all_frames)
    with entered:
        run()
    return entered.found()


# ---- Modules and time.

_LOADED = """
import sys
before = set(sys.modules)
{statement}
own = {own!r}
print("\\n".join(sorted(name for name in sys.modules if name.split(".")[0] in own and name not in before)))
"""


def modules(statement: str, work: Path) -> list[str]:
    """Own modules that some lines of Python load, in a fresh process."""
    script = _LOADED.format(statement=statement, own=OWN_PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=work, env=environment(work / "cache"), capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if line.split(".")[0] in OWN_PACKAGES]


def modules_of_search(work: Path) -> list[str]:
    """Own modules that ``quiver search`` has loaded when it ends."""
    words = ["quiver", *arguments("search", _index(work), "vitamin D and bones", k=5, json=True)]
    main = name("main")
    statement = (
        f"sys.argv = {words!r}\nfrom {main.__module__} import {main.__name__} as run\n"
        "import io\nstandard, sys.stdout = sys.stdout, io.StringIO()\n"
        "try:\n    run()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\nfinally:\n    sys.stdout = standard"
    )
    return modules(statement, work)


def help_seconds(work: Path, *, rounds: int = 5) -> tuple[list[float], list[float]]:
    """Wall time and processor time of ``quiver --help``, after a round that does not count."""
    wall, processor = [], []
    for _ in range(rounds + 1):
        begun, before = time.perf_counter(), os.times()
        subprocess.run([*executable(), "--help"], cwd=work, env=environment(work / "cache"), capture_output=True, check=True)
        after = os.times()
        wall.append(time.perf_counter() - begun)
        processor.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return wall[1:], processor[1:]


def _child(journey: str, given: argparse.Namespace, work: Path) -> list[list[str]]:
    words = [sys.executable, __file__, "--inner", journey, "--work", str(work)]
    words += ["--all-frames"] * given.all_frames + ["--cold"] * given.cold
    done = subprocess.run(words, cwd=work, env=environment(work / "cache"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{journey}: {done.stderr[-3000:]}")
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def tell_journeys(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Files and functions of each journey that is asked for."""
    told: dict[str, Any] = {}
    root = checkout()
    for journey in JOURNEYS:
        if given.only and journey not in given.only:
            continue
        for path in work.glob("journey-*"):
            if path.name != "journey-index" and path.is_dir():
                shutil.rmtree(path)
        entered = _child(journey, given, work)
        files = sorted({str(Path(path).relative_to(root)) for path, _ in entered})
        told[journey] = {"files": len(files), "functions": len(entered), "names": files}
        if not given.json:
            print(f"{journey}: {len(files)} files, {len(entered)} functions", flush=True)
    return told


def tell_modules(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Own modules that imports and a search load."""
    _index(work)
    told: dict[str, Any] = {}
    for what, loaded in {
        f"import {PACKAGE}": modules(f"import {PACKAGE}", work),
        f"BiEncoder, build_index and open_index of {PACKAGE}": modules(f"from {PACKAGE} import BiEncoder, build_index, open_index", work),
        "import of the command line": modules(f"import {name('main').__module__}", work),
        "quiver search": modules_of_search(work),
    }.items():
        told[f"modules: {what}"] = {"modules": len(loaded), "names": loaded}
        if not given.json:
            print(f"modules, {what}: {len(loaded)}", flush=True)
    return told


def tell_help(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The time of ``quiver --help``."""
    told: dict[str, Any] = {}
    for what, seconds in zip(("wall", "processor"), help_seconds(work), strict=True):
        told[f"help, {what} time"] = {"median": statistics.median(seconds), "seconds": seconds}
        if not given.json:
            rounds = ", ".join(f"{each:.2f}" for each in seconds)
            print(f"quiver --help, {what} time: median {statistics.median(seconds):.2f} s of {rounds}", flush=True)
    return told


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="A journey, modules or help; repeatable.")
    parser.add_argument("--work", type=Path, help="Folder for what is made on the way; by default one that is removed in the end.")
    parser.add_argument("--all-frames", action="store_true", help="Count lambdas, comprehensions and bodies of modules and classes too.")
    parser.add_argument("--cold", action="store_true", help="Measure the first run.")
    parser.add_argument("--json", action="store_true", help="Print JSON, with the files.")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        if given.inner:
            print(json.dumps(travel(given.inner, work, all_frames=given.all_frames, cold=given.cold)))
            return 0
        told = tell_journeys(given, work)
        if not given.only or "modules" in given.only:
            told |= tell_modules(given, work)
        if not given.only or "help" in given.only:
            told |= tell_help(given, work)
    if given.json:
        print(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
