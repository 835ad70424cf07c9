"""The planes of 16-bit words, split and joined by compiled loops that release the GIL: one call a chunk, at memory speed.

By bytes, so that neither the machine's order of bytes nor an address matters; the compiler makes vectors of them.
"""

from __future__ import annotations

from kvstore.loops_numba import USABLE, compiled

__all__ = ["USABLE", "join", "split"]


@compiled("void(Array(uint8, 1, 'C', True), uint8[::1], uint8[::1])")
def split(raw, exponents, others):  # type: ignore[no-untyped-def]
    """As planes_numpy.split; raw may be read-only."""
    for i in range(exponents.size):
        low, high = raw[2 * i], raw[2 * i + 1]
        exponents[i] = (high << 1) | (low >> 7)
        others[i] = (low << 1) | (high >> 7)


@compiled("void(Array(uint8, 1, 'C', True), Array(uint8, 1, 'C', True), uint8[::1])")
def join(exponents, others, raw):  # type: ignore[no-untyped-def]
    """As planes_numpy.join; the planes may be read-only."""
    for i in range(exponents.size):
        exponent, other = exponents[i], others[i]
        raw[2 * i] = (other >> 1) | (exponent << 7)
        raw[2 * i + 1] = (exponent >> 1) | (other << 7)
