"""The files of a report in the folder of a run, whatever the run trained."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path

from quiver.encoder.files import write_text
from quiver.retrieval.training.run_folder import REPORTS

logger = logging.getLogger(__name__)

REPORT, PAGE = REPORTS
"""Markdown, and a page that a browser shows."""


def write_both(folder: Path, markdown: str, page: Callable[[], str]) -> Path:
    """Write a run's report into its folder, as Markdown and, where jinja2 is installed, as a page.

    Args:
        folder: It is there.
        markdown: The one.
        page: Gives the other.

    Returns:
        The page, or without jinja2 the Markdown.

    Raises:
        InputError: A file cannot be written.
    """
    write_text(folder / REPORT, markdown)
    if importlib.util.find_spec("jinja2") is None:
        logger.warning("%s: no %s, which needs jinja2: pip install 'quiver-retrieval[eval]'", folder, PAGE)
        return folder / REPORT
    write_text(folder / PAGE, page())
    return folder / PAGE
