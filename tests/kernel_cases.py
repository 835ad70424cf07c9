"""What the kernels' tests share: caches of every form, and the tables of slices that describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore import PagedKVCache
from kvstore.cache import CacheGroup
from kvstore.kernels.tables import SliceEntry, SliceTable, slice_tables
from kvstore.launches import engine_entries, staging_entries  # noqa: F401  (for the tests)
from tests.support import layer_tensors, random_tensor

CPU = torch.device("cpu")
BF16, FP32, FP8, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8


@dataclass(frozen=True)
class Form:
    """A cache's form: K and V of `head_size` channels (V of `v_size` where that is not None), or an MLA-like cell of
    head_size channels where the layout has no head. vector_bytes: the widest access that its alignment allows."""

    layout: str
    head_size: int
    dtype: torch.dtype = BF16
    v_size: int | None = None
    heads: int = 3
    vector_bytes: int = 16

    def cache(self, seed: int = 0, layers: int = 3, blocks: int = 3, tokens: int = 3) -> PagedKVCache:
        """A cache of random bytes."""
        size = {"layers": layers, "blocks": blocks, "tokens": tokens}
        if "H" not in self.layout:
            shape = (blocks, tokens, self.head_size)
            cells = {f"layers.{i}": random_tensor(shape, self.dtype, seed * 1_000 + i) for i in range(layers)}
            return PagedKVCache.from_tensors(cells, self.layout)
        tensors = layer_tensors(
            self.layout, heads=self.heads, head_size=self.head_size, dtype=self.dtype, seed=seed, **size
        )
        if self.v_size is None:
            return PagedKVCache.from_tensors(tensors, self.layout)
        if "C" in self.layout:
            return PagedKVCache.from_tensors(tensors, self.layout, value_channels=self.v_size)
        return PagedKVCache.from_tensors(
            {name: (k, v[..., : self.v_size].contiguous()) for name, (k, v) in tensors.items()}, self.layout
        )


FORMS = {
    "packed HND": Form("BHNC", 128),
    "packed NHD": Form("BNHC", 64),
    "split NHD": Form("2BNHD", 128),
    "split HND": Form("2BHND", 96),
    "split in the block": Form("B2NHD", 80),
    "tokens first": Form("NBHC", 64),
    "pairs HND": Form("BHND", 256),
    "pairs NHD fp8": Form("BNHD", 64, FP8),
    "pairs NHD fp32": Form("BNHD", 72, FP32),
    "K larger than V": Form("BHND", 192, v_size=128),
    "V larger than K": Form("BHNC", 32, v_size=48),
    "MLA 576 bf16": Form("BNC", 576, BF16, heads=1),
    "MLA 656 bytes": Form("BNC", 656, U8, heads=1),
    "MLA 584 bytes": Form("BNC", 584, U8, heads=1, vector_bytes=8),
    "8-byte K and V": Form("2BNHD", 20, BF16, vector_bytes=8),
    "one piece each": Form("BNHD", 8, FP8, vector_bytes=8),
}


def tables(group: CacheGroup, entries: list[SliceEntry]) -> list[SliceTable]:
    """The group's tables on the CPU."""
    return slice_tables(entries, group.block_size, group.block_bytes, CPU)


def rows_of(*columns: Any) -> torch.Tensor:
    """Rows of the given columns, numbers or sequences: (rows, columns) int64."""
    whole = [torch.as_tensor(c, dtype=torch.int64) for c in columns]
    return torch.stack(torch.broadcast_tensors(*whole), 1).contiguous()
