"""One way to show progress: a bar with rate and remaining time on standard error, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress_bar(description: str, total: int, *, enabled: bool) -> Iterator[Advance]:
    """Show a bar while the block runs.

    Args:
        description: What is being done.
        total: Steps in all.
        enabled: False shows nothing.

    Yields:
        A function that takes the number of further steps done.
    """
    if not enabled or total == 0:
        yield lambda steps: None
        return
    # Imported late: a library user who asks for no bar does not pay for rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    # rich forgets steps after 30 seconds by default, and one batch of a large model may take longer.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
