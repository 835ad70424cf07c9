"""Campaign "model": random histories of one store, opened again and again in other ways, against a dict."""

from __future__ import annotations

import io
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore import KVStore, PagedKVCache, Rank, StoreConfig
from kvstore.errors import ConfigError
from kvstore.opening import complete_identity
from kvstore.record import record_key
from tests.campaign.children import Ending, Say, in_child
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.worlds import audit, audit_file
from tests.support import IDENTITY, MIB, Raw, block_hashes, canonical, flip, layer_tensors

EXAMPLES = 4
STEPS = 30
PATIENCE_S = 600.0
REQUESTS, LENGTH, TOKENS = 10, 5, 16
IDENTITIES = (IDENTITY, replace(IDENTITY, revision="2"))
CAPACITIES = (MIB, 2 * MIB, 8 * MIB)


class WrongServed(AssertionError):
    """A block was verified that is not what was stored."""


Key = tuple[int, int, int, int]
"""Identity, group, request, index in the request."""


def layers(seed: int) -> dict[str, torch.Tensor]:
    """Two layers of 4 KiB slices, one of 1 KiB: two groups, of blocks of 16 KiB and of 1 KiB."""
    wide = layer_tensors("BHNC", 2, REQUESTS * LENGTH, 2, TOKENS, 64, seed=seed)
    narrow = layer_tensors("BHNC", 1, REQUESTS * LENGTH, 1, TOKENS, 16, seed=seed, first_layer=2)
    return wide | narrow


def two_groups(tensors: dict[str, torch.Tensor]) -> PagedKVCache:
    names = list(tensors)
    return PagedKVCache.from_tensors(tensors, "BHNC", groups={0: names[:2], 1: names[2:]})


@cache
def sources() -> tuple[PagedKVCache, ...]:
    """For each identity the cache whose block n is block n % LENGTH of request n // LENGTH."""
    return tuple(two_groups(layers(21 + number)) for number in range(len(IDENTITIES)))


@cache
def target() -> tuple[PagedKVCache, dict[str, torch.Tensor]]:
    tensors = layers(31)
    return two_groups(tensors), tensors


@cache
def truth(identity: int, group: int) -> np.ndarray[Any, Any]:
    return canonical(sources()[identity], range(REQUESTS * LENGTH), group)


@cache
def hashes(request: int) -> list[bytes]:
    return block_hashes(LENGTH, f"model/{request}")


@cache
def identity_ids() -> list[bytes]:
    return [complete_identity(of, sources()[n], Rank()).digest() for n, of in enumerate(IDENTITIES)]


FIGURES: Counter[str] = Counter()
"""What the machines of this process did."""

requests = st.integers(0, REQUESTS - 1)
cuts = st.sampled_from((0, 0, 0, 1, TOKENS - 1))
"""Tokens that a call's last block lacks."""
groups = st.sampled_from((0, 0, 0, 1))
identities = st.sampled_from((0, 0, 0, 1))
configs = st.builds(
    StoreConfig,
    capacity_bytes=st.sampled_from(CAPACITIES),
    durability=st.sampled_from(("commit", "process")),
    eviction=st.sampled_from(("none", "hazard", "lru")),
    codec=st.sampled_from(("raw", "bf16-planes")),
    quarantine_bytes=st.sampled_from((0, 40_000, 64 * MIB)),
)


