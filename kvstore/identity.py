"""Who may reuse a block: the identity of the unsharded model, and the fingerprints of its layers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvstore.checksum import MASK64, MAX_KV_HEADS_PER_LAYER, PIECE_BYTES
from kvstore.errors import ConfigError, IdentityError, UnsupportedCache

IDENTITY_ID_BYTES = 16
LAYER_TYPES = ("full", "sliding", "chunked", "cross", "mla", "mamba")
Scalar = str | int | float | bool | None


class StateSpec(NamedTuple):
    """One Mamba state of a layer in the unsharded model: its rows, the elements of a row, the bytes of each (2 or 4). Where
    the split is not known: no rows, and the elements that one rank has."""

    rows: int
    elements: int
    itemsize: int


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the unsharded model. kv_heads counts all ranks' heads; k_bytes and v_bytes are one head's
    bytes of one token; group is the KV cache group that the layer belongs to.

    states: of a layer of type mamba, in order. Its kv_heads are then the rows of all states, or the number of ranks
    where the split is not known, and its k_bytes and v_bytes are 0.
    """

    name: str
    type: str
    dtype: str
    kv_heads: int
    k_bytes: int
    v_bytes: int
    group: int = 0
    states: tuple[StateSpec, ...] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) and text for text in (self.name, self.type, self.dtype)):
            raise IdentityError(f"{self}: expected non-empty strings as name, type and dtype")
        numbers = (self.kv_heads, self.k_bytes, self.v_bytes, self.group)
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers) or not 0 <= self.group < 2**16:
            raise IdentityError(f"{self}: expected integers, and a group of 0 to 65535")
        if self.type not in LAYER_TYPES:
            raise IdentityError(f"layer {self.name}: type {self.type!r}: expected one of {', '.join(LAYER_TYPES)}")
        if not 1 <= self.kv_heads <= MAX_KV_HEADS_PER_LAYER:
            raise IdentityError(f"layer {self.name}: {self.kv_heads} KV heads: expected 1 to {MAX_KV_HEADS_PER_LAYER}")
        if min(self.k_bytes, self.v_bytes) < 0 or self.k_bytes % PIECE_BYTES or self.v_bytes % PIECE_BYTES:
            raise IdentityError(
                f"layer {self.name}: K of {self.k_bytes} and V of {self.v_bytes} bytes: expected multiples of 8"
            )
        object.__setattr__(self, "states", _state_specs(self) if self.states else ())

    @property
    def described(self) -> list[object]:
        """The layer's array in an identity's JSON."""
        states = [[list(state) for state in self.states]] if self.states else []
        return [self.name, self.type, self.dtype, self.kv_heads, self.k_bytes, self.v_bytes, self.group, *states]


def _state_specs(layer: LayerSpec) -> tuple[StateSpec, ...]:
    """The layer's states, checked: they may come from JSON."""
    given = layer.states if isinstance(layer.states, Sequence) and not isinstance(layer.states, str) else ()
    states = [state for state in given if isinstance(state, Sequence) and len(state) == 3]
    plain = all(isinstance(n, int) and not isinstance(n, bool) for state in states for n in state)
    if not states or len(states) != len(given) or not plain:
        raise IdentityError(
            f"layer {layer.name}: states is {layer.states!r}: expected StateSpec(rows, elements, itemsize)"
        )
    made = tuple(StateSpec(*state) for state in states)
    rows = [state.rows for state in made]
    numbered = sum(rows) == layer.kv_heads if min(rows) > 0 else not any(rows)
    sized = all(0 < state.elements < 2**32 and state.itemsize in (2, 4) for state in made)
    if layer.type != "mamba" or layer.k_bytes or layer.v_bytes or not numbered or not sized:
        raise IdentityError(
            f"{layer}: expected type mamba, no K and V, elements of 2 or 4 bytes, and kv_heads that are the rows of all "
            "states (or states without rows, where the split is not known)"
        )
    return made


