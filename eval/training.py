"""Train a recipe with everything that ``quiver train`` does: development scores during the run, and a report in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quiver.encoder.environment import is_main_process
from quiver.encoder.files import expand_home
from quiver.encoder.training.recipe_file import Overrides
from quiver.encoder.training.trainer import Callback
from quiver.eval.report.training import write_training_report
from quiver.retrieval.training import run as training_run
from quiver.retrieval.training.data import source_stamps
from quiver.retrieval.training.recipe import Recipe, load_recipe
from quiver.retrieval.training.run import Scorer


def train(  # noqa: PLR0913  # each is an option of the command, or replaces a part of it
    recipe: str | Path | Mapping[str, Any] | Recipe,
    out: str | Path,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    device: str | None = None,
    command: str | None = None,
    scorer: Scorer | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    r"""Train a retriever from a recipe; under torchrun, as one of its processes.

    Args:
        recipe: Name of a shipped recipe, a YAML file, its sections as a mapping, or a recipe of `load_recipe`.
        out: Run folder to write; the model is in ``model/``, the report in ``report.html``.
        overrides: Changed settings: ``["training.batch_size=64"]``, or ``{"training.batch_size": 64}``; ``{"development": None}`` leaves
            out the evaluation during the run, ``{"encoder": "bert-base"}`` chooses a row of the recipe's table of encoders.
        resume: Resume the unfinished run in ``out`` from its last checkpoint, or from the beginning if it has none.
        overwrite: Replace an earlier run in ``out`` when this one is complete.
        progress: Show progress bars.
        device: ``cpu``, ``cuda`` or, in one process, ``cuda:1``; None for a GPU if available.
        command: Command line to record.
        scorer: Scores a model during the run; None for nDCG@10 on the development collection of the recipe.
        callbacks: Receive events of the training loop.

    Returns:
        The content of ``run.json``.

    Raises:
        InputError: The recipe, its data, its starting checkpoint or its development collection cannot be used, an extra is missing, ``out``
            holds a run or another process trains there, there is nothing to resume or the run was started with other settings, or the
            loss is not finite.
        RunStoppedError: SIGTERM or SIGINT arrived; the run is saved and can be resumed.

    Example:
        >>> from pathlib import Path
        >>> from quiver import train
        >>> pairs = Path("pairs.csv").write_text("query,positive\nget rid of limescale,Descale it.\nerror E17,Let it cool.\n")
        >>> settings = {"data.train": "pairs.csv", "training.batch_size": 2, "development": None}
        >>> record = train("docstrings-dense", "runs/mine", settings, overwrite=True)
        >>> record["result"]["steps"]
        1
    """
    resolved, folder = load_recipe(recipe, overrides), expand_home(out)
    if resolved.development is not None and scorer is None:
        source_stamps(resolved.data)  # missing training data are reported before missing development data
        from quiver.eval.development import development_scorer  # it imports the indexes, which other runs need not

        # Only the process that scores holds the development collection in memory.
        scorer = development_scorer(resolved.development, progress=progress) if is_main_process() else _broadcast_score
    record = training_run.train(
        resolved,
        folder,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        command=command,
        scorer=scorer,
        callbacks=callbacks,
        device=device,
    )
    if is_main_process():
        write_training_report(folder)
    return record


def _broadcast_score(model: object) -> float:
    raise ValueError("only process 0 computes development scores; the other processes receive them by broadcast")