class Machine(RuleBasedStateMachine):
    """The model says for each key how many tokens its record has. Where the store may evict, a record may be gone; it is
    never another one. With eviction="none" every record of the model is served."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="model-"))
        self.records: dict[Key, int] = {}
        self.damaged: set[Key] = set()
        self.spoiled = 0
        """How many headers were ever damaged."""
        self.lossy: set[int] = set()
        """Identities of which something may have been evicted since the last look at all that is there."""
        self.once_damaged: set[Key] = set()
        """A damaged record for which quarantine had no room is refused, and still in the index."""
        self.store: KVStore | None = None
        self.now, self.lives, self.identity = 1e9, 0, 0

    def clock(self) -> float:
        return self.now

    @property
    def open(self) -> KVStore:
        assert self.store is not None
        return self.store

    @property
    def path(self) -> Path:
        return self.folder / f"life-{self.lives}"

    @initialize(config=configs, identity=identities)
    def begin(self, config: StoreConfig, identity: int) -> None:
        self.config, self.identity = config, identity
        self.store = KVStore(self.path, sources()[identity], IDENTITIES[identity], config, clock=self.clock)

    @rule(request=requests, first=st.integers(0, LENGTH - 1), count=st.integers(1, LENGTH), group=groups, cut=cuts)
    def put(self, request: int, first: int, count: int, group: int, cut: int) -> None:
        self._put(request, first, min(first + count, LENGTH), group, cut)

    @rule(some=st.lists(requests, min_size=2, max_size=REQUESTS, unique=True), touched=st.booleans())
    def put_many(self, some: list[int], touched: bool) -> None:
        for request in some:
            if touched:
                self.touch(request, 0)
            self._put(request, 0, LENGTH, 0, 0)

    def _put(self, request: int, first: int, end: int, group: int, cut: int) -> None:
        self.now += 10
        tokens, numbers = end * TOKENS - cut, range(request * LENGTH + first, request * LENGTH + end)
        parent = hashes(request)[first - 1] if first else None
        result = self.open.put_blocks(hashes(request)[first:end], numbers, first, tokens, group, parent)
        for i, index in enumerate(range(first, end)):
            self._note(result, i, (self.identity, group, request, index), min(TOKENS, tokens - index * TOKENS))
        self._may_lose(self.config.eviction != "none" and bool(result.stored.any()))
        allowed = {"store_full", "not_admitted"}
        assert set(result.failed.values()) <= allowed, result.failed

    def _note(self, result: Any, i: int, key: Key, valid: int) -> None:
        FIGURES["stored"] += int(result.stored[i])
        if result.stored[i]:
            self.records[key] = valid
            self.damaged.discard(key)
        elif result.present[i]:
            known = key in self.once_damaged or self.records.get(key) == valid
            assert known, f"{key} is present, and never was put so"

    @rule(request=requests, group=groups)
    def get(self, request: int, group: int) -> None:
        self.now += 1
        self._get(request, group)

    def _get(self, request: int, group: int) -> None:
        """Get all blocks of a request, each asked for with the tokens that the model has."""
        for index in range(LENGTH):
            key = (self.identity, group, request, index)
            valid = self.records.get(key, TOKENS)
            self._check(key, valid, *self._load(request, index, group, valid))

    def _load(self, request: int, index: int, group: int, valid: int) -> tuple[Any, bool]:
        """One block's result, and whether its valid tokens are right."""
        loaded, tensors = target()
        for tensor in tensors.values():
            tensor[0].view(torch.uint8).numpy().fill(0xA5)
        loader = self.open.attach(loaded)
        got = loader.get_blocks([hashes(request)[index]], [0], index, index * TOKENS + valid, group)
        members = loaded.group(group)
        rows = canonical(loaded, [0], group)[0], truth(self.identity, group)[request * LENGTH + index]
        shaped = [row.reshape(len(members.slices), TOKENS, -1)[:, :valid] for row in rows]
        return got, bool(np.array_equal(*shaped))

    def _check(self, key: Key, valid: int, got: Any, right: bool) -> None:
        if got.verified[0] and (not right or self.records.get(key) != valid or key in self.damaged):
            raise WrongServed(
                f"{key}: {valid} tokens verified; the model: {self.records.get(key)}, {key in self.damaged}"
            )
        FIGURES["served"] += int(got.verified[0])
        if key in self.damaged and not got.verified[0]:
            self._forget(key)
        elif not got.verified[0] and key in self.records:
            assert not got.rejected, f"{key} is intact, and rejected: {got.rejected}"
            assert self.identity in self.lossy, f"{key} is lost"
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self.records.pop(key, None)
        self.damaged.discard(key)

    @rule(request=requests, group=groups)
    def touch(self, request: int, group: int) -> None:
        self.now += 5
        self.open.touch(hashes(request), group)

    @precondition(lambda self: self.store is not None and self.config.eviction != "none")
    @rule(blocks=st.integers(0, 12))
    def evict(self, blocks: int) -> None:
        before = self.open.stats()["records"]
        gone = self.open.evict(blocks)
        assert gone == min(blocks, before), f"evict({blocks}) of {before} evicted {gone}"
        assert self.open.stats()["records"] == before - gone
        self._may_lose(gone > 0)

    def _may_lose(self, evicted: bool) -> None:
        self.lossy |= set(range(len(IDENTITIES))) if evicted else set()

    @precondition(lambda self: len(self.records) > 15)
    @rule()
    def clear(self) -> None:
        before = self.open.stats()["records"]
        assert self.open.clear() == before
        assert self.open.stats()["records"] == 0
        self.records.clear()
        self.damaged.clear()

    @rule(config=configs, identity=identities)
    def reopen(self, config: StoreConfig, identity: int) -> None:
        """Close, and open in another way; a capacity that is too small for what may not be evicted is refused."""
        self._settle()
        self.open.close()
        assert not audit_file(self.open.folder)
        self._open_as(config, identity)

    @rule(config=configs, identity=identities)
    def abandon(self, config: StoreConfig, identity: int) -> None:
        """What a process leaves that is killed between two calls: its files, as they are."""
        self._settle()
        old, abandoned = self.path, self.open
        self.lives += 1
        shutil.copytree(old, self.path)
        abandoned.close()
        shutil.rmtree(old)
        self._open_as(config, identity)

    def _open_as(self, config: StoreConfig, identity: int) -> None:
        self._may_lose(config.eviction != "none" and config.capacity_bytes < self.config.capacity_bytes)
        for chosen in (config, replace(config, capacity_bytes=CAPACITIES[-1])):
            with suppress(ConfigError):
                self.store = KVStore(self.path, sources()[identity], IDENTITIES[identity], chosen, clock=self.clock)
                self.config, self.identity = chosen, identity
                return
            assert config.eviction == "none", "a capacity was refused that eviction could make room for"
        raise AssertionError("the largest capacity was refused")

    @precondition(lambda self: self.records)
    @rule(data=st.data(), header=st.sampled_from((False, False, True)))
    def damage(self, data: Any, header: bool) -> None:
        """Flip a bit of a record's header or of its first chunk, if it is still there."""
        key = data.draw(st.sampled_from(sorted(self.records)))
        raw, index = Raw(self.open), self._index_key(key)
        entry = raw.entry(index)
        if entry is None or key in self.damaged:
            return
        bit, chunk = data.draw(st.integers(0, 10**6)), entry[40:48][::-1] + b"\0\1"
        with suppress(lmdb.MapFullError):
            if header:
                raw.put_entry(index, flip(entry, bit % (len(entry) * 8)))
            else:
                raw.put_chunk(chunk, flip(stored := raw.chunk(chunk), bit % (len(stored) * 8)))
            self.spoiled += header
            self.damaged.add(key)
            self.once_damaged.add(key)

    def _index_key(self, key: Key) -> bytes:
        identity, group, request, index = key
        return record_key(identity_ids()[identity], group, hashes(request)[index])

    @precondition(lambda self: self.store is not None)
    @invariant()
    def accounts(self) -> None:
        assert not (problems := audit(self.open, self.spoiled)), problems

    def _settle(self) -> None:
        """Look at everything under this identity: what is not evicted is served, and what is gone the model forgets."""
        for request in range(REQUESTS):
            for group in (0, 1):
                self._get(request, group)
        self.lossy.discard(self.identity)

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self._settle()
                self.open.close()
                assert not (problems := audit_file(self.open.folder)), problems
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


