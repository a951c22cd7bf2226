"""What only Linux has is not needed: an index is built, extended and searched without it, as on macOS and Windows."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quiver import BiEncoder
from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.encoder.cpu import support
from quiver.retrieval.models.options import ModelFolder

# Runs commands on a Python that lacks calls and modules of Linux; libraries are loaded before, as theirs are built for the platform.
SCRIPT = """
import errno, os, sys
import faiss, numba, numpy, pyarrow, tokenizers, torch

def no_link(*arguments, **options):
    raise OSError(errno.ENOTSUP, "no hard links")

os.link = no_link
for name in ("fork", "getuid", "sched_getaffinity", "sched_setaffinity", "killpg", "setsid", "posix_fadvise"):
    delattr(os, name)
sys.modules["resource"] = sys.modules["fcntl"] = None
sys.platform = "another"
from quiver.cli.main import main
for line in (
    "index build data --model model --out index", "index add index more.jsonl", "index compact index", "search index wings", "doctor"
):
    sys.argv = ["quiver", *line.split()]
    try:
        main()
    except SystemExit as stop:
        sys.exit(f"{line}: {stop.code}")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="removes calls of Linux")
def test_an_index_needs_nothing_that_only_linux_has(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["owls have wings", "trout have fins"], vocab_size=300, max_length=64)
    layers = {"num_heads": 2, "intermediate_size": 48, "layer_types": ["global"], "max_positions": 64}
    encoder = init_weights(Encoder(EncoderConfig.modernbert(vocab_size=300, hidden_size=32, **layers)), seed=1)
    folder = tmp_path / "model"
    BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", folder, max_length=16)).save_pretrained(folder)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.jsonl").write_text(json.dumps({"_id": "owl", "text": "owls have wings"}) + "\n")
    (tmp_path / "more.jsonl").write_text(json.dumps({"_id": "trout", "text": "trout have fins"}) + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert "trout have fins" in done.stdout


def test_kernels_that_need_linux_say_so_and_have_a_fallback(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    with caplog.at_level(logging.INFO, "quiver"):
        assert support.openmp_launcher.__wrapped__() is None
    [record] = [record for record in caplog.records if "Linux" in record.message]
    assert "\n" not in record.message


def test_a_service_stops_by_a_signal_where_event_loops_have_no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    from quiver.retrieval.serving.server import handle_signals

    called, before = [], {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    async def wait() -> None:
        loop = asyncio.get_running_loop()

        def unsupported(*arguments: object) -> None:
            raise NotImplementedError

        monkeypatch.setattr(loop, "add_signal_handler", unsupported)
        handle_signals(loop, lambda: called.append(True))
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)

    try:
        asyncio.run(wait())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert called == [True]
