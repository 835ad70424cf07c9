"""PagedKVCache: where an engine keeps each layer, head and token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvstore.checksum import MAX_KV_HEADS_PER_LAYER, UInt64Array, slice_factors
from kvstore.errors import InvalidCache, UnknownGroup, UnsupportedCache, UnsupportedDevice
from kvstore.identity import LAYER_TYPES, LayerSpec, layer_number
from kvstore.layout import LayerPlanes, LayerTensors, Plane, check_layout, take_apart

CPU = torch.device("cpu")
MAX_GROUP = 2**16 - 1


@dataclass(frozen=True)
class LayerCache:
    """One layer of a group: its number in the model, its heads (global numbers first_head to first_head + heads
    - 1) and the planes that hold their K and V."""

    name: str
    number: int
    type: str
    dtype: str
    first_head: int
    heads: int
    k: Plane
    v: Plane

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token's K and V in one head."""
        return self.k.nbytes + self.v.nbytes

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes that hold a cell, in its order: one where K and V of a token are one run, else two."""
        k, v = self.k, self.v
        follows = v.address == k.address + k.channels * k.channel_stride and replace(
            v, address=0, channels=0
        ) == replace(k, address=0, channels=0)
        if v.channels and not follows:
            return (k, v)
        return (replace(k, channels=k.channels + v.channels),)

    def spec(self, group: int) -> LayerSpec:
        """The layer as an identity describes it, where this cache holds all its heads."""
        return LayerSpec(self.name, self.type, self.dtype, self.heads, self.k.nbytes, self.v.nbytes, group)


@dataclass(frozen=True)
class Slice:
    """One layer and one head of a block, in canonical order: `layer` and `head` are global numbers, `row` the
    layer's index in its group, `local_head` the head's in its layer, `nbytes` the bytes of block_size tokens."""

    layer: int
    head: int
    row: int
    local_head: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class CacheGroup:
    """One KV cache group: layers in order of number, then name; all with the same blocks and block size.

    Immutable and safe to share between threads; compares and hashes by identity.
    """

    number: int
    layers: tuple[LayerCache, ...]
    block_size: int
    num_blocks: int
    device: torch.device = CPU

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """The slices of a block in canonical order: head by head (global number), in it layer by layer."""
        rows = [
            Slice(layer.number, layer.first_head + h, row, h, layer.cell_bytes * self.block_size)
            for row, layer in enumerate(self.layers)
            for h in range(layer.heads)
        ]
        return tuple(sorted(rows, key=lambda s: (s.head, s.row)))

    @cached_property
    def factors(self) -> UInt64Array:
        """m of each slice, (slices,) uint64."""
        return slice_factors([s.layer for s in self.slices], [s.head for s in self.slices])

    @cached_property
    def slice_bytes(self) -> tuple[int, ...]:
        """Bytes of each slice, in canonical order."""
        return tuple(s.nbytes for s in self.slices)

    @cached_property
    def offsets(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Offset of each slice in a block's canonical bytes, and their end: (slices + 1,) int64."""
        return np.concatenate(([0], np.cumsum(self.slice_bytes))).astype(np.int64)

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block in this group and rank."""
        return int(self.offsets[-1])

    @cached_property
    def regular(self) -> bool:
        """Whether the compiled loops can walk every layer (see Plane.regular)."""
        return all(layer.k.regular and layer.v.regular for layer in self.layers)


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """An engine's paged KV cache: for each group its layers' tensors, blocks and heads.

    The caller owns the tensors, which this object keeps alive; their memory must stay where it is for as long as
    the object is used. kvstore reads and writes that memory without synchronising with the caller's threads; on a device
    it waits for what the calling thread's current stream has been given before the call, and for nothing else.
    Immutable, so any thread may use it, also after a fork.
    """

    groups: Mapping[int, CacheGroup]
    tensors: Mapping[str, LayerTensors] = field(repr=False)
    layout: str

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, LayerTensors],
        layout: str,
        groups: Mapping[int, Sequence[str]] | None = None,
        first_head: Mapping[str, int] | None = None,
        *,
        value_channels: int | Mapping[str, int] | None = None,
        layer_types: Mapping[str, str] | None = None,
    ) -> PagedKVCache:
        """Describe the tensors of a paged cache, one entry a layer.

        tensors: layer name -> tensor, or (K, V) pair of tensors where the layout has neither C nor 2. bf16, fp16,
        fp32, fp8, int8 or uint8, with any strides. layout: the order of the axes (docs of kvstore.layout).
        groups: {group number: layer names}, by default all layers in group 0. first_head: {name: global number
        of its first head} of a tensor-parallel rank, by default 0. value_channels: with C, how many of the last
        channels are V; by default half of them, none without an H axis (MLA keeps K alone). layer_types:
        {name: type}, by default "full".

        Raises UnknownLayout, and InvalidCache or one of its kinds for what cannot be stored or checksummed.
        """
        check_layout(layout)
        if not isinstance(tensors, Mapping) or not tensors:
            raise InvalidCache(f"tensors is {type(tensors).__name__}, or empty: expected {{layer name: tensor}}")
        if wrong := unnamed(tensors):
            raise InvalidCache(f"tensors has the key {wrong[0]!r}: expected the model's layer names")
        names = _group_names(tensors, groups)
        heads = _per_layer("first_head", first_head or {}, tensors)
        types = _per_layer("layer_types", layer_types or {}, tensors)
        by_layer = isinstance(value_channels, Mapping)
        values = _per_layer("value_channels", value_channels, tensors) if by_layer else {}
        if not by_layer:
            values = dict.fromkeys(tensors, value_channels)
        planes = {name: take_apart(name, tensors[name], layout, values.get(name)) for name in tensors}
        layers = {name: _layer(name, planes[name], heads.get(name, 0), types.get(name, "full")) for name in tensors}
        made = {number: _group(number, [layers[n] for n in members], planes) for number, members in names.items()}
        kept = {n: t if isinstance(t, torch.Tensor) else (t[0], t[1]) for n, t in tensors.items()}
        return cls(made, kept, layout)

    def group(self, number: int) -> CacheGroup:
        """The group of that number; raises UnknownGroup."""
        found = self.groups.get(number) if isinstance(number, int) and not isinstance(number, bool) else None
        if found is None:
            raise UnknownGroup(f"group {number!r}: this cache has the groups {sorted(self.groups)}")
        return found


def unnamed(names: Iterable[object]) -> list[object]:
    """Those of the names that are none."""
    return [name for name in names if not isinstance(name, str)]


def _per_layer(option: str, given: object, tensors: Mapping[str, LayerTensors]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidCache(f"{option} is {given!r}: expected {{layer name: value}}")
    if unknown := sorted(map(str, set(given) - set(tensors))):
        raise InvalidCache(f"{option} names layers that are not in tensors: {', '.join(unknown)}")
    return dict(given)


def _group_names(
    tensors: Mapping[str, LayerTensors], groups: Mapping[int, Sequence[str]] | None
) -> dict[int, tuple[str, ...]]:
    if groups is None:
        return {0: tuple(tensors)}
    if not isinstance(groups, Mapping):
        raise InvalidCache(f"groups is {groups!r}: expected {{group number: layer names}}")
    named: dict[int, tuple[str, ...]] = {}
    for number, members in groups.items():
        listed = isinstance(members, Sequence) and not isinstance(members, str) and len(members)
        if not isinstance(number, int) or not 0 <= number <= MAX_GROUP or not listed or unnamed(members):
            raise InvalidCache(
                f"groups[{number!r}] is {members!r}: expected a number of 0 to {MAX_GROUP} and layer names"
            )
        named[number] = tuple(members)
    every = [name for members in named.values() for name in members]
    if len(every) != len(tensors) or set(every) != set(tensors):
        wrong = sorted(map(str, set(tensors) ^ set(every))) or sorted({n for n in every if every.count(n) > 1})
        raise InvalidCache(f"groups must name each layer of tensors exactly once; these do not fit: {', '.join(wrong)}")
    return named


def _layer(name: str, planes: LayerPlanes, first_head: int, kind: str) -> LayerCache:
    if not isinstance(first_head, int) or first_head < 0:
        raise InvalidCache(
            f"first_head[{name!r}] is {first_head!r}: expected the global number of its first head, 0 or more"
        )
    if first_head + planes.heads > MAX_KV_HEADS_PER_LAYER:
        raise UnsupportedCache(
            f"layer {name}: heads {first_head} to {first_head + planes.heads - 1}: the checksum numbers at most "
            f"{MAX_KV_HEADS_PER_LAYER} KV heads a layer"
        )
    if kind not in LAYER_TYPES or kind == "mamba":
        types = ", ".join(t for t in LAYER_TYPES if t != "mamba")
        raise UnsupportedCache(f"layer {name}: type {kind!r}: a paged cache of tokens has one of {types}")
    return LayerCache(name, layer_number(name), kind, planes.dtype, first_head, planes.heads, planes.k, planes.v)


def _group(number: int, members: list[LayerCache], planes: Mapping[str, LayerPlanes]) -> CacheGroup:
    layers = sorted(members, key=lambda layer: (layer.number, layer.name))
    for one, two in itertools.pairwise(layers):
        if one.number == two.number:
            raise UnsupportedCache(
                f"group {number}: {one.name} and {two.name} are both layer {one.number}: this version checksums one cache "
                "a layer; put them in different groups"
            )
    first = planes[layers[0].name]
    for layer in layers:
        own = planes[layer.name]
        if (own.blocks, own.tokens) != (first.blocks, first.tokens):
            raise UnsupportedCache(
                f"group {number}: {layer.name} has {own.blocks} blocks of {own.tokens} tokens, {layers[0].name} has "
                f"{first.blocks} of {first.tokens}: layers of a group share their block ids, so both must be equal"
            )
        if own.device != first.device:
            raise UnsupportedDevice(
                f"group {number}: {layer.name} is on {own.device}, {layers[0].name} on {first.device}: a group lies on one "
                "device; put the layers of each device into a group of their own"
            )
    made = CacheGroup(number, tuple(layers), first.tokens, first.blocks, first.device)
    if shared := shared_memory(made):
        raise UnsupportedCache(
            f"group {number}: {shared[0]} and {shared[1]} share memory: each needs bytes of its own in every block; name a "
            "tensor once, or put layers that share one on purpose into different groups"
        )
    return made


def shared_memory(group: CacheGroup) -> tuple[str, str] | None:
    """Two planes of a group that share bytes, as "layer K" and "layer V"; None where there are none.

    Groups may share memory: an engine gives them different blocks of it.
    """
    planes = [
        (plane, (group.num_blocks, layer.heads, group.block_size), f"{layer.name} {letter}")
        for layer in group.layers
        for letter, plane in (("K", layer.k), ("V", layer.v))
        if plane.channels
    ]
    planes.sort(key=lambda entry: entry[0].address)
    for index, (plane, sizes, name) in enumerate(planes):
        end = plane.end(sizes)
        for above, above_sizes, other in planes[index + 1 :]:
            if above.address >= end:
                break
            if plane.shares_bytes(above, sizes, above_sizes):
                return name, other
    return None
