"""Payload codecs: how a chunk's raw bytes are stored. A chunk is encoded as a whole and decoded alone.

Under every codec a chunk whose stored length is its raw length is stored raw.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.planes import Bf16PlanesCodec

Bytes = npt.NDArray[np.uint8]


class Codec(Protocol):
    """One way to store a chunk. Any thread may call it. What decode fills is exactly what encode was given, whatever the
    bytes and however many."""

    number: int
    name: str

    def encode(self, raw: Bytes) -> memoryview:
        """The stored bytes of one chunk, at most as many as raw. raw: (bytes,) uint8, contiguous and writable.

        Takes raw over: the stored bytes may lie in its memory, in place of what was there, and are valid until it
        changes.
        """

    def decode(self, stored: memoryview, out: Bytes) -> str | None:
        """Fill out, (raw length,) uint8 and contiguous, from untrusted bytes; None, or what is wrong with them. Then
        what is in out is undefined. Raises nothing, whatever the bytes."""


class RawCodec:
    """Stored bytes are the raw bytes."""

    number = 0
    name = "raw"

    def encode(self, raw: Bytes) -> memoryview:
        return raw.data

    def decode(self, stored: memoryview, out: Bytes) -> str | None:
        if len(stored) != out.size:
            return f"{len(stored)} raw bytes, expected {out.size}"
        np.copyto(out, np.frombuffer(stored, np.uint8))
        return None


CODECS: Final[dict[int, Codec]] = {codec.number: codec for codec in (RawCodec(), Bf16PlanesCodec())}


def codec_named(name: str) -> Codec:
    """The codec of that name; raises ConfigError."""
    for codec in CODECS.values():
        if codec.name == name:
            return codec
    raise ConfigError(f"codec {name!r}: expected one of {', '.join(c.name for c in CODECS.values())}")
