"""The layers of a transformers DynamicCache that keep recurrent states (Mamba, linear attention) as a group of states.

Such a layer keeps one state of all tokens so far, and not which: it is stored where they end at a block's end, as the block
that ends there, and serves a prefix of exactly these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from kvstore.errors import InvalidCache, InvalidShape, UnsupportedCache, UnsupportedDtype

if TYPE_CHECKING:
    from transformers import DynamicCache

STATES: Final = "mamba"
"""The type of layers with states, of kvstore.identity.LAYER_TYPES."""
CONV: Final = "conv_states"
RECURRENT: Final = "recurrent_states"
Slots = tuple[tuple[str, int], ...]
"""The states of a layer in the order in which they are stored: which of its dicts, and the key in it."""


@dataclass(frozen=True)
class StateLayers:
    """Layers that keep the same states; a LayerGroup of one block, the last one of a prefix."""

    number: int
    layers: tuple[int, ...]
    slots: Slots

    @property
    def type(self) -> str:
        """As LayerGroup."""
        return STATES

    @property
    def window(self) -> int | None:
        """As LayerGroup."""
        return None

    def name(self, index: int) -> str:
        """As LayerGroup."""
        return f"model.layers.{index}.linear_attn"

    def blank(self, layer: Any, block_size: int) -> tuple[torch.Tensor, ...]:
        """As LayerGroup: a tensor a state, as the layer has it, (1, ...)."""
        return tuple(torch.zeros_like(given) for given in self._states(layer))

    def check(self, layer: Any, index: int, parts: Sequence[torch.Tensor], tokens: int) -> None:
        """As LayerGroup."""
        if layer.record_past:
            raise InvalidCache(
                f"layer {index} records its past (`activate_past_recording`): `crop` takes tokens from attention then, but "
                "none from a recurrent state, so that they may not belong together; expected a cache of load_cache, which "
                "records windows alone"
            )
        if slots_of(layer) != self.slots or not all(layer.has_previous_state.values()):
            raise InvalidCache(
                f"layer {index} has {len(slots_of(layer))} states, or no tokens behind them: expected the "
                f"{len(self.slots)} of the model, after a forward pass; do not save a cache that was reset"
            )
        for (kind, own), given, part in zip(self.slots, self._states(layer), parts, strict=True):
            _check_state(f"{kind}[{own}] of layer {index}", given, part)

    def held(self, cache: DynamicCache, tokens: int, block_size: int) -> range:
        """As LayerGroup: the block that ends where the tokens end, if one does."""
        return range(0) if tokens % block_size else self.needed(tokens, block_size)

    def needed(self, tokens: int, block_size: int) -> range:
        """As LayerGroup."""
        blocks = tokens // block_size
        return range(max(0, blocks - 1), blocks)

    def tensors(self, layer: Any, blocks: range, block_size: int) -> tuple[torch.Tensor, ...]:
        """As LayerGroup: the states, (1, ...) each, the one block that there is."""
        return self._states(layer)

    def make_room(self, layer: Any, parts: Sequence[torch.Tensor], blocks: range, block_size: int) -> None:
        """As LayerGroup. The layer makes the tensors, and notes their sizes, device and dtype, as in a forward pass; it reads
        them because it is told that tokens came before."""
        for (kind, own), part in zip(self.slots, parts, strict=True):
            layer.lazy_initialization(**{kind: part, "state_idx": own})
            if kind == CONV:
                # A layer that keeps tokens, too, leaves it out where these came first.
                layer.dtype = part.dtype
        layer.has_previous_state.update(dict.fromkeys(layer.has_previous_state, True))

    def cut(self, layer: Any, tokens: int) -> None:
        """As LayerGroup. A state is of all its tokens: a prefix that a state belongs to is as long as what was loaded."""

    def record(self, layer: Any) -> None:
        """As LayerGroup: no state of the past can be kept, whoever needs one saves it in time."""

    def _states(self, layer: Any) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(layer, kind)[own] for kind, own in self.slots)


def keeps_states(layer: object) -> bool:
    """Whether a layer keeps recurrent states, attention's tokens beside them or not."""
    return hasattr(layer, CONV)


def slots_of(layer: Any) -> Slots:
    """Which states a layer has after a forward pass: conv states, then recurrent ones."""
    return tuple(
        (kind, own) for kind in (CONV, RECURRENT) for own, given in getattr(layer, kind).items() if given is not None
    )


def state_groups(layers: Sequence[Any], first: int) -> tuple[StateLayers, ...]:
    """The groups of those of a model's filled layers that keep states, numbered from `first` on.

    Raises UnsupportedCache for a layer without a state.
    """
    slots = {index: slots_of(layer) for index, layer in enumerate(layers) if keeps_states(layer)}
    if empty := [index for index, own in slots.items() if not own]:
        raise UnsupportedCache(f"the layers {empty} have no states after a forward pass: expected at least one each")
    kinds = sorted(set(slots.values()))
    return tuple(
        StateLayers(first + number, tuple(index for index, own in slots.items() if own == kind), kind)
        for number, kind in enumerate(kinds)
    )


def _check_state(what: str, given: torch.Tensor, part: torch.Tensor) -> None:
    if given.shape != part.shape:
        raise InvalidShape(
            f"{what} has the shape {tuple(given.shape)}: expected {tuple(part.shape)}, one sequence of the store's model; "
            "save each sequence of a batch from a cache of its own"
        )
    if given.dtype != part.dtype:
        raise UnsupportedDtype(f"{what} is {given.dtype}: the store was opened for a model that keeps {part.dtype}")
