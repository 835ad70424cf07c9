"""Mamba states in the checksum protocol: ranks' parts add up, also of other splits, and what is wrong is named."""

from __future__ import annotations

import pytest
import torch

from kvstore import (
    KVChecksumBlocks,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumSide,
    KVChecksumWorker,
    PagedKVCache,
    Rank,
    StateTensor,
    block_checksums,
    compare,
)
from tests.test_state_splits import IDS, NAMES, TOKENS, cache_of, tensors

SLOT = IDS[0]


def record(cache: PagedKVCache, rank: int, size: int, received: bool) -> KVChecksumRecord:
    """What a rank reports of the request's state, which a block at position 0 holds."""
    blocks = {"r": KVChecksumBlocks(TOKENS, {0: (0, [SLOT])})}
    scheduled = KVChecksumScheduled(reqs_to_recv=blocks) if received else KVChecksumScheduled(reqs_to_send=blocks)
    worker = KVChecksumWorker(cache, Rank(rank, size))
    assert not worker.skipped
    return worker.execute(scheduled).result()


def side(size: int) -> KVChecksumSide:
    return KVChecksumSide(size, 1, {0: TOKENS})


@pytest.mark.parametrize(("sender", "receiver"), [(1, 1), (1, 2), (4, 2), (2, 8)])
def test_states_compare_across_splits(sender: int, receiver: int) -> None:
    sent = [record(cache_of(r, sender, filled=True), r, sender, received=False) for r in range(sender)]
    caches = [cache_of(r, receiver, filled=True) for r in range(receiver)]
    got = [record(cache, r, receiver, received=True) for r, cache in enumerate(caches)]
    sides = {"num_tokens": TOKENS, "reported_side": side(receiver), "expected_side": side(sender)}
    assert compare(got, sent, "r", **sides).ok()  # type: ignore[arg-type]
    wrong = tensors(caches[-1], NAMES[1])[1].tensor
    wrong[SLOT].view(torch.uint8).flatten()[5] ^= 1
    got[-1] = record(caches[-1], receiver - 1, receiver, received=True)
    found = compare(got, sent, "r", **sides)  # type: ignore[arg-type]
    assert not found.ok()
    assert [(m.group, m.first_token, m.end_token) for m in found.mismatching] == [(0, 0, TOKENS)]


def test_the_worker_sums_what_the_store_verifies() -> None:
    cache = cache_of(0, 1, filled=True)
    found = record(cache, 0, 1, received=False).checksums["r"][0]
    assert found.values.tolist() == [[int(block_checksums(cache, [SLOT])[0])]]


def test_a_rank_that_is_missing_is_not_taken_for_equal() -> None:
    sent = [record(cache_of(0, 1, filled=True), 0, 1, received=False)]
    got = [record(cache_of(0, 2, filled=True), 0, 2, received=True)]
    found = compare(got, sent, "r", num_tokens=TOKENS, reported_side=side(2), expected_side=side(1))
    assert not found.ok()
    assert found.unverified
    assert not found.equal


def test_rows_that_several_ranks_have_are_not_summed() -> None:
    states = {NAMES[0]: [StateTensor(torch.zeros(4, 24, 3, dtype=torch.bfloat16), 1, [(0, 16), (24, 8)], 32)]}
    cache = PagedKVCache.from_tensors({}, "BHNC", states=states, state_block_size={0: TOKENS})
    assert "some have the same ones" in KVChecksumWorker(cache, Rank(0, 2)).skipped[0]


def test_block_checksums_lie_where_the_states_do() -> None:
    made = KVChecksumWorker(cache_of(0, 1, filled=True), Rank()).init_block_checksums(7)
    assert (made.dtype, made.shape, made.device.type) == (torch.int64, (7,), "cpu")
