"""The layers of a transformers DynamicCache as groups of a paged cache, without a copy.

Layers that keep the same tokens are a group: full attention keeps all of them, a sliding window the last ones, and
recurrent states (kvstore.engines.transformers_states) what came of all of them. Block i of a request is its tokens
i * block_size and on, in every group; a group has those blocks that its layers keep whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from kvstore.cache import PagedKVCache, StateTensor
from kvstore.engines.transformers_states import STATES, keeps_states, state_groups
from kvstore.errors import EngineError, InvalidCache, InvalidShape, UnsupportedCache, UnsupportedDtype

if TYPE_CHECKING:
    from transformers import DynamicCache

LAYOUT: Final = "BHND"
Parts = tuple[torch.Tensor, ...]
"""What a layer keeps in a group: K and V, (blocks, heads, block_size, head size) each, or its states, (1, ...) each."""
KNOWN: Final = (
    *("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"),
)
"""Full attention, a sliding window, recurrent states, and states beside full attention in one layer."""


class LayerGroup(Protocol):
    """Layers that keep the same of a request, and what saving and loading them takes.

    A layer may be in two: hybrid ones keep tokens and states side by side. What keeps something else is a further class with
    these methods: `check_kinds` lets its layers through, `layer_groups` makes it of them, and `described` tells the paged
    cache of its tensors.
    """

    @property
    def number(self) -> int:
        """The group's number in the store."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The indices of its layers in the model."""

    @property
    def type(self) -> str:
        """Its layers' type, one of kvstore.identity.LAYER_TYPES."""

    @property
    def window(self) -> int | None:
        """How many tokens a sliding window has, that of the token that looks back among them; None: there is none."""

    def name(self, index: int) -> str:
        """A layer's name in the identity."""

    def blank(self, layer: Any, block_size: int) -> Parts:
        """One block of zeros, with the shapes, dtype and device of what a filled layer of the model keeps."""

    def check(self, layer: Any, index: int, parts: Parts, tokens: int) -> None:
        """Raise InvalidCache or one of its kinds where a layer is none of this group's, or not one of a cache of `tokens`
        tokens. parts: as `blank`."""

    def held(self, cache: DynamicCache, tokens: int, block_size: int) -> range:
        """The positions of the whole blocks that a cache filled with so many tokens still has."""

    def needed(self, tokens: int, block_size: int) -> range:
        """The positions of the blocks without which a prefix of so many tokens cannot be gone on from."""

    def tensors(self, layer: Any, blocks: range, block_size: int) -> Parts:
        """Blocks of a layer as a paged cache has them, in the layer's own memory."""

    def make_room(self, layer: Any, parts: Parts, blocks: range, block_size: int) -> None:
        """Give an empty layer tensors for these blocks of a request, whose contents are undefined. parts: as `blank`."""

    def cut(self, layer: Any, tokens: int) -> None:
        """Drop what a layer has of the tokens behind the first `tokens` of its request."""

    def record(self, layer: Any) -> None:
        """Have a layer keep what it is given from now on, so that whole blocks are still there when they are saved."""


