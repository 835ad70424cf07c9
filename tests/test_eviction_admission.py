"""Which new blocks the policies admit, and what becomes of blocks whose earlier blocks are gone."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.eviction import policy_named
from tests.policy_calls import BOTH, T0, chain, every, here, in_order, keys, put, serve

# --- admission ---------------------------------------------------------------------------------------------------


@BOTH
def test_what_there_is_room_for_is_admitted(name: str) -> None:
    policy = policy_named(name)
    admission = serve(policy, chain(1, 2, 3), size=10, room=30)
    assert admission.admitted.all()
    assert admission.victims.size == 0


@BOTH
def test_of_a_put_larger_than_everything_the_head_is_admitted(name: str) -> None:
    policy = policy_named(name)
    assert serve(policy, chain(1, 2, 3, 4), room=2).admitted.tolist() == [True, True, False, False]


def test_lru_admits_what_is_new_and_evicts_what_is_old() -> None:
    policy = policy_named("lru")
    serve(policy, chain(1, 2, 3), T0)
    admission = serve(policy, chain(11, 12), T0 + 1, room=0)
    assert admission.admitted.all()
    assert admission.victims.tolist() == [3, 2]


@BOTH
def test_the_parent_of_a_new_block_is_no_victim_for_it(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2), T0)
    serve(policy, chain(11, 12, 13), T0 + 4000)
    policy.request(chain(1, 2, 3), T0 + 8000)
    admission = policy.admit(chain(3, parent=2, start=2), every(chain(3)), 1, 0, T0 + 8000)
    assert not {1, 2} & set(admission.victims.tolist())


@BOTH
def test_a_put_of_present_blocks_costs_nothing(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2))
    absent = np.array([False, False, True])
    admission = policy.admit(chain(1, 2, 3), absent, 1, 1, T0)
    assert admission.admitted.tolist() == [False, False, True]
    assert admission.victims.size == 0


@BOTH
def test_a_resident_block_that_the_store_writes_again_is_admitted_and_no_victim(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2))
    serve(policy, chain(11), T0 + 1)
    admission = policy.admit(chain(2, 3, parent=1, start=1), np.array([True, True]), 1, 0, T0 + 2)
    assert admission.admitted[0]
    assert 2 not in admission.victims.tolist()
    scarce = policy.admit(chain(2, 3, parent=1, start=1), np.array([True, True]), 1, -5, T0 + 3)
    assert scarce.admitted.tolist() == [True, False]
    assert scarce.victims.tolist() == [11]


def test_blocks_the_store_has_and_the_policy_has_not_are_believed() -> None:
    policy = policy_named("lru")
    policy.admit(chain(1, 2, 3), np.array([False, False, True]), 1, 10, T0)
    assert here(policy, (1, 2, 3)) == [1, 2]


@pytest.mark.parametrize(("name", "kept"), [("hazard", True), ("lru", False)])
def test_a_scan_does_not_wash_out_of_hazard_what_comes_back(name: str, kept: bool) -> None:
    policy, capacity, served = policy_named(name), 100, []
    for step in range(800):
        scan = chain(*range(1000 + 20 * step, 1020 + 20 * step))
        for blocks in [scan] if step % 10 else [scan, chain(1, 2, 3, 4)]:
            if blocks is not scan:
                served.append(here(policy, (1, 2, 3, 4)) == [1, 2, 3, 4])
            policy.request(blocks, T0 + 2 * step)
            absent = ~policy.resident(blocks.keys)
            admission = policy.admit(blocks, absent, 1, capacity - policy.figures()["resident"], T0 + 2 * step)
            policy.removed(admission.victims)
            policy.written(blocks, admission.admitted, 1, T0 + 2 * step)
    assert all(served[40:]) if kept else not any(served)


# --- blocks whose earlier blocks are gone ------------------------------------------------------------------------


@BOTH
def test_what_follows_a_dropped_block_goes_first(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(11, 12), T0)
    serve(policy, chain(1, 2, 3, 4), T0 + 10)
    policy.removed(keys(2))
    assert policy.figures()["orphans"] == 2
    order = in_order(policy, T0 + 11)
    assert order[:2] == [4, 3]
    assert sorted(order[2:]) == [1, 11, 12]


@BOTH
def test_a_parent_that_is_put_again_revives_what_follows(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3, 4), T0)
    policy.removed(keys(2))
    serve(policy, chain(11, 12), T0 + 10)
    assert put(policy, chain(2, parent=1, start=1), T0 + 11).admitted.all()
    assert policy.figures()["orphans"] == 0
    order = in_order(policy, T0 + 12)
    assert [block for block in order if block < 10] == [4, 3, 2, 1]


@BOTH
def test_only_the_gap_that_is_closed_last_revives(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3, 4, 5))
    policy.removed(keys(2, 4))
    put(policy, chain(4, parent=3, start=3))
    assert policy.figures()["orphans"] == 3
    put(policy, chain(2, parent=1, start=1))
    assert policy.figures()["orphans"] == 0


@BOTH
def test_a_new_block_without_its_parent_is_not_worth_an_eviction(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2))
    admission = put(policy, chain(22, 23, parent=21, start=1), T0 + 1, room=0)
    assert not admission.admitted.any()
    assert admission.victims.size == 0


@BOTH
def test_a_new_block_whose_parent_is_on_its_way_is_admitted(name: str) -> None:
    policy = policy_named(name)
    policy.request(chain(21, 22, 23), T0)
    tail = chain(23, parent=22, start=2)
    assert policy.admit(tail, every(tail), 1, 1, T0).admitted.all()
    policy.written(tail, every(tail), 1, T0)
    assert policy.figures()["orphans"] == 1
    put(policy, chain(21, 22), T0)
    assert policy.figures()["orphans"] == 0
    assert in_order(policy) == [23, 22, 21]


@BOTH
def test_parents_that_run_in_a_circle_are_evictable(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 3, parent=3, start=5))
    put(policy, chain(4, parent=5, start=1))
    put(policy, chain(5, parent=4, start=1))
    assert sorted(in_order(policy)) == [1, 2, 3, 4, 5]


@BOTH
def test_a_request_that_names_a_key_twice_counts_it_once(name: str) -> None:
    policy = policy_named(name)
    serve(policy, chain(1, 2, 1, 3))
    assert sorted(in_order(policy)) == [1, 2, 3]
    assert policy.touches(keys(1), T0).counts.tolist() == [1]
    policy.removed(keys(3, 3, 1))
    assert policy.figures()["resident"] == 1
