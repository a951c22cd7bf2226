"""The chart of position embeddings, and the models that it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.encoder.pretraining.position_extension import interpolate_positions
from quiver.eval.report.positions import principal_components, write_position_plot
from quiver.retrieval.models.export.export import lengthen_model


def test_components_are_computed_from_the_original_table() -> None:
    old = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([9.0, 5.0, 3.0, 1.0, 0.5, 0.1])
    new = interpolate_positions(old, 2)
    projected, longer = principal_components(old, new)
    assert (projected.shape, longer.shape) == ((40, 3), (80, 3))
    torch.testing.assert_close(longer[::2], projected)
    torch.testing.assert_close(longer[1:-1:2], (projected[:-1] + projected[1:]) / 2, atol=1e-5, rtol=0)
    values = np.linalg.eigvalsh(np.cov(old.double().numpy().T))[::-1]
    np.testing.assert_allclose(projected.var(0).numpy(), values[:3], rtol=1e-6)
    # The sign is fixed: a table and its mirror image have mirrored coordinates in the same directions.
    mirrored, _ = principal_components(-old, new)
    torch.testing.assert_close(mirrored, -projected)


def test_the_figure_of_minilm_is_written(minilm: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = lengthen_model(minilm, tmp_path / "longer", factor=2)
    write_position_plot(minilm, done.folder, tmp_path / "figure.svg")
    drawn = (tmp_path / "figure.svg").read_text()
    for words in ("512 positions", "1,024 positions", "component 3"):
        assert f">{words}</text>" in drawn
