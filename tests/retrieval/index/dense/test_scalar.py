"""A byte a coordinate: errors stay within half a step, whatever the vectors are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quiver.encoder.errors import InputError
from quiver.retrieval.index import kernels
from quiver.retrieval.index.dense.refine import ScalarCoding

MATRICES = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 12), st.integers(1, 9)), elements=st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)
)


@given(MATRICES, MATRICES, st.sampled_from([8, 16]))
def test_decoded_values_are_within_half_a_step(sample: np.ndarray, others: np.ndarray, bits: Any) -> None:
    coding = ScalarCoding.learn(sample, bits)
    vectors = np.resize(others, (len(others), coding.dim)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        overflows = not np.isfinite((vectors - coding.centre) / coding.spread).all()
    if overflows:
        with pytest.raises(InputError, match="too large for quantized codes"):
            coding.encode(vectors)
        return
    codes, scales = coding.encode(vectors)
    assert np.abs(codes.astype(int)).max() <= coding.largest == 2 ** (bits - 1) - 1
    decoded = coding.decode(codes, scales).astype(float)
    # Half a step, and what float32 makes of a vector and a centre that are much larger than their difference.
    rounding = 2.0**-20 * (np.abs(vectors) + np.abs(coding.centre))
    assert (np.abs(decoded - vectors) <= 0.5001 * scales[:, None].astype(float) * coding.spread + rounding + 1e-30).all()


@given(MATRICES)
def test_a_vector_is_coded_the_same_alone_and_among_others(vectors: np.ndarray) -> None:
    coding = ScalarCoding.learn(vectors)
    codes, scales = coding.encode(vectors)
    for row in range(len(vectors)):
        alone, scale = coding.encode(vectors[row : row + 1])
        np.testing.assert_array_equal(alone[0], codes[row])
        assert scale[0] == scales[row]


def test_by_hand() -> None:
    coding = ScalarCoding(np.array([1, 0], np.float32), np.array([1, 2], np.float32))
    codes, scales = coding.encode(np.array([[1 + 127, 2 * 64], [1, 0]], np.float32))
    assert codes.tolist() == [[127, 64], [0, 0]]
    assert scales.tolist() == [1.0, 0.0]
    assert coding.decode(codes, scales).tolist() == [[128.0, 128.0], [1.0, 0.0]]
    weights, offset = coding.weigh(np.array([1, 0.5], np.float32))
    assert kernels.inner_products(codes, scales, np.array([1, 0]), weights, offset).tolist() == [1, 128 + 64]
    assert (coding.nbytes, ScalarCoding(coding.centre, coding.spread, 16).nbytes) == (6, 8)


def test_vectors_that_float32_cannot_hold_are_refused() -> None:
    coding = ScalarCoding.learn(np.eye(3, dtype=np.float32))
    with pytest.raises(InputError, match="too large for quantized codes"):
        coding.encode(np.full((1, 3), 3.4e38, np.float32))
