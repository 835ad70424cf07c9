"""One request's KV in the unsharded model, dealt out to the ranks of any split, and read back from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore import CacheIdentity, KVStore, LayerSpec, PagedKVCache, Rank, StoreConfig
from kvstore.results import GetResult
from tests.support import SMALL, block_hashes, open_store

STEP = 4
"""Tokens between hashes."""


@dataclass(frozen=True)
class Split:
    """How ranks hold a model, and in what blocks."""

    tp: int = 1
    pp: int = 1
    block_size: int = STEP
    layout: str = "BHNC"

    @property
    def ranks(self) -> list[Rank]:
        """Every rank."""
        return [Rank(t, self.tp, p, self.pp) for p in range(self.pp) for t in range(self.tp)]


class Model:
    """KV of a request of `tokens` tokens: kv[layer, head, token] are the bytes of K, then V."""

    def __init__(
        self, layers: int = 4, heads: int = 4, tokens: int = 32, k: int = 16, v: int = 16, seed: int = 0
    ) -> None:
        self.layers, self.heads, self.tokens, self.k = layers, heads, tokens, k
        self.kv = np.random.default_rng(seed).integers(0, 256, (layers, heads, tokens, k + v), np.uint8)
        specs = tuple(LayerSpec(self.name(i), "full", "uint8", heads, k, v) for i in range(layers))
        self.identity = CacheIdentity(model="split/model", layers=specs)
        self.steps = block_hashes(-(-tokens // STEP), f"splits {seed}")

    def name(self, layer: int) -> str:
        """The layer's name."""
        return f"model.layers.{layer}.self_attn.attn"

    def share(self, split: Split, rank: Rank) -> tuple[range, range]:
        """The layers and heads of a rank."""
        stage, copies = self.layers // split.pp, max(1, split.tp // self.heads)
        heads = max(1, self.heads // split.tp)
        first = rank.tp_rank // copies * heads
        return range(rank.pp_rank * stage, (rank.pp_rank + 1) * stage), range(first, first + heads)

    def hashes(self, split: Split) -> list[bytes]:
        """The hash of each block."""
        times = split.block_size // STEP
        blocks = -(-self.tokens // split.block_size)
        return [self.steps[min((i + 1) * times, len(self.steps)) - 1] for i in range(blocks)]

    def ids(self, split: Split) -> list[int]:
        """Where each block lies in the caches."""
        blocks = len(self.hashes(split))
        return [(2 * i + 3) % (2 * blocks + 1) for i in range(blocks)]

    def cache(self, split: Split, rank: Rank, filled: bool) -> PagedKVCache:
        """The rank's cache, with its part of the KV, or zeros."""
        layers, heads = self.share(split, rank)
        names = [self.name(layer) for layer in layers]
        size = {"B": 2 * len(self.hashes(split)) + 1, "H": len(heads), "N": split.block_size, "2": 2}
        size |= {"C": self.kv.shape[3], "D": self.k}
        tensors: dict[str, Any] = {}
        for layer, name in zip(layers, names, strict=True):
            parts = 1 if set(split.layout) & set("2C") else 2
            made = [torch.zeros([size[axis] for axis in split.layout], dtype=torch.uint8) for _ in range(parts)]
            tensors[name] = made[0] if parts == 1 else tuple(made)
            if filled:
                self._write(tensors[name], split, self.kv[layer, heads.start : heads.stop])
        return PagedKVCache.from_tensors(tensors, split.layout, first_head=dict.fromkeys(names, heads.start))

    def _write(self, tensors: Any, split: Split, kv: np.ndarray[Any, Any]) -> None:
        for block, place in enumerate(self.ids(split)):
            tokens = kv[:, block * split.block_size : (block + 1) * split.block_size]
            for index, view in enumerate(block_views(tensors, split.layout, place)):
                part = tokens if "C" in split.layout else np.split(tokens, [self.k], axis=2)[index]
                view[:, : tokens.shape[1]] = torch.from_numpy(part)

    def found(self, cache: PagedKVCache, split: Split, rank: Rank) -> np.ndarray[Any, Any]:
        """What lies in a rank's cache: (layers, heads, tokens, bytes)."""
        layers, heads = self.share(split, rank)
        out = np.zeros((len(layers), len(heads), self.tokens, self.kv.shape[3]), np.uint8)
        for row, layer in enumerate(layers):
            for block, place in enumerate(self.ids(split)):
                views = block_views(cache.tensors[self.name(layer)], split.layout, place)
                first, end = block * split.block_size, min((block + 1) * split.block_size, self.tokens)
                out[row, :, first:end] = np.concatenate([view.numpy() for view in views], axis=2)[:, : end - first]
        return out

    def expected(self, split: Split, rank: Rank) -> np.ndarray[Any, Any]:
        """What should lie there."""
        layers, heads = self.share(split, rank)
        return self.kv[layers.start : layers.stop, heads.start : heads.stop]

    def put(self, path: Path, split: Split, config: StoreConfig = SMALL, **options: Any) -> None:
        """Every rank stores its part."""
        for rank in split.ranks:
            cache = self.cache(split, rank, filled=True)
            with open_store(path, cache, config, identity=self.identity, rank=rank, **options) as store:
                result = store.put_blocks(self.hashes(split), self.ids(split), num_tokens=self.tokens)
                expected = {"replica"} if self.is_copy(split, rank) else set()
                assert set(result.failed.values()) == expected, result.failed

    def is_copy(self, split: Split, rank: Rank) -> bool:
        """Whether another rank stores what this one has."""
        return bool(rank.tp_rank % max(1, split.tp // self.heads))

    def get(self, store: KVStore, split: Split, steps: bool = False) -> GetResult:
        """Load the request's blocks. steps: ask with all hashes."""
        hashes, size = (self.steps, STEP) if steps else (self.hashes(split), None)
        return store.get_blocks(hashes, self.ids(split), num_tokens=self.tokens, hash_block_size=size)


def block_views(tensors: Any, layout: str, block: int) -> list[torch.Tensor]:
    """One block's parts as (heads, tokens, bytes): K and V together, or each."""
    if "C" in layout:
        axes = [layout.index(axis) for axis in "BHNC"]
        return [tensors.permute(axes)[block]]
    if "2" in layout:
        axes = [layout.index(axis) for axis in "2BHND"]
        return list(tensors.permute(axes)[:, block])
    axes = [layout.index(axis) for axis in "BHND"]
    return [part.permute(axes)[block] for part in tensors]
