"""A lock that lets one process at a time train in a run folder (the file ``.lock``, removed at the end)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from quiver.encoder.errors import InputError

LOCK = ".lock"


@contextmanager
def exclusive_lock(out: Path) -> Iterator[None]:
    """Lock a run folder for the block. The folder is created if it is missing, and removed at the end if it was created and is empty.

    Raises:
        InputError: ``out`` is a file or cannot be written, or another session trains there.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    created = not out.exists()
    lock = FileLock(out / LOCK)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        if not (out / LOCK).exists():  # the previous holder has just removed the file that is locked now
            raise Timeout(lock.lock_file)
    except Timeout as error:
        raise InputError(f"{out}: another session is training there; wait for it, or choose another --out") from error
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no file that is open, and filelock does it there
            (out / LOCK).unlink()
        lock.release()
        if created:
            remove_empty(out)


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    if not any(folder.iterdir()):
        folder.rmdir()
