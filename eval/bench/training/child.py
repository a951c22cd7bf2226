"""A fresh process that trains with one library and reports what it takes: ``python -m eval.training_speed.child``.

It speaks as `quiver.eval.bench.encoder.child` does: the first line is a `TrainingChild`, each further one some batches to train on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiver.eval.bench.encoder.child import Make, Run, serve
from quiver.eval.bench.training.results import TrainingSettings
from quiver.eval.bench.training.sides import Start, make_recipe, make_side
from quiver.eval.bench.training.workloads import TrainingWorkload
from quiver.retrieval.models.loading import default_device

MODULE = "quiver.eval.bench.training.child"


@dataclass(frozen=True)
class TrainingChild:
    """What a child loads.

    Attributes:
        library: The side.
        model: Folder of the encoder that it starts from.
        colbert: Folder of the PyLate model that it starts from, if there is one.
        kind: Of the model.
        workload: Decides lengths.
        settings: As in the parent.
    """

    library: str
    model: str
    colbert: str | None
    kind: str
    workload: TrainingWorkload
    settings: TrainingSettings


def _load(request: dict[str, Any]) -> tuple[Make, None]:
    settings, workload = TrainingSettings(**request["settings"]), TrainingWorkload(**request["workload"])
    colbert = request["colbert"]
    start = Start(Path(request["model"]), None if colbert is None else Path(colbert))
    recipe = make_recipe(request["kind"], workload, settings, start)
    side = make_side(request["library"], recipe, start, steps=settings.rounds + 1)

    def make(further: dict[str, Any]) -> Run:
        first, *others = further["batches"]
        side.step(first[:2])  # the optimiser's state, which a run has all the time, is there before anything is measured

        def run() -> None:
            for rows in others:
                side.step(rows)

        return run

    return make, None


if __name__ == "__main__":
    serve(_load, on_cuda=default_device() == "cuda")
