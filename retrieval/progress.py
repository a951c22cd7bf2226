"""Progress bars on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress_bar(description: str, total: int, *, enabled: bool) -> Iterator[Advance]:
    """Show a bar while the block runs.

    Args:
        description: Label of the bar.
        total: Number of steps.
        enabled: Show the bar; nothing is shown otherwise, or if there are no steps.

    Yields:
        Function that advances the bar by a number of steps.
    """
    if not enabled or total == 0:
        yield lambda steps: None
        return
    # Imported here, so that library users without a bar do not import rich.
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
