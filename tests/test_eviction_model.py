"""The array policies against a plain model in dicts and sets, over any order of calls that hypothesis finds.

The blocks are those of a small tree; a request is a path from its root. The model does `lru` in full, and says of any
policy what it may evict.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvstore.eviction import policy_named
from kvstore.eviction_types import NO_KEY, Admission, Chain, Policy, Records

CAPACITY = 12
NODES = range(1, 41)
PARENT = {node: node - 1 if node % 4 else node // 3 for node in NODES}
"""Short chains that branch; the parent of node 1 is 0, the root's NO_KEY."""
nodes = st.sampled_from(NODES)


def path(node: int) -> list[int]:
    """From the root to a node."""
    return [] if node == NO_KEY else [*path(PARENT[node]), node]


def uint64(numbers: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


class Model:
    """What is resident, wanted and pinned, and in which order blocks were touched."""

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.resident: set[int] = set()
        self.wanted: set[int] = set()
        self.pins: Counter[int] = Counter()

    def request(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.place[block] = max(self.place.values(), default=0) + 1
        self.wanted |= set(blocks) - self.resident

    def orphan(self, block: int) -> bool:
        return not set(path(PARENT[block])) <= self.resident

    def hopeless(self, block: int, new: set[int]) -> bool:
        parent = PARENT[block]
        if parent in new:
            return self.hopeless(parent, new)
        on_its_way = parent in self.wanted or (parent in self.resident and not self.orphan(parent))
        return parent != NO_KEY and not on_its_way

    def evict(self, need: int, new: set[int]) -> list[int]:
        """The worst leaves first, one after the other."""
        left, taken = self.resident | new, list[int]()
        bad = {block: self.hopeless(block, new) if block in new else self.orphan(block) for block in left}
        while len(taken) < need:
            inner = {PARENT[block] for block in left}
            leaves = [block for block in left - inner if block in new or not self.pins[block]]
            if not leaves:
                break
            worst = min(leaves, key=lambda block: (not bad[block], self.place[block]))
            left.remove(worst)
            taken.append(worst)
        return taken


class Machine(RuleBasedStateMachine):
    """Calls as a store makes them, with surprises: records condemned, processes restarted, clocks set back."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy = policy_named(self.name)
        self.model = Model()
        self.now = 1.7e9

    @rule(seconds=st.sampled_from([1, 1, 2, 30, 5000]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(node=nodes)
    def request(self, node: int) -> None:
        self.now += 1
        self.policy.request(Chain(uint64(path(node))), self.now)
        self.model.request(path(node))

    @rule(node=nodes, skip=st.integers(0, 3), room=st.integers(-2, 4), write=st.integers(0, 9))
    def put(self, node: int, skip: int, room: int, write: int) -> None:
        """Of a path, but for its first blocks; what was admitted after the first `write` of them fails."""
        self.now += 1
        blocks = path(node)[skip:]
        if not blocks or not set(path(node)[:skip]) <= self.model.resident | self.model.wanted:
            return
        chain = Chain(uint64(blocks), PARENT[blocks[0]], len(path(blocks[0])) - 1)
        new = set(blocks) - self.model.resident
        absent = np.array([block in new for block in blocks], bool)
        admission = self.policy.admit(chain, absent, 1, room, self.now)
        self._check_admission(blocks, new, room, admission)
        self._remove(admission.victims.tolist())
        stored = admission.admitted & (np.cumsum(admission.admitted) <= write)
        self.policy.written(chain, stored, 1, self.now)
        self.model.resident |= set(uint64(blocks)[stored].tolist())
        self.model.wanted -= self.model.resident

    def _check_admission(self, blocks: list[int], new: set[int], room: int, admission: Admission) -> None:
        if not new <= self.model.wanted:
            self.model.request(blocks)
        lost = new - set(uint64(blocks)[admission.admitted].tolist())
        need = len(new) - room if new else 0
        if self.name == "lru":
            taken = self.model.evict(need, new)
            assert admission.victims.tolist() == [block for block in taken if block not in new]
            assert lost == new & set(taken)
        assert len(lost) + admission.victims.size <= max(0, need)
        self._check_leaves([*admission.victims.tolist()], new - lost)
        self.model.wanted -= lost

    @rule(blocks=st.lists(nodes, max_size=4))
    def removed(self, blocks: list[int]) -> None:
        self._remove(blocks)

    def _remove(self, blocks: list[int]) -> None:
        self.policy.removed(uint64(blocks))
        self.model.resident -= set(blocks)

    @rule(blocks=st.lists(nodes, max_size=4))
    def pin(self, blocks: list[int]) -> None:
        self.policy.pin(uint64(blocks))
        self.model.pins.update(blocks)

    @rule(blocks=st.lists(nodes, max_size=6))
    def unpin(self, blocks: list[int]) -> None:
        self.policy.unpin(uint64(blocks))
        for block in blocks:
            self.model.pins[block] = max(0, self.model.pins[block] - 1)

    @rule(back=st.sampled_from([0, 0, 100_000]))
    def restart(self, back: int) -> None:
        """Only what records remember survives; the clock may have been set back meanwhile."""
        kept = sorted(self.model.resident)
        touches = self.policy.touches(uint64(kept), self.now)
        positions = np.array([len(path(block)) - 1 for block in kept], np.int64)
        records = Records(
            uint64(kept), uint64([PARENT[block] for block in kept]), np.ones(len(kept), np.int64), positions, touches
        )
        snapshot, self.policy = self.policy.snapshot(), policy_named(self.name)
        assert self.policy.restore(snapshot)
        self.policy.load(records, self.now)
        self.model.wanted, self.model.pins = set(), Counter()
        self.now -= back

    def _check_leaves(self, victims: list[int], admitted: set[int]) -> None:
        """Each victim in its turn has no resident child, and is not pinned."""
        left = self.model.resident | admitted
        for victim in victims:
            assert victim in self.model.resident
            assert not self.model.pins[victim]
            assert victim not in {PARENT[block] for block in left - {victim}}
            left.remove(victim)

    @invariant()
    def same_blocks(self) -> None:
        found = self.policy.resident(uint64(list(NODES)))
        assert {node for node, here in zip(NODES, found, strict=True) if here} == self.model.resident
        figures = self.policy.figures()
        assert figures["resident"] == len(self.model.resident)
        assert figures["orphans"] == sum(map(self.model.orphan, self.model.resident))

    @invariant()
    def victims_are_leaves_and_all_that_can_go_goes(self) -> None:
        victims = self.policy.victims(10**6, self.now).tolist()
        expected = self.model.evict(10**6, set())
        assert victims == expected if self.name == "lru" else sorted(victims) == sorted(expected)
        self._check_leaves(victims, set())
        orphans = [self.model.orphan(block) for block in victims]
        assert orphans == sorted(orphans, reverse=True), "what is worth nothing goes first"


class HazardMachine(Machine):
    """The same calls, for a policy whose order is not the model's."""

    name = "hazard"


def test_lru_is_the_model() -> None:
    run(Machine)


def test_hazard_evicts_what_may_be_evicted() -> None:
    run(HazardMachine)


def run(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
