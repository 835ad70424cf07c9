"""A store that ranks of one split wrote is loaded under another, bit for bit, or missed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, PagedKVCache, Rank
from kvstore.errors import ConfigError, LengthMismatch, StorePathError
from tests.splitmodel import STEP, Model, Split
from tests.support import LAYOUTS, SMALL, io_mode, open_store

pytestmark = pytest.mark.both

SPLITS: dict[str, tuple[Split, Split, dict[str, int]]] = {
    "tensor 1 to 4": (Split(1), Split(4), {}),
    "tensor 4 to 2": (Split(4), Split(2), {}),
    "tensor 4 to 1": (Split(4), Split(1), {}),
    "tensor 2 to 8 with replicas": (Split(2), Split(8), {}),
    "tensor 8 with replicas to 2": (Split(8), Split(2), {}),
    "pipeline 1 to 2": (Split(1), Split(1, 2), {}),
    "pipeline 2 to 1": (Split(1, 2), Split(1), {}),
    "pipeline 4 to 2": (Split(1, 4), Split(1, 2), {}),
    "both at once": (Split(2, 1), Split(1, 2), {}),
    "both at once, back": (Split(4, 2), Split(2, 4), {}),
    "NHD to HND": (Split(1, layout="B2NHD"), Split(2, layout="2BHND"), {}),
    "HND to packed": (Split(2, layout="BHND"), Split(1, layout="BNHC"), {}),
    "packed to a pair": (Split(4, layout="BHNC"), Split(2, layout="BNHD"), {}),
    "a last block that is not full": (Split(2), Split(1, 2), {"tokens": 30}),
    "one head on two ranks": (Split(1), Split(2), {"heads": 1}),
    "two ranks' one head on one": (Split(2), Split(1), {"heads": 1}),
}


@contextmanager
def opened(
    model: Model, path: Path, split: Split, rank: Rank, **options: Any
) -> Iterator[tuple[KVStore, PagedKVCache]]:
    """A rank's store and its empty cache."""
    cache = model.cache(split, rank, filled=False)
    with open_store(path, cache, options.pop("config", SMALL), identity=model.identity, rank=rank, **options) as store:
        yield store, cache


def check_all(model: Model, path: Path, split: Split, steps: bool = False, **options: Any) -> dict[str, int]:
    """Every rank of a split loads everything; the sums of their counters."""
    totals: dict[str, int] = {}
    for rank in split.ranks:
        with opened(model, path, split, rank, **options) as (store, cache):
            hashes, size = (model.steps, STEP) if steps else (model.hashes(split), None)
            whole = model.tokens // split.block_size
            assert store.match_prefix(hashes, hash_block_size=size) >= whole
            got = model.get(store, split, steps)
            assert got.verified.all(), (rank, got)
            assert np.array_equal(model.found(cache, split, rank), model.expected(split, rank))
            totals = {name: totals.get(name, 0) + count for name, count in store.stats().items()}
    return totals


@pytest.mark.parametrize("case", SPLITS)
def test_what_one_split_stored_another_loads_bit_for_bit(tmp_path: Path, case: str) -> None:
    stored, loaded, options = SPLITS[case]
    model = Model(**options)
    model.put(tmp_path, stored)
    totals = check_all(model, tmp_path, loaded)
    assert totals["get_spliced"] > 0 or stored == loaded


@pytest.mark.parametrize("codec", ["raw", "bf16-planes"])
def test_the_same_with_a_codec(tmp_path: Path, codec: str) -> None:
    model, config = Model(), replace(SMALL, codec=codec)
    model.put(tmp_path, Split(4), config)
    check_all(model, tmp_path, Split(2, 2), config=config)


SIZES: dict[str, tuple[Split, Split, dict[str, int]]] = {
    "4 to 16": (Split(block_size=4), Split(block_size=16), {}),
    "4 to 16, a last block that is not full": (Split(block_size=4), Split(block_size=16), {"tokens": 26}),
    "16 to 4": (Split(block_size=16), Split(block_size=4), {}),
    "16 to 4, a last block that is not full": (Split(block_size=16), Split(block_size=4), {"tokens": 26}),
    "16 to 8 of another split": (Split(2, block_size=16), Split(1, 2, block_size=8), {}),
    "8 to 16 of another split and layout": (Split(1, 2, 8, "BHND"), Split(4, 1, 16, "2BNHD"), {}),
}


@pytest.mark.parametrize("case", SIZES)
def test_blocks_of_another_size(tmp_path: Path, case: str) -> None:
    stored, loaded, options = SIZES[case]
    model = Model(**options)
    model.put(tmp_path, stored)
    check_all(model, tmp_path, loaded, steps=True)


