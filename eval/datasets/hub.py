"""Files of dataset repositories from the Hugging Face hub into a folder, at one commit.

What is asked for may be a branch; what is fetched is the commit it stood for, and that is what is recorded. Nothing of a repository is
run: loading scripts are files like any other, and are not fetched.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from quiver.encoder.errors import InputError
from quiver.eval.datasets.download import check_room, reason
from quiver.eval.datasets.layouts import CARD

Choose = Callable[[str, Sequence[str]], Sequence[str]]
"""The text of a card and the names of all files to the names of those that are wanted."""


def fetch_files(repository: str, revision: str | None, folder: Path, choose: Choose, *, progress: bool) -> str:
    """Fetch the card of a repository, and the files that it leads to.

    Args:
        repository: ``owner/name`` of a dataset.
        revision: A commit or a branch; None for the main branch as it is now.
        folder: Where the files go, under their own names; what an earlier call that was stopped has left there is used.
        choose: Which files are wanted.
        progress: Show the hub client's own bars.

    Returns:
        The commit.

    Raises:
        InputError: There is no such repository or revision, the hub cannot be reached, or the disk is full.
    """
    # Imported late: whoever has the data does not pay for the client.
    from huggingface_hub import HfApi, hf_hub_download

    endpoint = os.environ.get("HF_ENDPOINT")  # a mirror; the client reads it at import, a program may set it later
    errors = _client_errors()
    shown = f"{repository}@{revision[:12]}" if revision else repository
    try:
        with _bars(progress):
            info = HfApi(endpoint=endpoint).dataset_info(repository, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _inside(file.rfilename)}
            card = ""
            if CARD in sizes:
                path = hf_hub_download(repository, CARD, repo_type="dataset", revision=info.sha, local_dir=folder, endpoint=endpoint)
                card = Path(path).read_text(encoding="utf-8", errors="replace")
            wanted = choose(card, list(sizes))
            check_room(folder, sum(sizes[name] for name in wanted))
            for name in wanted:
                hf_hub_download(repository, name, repo_type="dataset", revision=info.sha, local_dir=folder, endpoint=endpoint)
    except errors as error:
        raise reason(error, shown, folder) from error
    if info.sha is None:
        raise InputError(f"{repository}: the hub does not say which commit this is; fetch it again")
    _prune(folder, {CARD, *wanted})
    return info.sha


def _prune(folder: Path, wanted: Container[str]) -> None:
    """Drop the client's notes on what it was doing, and what an earlier call may have left there of another commit."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted:
            path.unlink()


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name


def _client_errors() -> tuple[type[Exception], ...]:
    """What the client raises when it cannot fetch.

    Up to 0.x it spoke through requests, whose errors are OSErrors; from 1.0 on through httpx, whose are not. Large files come through
    hf_xet, which raises RuntimeErrors, and in later versions an error of its own.
    """
    modules = (sys.modules.get("httpx"), importlib.import_module("huggingface_hub.errors"))
    names = ("HTTPError", "XetDownloadError", "RevisionResolutionError", "EntryNotFoundError")
    found = (getattr(module, name, None) for module in modules for name in names)
    return (OSError, RuntimeError, *(each for each in found if isinstance(each, type) and issubclass(each, Exception)))


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """The client's bars are on or off for the whole process; leave them as they were."""
    bars = importlib.import_module("huggingface_hub.utils")
    if shown or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()
