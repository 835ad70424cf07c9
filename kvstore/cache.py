"""PagedKVCache: where an engine keeps each layer, head and token."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from kvstore.checksum import MAX_KV_HEADS_PER_LAYER, ReplicaKey
from kvstore.errors import InvalidCache, UnknownGroup, UnsupportedCache, UnsupportedDevice
from kvstore.group import CPU as CPU
from kvstore.group import CacheGroup as CacheGroup
from kvstore.group import LayerCache as LayerCache
from kvstore.group import Slice as Slice
from kvstore.group import shared_memory as shared_memory
from kvstore.identity import LAYER_TYPES, heads_before, layer_number
from kvstore.layout import LayerPlanes, LayerTensors, check_layout, take_apart
from kvstore.states import StateGroup as StateGroup
from kvstore.states import StateTensor as StateTensor
from kvstore.statetensors import make_state_group

log = logging.getLogger(__name__)
MAX_GROUP = 2**16 - 1
UNSUPPORTED: Final = ("raise", "skip")
AnyGroup = CacheGroup | StateGroup


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
    skipped: Mapping[int, str] = field(default_factory=dict)
    """Groups that cannot be checksummed, which are in neither, and why."""
    state_groups: Mapping[int, StateGroup] = field(default_factory=dict)
    """Groups of Mamba states, whose numbers are not those of `groups`."""
    states: Mapping[str, Sequence[StateTensor]] = field(default_factory=dict, repr=False)

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
        kv_heads: Mapping[str, int] | None = None,
        replicas: Mapping[str, tuple[int, int]] | None = None,
        windows: Mapping[int, int] | None = None,
        unsupported: str = "raise",
        states: Mapping[str, Sequence[StateTensor]] | None = None,
        state_block_size: Mapping[int, int] | None = None,
        tp_rank: int = 0,
    ) -> PagedKVCache:
        """Describe the tensors of a paged cache, one entry a layer.

        tensors: layer name -> tensor, or (K, V) pair of tensors where the layout has neither C nor 2. bf16, fp16,
        fp32, fp8, int8 or uint8, with any strides. layout: the order of the axes (docs of kvstore.layout); of states alone
        any will do.
        groups: {group number: layer names}, by default all layers in group 0. first_head: {name: global number
        of its first head} of a tensor-parallel rank, by default 0. value_channels: with C, how many of the last
        channels are V; by default half of them, none without an H axis (MLA keeps K alone). layer_types:
        {name: type}, by default "full". kv_heads: {name: its KV heads in the unsharded model}; a rank says so of layer
        numbers that have several caches, whose heads are numbered one after the other in the order of their names; by
        default what the tensor has. replicas: {name: (copies, which of them)} of heads that several ranks hold, where these
        are not the ranks that `kvstore.replicas` takes them for. windows: {group: tokens} that a sliding window looks
        back. unsupported: "skip" leaves out groups that cannot be checksummed, and `skipped` says why.
        states: {layer name: its Mamba states in order, conv, then recurrent}; such layers are in groups of their own, and
        tensors may be empty then. state_block_size: {group of states: tokens that a block stands for}. tp_rank: this rank's
        number, for states whose split is not known.

        Layers of a group that share one cache count once, as the layer of the lowest number; the others are its `aliases`.

        Raises UnknownLayout, and InvalidCache or one of its kinds for what cannot be stored or checksummed.
        """
        check_layout(layout)
        if not isinstance(tensors, Mapping) or not (tensors or states):
            raise InvalidCache(f"tensors is {type(tensors).__name__}, or empty: expected {{layer name: tensor}}")
        every = {**tensors, **_checked_states(states, tensors, tp_rank)}
        if wrong := unnamed(every):
            raise InvalidCache(f"tensors has the key {wrong[0]!r}: expected the model's layer names")
        if unsupported not in UNSUPPORTED:
            raise InvalidCache(f"unsupported is {unsupported!r}: expected one of {UNSUPPORTED}")
        values = value_channels if isinstance(value_channels, Mapping) else dict.fromkeys(tensors, value_channels)
        names = _group_names(every, groups)
        sizes = _block_sizes(state_block_size or {}, names, states or {})
        options = _Options(
            layout,
            _per_layer("value_channels", values, tensors),
            _per_layer("first_head", first_head or {}, tensors),
            _per_layer("layer_types", layer_types or {}, tensors),
            _per_layer("kv_heads", kv_heads or {}, tensors),
            _per_layer("replicas", replicas or {}, tensors),
            _windows(windows or {}, {n: members for n, members in names.items() if n not in sizes}),
            sizes,
            frozenset(states or {}),
            tp_rank,
        )
        made, skipped = _make_groups(every, names, options, skip=unsupported == "skip")
        kept = {n: t if isinstance(t, torch.Tensor) else (t[0], t[1]) for n, t in tensors.items()}
        own_states = {name: tuple(given) for name, given in (states or {}).items()}
        of_states = {n: g for n, g in made.items() if isinstance(g, StateGroup)}
        of_tokens = {n: g for n, g in made.items() if isinstance(g, CacheGroup)}
        return cls(of_tokens, kept, layout, skipped, of_states, own_states)

    def group(self, number: int) -> CacheGroup:
        """The group of that number; raises UnknownGroup, and UnsupportedCache for one that was skipped."""
        known = isinstance(number, int) and not isinstance(number, bool)
        found = self.groups.get(number) if known else None
        if known and number in self.skipped:
            raise UnsupportedCache(f"group {number} cannot be checksummed: {self.skipped[number]}")
        if found is None:
            raise UnknownGroup(f"group {number!r}: this cache has the groups {sorted(self.groups)}")
        return found

    def any_group(self, number: int) -> AnyGroup:
        """The group of that number, of tokens or of states; raises as `group`."""
        if isinstance(number, int) and not isinstance(number, bool) and number in self.state_groups:
            return self.state_groups[number]
        return self.group(number)

    @property
    def all_groups(self) -> dict[int, AnyGroup]:
        """The groups of tokens and of states."""
        return {**self.groups, **self.state_groups}


@dataclass(frozen=True)
class _Options:
    """What from_tensors was told, by layer name; windows, block_sizes (of states): by group."""

    layout: str
    value_channels: dict[str, Any]
    first_head: dict[str, Any]
    types: dict[str, Any]
    kv_heads: dict[str, Any]
    replicas: dict[str, Any]
    windows: dict[int, int]
    block_sizes: dict[int, Any]
    state_layers: frozenset[str]
    tp_rank: int


def unnamed(names: Iterable[object]) -> list[object]:
    """Those of the names that are none."""
    return [name for name in names if not isinstance(name, str)]


def _per_layer(option: str, given: object, tensors: Mapping[str, LayerTensors]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidCache(f"{option} is {given!r}: expected {{layer name: value}}")
    if unknown := sorted(map(str, set(given) - set(tensors))):
        raise InvalidCache(f"{option} names layers that are not in tensors: {', '.join(unknown)}")
    return dict(given)


def _checked_states(states: object, tensors: Mapping[str, LayerTensors], tp_rank: object) -> dict[str, Any]:
    """The layers of states by name; raises InvalidCache where they are none, or layers of tokens as well."""
    if states is not None and not isinstance(states, Mapping):
        raise InvalidCache(f"states is {states!r}: expected {{layer name: list of StateTensor}}")
    if not _whole(tp_rank) or not 0 <= tp_rank < MAX_KV_HEADS_PER_LAYER:  # type: ignore[operator]
        raise InvalidCache(f"tp_rank is {tp_rank!r}: expected this rank's number, 0 to {MAX_KV_HEADS_PER_LAYER - 1}")
    found = dict(states or {})
    if twice := sorted(str(name) for name in found if name in tensors):
        raise InvalidCache(f"states and tensors both have {', '.join(twice)}: a layer has one or the other")
    return found


def _block_sizes(given: object, names: Mapping[int, Sequence[str]], states: Mapping[str, object]) -> dict[int, Any]:
    of_states = sorted(number for number, members in names.items() if any(name in states for name in members))
    if not isinstance(given, Mapping) or set(given) != set(of_states):
        raise InvalidCache(
            f"state_block_size is {given!r}: expected {{group: tokens a block}} for the groups of states, {of_states}"
        )
    return dict(given)


def _group_names(
    tensors: Mapping[str, object], groups: Mapping[int, Sequence[str]] | None
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


def _windows(given: object, names: Mapping[int, Sequence[str]]) -> dict[int, int]:
    if not isinstance(given, Mapping):
        raise InvalidCache(f"windows is {given!r}: expected {{group number: tokens}}")
    for number, tokens in given.items():
        if number not in names or not _whole(tokens) or tokens < 1:
            raise InvalidCache(
                f"windows[{number!r}] is {tokens!r}: expected a group of tokens of this cache, and 1 token or more"
            )
    return dict(given)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _make_groups(
    layers: Mapping[str, Any], names: Mapping[int, Sequence[str]], options: _Options, skip: bool
) -> tuple[dict[int, AnyGroup], dict[int, str]]:
    """The groups, and those that were skipped with the reason."""
    made, skipped = dict[int, AnyGroup](), dict[int, str]()
    for number, members in names.items():
        try:
            made[number] = _make_any_group(number, {name: layers[name] for name in members}, options)
        except UnsupportedCache as error:
            if not skip:
                raise
            skipped[number] = str(error)
            log.warning("group %d cannot be checksummed, so that it is neither stored nor loaded: %s", number, error)
    return made, skipped


def _make_any_group(number: int, layers: Mapping[str, Any], options: _Options) -> AnyGroup:
    if number not in options.block_sizes:
        return _make_group(number, layers, options)
    if others := sorted(set(layers) - options.state_layers):
        raise UnsupportedCache(
            f"group {number} has layers with states and layers of tokens, {others[0]} among them: a group has one kind; put "
            "them into groups of their own"
        )
    return make_state_group(number, layers, options.block_sizes[number], options.tp_rank)


def _make_group(number: int, tensors: Mapping[str, LayerTensors], options: _Options) -> CacheGroup:
    planes = {
        name: take_apart(name, t, options.layout, options.value_channels.get(name)) for name, t in tensors.items()
    }
    layers = [_layer(name, planes[name], options) for name in tensors]
    return _group(number, _numbered(_without_aliases(layers)), planes, options.windows.get(number))


def _layer(name: str, planes: LayerPlanes, options: _Options) -> LayerCache:
    first_head, kind = options.first_head.get(name, 0), options.types.get(name, "full")
    kv_heads, replica = options.kv_heads.get(name), options.replicas.get(name)
    if not _whole(first_head) or first_head < 0:
        raise InvalidCache(
            f"first_head[{name!r}] is {first_head!r}: expected the global number of its first head, 0 or more"
        )
    if first_head + planes.heads > MAX_KV_HEADS_PER_LAYER:
        raise UnsupportedCache(
            f"layer {name}: heads {first_head} to {first_head + planes.heads - 1}: the checksum numbers at most "
            f"{MAX_KV_HEADS_PER_LAYER} KV heads a layer"
        )
    if kv_heads is not None and (not _whole(kv_heads) or kv_heads < first_head + planes.heads):
        raise InvalidCache(
            f"kv_heads[{name!r}] is {kv_heads!r}, its tensor has the heads {first_head} to "
            f"{first_head + planes.heads - 1}: expected the KV heads of the unsharded model"
        )
    if kind not in LAYER_TYPES or kind == "mamba":
        types = ", ".join(t for t in LAYER_TYPES if t != "mamba")
        raise UnsupportedCache(
            f"layer {name}: type {kind!r}: a paged cache of tokens has one of {types}; Mamba layers "
            "go into states={name: ...}"
        )
    key = None if replica is None else _replica(name, replica)
    return LayerCache(
        *(name, layer_number(name), kind, planes.dtype, first_head, planes.heads, planes.k, planes.v),
        kv_heads=kv_heads,
        replica=key,
    )


def _replica(name: str, given: object) -> ReplicaKey:
    if not isinstance(given, tuple) or len(given) != 2 or not all(map(_whole, given)) or not 0 <= given[1] < given[0]:
        raise InvalidCache(f"replicas[{name!r}] is {given!r}: expected (copies, which of them, from 0)")
    return ReplicaKey(*given)


def _without_aliases(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Layers that have one cache as one, that of the lowest number."""
    found: dict[object, LayerCache] = {}
    for layer in sorted(layers, key=lambda layer: (layer.number, layer.name)):
        place = (layer.k, layer.v, layer.heads)
        first = found.setdefault(place, layer)
        if first is layer:
            continue
        if (first.first_head, first.type, first.kv_heads) != (layer.first_head, layer.type, layer.kv_heads):
            raise InvalidCache(
                f"{first.name} and {layer.name} share one cache, and differ in first_head, layer_types or kv_heads: "
                "describe both alike"
            )
        found[place] = replace(first, aliases=(*first.aliases, layer.name))
    return list(found.values())


def _numbered(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """The layers with their heads numbered behind those of the caches that come before, of the same layer number."""
    before = heads_before({layer.name: layer.kv_heads or layer.first_head + layer.heads for layer in layers})
    return [
        replace(layer, first_head=before[layer.name] + layer.first_head, heads_before=before[layer.name])
        for layer in layers
    ]


def _group(number: int, members: list[LayerCache], planes: Mapping[str, LayerPlanes], window: int | None) -> CacheGroup:
    layers = sorted(members, key=lambda layer: (layer.number, layer.name))
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
    made = CacheGroup(number, tuple(layers), first.tokens, first.blocks, first.device, window)
    if shared := shared_memory(made):
        raise UnsupportedCache(
            f"group {number}: {shared[0]} and {shared[1]} share memory: each needs bytes of its own in every block; name a "
            "tensor once, or put layers that share one on purpose into different groups"
        )
    return made
