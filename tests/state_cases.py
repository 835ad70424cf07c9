"""Caches of Mamba states for tests, and docs/checksum.md section 5 in plain Python, from torch's own indexing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from kvstore import PagedKVCache, StateTensor
from tests.support import layer_tensors, random_tensor

SLOTS = 5
TOKENS = 8
"""Tokens that a block of a group of states stands for."""
GROUP = 1
MASK = 2**64 - 1
States = dict[str, list[StateTensor]]


def mamba(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> States:
    """Two layers of different shapes: conv states in one dtype, recurrent ones in float32."""
    shapes = {0: ((40, 3), (8, 5, 6)), 12: ((24, 4), (3, 7, 2))}
    return {
        f"model.layers.{layer}.mixer": [
            StateTensor(random_tensor((SLOTS, *conv), dtype, 100 * seed + layer), 1),
            StateTensor(random_tensor((SLOTS, *recurrent), torch.float32, 100 * seed + layer + 50), 1),
        ]
        for layer, (conv, recurrent) in shapes.items()
    }


def pages(seed: int = 0) -> States:
    """As an engine keeps them whose slots are pages: of each, conv, then recurrent state, then room to spare; conv states
    lie with their rows last."""
    found: States = {}
    for layer in range(2):
        page = random_tensor((SLOTS, 2000), torch.uint8, 100 * seed + layer)
        conv = page[:, 16:256].view(torch.bfloat16).view(SLOTS, 3, 40)
        recurrent = page[:, 256:1216].view(torch.float32).view(SLOTS, 8, 5, 6)
        found[f"model.layers.{layer}.mixer"] = [StateTensor(conv, 2), StateTensor(recurrent, 1)]
    return found


def strided(seed: int = 0) -> States:
    """Axes in no order, with gaps, that do not merge; the split one in the middle, last, and before rows that have gaps
    between them."""
    first = random_tensor((4, 6, SLOTS, 5, 10), torch.float32, 100 * seed + 1).permute(2, 0, 4, 3, 1)[:, :, ::2]
    second = random_tensor((7, SLOTS, 9), torch.float16, 100 * seed + 2).permute(1, 0, 2)[..., :8]
    third = random_tensor((SLOTS, 6, 9), torch.bfloat16, 100 * seed + 3)[..., :7]
    return {"layers.3.mixer": [StateTensor(first, 3), StateTensor(second, 2), StateTensor(third, 1)]}


def unknown(seed: int = 0) -> States:
    """A layer whose split is not known for one of its states, and so for none; and one whose split is."""
    found = mamba(seed)
    conv, recurrent = found["model.layers.12.mixer"]
    found["model.layers.12.mixer"] = [StateTensor(conv.tensor, 1), StateTensor(recurrent.tensor, None)]
    return found


def ranks_part(seed: int = 0) -> States:
    """The rows of one rank of several: three ranges of a conv state, one of a recurrent one; and ranges that lie in another
    order than their rows' numbers."""
    conv = random_tensor((SLOTS, 20, 3), torch.bfloat16, 100 * seed + 1)
    recurrent = random_tensor((SLOTS, 4, 6), torch.float32, 100 * seed + 2)
    swapped = random_tensor((SLOTS, 12, 2), torch.float16, 100 * seed + 3)
    return {
        "layers.1.mixer": [
            StateTensor(conv, 1, [(10, 10), (23, 5), (33, 5)], 40),
            StateTensor(recurrent, 1, [(4, 4)], 8),
        ],
        "layers.2.mixer": [StateTensor(swapped, 1, [(6, 6), (0, 6)])],
    }


FORMS = {"mamba": mamba, "pages": pages, "strided": strided, "unknown": unknown, "a rank's part": ranks_part}


def cache_of(states: States, seed: int = 0, tp_rank: int = 0) -> PagedKVCache:
    """Group 0: layers of tokens, SLOTS blocks of TOKENS; group 1: the states."""
    tensors = layer_tensors("BHNC", blocks=SLOTS, tokens=TOKENS, seed=seed, first_layer=20)
    groups = {0: list(tensors), GROUP: list(states)}
    return PagedKVCache.from_tensors(
        tensors, "BHNC", groups, states=states, state_block_size={GROUP: TOKENS}, tp_rank=tp_rank
    )


