"""SmolLM2's KV dealt out to the ranks of a split, and the process that goes on from what another split's ranks stored."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvstore import CacheIdentity, KVStore, LayerSpec, PagedKVCache, Rank, StoreConfig
from kvstore.engines.transformers import chain_hashes
from kvstore.tools.model import load_smollm2, smollm2_folder
from tests.real_models import go_on
from tests.splitmodel import block_views
from tests.support import MIB

LAYERS, HEADS, SIZE = 30, 3, 64
STEP = 4
"""Tokens between hashes."""
PREFIX, PROMPT = 100, 116
"""Tokens that are stored, whose last block of 16 is not full, and tokens of the prompt."""
CONFIG = StoreConfig(capacity_bytes=128 * MIB, durability="process", max_rejections_per_minute=None)
Kv = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, [heads, tokens, head size]."""


@dataclass(frozen=True)
class Split:
    """How ranks hold the model: heads over tp, layers over pp; in which layout, blocks and groups. Layer i is in group
    i % groups."""

    tp: int = 1
    pp: int = 1
    layout: str = "BHNC"
    block_size: int = 16
    groups: int = 1
    io: str = "inline"

    @property
    def ranks(self) -> list[Rank]:
        """Every rank."""
        return [Rank(t, self.tp, p, self.pp) for p in range(self.pp) for t in range(self.tp)]

    @property
    def copies(self) -> int:
        """How many ranks in a row have the same heads."""
        return max(1, self.tp // HEADS)

    @property
    def blocks(self) -> int:
        """How many blocks the stored tokens are."""
        return -(-PREFIX // self.block_size)

    @property
    def ids(self) -> list[int]:
        """Where each block lies in a rank's tensors: neither in order nor side by side."""
        return np.random.default_rng(self.tp * 10 + self.pp).permutation(2 * self.blocks)[: self.blocks].tolist()

    def share(self, rank: Rank) -> tuple[range, range]:
        """The layers and the heads of a rank."""
        stage, heads = LAYERS // self.pp, max(1, HEADS // self.tp)
        first = rank.tp_rank // self.copies * heads
        return range(rank.pp_rank * stage, (rank.pp_rank + 1) * stage), range(first, first + heads)

    def hashes(self, steps: Sequence[bytes]) -> list[bytes]:
        """The hash of each block. steps: one for each STEP tokens."""
        every = self.block_size // STEP
        return [steps[min((block + 1) * every, len(steps)) - 1] for block in range(self.blocks)]


def layer_name(layer: int) -> str:
    """The layer's name."""
    return f"model.layers.{layer}.self_attn.attn"


def identity(groups: int = 1) -> CacheIdentity:
    """The unsharded model's."""
    specs = tuple(
        LayerSpec(layer_name(i), "full", "bfloat16", HEADS, 2 * SIZE, 2 * SIZE, i % groups) for i in range(LAYERS)
    )
    return CacheIdentity(model="SmolLM2-135M-Instruct", dtype="bfloat16", layers=specs)


def kv_of(cache: Any) -> Kv:
    """What a model's cache of one sequence holds."""
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def cache_of(kv: Kv) -> Any:
    """The cache that holds it."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys[None], values[None], layer)
    return cache


def request_steps(ids: torch.Tensor) -> list[bytes]:
    """A hash for each STEP of the stored tokens."""
    return chain_hashes(ids[:, :PREFIX], STEP)


def part(split: Split, rank: Rank, kv: Kv | None = None) -> PagedKVCache:
    """A rank's paged cache: its part of the KV, and NaN everywhere else."""
    layers, heads = split.share(rank)
    sizes = {"B": 2 * split.blocks + 1, "H": len(heads), "N": split.block_size, "2": 2, "C": 2 * SIZE, "D": SIZE}
    tensors: dict[str, Any] = {}
    for layer in layers:
        count = 1 if set(split.layout) & set("2C") else 2
        shape = [sizes[axis] for axis in split.layout]
        made = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(count)]
        tensors[layer_name(layer)] = made[0] if count == 1 else tuple(made)
    paged = described(tensors, split, rank)
    if kv is not None:
        write(paged, split, rank, kv)
    return paged


def described(tensors: dict[str, Any], split: Split, rank: Rank) -> PagedKVCache:
    """A rank's tensors as the engine describes them."""
    layers, heads = split.share(rank)
    groups = {
        n: names for n in range(split.groups) if (names := [layer_name(i) for i in layers if i % split.groups == n])
    }
    return PagedKVCache.from_tensors(tensors, split.layout, groups, first_head=dict.fromkeys(tensors, heads.start))


def views(paged: PagedKVCache, layer: int, block_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a block of a layer where they lie, (heads, tokens, head size) each."""
    found = block_views(paged.tensors[layer_name(layer)], paged.layout, block_id)
    return (found[0][..., :SIZE], found[0][..., SIZE:]) if len(found) == 1 else (found[0], found[1])


def write(paged: PagedKVCache, split: Split, rank: Rank, kv: Kv) -> None:
    """Fill a rank's blocks."""
    layers, heads = split.share(rank)
    for layer in layers:
        for block, block_id in enumerate(split.ids):
            first = block * split.block_size
            for view, whole in zip(views(paged, layer, block_id), kv[layer], strict=True):
                tokens = whole[heads.start : heads.stop, first : first + split.block_size]
                view[:, : tokens.shape[1]] = tokens


def read(paged: PagedKVCache, split: Split, rank: Rank, kv: Kv) -> None:
    """Take a rank's part of the KV out of its blocks. A head that another rank has brought already must be the same."""
    layers, heads = split.share(rank)
    for layer in layers:
        for block, block_id in enumerate(split.ids):
            first, end = block * split.block_size, min((block + 1) * split.block_size, PREFIX)
            for view, whole in zip(views(paged, layer, block_id), kv[layer], strict=True):
                target = whole[heads.start : heads.stop, first:end]
                if rank.tp_rank % split.copies:
                    assert same_bits(target, view[:, : end - first]), (rank, layer, block)
                target.copy_(view[:, : end - first])


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether bfloat16 tensors are equal bit for bit."""
    return torch.equal(one.contiguous().view(torch.int16), two.contiguous().view(torch.int16))


def open_rank(path: Path, split: Split, rank: Rank, paged: PagedKVCache) -> KVStore:
    """A rank's shard."""
    return KVStore(path, paged, identity(split.groups), CONFIG, rank=rank, io=split.io)


def put(path: Path, split: Split, kv: Kv, steps: Sequence[bytes]) -> None:
    """Every rank stores its part; those with copies of heads store nothing."""
    for rank in split.ranks:
        paged = part(split, rank, kv)
        with open_rank(path, split, rank, paged) as store:
            for group in paged.groups:
                result = store.put_blocks(split.hashes(steps), split.ids, num_tokens=PREFIX, group=group)
                if rank.tp_rank % split.copies:
                    assert set(result.failed.values()) == {"replica"}, (rank, result)
                    assert store.stats()["records"] == 0
                else:
                    assert result.stored.all(), (rank, result)


def load(path: Path, split: Split, steps: Sequence[bytes]) -> tuple[Kv, int]:
    """What all ranks of a split load together, and how many blocks were put together from other ranks' records."""
    kv = [
        tuple(torch.full((HEADS, PREFIX, SIZE), torch.nan, dtype=torch.bfloat16) for _ in "KV") for _ in range(LAYERS)
    ]
    spliced = 0
    for rank in split.ranks:
        paged = part(split, rank)
        with open_rank(path, split, rank, paged) as store:
            for group in paged.groups:
                got = store.get_blocks(steps, split.ids, num_tokens=PREFIX, group=group, hash_block_size=STEP)
                assert got.verified.all(), (rank, got)
            spliced += store.stats().get("get_spliced", 0)
        read(paged, split, rank, kv)  # type: ignore[arg-type]
    return kv, spliced  # type: ignore[return-value]


def elsewhere(tasks: Sequence[tuple[Path, Split]], ids: torch.Tensor, folder: Path) -> list[dict[str, Any]]:
    """Load and go on in another process; of each task: logits, answer, spliced."""
    listed = [{"store": str(path), "split": asdict(split)} for path, split in tasks]
    (folder / "tasks.json").write_text(json.dumps({"ids": ids[0].tolist(), "tasks": listed}))
    command = [sys.executable, "-m", "tests.real_splits", str(folder / "tasks.json")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def _main(request: dict[str, Any]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    model, ids, found = load_smollm2(smollm2_folder(progress=False))[1], torch.tensor([request["ids"]]), []
    for task in request["tasks"]:
        kv, spliced = load(Path(task["store"]), replace(Split(), **task["split"]), request_steps(ids))
        found.append(asdict(go_on(model, ids, cache_of(kv))) | {"spliced": spliced})
    return found


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(Path(sys.argv[1]).read_text()))))
