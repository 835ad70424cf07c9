"""What the protocol's tests share: a model's KV, the caches of engines that hold it in parts, and its checksums by
docs/checksum.md alone, in plain integers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore import (
    KVChecksumBlocks,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumSide,
    KVChecksumWorker,
    PagedKVCache,
    Rank,
)

Cells = npt.NDArray[np.uint8]
REQUEST = "request/0"
LAYOUTS: dict[str, Callable[[Cells], Any]] = {
    "BHNC": lambda kv: kv.reshape(*kv.shape[:3], -1),
    "BNHC": lambda kv: kv.swapaxes(1, 2).reshape(kv.shape[0], kv.shape[2], kv.shape[1], -1),
    "B2NHD": lambda kv: kv.transpose(0, 3, 2, 1, 4),
    "2BNHD": lambda kv: kv.transpose(3, 0, 2, 1, 4),
    "BHND": lambda kv: (kv[:, :, :, 0], kv[:, :, :, 1]),
    "BNHD": lambda kv: (kv[:, :, :, 0].swapaxes(1, 2), kv[:, :, :, 1].swapaxes(1, 2)),
}
"""Memory of (blocks, heads, tokens, 2, channels) in each layout."""


@dataclass(frozen=True)
class Layer:
    """One cache of the model: its group, and its KV, (heads, tokens, 2, channels) uint8."""

    name: str
    number: int
    group: int
    kv: Cells


@dataclass(frozen=True)
class Model:
    """A request's KV in the unsharded model."""

    layers: list[Layer]
    num_tokens: int

    @property
    def groups(self) -> list[int]:
        """The numbers of its groups."""
        return sorted({layer.group for layer in self.layers})


@dataclass(frozen=True)
class Split:
    """How an engine holds a model. first: the first position that it reports, by group."""

    tp: int
    pp: int
    layout: str
    block_sizes: Mapping[int, int]
    first: Mapping[int, int] = field(default_factory=dict)

    @property
    def side(self) -> KVChecksumSide:
        """What a comparison is told."""
        return KVChecksumSide(self.tp, self.pp, self.block_sizes)

    @property
    def ranks(self) -> list[Rank]:
        """Every worker."""
        return [Rank(tp, self.tp, pp, self.pp) for pp in range(self.pp) for tp in range(self.tp)]


def random_model(rng: random.Random, max_tokens: int = 60) -> Model:
    """Layers of two groups, some with several caches, with 1, 2 or 4 heads."""
    numbers, tokens = sorted(rng.sample(range(100), rng.randint(2, 4))), rng.randint(1, max_tokens)
    bits = np.random.default_rng(rng.getrandbits(32))
    layers = []
    for number in numbers:
        group = rng.choice([0, 3])
        for part in ("attn", "indexer")[: rng.choice([1, 1, 2])]:
            shape = (rng.choice([1, 2, 4]), tokens, 2, 8 * rng.randint(1, 3))
            layers.append(
                Layer(f"model.layers.{number}.self.{part}", number, group, bits.integers(0, 256, shape, np.uint8))
            )
    return Model(layers, tokens)


def random_split(rng: random.Random, model: Model, sizes: Sequence[int] = (1, 2, 3, 4, 6)) -> Split:
    """Any engine for it. Every stage has a layer."""
    stages = rng.randint(1, min(3, len({layer.number for layer in model.layers})))
    blocks = {group: rng.choice(sizes) for group in model.groups}
    return Split(rng.choice([1, 2, 4]), stages, rng.choice(sorted(LAYOUTS)), blocks)


