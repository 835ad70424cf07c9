"""Which blocks the policies give up: the tail before the head, leaves alone, nothing pinned; what they forget."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.eviction import policy_named
from kvstore.eviction_types import NO_KEY, Chain, Records, Touches, hash_start, key_salt, policy_keys
from tests.policy_calls import BOTH, T0, chain, every, here, in_order, keys, put, serve

# --- the order ---------------------------------------------------------------------------------------------------


@BOTH
def test_of_a_request_the_tail_goes_before_the_head(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3, 4))
    assert policy.victims(2, T0 + 1).tolist() == [4, 3]
    assert in_order(policy) == [4, 3, 2, 1]


@BOTH
def test_choosing_victims_changes_nothing(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3))
    assert in_order(policy) == in_order(policy)
    assert here(policy, (1, 2, 3)) == [1, 2, 3]


def test_lru_gives_up_the_request_that_was_longest_ago() -> None:
    policy = policy_named("lru")
    serve(policy, chain(1, 2), T0)
    serve(policy, chain(11, 12), T0 + 1)
    policy.request(chain(1, 2), T0 + 2)
    assert in_order(policy, T0 + 3) == [12, 11, 2, 1]


@BOTH
def test_a_shared_head_outlives_all_its_branches(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3))
    put(policy, chain(4, 5, parent=2, start=2))
    order = in_order(policy)
    assert order[-2:] == [2, 1]
    assert order.index(5) < order.index(4)


@BOTH
def test_a_put_in_several_batches_makes_one_chain(name: str) -> None:
    policy = policy_named(name)
    policy.request(chain(1, 2, 3, 4), T0)
    put(policy, chain(1, 2), T0 + 1)
    put(policy, chain(3, 4, parent=2, start=2), T0 + 2)
    assert in_order(policy, T0 + 3) == [4, 3, 2, 1]


@BOTH
def test_a_later_request_tells_a_parent_that_the_put_did_not_name(name: str) -> None:
    policy = policy_named(name)
    put(policy, chain(3, 4, start=2), T0)
    put(policy, chain(1, 2), T0 + 1)
    policy.request(chain(1, 2, 3, 4), T0 + 2)
    assert in_order(policy, T0 + 3) == [4, 3, 2, 1]
    policy.pin(keys(4))
    assert in_order(policy, T0 + 3) == []
    policy.removed(keys(2))
    assert policy.figures()["orphans"] == 2


@BOTH
def test_a_block_that_was_only_named_as_a_parent_has_its_place_when_it_is_written(name: str) -> None:
    policy = policy_named(name)
    put(policy, chain(4, parent=3, start=4), T0)
    policy.written(chain(3, parent=2, start=3), every(chain(3)), 1, T0 + 1)
    policy.removed(keys(4))
    assert in_order(policy, T0 + 2) == [3]


@BOTH
def test_victims_are_as_many_as_their_sizes_need(name: str) -> None:
    policy = policy_named(name)
    blocks = chain(1, 2, 3)
    policy.request(blocks, T0)
    policy.written(blocks, every(blocks), np.array([64, 4096, 128]), T0)
    assert policy.victims(128, T0).tolist() == [3]
    assert policy.victims(129, T0).tolist() == [3, 2]
    assert policy.victims(0, T0).tolist() == []


@BOTH
def test_a_block_that_is_written_again_has_its_new_size(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2))
    policy.written(chain(2, parent=1, start=1), every(chain(2)), 50, T0)
    assert policy.victims(50, T0).tolist() == [2]
    assert policy.figures()["resident"] == 2


# --- pins --------------------------------------------------------------------------------------------------------


@BOTH
def test_what_is_pinned_and_what_comes_before_it_stays(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3, 4))
    policy.pin(keys(2))
    assert in_order(policy) == [4, 3]
    policy.unpin(keys(2))
    assert in_order(policy) == [4, 3, 2, 1]


@BOTH
def test_pins_count(name: str) -> None:
    policy = policy_named(name)
    policy.pin(keys(1))
    serve(policy, chain(1))
    policy.pin(keys(1))
    policy.unpin(keys(1))
    assert in_order(policy) == []
    policy.unpin(keys(1, 7))
    policy.unpin(keys(1))
    assert in_order(policy) == [1]
    assert policy.figures()["pinned"] == 0


@BOTH
def test_a_put_that_finds_only_pinned_blocks_is_refused(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2))
    policy.pin(keys(1, 2))
    admission = serve(policy, chain(11, 12), T0 + 1, room=0)
    assert admission.admitted.tolist() == [False, False]
    assert admission.victims.tolist() == []


# --- age limit and clock -----------------------------------------------------------------------------------------


@BOTH
def test_what_is_past_the_age_limit_goes_first_and_is_told(name: str) -> None:
    policy = policy_named(name, max_age_s=100.0)
    serve(policy, chain(1, 2, 3), T0)
    serve(policy, chain(11, 12), T0 + 60)
    policy.request(chain(1), T0 + 60)
    assert policy.expired(T0 + 90).tolist() == []
    assert policy.expired(T0 + 101).tolist() == [3, 2]
    assert policy.victims(2, T0 + 101).tolist() == [3, 2]
    policy.pin(keys(3))
    assert policy.expired(T0 + 101).tolist() == []


@BOTH
def test_without_an_age_limit_nothing_expires(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2))
    assert policy.expired(T0 + 1e9).tolist() == []


@BOTH
@pytest.mark.parametrize("jump", [-1e9, -3600.0, -1.0, 1e9, float("nan"), float("inf")])
def test_a_clock_that_jumps_leaves_the_order_alone(name: str, jump: float) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2), T0)
    policy.request(chain(1, 2), T0 + jump)
    serve(policy, chain(11, 12), T0 + 5 + (jump if abs(jump) == 1e9 else 0))
    policy.request(chain(11, 12), T0 + 6)
    assert sorted(in_order(policy, T0 + 7)) == [1, 2, 11, 12]
    assert in_order(policy, T0 + 7)[:2] == [2, 1]


def test_after_a_step_back_ages_go_on_and_times_are_those_of_the_new_clock() -> None:
    policy = policy_named("lru", max_age_s=100.0)
    serve(policy, chain(1), T0)
    policy.request(chain(2), T0 - 5000)
    assert policy.touches(keys(1), T0 - 5000).times.tolist() == [T0 - 5000]
    assert policy.expired(T0 - 4950).tolist() == []
    assert policy.expired(T0 - 4899).tolist() == [1]


# --- what is forgotten, and names --------------------------------------------------------------------------------


def test_ghosts_are_bounded_by_the_blocks_that_are_here() -> None:
    policy = policy_named("hazard")
    serve(policy, chain(*range(1, 301)))
    for step in range(100):
        policy.request(chain(*range(1000 + 100 * step, 1100 + 100 * step)), T0 + step)
    assert policy.figures()["ghosts"] == 3000 + 100
    policy.request(chain(1), T0 + 101)
    assert policy.figures()["ghosts"] == 3000
    assert policy.touches(keys(1000), T0).times.tolist() != policy.touches(keys(10999), T0).times.tolist()


def test_ghosts_are_bounded_by_the_operator() -> None:
    policy = policy_named("hazard", max_ghosts=2000)
    serve(policy, chain(*range(1, 301)))
    for step in range(50):
        policy.request(chain(*range(1000 + 100 * step, 1100 + 100 * step)), T0 + step)
    assert policy.figures()["ghosts"] <= 2100


def test_the_oldest_ghost_is_forgotten_first() -> None:
    policy = policy_named("lru")
    policy.request(chain(*range(1, 601)), T0)
    policy.request(chain(*range(1001, 1601)), T0 + 10)
    policy.request(chain(1001), T0 + 20)
    times = policy.touches(keys(600, 1, 1600), T0 + 30).times.tolist()
    assert times == [T0 + 30, T0, T0 + 10]


@BOTH
def test_a_ghost_is_kept_as_long_as_a_block_needs_it_as_parent(name: str) -> None:
    policy = policy_named(name)
    policy.request(chain(1, 2), T0)
    policy.written(chain(2, parent=1, start=1), every(chain(2)), 1, T0)
    for step in range(5):
        policy.request(chain(*range(1000 * step + 1000, 1000 * step + 1900)), T0 + step)
    assert policy.figures()["orphans"] == 1
    put(policy, chain(1), T0 + 5)
    assert policy.figures()["orphans"] == 0
    assert in_order(policy, T0 + 6) == [2, 1]


def test_a_ghost_that_no_block_needs_any_more_is_forgotten_in_its_turn() -> None:
    policy = policy_named("lru")
    for number in range(10, 6010, 2):
        policy.written(chain(number, parent=number + 1, start=1), every(chain(1)), 1, T0)
        policy.removed(keys(number))
    assert policy.figures()["ghosts"] < 1010


def test_a_block_that_was_refused_is_the_youngest_ghost() -> None:
    policy = policy_named("hazard")
    policy.request(chain(1), T0)
    policy.request(chain(*range(1001, 1501)), T0)
    assert not policy.admit(chain(1), every(chain(1)), 1, 0, T0).admitted.any()
    policy.request(chain(*range(2001, 2901)), T0 + 1)
    policy.request(chain(9), T0 + 2)
    assert policy.touches(keys(1, 1500, 1001), T0 + 3).times.tolist() == [T0, T0 + 3, T0]


def test_a_ghost_that_comes_back_keeps_its_count() -> None:
    policy = policy_named("hazard")
    serve(policy, chain(1))
    policy.removed(keys(1))
    policy.request(chain(1), T0 + 1)
    assert policy.touches(keys(1), T0 + 1).counts.tolist() == [2]


@BOTH
def test_calls_about_unknown_blocks_do_nothing(name: str) -> None:
    policy = policy_named(name)
    policy.removed(keys(1, 2))
    policy.unpin(keys(1))
    policy.request(Chain(keys()), T0)
    policy.written(chain(1), np.array([False]), 1, T0)
    assert policy.admit(Chain(keys()), np.zeros(0, bool), 1, 0, T0).admitted.size == 0
    assert in_order(policy) == []
    assert policy.figures()["resident"] == 0


@BOTH
def test_a_write_that_nobody_announced_counts_as_a_request(name: str) -> None:
    policy = policy_named(name)
    policy.written(chain(1, 2), np.array([True, True]), 1, T0)
    assert in_order(policy) == [2, 1]
    assert policy.touches(keys(1), T0).counts.tolist() == [1]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="hazard, lru"):
        policy_named("fifo")


def test_keys_lead_back_to_the_hashes_and_tell_groups_apart() -> None:
    hashes = [bytes([i] * 32) for i in range(1, 9)]
    one, two = key_salt(b"identity" + b"\0\0"), key_salt(b"identity" + b"\0\1")
    found = policy_keys(one, hashes)
    assert [hash_start(one, key) for key in found.tolist()] == [h[:8] for h in hashes]
    assert not set(found.tolist()) & set(policy_keys(two, hashes).tolist())
    assert policy_keys(one, []).size == 0
    assert policy_keys(one, [one.to_bytes(8, "little")]).tolist() != [NO_KEY]


def records(numbers: list[int], parents: list[int], positions: list[int], times: list[float]) -> Records:
    ones = np.ones(len(numbers), np.int64)
    touches = Touches(np.array(times), ones, 0 * ones)
    return Records(keys(*numbers), keys(*parents), ones, np.array(positions), touches)


@BOTH
def test_records_that_make_no_sense_are_evictable(name: str) -> None:
    policy = policy_named(name)
    wild = records(
        [1, 2, 3, 3, 4, 5], [2, 1, 3, 1, 99, 1], [0, 1, 2, 2, 3, 1], [T0, -1e30, 1e30, float("nan"), 0.0, T0]
    )
    policy.load(wild, T0)
    assert sorted(in_order(policy)) == [1, 2, 3, 4, 5]
    assert in_order(policy)[0] == 4