def test_a_large_block_goes_through_staging_memory_that_holds_less(tmp_path: Path) -> None:
    model, config = Model(), replace(SMALL, batch_bytes=1)
    model.put(tmp_path, Split(block_size=16))
    check_all(model, tmp_path, Split(block_size=4), steps=True, config=config)
    check_all(model, tmp_path, Split(2, block_size=8), steps=True, config=config)


def test_blocks_of_several_sizes_follow_each_other(tmp_path: Path) -> None:
    model, small, large = Model(), Split(block_size=4), Split(block_size=16)
    rank = Rank()
    cache = model.cache(large, rank, filled=True)
    with open_store(tmp_path, cache, identity=model.identity) as store:
        assert store.put_blocks(model.hashes(large)[:1], model.ids(large)[:1]).stored.all()
    cache = model.cache(small, rank, filled=True)
    with open_store(tmp_path, cache, identity=model.identity) as store:
        assert store.put_blocks(model.hashes(small)[4:], model.ids(small)[4:], start=4).stored.all()
    for loaded in (small, large, Split(2, 2, 8)):
        check_all(model, tmp_path, loaded, steps=True)


def random_split(rng: random.Random, model: Model) -> Split:
    """Any split that the model has: heads over ranks evenly or as copies, layers over stages evenly."""
    ranks = [n for n in (1, 2, 3, 4, 6, 8) if n <= 2 * model.heads and not max(n, model.heads) % min(n, model.heads)]
    stages = [n for n in (1, 2, 3, 4) if not model.layers % n]
    return Split(rng.choice(ranks), rng.choice(stages), rng.choice((4, 8, 16)), rng.choice(LAYOUTS))


@pytest.mark.inline("opens hundreds of stores")
@pytest.mark.parametrize("seed", range(20))
def test_random_models_of_random_splits(tmp_path: Path, seed: int) -> None:
    """Several sides of one store write a part of the request each, and all load it, as far as anybody wrote it whole."""
    rng = random.Random(seed)
    sizes = {"layers": rng.choice((1, 2, 3, 4, 6)), "heads": rng.choice((1, 2, 3, 4)), "tokens": rng.randrange(17, 49)}
    cell = rng.choice((8, 16, 24))
    model = Model(k=cell, v=cell, seed=seed, **sizes)
    model.put(tmp_path, random_split(rng, model), replace(SMALL, codec=rng.choice(("raw", "bf16-planes"))))
    if rng.random() < 0.5:
        model.put(tmp_path, random_split(rng, model))
    for _ in range(2):
        check_all(model, tmp_path, random_split(rng, model), steps=True)


def test_a_part_of_a_larger_block_alone_is_a_miss(tmp_path: Path) -> None:
    model, small = Model(), Split(block_size=4)
    model.put(tmp_path, Split(block_size=16))
    with opened(model, tmp_path, small, Rank()) as (store, _):
        assert store.match_prefix(model.steps[:7]) == 4
        got = store.get_blocks(model.steps[:7], model.ids(small)[:7])
        assert got.verified.tolist() == [True] * 4 + [False] * 3
        assert got.missing.tolist() == [False] * 4 + [True] * 3
        assert store.get_blocks(model.steps[1:4], model.ids(small)[1:4], start=1).missing.all()


def test_without_hashes_inside_the_blocks_smaller_ones_are_not_found(tmp_path: Path) -> None:
    model, large = Model(), Split(block_size=16)
    model.put(tmp_path, Split(block_size=4))
    with opened(model, tmp_path, large, Rank()) as (store, _):
        assert store.match_prefix(model.hashes(large)) == 0
        assert not model.get(store, large).verified.any()


def test_a_missing_rank_makes_its_blocks_misses(tmp_path: Path) -> None:
    model, stored = Model(), Split(4)
    model.put(tmp_path, stored)
    for path in (tmp_path / "tp1of4-pp0of1").iterdir():
        path.unlink()
    (tmp_path / "tp1of4-pp0of1").rmdir()
    for rank, whole in ((Rank(0, 2), 0), (Rank(1, 2), 8)):
        with opened(model, tmp_path, Split(2), rank) as (store, _):
            assert store.match_prefix(model.steps) == whole
            got = model.get(store, Split(2))
            assert (got.verified.all(), got.missing.all()) == (bool(whole), not whole)
            assert not got.rejected


