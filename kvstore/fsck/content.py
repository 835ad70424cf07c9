"""Deep checks of a record: its chunks decoded, its content checksum taken from what they decode to, its geometry and
fingerprint compared with the identity's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.audit import MAX_RAW_BYTES, PREFIX_BYTES, sums_of
from kvstore.checksum import MASK64, UInt64Array
from kvstore.codec import CODECS
from kvstore.errors import ConfigError, KVStoreError
from kvstore.fsck.stages import NOT_CHECKED, Problem, untagged
from kvstore.geometry import decode_geometry
from kvstore.identity import (
    IDENTITY_ID_BYTES,
    LayerSpec,
    heads_before,
    identity_digest,
    layer_number,
    layers_fingerprint,
)
from kvstore.record import Directory, Header
from kvstore.shape import GroupShape, described
from kvstore.snapshot import ReadView
from kvstore.span import Span
from kvstore.stategeometry import STATES, UNSPLIT, decode_states, grid_of

if TYPE_CHECKING:
    import torch

    from kvstore.cache import PagedKVCache

Bytes = npt.NDArray[np.uint8]
MAX_LAYERS: Final = 2**16
NO_IDENTITY: Final = "fingerprints of records whose identity is missing or damaged"


class Heads(NamedTuple):
    """Heads of one cache, or rows of one state, from the first one's number to before the end. form: bytes of K and V of a
    token and head; of states their origin, elements of a row, bytes of each, and grid."""

    first: int
    end: int
    form: tuple[int, ...]

    def within(self, model: Heads) -> bool:
        """Whether these are some of the model's."""
        return model.first <= self.first and self.end <= model.end and self.form == model.form


class Members(NamedTuple):
    """What an identity says of a group: its fingerprint; the heads of its caches by layer number, None where its layers'
    names have no numbers."""

    fingerprint: int
    layers: dict[int, list[Heads]] | None


@dataclass(frozen=True)
class Content:
    """The deep checks of one shard's records. identities: canonical JSON by identity id. Raises ConfigError for a device
    that torch does not have here."""

    device: str
    identities: dict[bytes, bytes]

    def __post_init__(self) -> None:
        if self.device != "cpu":
            _check_device(self.device)

    def __call__(self, view: ReadView, header: Header, shape: GroupShape, directory: Directory) -> Iterator[Problem]:
        yield from self._identity(header)
        if shape.plan.raw_length > MAX_RAW_BYTES:
            yield Problem(NOT_CHECKED, f"the content of a block of {shape.plan.raw_length} bytes")
            return
        block = _decoded(view, header, shape)
        yield from [block] if isinstance(block, Problem) else self._sums(header, shape, directory, block)

    def _identity(self, header: Header) -> Iterator[Problem]:
        identity_id, group = header.key[:IDENTITY_ID_BYTES], header.key[IDENTITY_ID_BYTES:PREFIX_BYTES]
        text = self.identities.get(identity_id)
        members = None if text is None else members_of(identity_id, text)
        if members is None:
            yield Problem(NOT_CHECKED, NO_IDENTITY)
            return
        known = members.get(int.from_bytes(group, "big"))
        if known is None or known.fingerprint != header.fingerprint:
            of = "no such group" if known is None else f"{known.fingerprint:016x}"
            yield Problem("GEOMETRY", f"stored for layers {header.fingerprint:016x}, its identity has {of}")
        elif known.layers is not None and not _fits(header.geometry, header.flags, known.layers):
            words = described(header.block_size, header.geometry, header.flags)
            yield Problem("GEOMETRY", f"its layers are not its identity's: {words}")

    def _sums(self, header: Header, shape: GroupShape, directory: Directory, block: Bytes) -> Iterator[Problem]:
        sums = slice_sums(self.device, header, shape, block)
        astray = np.flatnonzero(sums != directory.slice_sums)
        total, expected = int((sums * shape.factors).sum(dtype=np.uint64)), untagged(header)
        # A table that is not the header's is a finding of its own; bytes that agree with one of the two are no other.
        if astray.size and total != expected:
            yield Problem(
                "CONTENT",
                f"its bytes sum to {total:016x}, the header says {expected:016x}; {astray.size} slices are not those of the "
                f"slice table, the first {shape.slices[int(astray[0])]}",
            )
        elif astray.size and int((directory.slice_sums * shape.factors).sum(dtype=np.uint64)) == expected:
            yield Problem(
                "SLICE_TABLE", f"{astray.size} slices of the table are not those of the bytes, which sum right"
            )


def _decoded(view: ReadView, header: Header, shape: GroupShape) -> Bytes | Problem:
    """The block's raw bytes: of at most about twice what is stored, which was seen to be there."""
    plan = shape.plan
    block = np.empty(plan.raw_length, np.uint8)
    for number, (start, end) in enumerate(zip(plan.bounds, plan.bounds[1:], strict=False), 1):
        chunk, out = view.chunk(header.sequence, number), block[start:end]
        assert chunk is not None, "all chunks were there in this snapshot"
        codec = CODECS[0] if len(chunk) == out.size else CODECS[header.codec]
        if why := codec.decode(chunk, out):
            return Problem("DECODE", f"chunk {number} of {plan.num_chunks}: {why}", chunk)
    return block


