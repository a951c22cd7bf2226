"""Python processes that tests start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path


@cache
def imported_python() -> str:
    """Start fork_server.py, and return the path of an interpreter that has imported everything.

    It is for processes whose imports, first seconds and memory are not tested: it saves them several seconds each.
    """
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="quiver-python-"))
    server = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(folder / "socket")]
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -SE {shlex.join(server[1:])} "$@"\n')
    interpreter.chmod(0o755)
    # It ends when the pipe does, with this process.
    process = subprocess.Popen(server, stdin=subprocess.PIPE, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    while not (folder / "socket").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return str(interpreter)
