"""What this process runs with: versions of installed packages, for records of runs, reports and ``quiver doctor``; its memory."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STATUS = Path("/proc/self/status")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, by its name on the package index; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_main_process() -> bool:
    """Return whether this is process 0 of torchrun, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def resident(name: str) -> int:
    """Return ``VmRSS``, ``VmHWM``, ``RssAnon`` or ``RssFile`` of this process in bytes, on Linux."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no {name}")
    return int(found[1]) * 1024