@dataclass(frozen=True)
class CacheIdentity:
    """What must be equal for KV to be reusable, described for the unsharded model.

    model, revision: the weights, as their owner names them (a path, a hub name and commit, a digest).
    dtype, quantization: what the model computes in. extra: whatever else changes KV and is not in the block
    hash (scales of an fp8 cache, rope settings, adapters and salts that the hash leaves out), as plain values.
    layers: every layer of the model; None takes them from the cache, which needs a cache that holds the
    whole model. The split over ranks, the block size and the memory layout are not part of it.

    Raises IdentityError for an empty model or values that are not plain.
    """

    model: str
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    layers: tuple[LayerSpec, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "revision", "dtype", "quantization"):
            value = getattr(self, name)
            if not isinstance(value, str) or (name == "model" and not value):
                raise IdentityError(f"identity: {name} is {value!r}: expected a {'non-empty ' * (name == 'model')}str")
        if not isinstance(self.extra, Mapping):
            raise IdentityError(f"identity: extra is {self.extra!r}: expected {{name: value}}")
        for key, extra in self.extra.items():
            if not isinstance(key, str) or not isinstance(extra, Scalar):
                raise IdentityError(f"identity: extra[{key!r}] is {extra!r}: expected str, int, float, bool or None")
            if isinstance(extra, float) and not math.isfinite(extra):
                raise IdentityError(f"identity: extra[{key!r}] is {extra}: expected a finite number")
            if isinstance(extra, int) and not -(2**63) <= extra < 2**63:
                raise IdentityError(f"identity: extra[{key!r}] is an integer too large: expected one below 2**63")
        object.__setattr__(self, "extra", dict(self.extra))
        if self.layers is not None:
            given = tuple(self.layers) if isinstance(self.layers, Iterable) else ()
            if not given or not all(isinstance(layer, LayerSpec) for layer in given):
                raise IdentityError(
                    f"identity: layers is {self.layers!r}: expected every layer of the model, as LayerSpec"
                )
            ordered = tuple(sorted(given, key=lambda layer: layer.name))
            if len({layer.name for layer in ordered}) != len(ordered):
                raise IdentityError("identity: two layers have one name: describe each layer of the model once")
            object.__setattr__(self, "layers", ordered)

    def with_layers(self, layers: Iterable[LayerSpec]) -> CacheIdentity:
        """This identity with `layers`, where it has none of its own."""
        return self if self.layers is not None else replace(self, layers=tuple(layers))

    def canonical_json(self) -> str:
        """The identity as JSON with sorted keys and no spaces: equal text means equal identity."""
        return self._json

    def digest(self) -> bytes:
        """The identity id: 16 bytes of BLAKE2b over the canonical JSON."""
        return self._digest

    @cached_property
    def _json(self) -> str:
        layers = [layer.described for layer in self.layers or ()]
        text = {
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "extra": dict(self.extra),
            "layers": layers,
        }
        return json.dumps(text, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

    @cached_property
    def _digest(self) -> bytes:
        return identity_digest(self._json.encode())


def identity_digest(canonical_json: bytes) -> bytes:
    """The identity id of a canonical JSON."""
    return hashlib.blake2b(canonical_json, digest_size=IDENTITY_ID_BYTES).digest()


def layer_fingerprint(layer: LayerSpec) -> int:
    """One layer's uint64: 8 bytes of BLAKE2b, little-endian, over the JSON of [name, type, dtype]."""
    text = json.dumps([layer.name, layer.type, layer.dtype], separators=(",", ":"), ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def layers_fingerprint(layers: Iterable[LayerSpec]) -> int:
    """Sum of the layers' fingerprints mod 2**64: the parts of pipeline stages add up to the model's."""
    return sum(layer_fingerprint(layer) for layer in layers) & MASK64


def group_fingerprint(identity: CacheIdentity, group: int) -> int:
    """A group's fingerprint: the sum over its layers in the model, and 64 bits of the identity added once."""
    members = (layer for layer in identity.layers or () if layer.group == group)
    return (layers_fingerprint(members) + int.from_bytes(identity.digest()[:8], "little")) & MASK64


def layer_number(name: str) -> int:
    """The number in a layer's name ("model.layers.12.self_attn.attn" is 12).

    Raises UnsupportedCache where the name has none, or more than one.
    """
    numbers = [int(part) for part in name.split(".") if re.fullmatch(r"[0-9]+", part)]
    if len(numbers) != 1 or numbers[0] >= 2**31:
        raise UnsupportedCache(
            f"layer {name!r}: {len(numbers)} numbers in its name, expected exactly one below 2**31, as in "
            "'model.layers.12.self_attn.attn'; the checksum numbers layers by it"
        )
    return numbers[0]


def heads_before(kv_heads: Mapping[str, int]) -> dict[str, int]:
    """Of each layer name of a group the heads that are numbered before its own: those of the caches of the same layer
    number whose names come first. kv_heads: by name, in the unsharded model. Raises UnsupportedCache."""
    before, ends = dict[str, int](), dict[int, int]()
    for name in sorted(kv_heads):
        number = layer_number(name)
        before[name] = ends.get(number, 0)
        ends[number] = before[name] + kv_heads[name]
    for number, heads in ends.items():
        if heads > MAX_KV_HEADS_PER_LAYER:
            names = ", ".join(name for name in sorted(kv_heads) if layer_number(name) == number)
            raise UnsupportedCache(
                f"layer {number} ({names}) has {heads} KV heads: the checksum numbers at most {MAX_KV_HEADS_PER_LAYER} a "
                "layer"
            )
    return before


@dataclass(frozen=True)
class Rank:
    """One worker of a tensor- and pipeline-parallel engine. Raises ConfigError out of range."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rank, size))
            if not whole or not 0 <= rank < size <= 2**16:
                raise ConfigError(f"{name}_rank {rank!r} of {name}_size {size!r}: expected 0 <= rank < size")

    @property
    def whole(self) -> bool:
        """Whether this rank alone holds the model."""
        return self.tp_size == self.pp_size == 1

    @property
    def folder(self) -> str:
        """The shard's folder name; made of integers alone, so that no name ever becomes a path."""
        return f"tp{self.tp_rank}of{self.tp_size}-pp{self.pp_rank}of{self.pp_size}"
