"""Mamba states that ranks of one split stored are loaded under another, as far as both cut rows at the same places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvstore import CacheIdentity, KVStore, LayerSpec, PagedKVCache, Rank, StateSpec, StateTensor
from tests.support import Raw, block_hashes, flip, open_store, random_tensor

pytestmark = pytest.mark.both

NAMES = ("model.layers.0.mixer", "model.layers.7.mixer")
PARTS = (64, 16, 16)
"""Rows of a conv state: of x, B and C, of each of which every rank has a share."""
CONV, HEADS, SLOTS, TOKENS = sum(PARTS), 16, 6, 8
HASHES = block_hashes(4, "states")
IDS = [5, 0, 3, 2]
STATES = (StateSpec(CONV, 3, 2), StateSpec(HEADS, 35, 4))
LAYERS = tuple(LayerSpec(name, "mamba", "bfloat16,float32", CONV + HEADS, 0, 0, 0, STATES) for name in NAMES)
IDENTITY = CacheIdentity(model="state/splits", layers=LAYERS)
MODEL = {
    name: (
        random_tensor((SLOTS, CONV, 3), torch.bfloat16, seed),
        random_tensor((SLOTS, HEADS, 5, 7), torch.float32, seed + 10),
    )
    for seed, name in enumerate(NAMES)
}


def shares(rows: Sequence[int], rank: int, size: int) -> list[tuple[int, int]]:
    """(first row, rows) of a rank's share of each part."""
    starts = [sum(rows[:i]) for i in range(len(rows))]
    return [(start + count // size * rank, count // size) for start, count in zip(starts, rows, strict=True)]


def taken(tensor: torch.Tensor, rows: list[tuple[int, int]], filled: bool) -> torch.Tensor:
    part = torch.cat([tensor[:, first : first + count] for first, count in rows], dim=1)
    return part.clone() if filled else torch.zeros_like(part)


def cache_of(rank: int, size: int, filled: bool) -> PagedKVCache:
    """A rank's states."""
    conv_rows, head_rows = shares(PARTS, rank, size), shares((HEADS,), rank, size)
    states = {
        name: [
            StateTensor(taken(conv, conv_rows, filled), 1, conv_rows, CONV),
            StateTensor(taken(heads, head_rows, filled), 1, head_rows, HEADS),
        ]
        for name, (conv, heads) in MODEL.items()
    }
    return PagedKVCache.from_tensors({}, "BHNC", states=states, state_block_size={0: TOKENS}, tp_rank=rank)


def put_all(path: Path, size: int) -> None:
    for rank in range(size):
        with opened(path, cache_of(rank, size, filled=True), rank, size) as store:
            assert store.put_blocks(HASHES, IDS, num_tokens=30).stored.all()


def opened(path: Path, cache: PagedKVCache, rank: int, size: int) -> KVStore:
    return open_store(path, cache, identity=IDENTITY, rank=Rank(rank, size))


def same(cache: PagedKVCache, rank: int, size: int, blocks: Sequence[int]) -> bool:
    """Whether a rank's slots hold what the model has."""
    expected = cache_of(rank, size, filled=True)
    slots = [IDS[block] for block in blocks]
    return all(
        torch.equal(own.tensor[slots].view(torch.uint8), right.tensor[slots].view(torch.uint8))
        for name in NAMES
        for own, right in zip(tensors(cache, name), tensors(expected, name), strict=True)
    )


def tensors(cache: PagedKVCache, name: str) -> Sequence[StateTensor]:
    return cache.states[name]


@pytest.mark.parametrize(("stored", "loaded"), [(1, 2), (1, 4), (2, 1), (4, 1), (4, 2), (2, 4)])
def test_states_of_one_split_are_loaded_under_another(tmp_path: Path, stored: int, loaded: int) -> None:
    put_all(tmp_path, stored)
    for rank in range(loaded):
        cache = cache_of(rank, loaded, filled=False)
        with opened(tmp_path, cache, rank, loaded) as store:
            assert store.match_tokens({0: HASHES}) == 32
            got = store.get_blocks(HASHES, IDS, num_tokens=30)
            assert got.verified.all(), got
            assert same(cache, rank, loaded, range(4))
            assert store.stats()["get_spliced"] == 4


def test_another_number_of_tokens_is_a_miss(tmp_path: Path) -> None:
    put_all(tmp_path, 2)
    with opened(tmp_path, cache_of(0, 1, filled=False), 0, 1) as store:
        got = store.get_blocks(HASHES, IDS, num_tokens=29)
        assert got.verified.tolist() == [True, True, True, False]
        assert got.missing.tolist() == [False, False, False, True]


def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    put_all(tmp_path, 2)
    with opened(tmp_path, cache_of(1, 2, filled=True), 1, 2) as store:
        raw = Raw(store)
        key = store._views[0].shape.keys(HASHES)[2]
        entry = raw.entry(key)
        assert entry is not None
        chunk = next(k for k in reversed(raw.payload()) if k[:8] == entry[40:48][::-1])
        raw.put_chunk(chunk, flip(raw.chunk(chunk), 777))
    cache = cache_of(0, 1, filled=False)
    with opened(tmp_path, cache, 0, 1) as store:
        got = store.get_blocks(HASHES, IDS, num_tokens=30)
        assert {i: (r.kind, r.condemned) for i, r in got.rejected.items()} == {2: ("storage_hash", True)}
        assert same(cache, 0, 1, (0, 1, 3))


def test_a_split_that_cuts_rows_elsewhere_is_a_miss(tmp_path: Path) -> None:
    """A share of 16 rows over 3 ranks ends inside the ranges that others sum."""
    rows = [(0, 21), (64, 5), (80, 5)]
    states = {
        name: [
            StateTensor(taken(conv, rows, True), 1, rows, CONV),
            StateTensor(heads[:, :5].clone(), 1, [(0, 5)], HEADS),
        ]
        for name, (conv, heads) in MODEL.items()
    }
    put_all(tmp_path, 1)
    cache = PagedKVCache.from_tensors({}, "BHNC", states=states, state_block_size={0: TOKENS})
    with opened(tmp_path, cache, 0, 3) as store:
        assert store.match_tokens({0: HASHES}) == 0
        assert not store.get_blocks(HASHES, IDS, num_tokens=30).verified.any()


def test_shares_that_are_smaller_than_the_ranges_are_not_put_together(tmp_path: Path) -> None:
    put_all(tmp_path, 8)
    with opened(tmp_path, cache_of(0, 2, filled=False), 0, 2) as store:
        assert store.match_tokens({0: HASHES}) == 0
        assert store.get_blocks(HASHES, IDS, num_tokens=30).missing.all()
