"""What goes wrong with blocks on their way to the engine: real KV that lands where other KV belongs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvstore import PagedKVCache
from tests.real_splits import LAYERS, PREFIX, Split, views

WHOLE = Split(layout="BHND")
"""The split that loads."""
BLOCK, OTHER = 2, 4
"""The positions of what is misplaced."""


def exchange(one: torch.Tensor, two: torch.Tensor) -> None:
    """Exchange what lies in two places."""
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


def at(paged: PagedKVCache, layer: int, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a block, by its position, of the whole model's cache."""
    return views(paged, layer, WHOLE.ids[block])


def rows_shifted(paged: PagedKVCache, layers: range, heads: slice = slice(None)) -> None:
    for layer in layers:
        for view in at(paged, layer):
            view[heads].copy_(view[heads].roll(1, dims=1))


def rows_exchanged(paged: PagedKVCache, layers: range, first: int, second: int) -> None:
    for layer in layers:
        for view in at(paged, layer):
            exchange(view[:, first], view[:, second])


def heads_exchanged(paged: PagedKVCache, layers: range, parts: slice = slice(2)) -> None:
    for layer in layers:
        for view in at(paged, layer)[parts]:
            exchange(view[0], view[2])


def layers_exchanged(paged: PagedKVCache, first: int, second: int, heads: slice = slice(None)) -> None:
    for one, two in zip(at(paged, first), at(paged, second), strict=True):
        exchange(one[heads], two[heads])


def k_and_v_exchanged(paged: PagedKVCache, layers: range, heads: slice = slice(None)) -> None:
    for layer in layers:
        keys, values = at(paged, layer)
        exchange(keys[heads], values[heads])


def positions_exchanged(paged: PagedKVCache, layers: range) -> None:
    for layer in layers:
        for one, two in zip(at(paged, layer), at(paged, layer, OTHER), strict=True):
            exchange(one, two)


def all_rows_shifted(paged: PagedKVCache, layers: range) -> None:
    """Over all blocks: each one's first row is the last of the one before."""
    for layer in layers:
        for part in (0, 1):
            blocks = [at(paged, layer, block)[part] for block in range(WHOLE.blocks)]
            rows = torch.cat(blocks, dim=1)[:, :PREFIX].roll(1, dims=1).split(WHOLE.block_size, dim=1)
            for block, shifted in zip(blocks, rows, strict=True):
                block[:, : shifted.shape[1]] = shifted


ALL, ONE, LAST = range(LAYERS), range(17, 18), slice(2, 3)
EVERY_BLOCK = set(range(WHOLE.blocks))
MISPLACED: dict[str, tuple[Callable[[PagedKVCache], None], set[int]]] = {
    "rows shifted by one": (lambda p: rows_shifted(p, ALL), {BLOCK}),
    "rows of one layer shifted": (lambda p: rows_shifted(p, ONE), {BLOCK}),
    "rows of one head shifted": (lambda p: rows_shifted(p, ONE, LAST), {BLOCK}),
    "rows of all blocks shifted": (lambda p: all_rows_shifted(p, ALL), EVERY_BLOCK),
    "two rows exchanged": (lambda p: rows_exchanged(p, ALL, 4, 5), {BLOCK}),
    "two rows of one layer exchanged": (lambda p: rows_exchanged(p, ONE, 0, 15), {BLOCK}),
    "two heads exchanged": (lambda p: heads_exchanged(p, ALL), {BLOCK}),
    "two heads of one layer exchanged": (lambda p: heads_exchanged(p, ONE), {BLOCK}),
    "two heads of one layer's V exchanged": (lambda p: heads_exchanged(p, ONE, slice(1, 2)), {BLOCK}),
    "two layers exchanged": (lambda p: layers_exchanged(p, 3, 4), {BLOCK}),
    "two layers of one head exchanged": (lambda p: layers_exchanged(p, 0, 29, LAST), {BLOCK}),
    "K with V exchanged": (lambda p: k_and_v_exchanged(p, ALL), {BLOCK}),
    "K with V of one head exchanged": (lambda p: k_and_v_exchanged(p, ONE, LAST), {BLOCK}),
    "two positions exchanged": (lambda p: positions_exchanged(p, ALL), {BLOCK, OTHER}),
    "two positions of one layer exchanged": (lambda p: positions_exchanged(p, ONE), {BLOCK, OTHER}),
}