@lru_cache(maxsize=8)
def members_of(identity_id: bytes, text: bytes) -> dict[int, Members] | None:
    """The groups of an identity by its canonical JSON, None where that is damaged: anyone may have written it."""
    if identity_digest(text) != identity_id:
        return None
    try:
        layers = [LayerSpec(*layer) for layer in json.loads(text)["layers"][:MAX_LAYERS]]
    except (KVStoreError, ValueError, TypeError, KeyError, RecursionError):
        return None
    salt = int.from_bytes(identity_id[:8], "little")
    groups: dict[int, list[LayerSpec]] = {}
    for layer in layers:
        groups.setdefault(layer.group, []).append(layer)
    return {g: Members((layers_fingerprint(own) + salt) & MASK64, _by_number(own)) for g, own in groups.items()}


def _by_number(layers: list[LayerSpec]) -> dict[int, list[Heads]] | None:
    try:
        before = heads_before({layer.name: layer.kv_heads for layer in layers})
        numbers = {layer.name: layer_number(layer.name) for layer in layers}
    except KVStoreError:
        return None
    found: dict[int, list[Heads]] = {}
    for layer in layers:
        found.setdefault(numbers[layer.name], []).extend(_heads(layer, before[layer.name]))
    return found if len(before) == len(layers) else None


def _heads(layer: LayerSpec, first: int) -> Iterator[Heads]:
    """The heads of a layer in the model, or the rows of each of its states, numbered from `first` on."""
    if not layer.states:
        yield Heads(first, first + layer.kv_heads, (layer.k_bytes, layer.v_bytes))
    for index, state in enumerate(layer.states):
        if not state.rows:
            yield Heads(0, layer.kv_heads, (index, state.elements, state.itemsize, UNSPLIT))
            continue
        form = first, state.elements, state.itemsize, grid_of(state.rows, len(layer.states))
        yield Heads(first, first + state.rows, form)
        first += state.rows


@lru_cache(maxsize=64)
def _geometry_layers(geometry: bytes, flags: int) -> tuple[tuple[int, Heads], ...]:
    if flags & STATES:
        return tuple(
            (r.layer, Heads(r.first_row, r.first_row + r.rows, (r.origin, r.elements, r.itemsize, r.grid)))
            for r in decode_states(geometry)
        )
    return tuple(
        (s.layer, Heads(s.first_head, s.first_head + s.heads, (s.k_bytes, s.v_bytes)))
        for s in decode_geometry(geometry)
    )


def _fits(geometry: bytes, flags: int, known: dict[int, list[Heads]]) -> bool:
    """Whether a record's layers are of an identity's group. A rank's record has some of them, and some of their heads."""
    layers = _geometry_layers(geometry, flags)
    return all(any(map(stored.within, known.get(layer, ()))) for layer, stored in layers)


# --- sums ------------------------------------------------------------------------------------------------------------


def slice_sums(device: str, header: Header, shape: GroupShape, block: Bytes) -> UInt64Array:
    """s of each slice of a block's raw bytes, (slices,) uint64, taken on a device; of states on the host."""
    if device == "cpu" or shape.of_states:
        first = np.array([header.position * shape.block_size], np.int64)
        span = Span(header.position, np.zeros(1, np.int64), first, np.array([header.valid_tokens], np.int64))
        return np.asarray(sums_of(shape)(span, block[None])[0], np.uint64)
    return torch_sums(device, header, shape, block)


def torch_sums(device: str, header: Header, shape: GroupShape, block: Bytes) -> UInt64Array:
    """As slice_sums, by torch: a cache of one block whose layers are the record's slices."""
    import torch

    from kvstore.transfer import slice_checksums

    staged, cache = _staged(shape, device)
    staged.copy_(torch.from_numpy(block))
    tokens = header.position * shape.block_size + header.valid_tokens
    return np.asarray(slice_checksums(cache, [0], header.position, tokens)[0], np.uint64)


@lru_cache(maxsize=2)
def _staged(shape: GroupShape, device: str) -> tuple[torch.Tensor, PagedKVCache]:
    import torch

    from kvstore.cache import PagedKVCache

    staged = torch.empty(shape.plan.raw_length, dtype=torch.uint8, device=device)
    ends = shape.offsets.tolist()
    tensors = {
        f"slices.{number}": staged[start:end].view(1, shape.block_size, -1)
        for number, (start, end) in enumerate(pairwise(ends))
    }
    return staged, PagedKVCache.from_tensors(tensors, "BNC")


def _check_device(device: str) -> None:
    try:
        import torch

        if torch.cuda.is_available():
            return
        why = "torch finds no CUDA device"
    except ImportError as error:
        why = f"torch cannot be imported: {error}"
    raise ConfigError(f"device {device!r}: {why}: give the device cpu")
