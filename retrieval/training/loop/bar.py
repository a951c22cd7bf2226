"""The bar of a run: step of how many, time left, loss, tokens a second, the last score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from retrieval.training.loop.log import SCORE

Show: TypeAlias = Callable[[int, Mapping[str, int | float]], None]
"""Takes the number of updates done and what is new to tell, named as in the log."""

_FORMS = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s", SCORE: "nDCG@10 {:.4f}"}


@contextmanager
def training_bar(done: int, total: int, *, enabled: bool) -> Iterator[Show]:
    """Show a bar on standard error while the block runs.

    Args:
        done: Updates that earlier sessions did.
        total: Updates of the run.
        enabled: False shows nothing.
    """
    if not enabled:
        yield lambda step, news: None
        return
    # Imported late: who asks for no bar does not pay for rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}"),
    )
    told: dict[str, int | float] = {}
    # rich forgets steps after 30 seconds by default, and one update of a large batch may take longer.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task("", total=total, completed=done, news="")

        def show(step: int, news: Mapping[str, int | float]) -> None:
            told.update(news)
            bar.update(task, completed=step, news=", ".join(form.format(told[key]) for key, form in _FORMS.items() if key in told))

        yield show