def test_a_block_counts_only_when_every_rank_has_stored_it(tmp_path: Path) -> None:
    model, stored = Model(), Split(2)
    for rank, blocks in ((Rank(0, 2), 8), (Rank(1, 2), 5)):
        cache = model.cache(stored, rank, filled=True)
        with open_store(tmp_path, cache, identity=model.identity, rank=rank) as store:
            store.put_blocks(model.steps[:blocks], model.ids(stored)[:blocks])
    with opened(model, tmp_path, Split(1), Rank()) as (store, _):
        assert store.match_prefix(model.steps) == 5
        assert model.get(store, Split(1)).verified.tolist() == [True] * 5 + [False] * 3


def test_what_was_put_while_another_split_has_it_open_is_found(tmp_path: Path) -> None:
    model, stored = Model(), Split(1)
    with opened(model, tmp_path, Split(1, 2), Rank(0, 1, 0, 2)) as (store, _):
        assert store.match_prefix(model.steps) == 0
        writer = open_store(tmp_path, model.cache(stored, Rank(), filled=True), identity=model.identity)
        with writer:
            writer.put_blocks(model.steps, model.ids(stored))
            store._front.storage  # noqa: B018
            if io_mode() == "inline":
                store._front.storage.siblings._look_at = 0.0  # type: ignore[attr-defined]
                assert store.match_prefix(model.steps) == 8
        if io_mode() == "inline":
            assert model.get(store, Split(1, 2)).verified.all()


def test_a_rank_reads_the_chunks_with_its_slices_and_no_others(tmp_path: Path) -> None:
    """Heads of 64 KiB a block, so that a chunk holds four: of 16 heads and 2 layers, a rank of 4 needs two chunks."""
    model = Model(layers=2, heads=16, tokens=8, k=8192, v=8192)
    model.put(tmp_path, Split(1), replace(SMALL, capacity_bytes=128 * 2**20))
    for split, share in ((Split(4), 4), (Split(2), 2), (Split(16), 16)):
        with opened(model, tmp_path, split, split.ranks[-1]) as (store, _):
            assert model.get(store, split).verified.all()
            needed = model.kv.nbytes // share
            tables = 2 * (2 * 16 * 8 + 8 * 12)
            chunks = max(needed, 2 * 262_144)
            assert store.stats()["get_spliced_bytes"] <= 1.2 * chunks + tables
            assert store.stats()["get_spliced_bytes"] >= needed


def test_a_reader_needs_no_shard_of_its_own(tmp_path: Path) -> None:
    model, split = Model(), Split(1, 2)
    rank = split.ranks[1]
    with pytest.raises(StorePathError, match=r"expected a shard"):
        open_store(tmp_path, model.cache(split, rank, filled=False), identity=model.identity, rank=rank, mode="r")
    model.put(tmp_path, Split(2))
    with opened(model, tmp_path, split, rank, mode="r") as (store, cache):
        assert store.match_prefix(model.steps) == 8
        assert model.get(store, split).verified.all()
        assert np.array_equal(model.found(cache, split, rank), model.expected(split, rank))
        assert store.stats()["get_spliced"] == 8
    assert not (tmp_path / rank.folder).exists()


@pytest.mark.inline("waits for what a reader in this process looks for")
def test_a_reader_finds_its_own_shard_once_a_writer_makes_it(tmp_path: Path) -> None:
    model, split = Model(), Split(1)
    other = Model(seed=9)
    other.put(tmp_path, Split(2))
    with opened(model, tmp_path, split, Rank(), mode="r") as (store, _):
        assert model.get(store, split).missing.all()
        command = "import sys; from tests.splitmodel import *; Model().put(Path(sys.argv[1]), Split(1))"
        subprocess.run([sys.executable, "-c", command, str(tmp_path)], check=True, cwd=Path(__file__).parent.parent)
        deadline = time.monotonic() + 20
        while not (got := model.get(store, split)).verified.all() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert got.verified.all()


@pytest.mark.parametrize(
    ("hashes", "size", "error"),
    [(8, 3, ConfigError), (8, 0, ConfigError), (8, True, ConfigError), (8, 32, ConfigError), (7, 4, LengthMismatch)],
)
def test_steps_must_divide_blocks_and_be_as_many_as_the_tokens_have(
    tmp_path: Path, hashes: int, size: int, error: type[Exception]
) -> None:
    model, large = Model(), Split(block_size=16)
    with opened(model, tmp_path, large, Rank()) as (store, _), pytest.raises(error, match="hash_block_size"):
        store.get_blocks(model.steps[:hashes], model.ids(large), hash_block_size=size)
