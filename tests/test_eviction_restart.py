"""What a policy costs and survives: restarts, snapshots of any bytes, a million records, processes that must agree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from kvstore.eviction import POLICIES, HazardPolicy, policy_named
from kvstore.eviction_hazard import FORM, NUM_BUCKETS, NUM_CLASSES, Hazard, likelihood, worth_of
from kvstore.eviction_table import KeyTable
from kvstore.eviction_types import NO_KEY, Chain, Policy, Records, Touches
from tests.policy_simulation import Request, replay
from tests.policy_traces import chats, scans, together, zipf_documents

BOTH = pytest.mark.parametrize("name", POLICIES)
T0 = 1.7e9
MILLION = 1_000_000
CHAIN = 50


def mixed(requests: int, seed: int = 0) -> list[Request]:
    return list(together(zipf_documents(requests, seed, documents=200, gap_s=1), scans(requests // 4, seed, 40, 4)))


def records_of(policy: Policy, trace: list[Request], now: float) -> Records:
    """What the index would have, had each record been written at its block's last touch."""
    parents, positions = dict[int, int](), dict[int, int]()
    for _, keys in trace:
        for position, key in enumerate(keys.tolist()):
            parents[key] = NO_KEY if position == 0 else int(keys[position - 1])
            positions[key] = position
    every = np.array(sorted(parents), np.uint64)
    kept = every[policy.resident(every)]
    above = np.array([parents[key] for key in kept.tolist()], np.uint64)
    at = np.array([positions[key] for key in kept.tolist()], np.int64)
    return Records(kept, above, np.ones(kept.size, np.int64), at, policy.touches(kept, now))