def share(heads: int, rank: Rank) -> tuple[int, int]:
    """(first head, heads) of a rank, as engines deal them out."""
    if heads >= rank.tp_size:
        return rank.tp_rank * (heads // rank.tp_size), heads // rank.tp_size
    return rank.tp_rank // (rank.tp_size // heads), 1


def copy_of(heads: int, rank: Rank) -> tuple[int, int]:
    """The replica key that a rank's heads have."""
    copies = max(1, rank.tp_size // heads)
    return copies, rank.tp_rank % copies


def stage_layers(model: Model, rank: Rank) -> list[Layer]:
    """The layers of a rank's stage."""
    numbers = sorted({layer.number for layer in model.layers})
    low, high = (len(numbers) * stage // rank.pp_size for stage in (rank.pp_rank, rank.pp_rank + 1))
    return [layer for layer in model.layers if layer.number in numbers[low:high]]


def held(model: Model, rank: Rank) -> dict[str, Cells]:
    """The KV that a rank has of each layer, a copy."""
    found = {}
    for layer in stage_layers(model, rank):
        first, heads = share(layer.kv.shape[0], rank)
        found[layer.name] = layer.kv[first : first + heads].copy()
    return found


def block_tables(model: Model, split: Split, seed: int) -> dict[int, list[int]]:
    """Block ids by group, of the request's every position."""
    rng = random.Random(seed)
    counts = {group: -(-model.num_tokens // size) for group, size in split.block_sizes.items()}
    return {group: rng.sample(range(count + 2), count) for group, count in counts.items()}


def paged(kv: Cells, block_size: int, block_ids: Sequence[int], seed: int) -> Cells:
    """KV in blocks, (blocks, heads, tokens, 2, channels); garbage in every other slot."""
    heads, tokens, _, channels = kv.shape
    shape = (len(block_ids) + 2, heads, block_size, 2, channels)
    memory = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    for position, block in enumerate(block_ids):
        here = kv[:, position * block_size : min(tokens, (position + 1) * block_size)]
        memory[block, :, : here.shape[1]] = here
    return memory


def cache_of(
    model: Model, split: Split, rank: Rank, kv: Mapping[str, Cells], tables: Mapping[int, list[int]]
) -> PagedKVCache:
    """A rank's cache that holds this KV."""
    layers, tensors, first = stage_layers(model, rank), dict[str, Any](), dict[str, int]()
    for index, layer in enumerate(layers):
        memory = paged(kv[layer.name], split.block_sizes[layer.group], tables[layer.group], index)
        form = LAYOUTS[split.layout](memory)
        parts = [torch.from_numpy(np.ascontiguousarray(p)) for p in (form if isinstance(form, tuple) else (form,))]
        tensors[layer.name] = tuple(parts) if len(parts) == 2 else parts[0]
        first[layer.name] = share(layer.kv.shape[0], rank)[0]
    groups = {
        g: [layer.name for layer in layers if layer.group == g] for g in sorted({layer.group for layer in layers})
    }
    heads = {layer.name: layer.kv.shape[0] for layer in layers}
    return PagedKVCache.from_tensors(tensors, split.layout, groups, first, kv_heads=heads)


def blocks_of(model: Model, split: Split, tables: Mapping[int, list[int]]) -> KVChecksumBlocks:
    """The request's blocks as a scheduler names them, from each group's first position on."""
    placed = {group: (split.first.get(group, 0), ids[split.first.get(group, 0) :]) for group, ids in tables.items()}
    return KVChecksumBlocks(model.num_tokens, placed)


Damage = Callable[[Rank, dict[str, Cells]], None]


def records(
    model: Model, split: Split, sends: bool, damage: Damage | None = None, seed: int = 1
) -> list[KVChecksumRecord]:
    """What every rank of an engine reports of the request. damage: changes the KV of a rank."""
    tables, found = block_tables(model, split, seed), []
    requests = {REQUEST: blocks_of(model, split, tables)}
    scheduled = KVChecksumScheduled(reqs_to_send=requests) if sends else KVChecksumScheduled(reqs_to_recv=requests)
    for rank in split.ranks:
        kv = held(model, rank)
        if damage is not None:
            damage(rank, kv)
        worker = KVChecksumWorker(cache_of(model, split, rank, kv, tables), rank)
        found.append(worker.execute(scheduled).result())
    return found


# --- docs/checksum.md, in plain integers ---------------------------------------------------------------------------


def head_numbers(model: Model) -> dict[str, int]:
    """The number of each cache's first head: those of one layer number one after the other, by name."""
    found: dict[str, int] = {}
    for layer in model.layers:
        before = [o for o in model.layers if (o.group, o.number) == (layer.group, layer.number) and o.name < layer.name]
        found[layer.name] = sum(other.kv.shape[0] for other in before)
    return found


def document_sum(model: Model, group: int, tokens: range) -> int:
    """c of some tokens of a group, in the unsharded model: sections 2 and 3."""
    return sum(document_slices(model, group, tokens)) % 2**64


def document_slices(model: Model, group: int, tokens: range) -> Iterator[int]:
    """m*s of each slice."""
    first = head_numbers(model)
    for layer in (layer for layer in model.layers if layer.group == group):
        for head, kv in enumerate(layer.kv):
            m = 2 * (layer.number * 65536 + first[layer.name] + head) + 1
            yield m * sum(document_cell(kv[token].tobytes(), token) for token in tokens)


def document_cell(cell: bytes, token: int) -> int:
    """The part of s that one token has: K first, then V, in pieces of 8 bytes numbered from the request's start."""
    pieces = len(cell) // 8
    values = (int.from_bytes(cell[8 * p : 8 * p + 8], "little") for p in range(pieces))
    return sum(x * (2 * (token * pieces + p) + 1) for p, x in enumerate(values))
