"""Codec 1, "bf16-planes": the exponents of 16-bit floats compressed by zstd, the other bits as they are.

Of bfloat16 the exponents alone are worth compressing; signs and mantissas are noise. docs/format.md, section 10, is the
specification of the stored bytes. Other element types are kept without loss too, and without much gain.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kvstore import planes_numpy

log = logging.getLogger(__name__)
Bytes = npt.NDArray[np.uint8]

WINDOW_LOG: Final = 17
WINDOW_BYTES: Final = 2**WINDOW_LOG
"""The largest window a frame may ask for: the exponents of the largest chunk."""
PARAMETERS: Final = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=8, window_log=WINDOW_LOG
)
"""Exponents hardly repeat in runs: what is gained comes from their frequencies, so a search for matches is kept short.
No part of the format."""
WORTH: Final = (19, 20)
"""Encoded bytes over raw bytes, at most; a chunk that gains less is stored raw."""


class Workspace:
    """zstd's contexts and memory for the planes of one chunk. Serves one call at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._memory = np.empty(0, np.uint8)

    def planes(self, words: int) -> tuple[Bytes, Bytes]:
        """Memory for two planes, (words,) uint8 each; valid until the next call."""
        if self._memory.size < 2 * words:
            self._memory = np.empty(2 * words, np.uint8)
        return self._memory[:words], self._memory[words : 2 * words]


class Bf16PlanesCodec:
    """A Codec; any thread may call it. Keeps as many workspaces as were ever in use at once."""

    number = 1
    name = "bf16-planes"

    def __init__(self) -> None:
        self._idle: list[Workspace] = []

    def encode(self, raw: Bytes) -> memoryview:
        """The stored bytes of a chunk, raw, (bytes,) uint8, contiguous: in raw's own memory, so that no more is needed
        for a batch. Raw is unchanged where it is stored as it is."""
        words = raw.size // 2
        with self._workspace() as workspace:
            exponents, others = workspace.planes(words)
            plane_loops().split(raw[: 2 * words], exponents, others)
            frame = workspace.compressor.compress(exponents.data)
            start = raw.size - words
            end = start + len(frame)
            if end * WORTH[1] > raw.size * WORTH[0]:
                return raw.data
            raw[words:start] = raw[2 * words :]
            raw[:words] = others
        raw[start:end] = np.frombuffer(frame, np.uint8)
        return raw.data[:end]

    def decode(self, stored: memoryview, out: Bytes) -> str | None:
        """Fill out, (raw length,) uint8, contiguous, from untrusted bytes; None, or what is wrong with them."""
        if len(stored) == out.size:
            np.copyto(out, np.frombuffer(stored, np.uint8))
            return None
        words = out.size // 2
        start = out.size - words
        if not start < len(stored) < out.size:
            return f"{len(stored)} bytes, expected {start + 1} to {out.size}"
        exponents = self._exponents(stored[start:], words)
        if isinstance(exponents, str):
            return exponents
        others = np.frombuffer(stored[:start], np.uint8)
        plane_loops().join(np.frombuffer(exponents, np.uint8), others[:words], out[: 2 * words])
        out[2 * words :] = others[words:]
        return None

    def _exponents(self, frame: memoryview, words: int) -> bytes | str:
        """The content of the one zstd frame that this is, or what is wrong with it. No memory is taken before the sizes
        that the frame claims are known to be right."""
        try:
            claimed = zstandard.get_frame_parameters(frame)
            if claimed.content_size != words or claimed.window_size > WINDOW_BYTES:
                return (
                    f"a zstd frame of {claimed.content_size} bytes and a window of {claimed.window_size}, expected "
                    f"{words} and at most {WINDOW_BYTES}"
                )
            with self._workspace() as workspace:
                found: bytes = workspace.decompressor.decompress(frame, max_output_size=words, allow_extra_data=False)
        except zstandard.ZstdError as error:
            return f"zstd: {error}"
        return found if len(found) == words else f"a zstd frame of {len(found)} bytes, expected {words}"

    @contextmanager
    def _workspace(self) -> Iterator[Workspace]:
        """A workspace that no other call has, whether of another thread, of a signal handler or of a fork's parent: each
        step on the list is one. One that an exception leaves in use is not used again."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace()
        yield workspace
        self._idle.append(workspace)


@cache
def plane_loops() -> ModuleType:
    """The module whose `split` and `join` are the fastest that work here; where those are numpy's, the log says once
    why."""
    try:
        if importlib.util.find_spec("numba") is None:
            reason = "is not installed"
        elif (loops := importlib.import_module("kvstore.planes_numba")).USABLE:
            return loops
        else:
            reason = "is switched off (NUMBA_DISABLE_JIT)"
    except Exception as error:
        # Whatever keeps numba from loading or compiling (an unfit numpy, a missing llvmlite), numpy does the work.
        reason = f"does not work ({type(error).__name__}: {error})"
    log.warning(
        "numba %s: codec bf16-planes runs in numpy, about half as fast; the extra `cpu` of kvstore brings it, or "
        "`pip install numba`",
        reason,
    )
    return planes_numpy