def million() -> Records:
    """Records in chains of 50, with keys in no order."""
    rng = np.random.default_rng(0)
    keys = rng.permutation(np.arange(1, MILLION + 1)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    positions = np.arange(MILLION) % CHAIN
    parents = np.where(positions == 0, np.uint64(NO_KEY), np.roll(keys, 1))
    times = (T0 + np.arange(MILLION) // CHAIN * 0.125).astype(np.float64)
    ones = np.ones(MILLION, np.int64)
    return Records(keys, parents, ones * 65536, positions, Touches(times, ones, ones * 0))


# --- restarts ----------------------------------------------------------------------------------------------------


@BOTH
def test_a_restart_in_the_middle_costs_little(name: str) -> None:
    trace, capacity = mixed(800), 600
    before, after = trace[:600], trace[600:650]
    policy, restarted = policy_named(name), policy_named(name)
    replay(before, policy, capacity)
    assert restarted.restore(policy.snapshot())
    restarted.load(records_of(policy, before, after[0][0]), after[0][0])
    assert restarted.figures()["resident"] == policy.figures()["resident"] == capacity
    expected = replay(after, policy, capacity).hit_ratio
    assert replay(after, policy_named(name), capacity).hit_ratio < expected - 0.02
    assert replay(after, restarted, capacity).hit_ratio > expected - 0.005


@BOTH
def test_after_a_restart_the_tail_still_goes_before_the_head(name: str) -> None:
    policy, blocks = policy_named(name), Chain(np.arange(1, 6).astype(np.uint64))
    policy.request(blocks, T0)
    policy.written(blocks, np.ones(5, bool), 1, T0)
    again = policy_named(name)
    again.load(records_of(policy, [(T0, blocks.keys)], T0 + 1), T0 + 1)
    assert again.victims(3, T0 + 1).tolist() == [5, 4, 3]


def test_a_class_is_that_of_the_count_whatever_the_record_says() -> None:
    policy = policy_named("hazard")
    touches = Touches(np.full(3, T0), np.array([1, 3, 10**9]), np.array([15, -7, 99]))
    keys = np.array([1, 2, 3], np.uint64)
    policy.load(Records(keys, np.zeros(3, np.uint64), np.ones(3, np.int64), np.zeros(3, np.int64), touches), T0)
    found = policy.touches(keys, T0)
    assert found.classes.tolist() == [12, 2, 15]
    assert found.counts.tolist() == [1, 3, 255]


# --- snapshots ---------------------------------------------------------------------------------------------------


def learned() -> Hazard:
    hazard, rng = Hazard(), np.random.default_rng(0)
    hazard.again[:] = rng.integers(0, 1000, hazard.again.shape)
    hazard.passed[:] = rng.integers(0, 1000, hazard.passed.shape)
    return hazard


def test_a_snapshot_gives_back_what_was_learned() -> None:
    hazard, other = learned(), Hazard()
    data = hazard.snapshot()
    assert len(data) < 12_000
    assert other.restore(data)
    hazard._learn()
    assert np.array_equal(other.rank, hazard.rank)
    assert other.snapshot() == data
    assert not np.array_equal(other.rank, Hazard().rank)


@pytest.mark.parametrize("at", [0, 4, 6, 8, 10, 12, FORM.size, FORM.size + 7, -1])
def test_a_snapshot_with_any_byte_changed_is_refused(at: int) -> None:
    data = bytearray(learned().snapshot())
    data[at] ^= 0x40
    hazard = Hazard()
    before = hazard.rank.copy()
    assert not hazard.restore(bytes(data))
    assert not hazard.again.any()
    assert np.array_equal(hazard.rank, before)


@pytest.mark.parametrize("cut", [0, 1, FORM.size - 1, FORM.size, 5000])
def test_a_snapshot_of_another_length_is_refused(cut: int) -> None:
    data = learned().snapshot()
    assert not Hazard().restore(data[:cut])
    assert not Hazard().restore(data + bytes(cut + 1))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_snapshot_of_impossible_counts_is_refused(value: float) -> None:
    hazard = learned()
    hazard.passed[3, 3] = value
    assert not Hazard().restore(hazard.snapshot())


def test_policies_do_not_take_each_others_snapshots() -> None:
    assert not policy_named("lru").restore(policy_named("hazard").snapshot())
    assert not policy_named("hazard").restore(policy_named("lru").snapshot())


# --- what hazard learns ------------------------------------------------------------------------------------------


def test_without_experience_the_longest_unused_goes_first() -> None:
    rank = Hazard().rank
    assert (np.diff(rank[0, 2:]) < 0).all()


def test_a_class_that_comes_back_is_kept_over_one_that_does_not() -> None:
    hazard = Hazard()
    hazard.again[1] += 500
    hazard.passed[0] += 1000
    hazard._learn()
    assert (hazard.rank[1, :-1] > hazard.rank[0, :-1]).all()


def test_the_worth_of_a_cell_looks_ahead() -> None:
    likely = np.full((1, NUM_BUCKETS), 0.01)
    likely[0, 8] = 0.9
    worth = worth_of(likely)[0]
    assert worth[7] > 10 * worth[9]
    assert worth[7] == pytest.approx((0.01 + 0.99 * 0.9) / (2**3.5 - 2**3 + (2**4 - 2**3.5) * 0.99 * 0.55), rel=0.01)


def test_a_cell_that_saw_little_is_taken_for_its_age_and_class() -> None:
    again, passed = np.zeros((NUM_CLASSES, NUM_BUCKETS)), np.full((NUM_CLASSES, NUM_BUCKETS), 1e5)
    passed[2] = 0
    again[2, 5] = 3
    assert likelihood(again, passed)[2, 5] < 0.1


def test_counters_halve_so_that_the_past_fades() -> None:
    hazard = Hazard()
    hazard.passed[0, 0], hazard.again[0, 0], hazard.passed[1, 1] = 99_000, 2_000, 99_000
    hazard._learn()
    assert (hazard.passed[0, 0], hazard.again[0, 0], hazard.passed[1, 1]) == (49_500, 1_000, 99_000)


def test_ages_are_counted_for_residents_and_ghosts_and_hits_where_they_happen() -> None:
    policy = HazardPolicy()
    block = Chain(np.array([7], np.uint64))
    policy.request(block, T0)
    policy.request(Chain(np.array([8], np.uint64)), T0 + 3.0)
    hazard = policy.hazard
    assert hazard.passed[0].tolist()[:5] == [1, 1, 1, 1, 0]
    policy.request(block, T0 + 3.0)
    assert hazard.again.sum() == 1
    assert hazard.again[0, 4] == 1


# --- a million records -------------------------------------------------------------------------------------------


@BOTH
def test_a_million_records_load_in_seconds_and_under_60_bytes_each(name: str) -> None:
    records, policy = million(), policy_named(name)
    start = time.perf_counter()
    policy.load(records, T0 + 20_000)
    assert time.perf_counter() - start < 8
    figures = policy.figures()
    assert figures["resident"] == MILLION
    assert figures["eviction_bytes"] < 60 * MILLION
    asked = records.keys[:: MILLION // 1000]
    assert min(timed(lambda: policy.resident(asked)) for _ in range(5)) < 0.002
    victims = policy.victims(65536 * 3 * CHAIN, T0 + 20_000)
    assert np.array_equal(victims, np.concatenate([records.keys[i * CHAIN : (i + 1) * CHAIN][::-1] for i in range(3)]))


def timed(call: object) -> float:
    assert callable(call)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_ghosts_too_take_under_60_bytes_whenever_arrays_have_just_grown() -> None:
    policy, worst = policy_named("hazard"), 0.0
    first = Chain(np.arange(1, 60_001).astype(np.uint64))
    policy.written(first, np.ones(60_000, bool), 1, T0)
    for step in range(1, 240):
        policy.request(Chain(np.arange(1, 2001).astype(np.uint64) + np.uint64(10**6 * step)), T0 + step)
        figures = policy.figures()
        worst = max(worst, figures["eviction_bytes"] / (figures["resident"] + figures["ghosts"]))
    assert figures["ghosts"] > 450_000
    assert worst < 60


def test_the_arrays_are_all_there_is() -> None:
    """`figures` counts what the policy holds: nothing of size hides in objects."""
    tracemalloc.start()
    try:
        policy = policy_named("hazard")
        for step in range(200):
            blocks = Chain(np.arange(1, 501).astype(np.uint64) + np.uint64(10**6 * step))
            policy.request(blocks, T0 + step)
            policy.written(blocks, np.ones(500, bool), 1, T0 + step)
        del blocks
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1.1 * policy.figures()["eviction_bytes"] + 200_000


def test_the_table_finds_what_was_put_in_through_collisions_and_rebuilding() -> None:
    table, rng = KeyTable(), np.random.default_rng(0)
    known = rng.permutation(np.arange(1, 5001)).astype(np.uint64) << np.uint64(40)
    for start in range(0, 5000, 50):
        slots = np.arange(start, start + 50)
        if table.full_with(50):
            table.build(np.arange(start + 50), known)
        else:
            table.insert(known[slots], slots)
    assert np.array_equal(table.find(known, known), np.arange(5000))
    assert (table.find(np.arange(1, 5001).astype(np.uint64), known) == -1).all()


def test_the_table_finds_keys_that_crowd_at_its_end() -> None:
    table = KeyTable()
    numbers = np.arange(1, 200_000).astype(np.uint64)
    crowd = numbers[np.argsort(-table._home(numbers), kind="stable")][:200]
    table.insert(crowd, np.arange(200))
    assert np.array_equal(table.find(crowd, crowd), np.arange(200))
    assert (table.find(crowd + np.uint64(200_000), crowd) == -1).all()


# --- agreement ---------------------------------------------------------------------------------------------------

DIGEST = """
import hashlib
from kvstore.eviction import policy_named
from kvstore.eviction_types import Chain
from tests.policy_traces import chats
policy, digest = policy_named({name!r}), hashlib.sha256()
for now, keys in chats(300):
    absent = ~policy.resident(keys)
    policy.request(Chain(keys), now)
    admission = policy.admit(Chain(keys), absent, 1, 200 - policy.figures()["resident"], now)
    policy.removed(admission.victims)
    policy.written(Chain(keys), admission.admitted, 1, now)
    digest.update(admission.victims.tobytes() + admission.admitted.tobytes())
print(digest.hexdigest(), policy.figures()["resident"])
"""


@BOTH
def test_processes_with_other_hash_seeds_evict_the_same(name: str) -> None:
    def run(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DIGEST.format(name=name)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = run("1")
    assert first.split()[1] == "200"
    assert run("2") == first


# --- hit ratios --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "capacity", "gain"),
    [
        (list(zipf_documents(600, documents=200)), 400, 1.1),
        (list(chats(900)), 300, 0.97),
        (list(chats(900)), 1200, 0.985),
        (mixed(600), 500, 1.2),
        (list(together(chats(600), scans(300, gap_s=2))), 500, 1.2),
    ],
    ids=["documents", "chats", "chats-large", "documents-and-scan", "chats-and-scan"],
)
def test_hazard_resists_scans_and_never_loses_much_to_lru(trace: list[Request], capacity: int, gain: float) -> None:
    lru, hazard = (replay(trace, policy_named(name), capacity) for name in ("lru", "hazard"))
    assert lru.hit_ratio > 0.1
    assert hazard.hit_ratio > gain * lru.hit_ratio
    assert hazard.blocks_written <= 1.03 * lru.blocks_written