# --- the campaign ----------------------------------------------------------------------------------------------------


def play(seed: int, shrink: bool, say: Say) -> None:
    """Let hypothesis play histories that follow from the seed; it says which one is wrong, the smallest where it is to
    shrink it, which takes minutes."""
    machine = type("Seeded", (Machine,), {"_hypothesis_internal_use_seed": seed})
    chosen = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            run_state_machine_as_test(machine, settings=chosen)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        kind = Kind.WRONG_SERVED if isinstance(error, WrongServed) else Kind.BROKEN
        say("failed", kind, f"{traceback.format_exc()}\n{notes}\n{said.getvalue()}")
    say("figures", dict(FIGURES))


@campaign("model", quick=20, full=2_000)
def model(context: Context) -> Iterator[Outcome]:
    """Random histories (puts, gets, eviction, damage, kills, reopenings) against a dict; a fault is four of them."""
    torch.set_num_threads(1)
    for number in range(len(IDENTITIES)):
        _ = sources(), target(), [truth(number, group) for group in (0, 1)]
    for number in context.faults():
        seed = context.random(number).randrange(2**31)
        shrink = len(context.numbers) == 1
        ending = in_child(lambda say: play(seed, shrink, say), PATIENCE_S)  # noqa: B023
        for figures in (values[0] for values in ending.all("figures")):
            context.figures.update(figures)
        yield judge(number, ending)


def judge(number: int, ending: Ending) -> Outcome:
    for kind, detail in ending.all("failed"):
        return Outcome(number, Kind(kind), detail)
    return Outcome(number, Kind.CRASHED, ending.crash) if ending.crash else Outcome(number, Kind.HARMLESS)
