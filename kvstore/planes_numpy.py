"""The planes of 16-bit words, split and joined by numpy: for machines without numba."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def split(raw: Bytes, exponents: Bytes, others: Bytes) -> None:
    """Part n little-endian words, (2n,) uint8, into bits 14 to 7 and, rotated left by one, bits 6 to 0 and 15: (n,) uint8
    each. All are contiguous and none overlaps another; no address need be even."""
    words = raw.view("<u2")
    np.right_shift(words, 7, out=exponents, casting="unsafe")
    np.left_shift(words, 1, out=others, casting="unsafe")
    others |= raw[1::2] >> 7


def join(exponents: Bytes, others: Bytes, raw: Bytes) -> None:
    """Fill raw, (2n,) uint8, with the words that `split` parted into these planes, (n,) uint8 each."""
    words = raw.view("<u2")
    np.copyto(words, exponents)
    words <<= 7
    words |= others >> 1
    raw[1::2] |= others << 7