@dataclass(frozen=True)
class TokenGroup:
    """Layers that keep K and V of tokens: of all, or where there is a window at least of the last window - 1."""

    number: int
    layers: tuple[int, ...]
    window: int | None = None

    @property
    def type(self) -> str:
        """As LayerGroup."""
        return "full" if self.window is None else "sliding"

    def name(self, index: int) -> str:
        """As LayerGroup."""
        return f"model.layers.{index}.self_attn"

    def blank(self, layer: Any, block_size: int) -> Parts:
        """As LayerGroup: K and V, (1, heads, block_size, head size) each."""
        keys, values = (
            part.new_zeros((1, part.shape[1], block_size, part.shape[3])) for part in (layer.keys, layer.values)
        )
        return (keys, values)

    def check(self, layer: Any, index: int, parts: Parts, tokens: int) -> None:
        """As LayerGroup."""
        if (window := window_of(layer)) != self.window:
            raise InvalidCache(
                f"layer {index} of the cache is a {type(layer).__name__} with the window {window}, the model's has "
                f"{self.window}: expected a cache that this model made, or DynamicCache(config=model.config)"
            )
        if layer.get_seq_length() != tokens:
            raise InvalidShape(f"layer {index} has seen {layer.get_seq_length()} tokens, layer 0 has seen {tokens}")
        least = tokens if self.window is None else min(tokens, self.window - 1)
        for letter, given, part in zip("KV", (layer.keys, layer.values), parts, strict=True):
            _check_tensor(f"{letter} of layer {index}", given, part, range(least, tokens + 1))
        if layer.keys.shape[2] != layer.values.shape[2]:
            raise InvalidShape(f"layer {index} keeps K of {layer.keys.shape[2]} tokens, V of {layer.values.shape[2]}")

    def held(self, cache: DynamicCache, tokens: int, block_size: int) -> range:
        """As LayerGroup."""
        layers = [cache.layers[index] for index in self.layers]
        first = max(_dropped(layer) for layer in layers)
        return range(-(-first // block_size), tokens // block_size)

    def needed(self, tokens: int, block_size: int) -> range:
        """As LayerGroup."""
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // block_size, tokens // block_size)

    def tensors(self, layer: Any, blocks: range, block_size: int) -> Parts:
        """As LayerGroup."""
        first = blocks.start * block_size - _dropped(layer)
        tokens = slice(first, first + len(blocks) * block_size)
        keys, values = (
            part[0, :, tokens].unflatten(1, (len(blocks), block_size)).transpose(0, 1)
            for part in (layer.keys, layer.values)
        )
        return keys, values

    def make_room(self, layer: Any, parts: Parts, blocks: range, block_size: int) -> None:
        """As LayerGroup. The tensors are set here because `update` would copy them: what was verified would not be what is
        read."""
        tokens = len(blocks) * block_size
        keys, values = (part.new_empty((1, part.shape[1], tokens, part.shape[3])) for part in parts)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        self._set_length(layer, blocks.stop * block_size)

    def cut(self, layer: Any, tokens: int) -> None:
        """As LayerGroup."""
        kept = tokens - _dropped(layer)
        layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
        self._set_length(layer, tokens)

    def record(self, layer: Any) -> None:
        """As LayerGroup."""
        if self.window is not None:
            layer.activate_past_recording()

    def _set_length(self, layer: Any, tokens: int) -> None:
        """A layer of full attention has as many tokens as its tensors; one with a window counts those it has seen."""
        if self.window is not None:
            layer.cumulative_length = tokens


def cache_utils() -> Any:
    """transformers.cache_utils, imported when first needed: it takes seconds. Raises EngineError."""
    try:
        from transformers import cache_utils as found
    except ImportError as error:
        raise EngineError(
            f"transformers cannot be imported: {error}: pip install transformers, or the extra `engines` of kvstore"
        ) from error
    return found


def layer_groups(layers: Sequence[Any]) -> tuple[LayerGroup, ...]:
    """The groups of a model's filled layers: full attention first, then windows from the smallest on, then states; numbered
    from 0.

    Raises UnsupportedCache for kinds of layers that no group is made of.
    """
    check_kinds(layers)
    windows = {index: window_of(layer) for index, layer in enumerate(layers) if keeps_tokens(layer)}
    kinds = sorted(set(windows.values()), key=lambda window: window or 0)
    of_tokens = [
        TokenGroup(number, tuple(index for index, own in windows.items() if own == window), window)
        for number, window in enumerate(kinds)
    ]
    return (*of_tokens, *state_groups(layers, len(of_tokens)))


def check_kinds(layers: Sequence[object]) -> None:
    """Raise UnsupportedCache for kinds of layers that no group is made of."""
    utils = cache_utils()
    known = [getattr(utils, name, None) for name in KNOWN]
    if kinds := sorted({type(layer).__name__ for layer in layers if type(layer) not in known}):
        raise UnsupportedCache(
            f"the cache has layers of the kinds {', '.join(kinds)}: expected {', '.join(KNOWN)} alone"
        )


def keeps_tokens(layer: object) -> bool:
    """Whether a layer keeps K and V of tokens, states beside them or not."""
    return hasattr(layer, "keys")


def filled(layer: Any) -> bool:
    """Whether a layer has been given anything."""
    return bool(
        getattr(layer, "is_initialized", False) or (keeps_states(layer) and any(layer.has_previous_state.values()))
    )


def check_keeps(layers: Sequence[Any], groups: Collection[LayerGroup]) -> None:
    """Raise InvalidCache where layers keep tokens or states, and those of the model with these groups do not, or other way
    round."""
    expected = [
        {index for g in groups if (g.type == STATES) is states for index in g.layers} for states in (False, True)
    ]
    if len(layers) != len(set.union(*expected)):
        raise InvalidCache(
            f"the cache has {len(layers)} layers, the model of the store {len(set.union(*expected))}: pass its cache"
        )
    for index, layer in enumerate(layers):
        if (keeps_tokens(layer), keeps_states(layer)) != (index in expected[0], index in expected[1]):
            raise InvalidCache(
                f"layer {index} of the cache is a {type(layer).__name__}, which the model has elsewhere or nowhere: expected "
                "a cache that this model made, or DynamicCache(config=model.config)"
            )


def window_of(layer: Any) -> int | None:
    """How many tokens, itself among them, a token of a DynamicCache's layer sees; None: all."""
    return int(layer.sliding_window) if layer.is_sliding else None


def paged(cache: DynamicCache, blocks: Mapping[LayerGroup, range], block_size: int) -> PagedKVCache:
    """Blocks of a filled DynamicCache as a paged cache: views of its own tensors. blocks: by group, which ones, at least
    one; a group's block 0 is the first of them."""
    tensors = {
        group.name(index): group.tensors(cache.layers[index], own, block_size)
        for group, own in blocks.items()
        for index in group.layers
    }
    return described(tensors, blocks, block_size)


def described(tensors: Mapping[str, Parts], groups: Collection[LayerGroup], block_size: int) -> PagedKVCache:
    """A paged cache of the layers of these groups, by name; as `LayerGroup.tensors`. Raises as PagedKVCache.from_tensors.

    States are one slice a layer: one rank has the whole model.
    """
    of_states = {group.number: group for group in groups if group.type == STATES}
    of_tokens = [group for group in groups if group.number not in of_states]
    return PagedKVCache.from_tensors(
        {name: (tensors[name][0], tensors[name][1]) for group in of_tokens for name in names_of(group)},
        LAYOUT,
        {group.number: names_of(group) for group in groups},
        layer_types={name: group.type for group in of_tokens for name in names_of(group)},
        windows={group.number: group.window for group in of_tokens if group.window is not None},
        states={n: [StateTensor(t, None) for t in tensors[n]] for g in of_states.values() for n in names_of(g)},
        state_block_size=dict.fromkeys(of_states, block_size),
    )


def names_of(group: LayerGroup) -> list[str]:
    """The names of a group's layers in the identity."""
    return [group.name(index) for index in group.layers]


def parts_of(cache: PagedKVCache, name: str) -> Parts:
    """What `described` was told of a layer."""
    if name in cache.states:
        return tuple(state.tensor for state in cache.states[name])
    return tuple(cache.tensors[name])


def _dropped(layer: Any) -> int:
    """How many of the tokens that a layer has seen it does not keep: the first ones."""
    return int(layer.get_seq_length() - layer.keys.shape[2])


def _check_tensor(what: str, given: torch.Tensor | None, part: torch.Tensor, tokens: range) -> None:
    """Compare a layer's tensor with the model's, (1, heads, block_size, head size). tokens: how many it may keep."""
    sizes = (1, part.shape[1], part.shape[3])
    shape = () if given is None else tuple(given.shape)
    if given is None or len(shape) != 4 or (*shape[:2], shape[3]) != sizes or shape[2] not in tokens:
        count = tokens.start if len(tokens) == 1 else f"{tokens.start} to {tokens[-1]}"
        raise InvalidShape(
            f"{what} has the shape {shape or None}: expected (1, {sizes[1]}, {count}, {sizes[2]}), one sequence of the "
            "store's model; save each sequence of a batch from a cache of its own"
        )
    if given.dtype != part.dtype:
        raise UnsupportedDtype(f"{what} is {given.dtype}: the store was opened for a model whose KV is {part.dtype}")
