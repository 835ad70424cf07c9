"""The torch formulation of the checksum, the baseline of the kernels: each layer's blocks are selected, multiplied by their
weights and summed."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvstore.cache import PagedKVCache
from kvstore.checksum import PIECE_BYTES, slice_factor
from kvstore.span import Span


class TorchSums:
    """c of each block by torch alone, for caches whose layers are alike and one tensor each: (blocks,) int64, the uint64
    sums' bits. Weights and ids of a call are made once and not counted."""

    def __init__(self, cache: PagedKVCache, device: torch.device) -> None:
        group, layout = cache.group(0), cache.layout
        self._layout, self._device, self._block_size = layout, device, group.block_size
        self._blocks = layout.index("B")
        self._words = [_words(cache, layer.name) for layer in group.layers]
        self._cell = group.layers[0].cell_bytes // PIECE_BYTES
        factors = [[slice_factor(layer.number, head) for head in range(layer.heads)] for layer in group.layers]
        self._factors = torch.from_numpy(np.array(factors, np.uint64).view(np.int64)).to(device)
        left = [axis for axis in layout if axis in "BH"]
        self._summed = [i for i, axis in enumerate(layout) if axis not in "BH"]
        self._order = [left.index(axis) for axis in "BH" if axis in left]

    def weights(self, span: Span) -> torch.Tensor:
        """2*j + 1 of each piece of a span's blocks, in the layout's order of axes."""
        parts = 2 if "2" in self._layout else 1
        shape = (len(span), self._block_size, parts, self._cell // parts)
        first = span.first_tokens[:, None] * self._cell
        index = first + np.arange(math.prod(shape[1:]), dtype=np.int64)
        axes = {"B": 0, "N": 1, "2": 2, "C": 3, "D": 3}
        whole = torch.from_numpy(2 * index + 1).view(shape)
        if parts == 1:
            whole, axes = whole.squeeze(2), {"B": 0, "N": 1, "C": 2, "D": 2}
        placed = whole.permute([axes[axis] for axis in self._layout if axis != "H"])
        if "H" in self._layout:
            placed = placed.unsqueeze(self._layout.index("H"))
        return placed.contiguous().to(self._device)

    def ids(self, span: Span) -> torch.Tensor:
        """A span's block ids on the device."""
        return torch.from_numpy(span.block_ids).to(self._device)

    def sums(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Enqueue the sums of a call."""
        total = torch.zeros(ids.numel(), dtype=torch.int64, device=self._device)
        for words, factors in zip(self._words, self._factors, strict=True):
            chosen = words.index_select(self._blocks, ids) * weights
            slices = chosen.sum(self._summed).permute(self._order).reshape(ids.numel(), -1)
            total += (slices * factors).sum(1)
        return total


def _words(cache: PagedKVCache, name: str) -> torch.Tensor:
    tensor = cache.tensors[name]
    assert isinstance(tensor, torch.Tensor)
    return tensor.view(torch.int64)
