"""A figure of position embeddings before and after their extension, as in Figure 1 of the paper.

Shapes: P positions, D model width, C principal components.
Source: Jeong et al., HCLT 2023, section 4.2 and Figure 1 (three principal components over the position).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.pretraining.position_extension import read_positions
from quiver.eval.report.charts import PALETTE, check_matplotlib, new_figure, save, style
from quiver.retrieval.models.pretrained import read_model_folder

COMPONENTS = 3
FORMATS = (".png", ".svg")


def check_format(path: Path) -> None:
    """Check that a plot can be drawn into a file."""
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: the name of a plot must end in {' or '.join(FORMATS)}")
    check_matplotlib()


def principal_components(old: Tensor, new: Tensor, *, count: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    """Project both tables on the principal components of the old one.

    Args:
        old: Position embeddings before the extension, (P, D).
        new: Position embeddings after it, (k P, D).
        count: Number of components C.

    Returns:
        (P, C) and (k P, C) in float64, relative to the mean of the old rows. The largest entry of each direction is positive, so that
        a table always gives the same figure.

    Example:
        >>> old, new = torch.tensor([[0.0, 1.0], [4.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0], [6.0, 1.0]])
        >>> [part.flatten().tolist() for part in principal_components(old, new, count=1)]
        [[-2.0, 2.0], [-2.0, 0.0, 2.0, 4.0]]
    """
    rows = old.double()
    mean = rows.mean(0)
    _, _, directions = torch.linalg.svd(rows - mean, full_matrices=False)
    directions = directions[:count]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * largest.sign()
    return (rows - mean) @ directions.T, (new.double() - mean) @ directions.T


def write_position_plot(old: Path, new: Path, path: Path) -> None:
    """Draw the position embeddings of two models side by side, over the position."""
    check_format(path)
    tables = [read_positions(read_model_folder(folder).encoder_folder) for folder in (old, new)]
    with style():
        figure = new_figure(10.0, 3.6, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, table, projected in zip(panels, tables, principal_components(*tables), strict=True):
            for position, values in enumerate(projected.T):
                axes.plot(values.numpy(), color=PALETTE[position + 1], linewidth=1.0, label=f"component {position + 1}")
            axes.set_title(f"{len(table):,} positions", fontsize=10)
            axes.set_xlabel("position p")
        panels[0].set_ylabel("EMB(p), principal components of the old table")
        panels[0].legend(fontsize=8)
    save(figure, path)
