"""Layouts: nothing is lost, and the bits are where the docstring says."""

from __future__ import annotations

import numpy as np
import pytest

from quiver.retrieval.index.kernels.packing import CELLS, SPAN, cells, lanes, pack, unpack, width_of


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("width", [8, 16, 48, 128])
def test_codes_come_back_and_lie_without_gaps(bits: int, width: int) -> None:
    codes = np.random.default_rng(width).integers(0, 1 << bits, (17, width)).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (17, width * bits // 8)
    np.testing.assert_array_equal(unpack(packed, bits), codes)
    stream = np.unpackbits(packed, axis=1, bitorder="little").reshape(17, width, bits)
    np.testing.assert_array_equal((stream << np.arange(bits)).sum(axis=2), codes)


def test_no_codes_at_all() -> None:
    assert pack(np.empty((0, 16), np.uint8), 3).shape == (0, 6)
    assert unpack(np.empty((0, 6), np.uint8), 3).shape == (0, 16)


@pytest.mark.parametrize("width", [4, 6, 7, 8])
def test_a_cell_has_the_codeword_nearest_to_its_middle(width: int) -> None:
    rng = np.random.default_rng(width)
    codebook = rng.standard_normal((1 << width, 2)).astype(np.float32)
    assert width_of(codebook) == width
    table = cells(codebook)
    assert table.shape == (CELLS, CELLS)
    for first, second in rng.integers(0, CELLS, (200, 2)):
        middle = (np.array([first, second]) + 0.5) * 2 * SPAN / CELLS - SPAN
        distances = ((codebook - middle) ** 2).sum(axis=1)
        assert distances[table[first, second]] == pytest.approx(distances.min(), abs=1e-6)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_lanes_hold_every_vector_and_are_filled_up_with_zeros(count: int) -> None:
    vectors = np.random.default_rng(count).standard_normal((count, 24)).astype(np.float32)
    packed = lanes(vectors)
    assert packed.shape == (-(-count // 16), 24, 16)
    assert packed.flags.c_contiguous
    flat = packed.transpose(0, 2, 1).reshape(-1, 24)
    np.testing.assert_array_equal(flat[:count], vectors)
    assert not flat[count:].any()
