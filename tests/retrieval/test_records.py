"""Rows of a matrix are views where possible."""

from __future__ import annotations

import numpy as np

from quiver.retrieval.records import MatrixRows, row_blocks


def test_rows_of_a_matrix_are_read_without_a_copy() -> None:
    matrix = np.arange(14, dtype=np.float32).reshape(7, 2)
    rows = MatrixRows(matrix)
    assert rows.shape == (7, 2)
    blocks = list(row_blocks(rows, 3))
    assert [(start, len(block)) for start, block in blocks] == [(0, 3), (3, 3), (6, 1)]
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), matrix)
    assert all(np.shares_memory(block, matrix) for _, block in blocks)
    assert np.shares_memory(rows.span(2, 4), matrix)
    np.testing.assert_array_equal(rows.span(2, 4), matrix[2:4])
    np.testing.assert_array_equal(rows.take(np.array([6, 0, 0])), matrix[[6, 0, 0]])