def split(states: Mapping[str, Sequence[StateTensor]], parts: int, part: int) -> States:
    """One rank's part of whole states: of the first state of a layer the rows in two ranges (the first 3/4 and the last
    quarter are split apart, as an x and a B part are), of the others in one."""
    found: States = {}
    for name, given in states.items():
        found[name] = []
        for index, state in enumerate(given):
            axis = state.split_axis
            assert axis is not None
            size = state.tensor.shape[axis]
            bounds = [0, size * 3 // 4, size] if index == 0 else [0, size]
            rows = [(a + (b - a) * part // parts, (b - a) // parts) for a, b in pairwise(bounds)]
            taken = torch.cat([state.tensor.narrow(axis, first, count) for first, count in rows], axis)
            found[name].append(StateTensor(taken, axis, rows, size))
    return found


def with_tensors(states: States, seed: int) -> States:
    """The same states over contiguous tensors of other random bytes."""
    return {
        name: [
            replace(
                state, tensor=random_tensor(state.tensor.shape, state.tensor.dtype, 1000 * seed + 7 * i + len(name))
            )
            for i, state in enumerate(given)
        ]
        for name, given in states.items()
    }


# --- docs/checksum.md, section 5 ---------------------------------------------------------------------------------


def row_numbers(state: StateTensor) -> list[int]:
    """The number of each row among the state's in the model, in the order in which they lie."""
    assert state.split_axis is not None
    ranges = state.rows or [(0, state.tensor.shape[state.split_axis])]
    return [first + i for first, count in ranges for i in range(count)]


def model_rows(state: StateTensor) -> int:
    return state.model_rows or max(row_numbers(state)) + 1


def row_bytes(state: StateTensor, slot: int) -> dict[int, bytes]:
    """Each row's bytes by its number: the elements of the other axes in their order, the last one fastest."""
    assert state.split_axis is not None
    rows = state.tensor[slot].movedim(state.split_axis - 1, 0)
    return {number: plain_bytes(rows[i]) for i, number in enumerate(row_numbers(state))}


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def weighed(data: bytes, itemsize: int, first: int = 0) -> int:
    """s: sum of x_j * (2*j + 1)."""
    pieces = (int.from_bytes(data[at : at + itemsize], "little") for at in range(0, len(data), itemsize))
    return sum(x * (2 * j + 1) for j, x in enumerate(pieces, first)) & MASK


def number_of(name: str) -> int:
    return int(re.findall(r"\d+", name)[0])


def reference_sum(states: Mapping[str, Sequence[StateTensor]], slot: int, tp_rank: int = 0) -> int:
    """c of a slot."""
    total = 0
    for name, given in states.items():
        layer = number_of(name)
        if any(state.split_axis is None for state in given):
            j = 0
            for state in given:
                s = weighed(plain_bytes(state.tensor[slot]), state.tensor.itemsize, j)
                total += (2 * (layer * 65536 + tp_rank) + 1) * s
                j += state.tensor[slot].numel()
            continue
        before = 0
        for state in given:
            for number, data in row_bytes(state, slot).items():
                total += (2 * (layer * 65536 + before + number) + 1) * weighed(data, state.tensor.itemsize)
            before += model_rows(state)
    return total & MASK


def canonical_bytes(states: Mapping[str, Sequence[StateTensor]], slot: int) -> bytes:
    """A slot's bytes as a record has them: layer by layer, state by state, row by row."""
    found = b""
    for name in sorted(states, key=lambda name: (number_of(name), name)):
        known = all(state.split_axis is not None for state in states[name])
        for state in states[name]:
            rows = row_bytes(state, slot) if known else {0: plain_bytes(state.tensor[slot])}
            found += b"".join(rows[number] for number in sorted(rows))
    return found


def snapshot(states: Mapping[str, Sequence[StateTensor]]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """All slots' canonical bytes: (SLOTS, block bytes) uint8."""
    return np.stack([np.frombuffer(canonical_bytes(states, slot), np.uint8) for slot in range(SLOTS)])
