"""The bar of a run: step of how many, time left, loss, tokens a second, and what else it is given a form for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from quiver.encoder.training.trainer import Callback

Show: TypeAlias = Callable[[int, Mapping[str, int | float]], None]
"""Takes the number of updates done, or what else is counted, and what is new to tell, named as in the log."""

FORMS: Mapping[str, str] = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
"""Key of a line of the log -> how the bar tells it."""


class BarCallback(Callback):
    """Shows steps and logged values on a progress bar.

    Args:
        show: What `training_bar` yields.
    """

    def __init__(self, show: Show) -> None:
        self._show = show

    def on_step(self, step: int) -> None:
        """Advance the bar."""
        self._show(step, {})

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values."""
        self._show(step, values)


@contextmanager
def training_bar(done: int, total: int, *, enabled: bool, forms: Mapping[str, str] = FORMS, unit: str = "step") -> Iterator[Show]:
    """Show a bar on standard error while the block runs.

    Args:
        done: Updates (or what else the unit says) that earlier sessions did.
        total: Those of the run.
        enabled: False shows nothing.
        forms: Key of a line of the log -> how it is told; other keys are passed over.
        unit: What is counted.
    """
    if not enabled:
        yield lambda step, news: None
        return
    # Imported late: who asks for no bar does not pay for rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn(unit),
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
            bar.update(task, completed=step, news=", ".join(form.format(told[key]) for key, form in forms.items() if key in told))

        yield show
