"""Campaign "kill": the writer is killed at a random moment of whatever it does, and what it acknowledged must be there."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import lmdb

from kvstore import KVStore, StoreConfig
from kvstore.errors import KVStoreError
from kvstore.storefile import DATA_NAME
from tests.campaign.children import PATIENCE_S, Child, Ending, Say, in_child
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.campaign.worlds import CAPACITY, WORLDS, World, audit, audit_file, small_config
from tests.support import MIB, Raw, flip, index_key

SHARD = "tp0of1-pp0of1"
OPS_AT_MOST = 24
ROOMY = {"small": 4 * MIB, "large": 4 * MIB, "huge": 16 * MIB}
"""What holds all of a world."""
SHRUNK = {"small": MIB, "large": MIB, "huge": 4 * MIB}
OPENING_S = 0.03
"""About how long an opening takes that shrinks the file."""


@dataclass(frozen=True)
class Scene:
    """What the writer is at: how often it does what, in which store."""

    name: str
    weights: dict[str, int]
    eviction: tuple[str, ...] = ("hazard", "lru")
    roomy: bool = False
    filled: bool = True
    """Whether it begins with a store that others filled."""


SCENES = (
    Scene("put", {"put": 1}, ("none",), roomy=True, filled=False),
    Scene("full", {"put": 1}, ("none",)),
    Scene("evicting", {"put": 8, "touch": 2, "get": 1}),
    Scene("evict", {"evict": 2, "put": 1}),
    Scene("clear", {"clear": 1, "put": 3}, ("none", "hazard", "lru")),
    Scene("quarantine", {"get": 1}, ("none", "hazard", "lru")),
    Scene("mixed", {"put": 8, "evict": 1, "clear": 1, "get": 4, "touch": 2, "reopen": 1}),
    Scene("shrink", {}, roomy=True),
)


@dataclass(frozen=True)
class Plan:
    """One fault, as its number and the seed choose it."""

    scene: Scene
    world: World
    config: StoreConfig
    then: StoreConfig
    """What the store is opened with after the kill."""
    chance: random.Random

    @classmethod
    def of(cls, chance: random.Random) -> Plan:
        scene, world = chance.choice(SCENES), chance.choice(list(WORLDS.values()))
        durability, eviction = chance.choice(("commit", "process")), chance.choice(scene.eviction)
        config = small_config(world, durability=durability, eviction=eviction)
        if scene.roomy:
            config = replace(config, capacity_bytes=ROOMY[world.name])
        then = replace(config, durability=chance.choice(("commit", "process")))
        if scene.name == "shrink":
            then = config = replace(then, capacity_bytes=SHRUNK[world.name], durability=durability)
        return cls(scene, world, config, then, chance)

    @property
    def template(self) -> str:
        """Plans with the same begin with the same filled store."""
        return f"{self.world.name}-{self.config.eviction}-{self.scene.roomy}"


@dataclass
class Clock:
    """Seconds that pass as the engine's work does, so that eviction has something to learn from."""

    now: float = 1e9

    def __call__(self) -> float:
        return self.now


def fill(plan: Plan, path: Path, say: Say) -> None:
    """Fill a store, some of it twice, so that it has free pages as well."""
    clock, world, capacity = Clock(), plan.world, (ROOMY if plan.scene.roomy else CAPACITY)[plan.world.name]
    with world.open(path, replace(plan.config, capacity_bytes=capacity), clock=clock) as store:
        for request in (*range(world.requests), *range(0, world.requests, 3)):
            clock.now += 20
            store.touch([world.hashes[n] for n in world.request(request)])
            world.put(store, world.request(request))
        say("present", world.present(store))


# --- the writer ------------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """The process that is killed. It says what it begins, and what is there once that has ended."""

    plan: Plan
    path: Path
    say: Say
    clock: Clock = field(default_factory=lambda: Clock(2e9))

    def run(self) -> None:
        chance, world = self.plan.chance, self.plan.world
        self.say("begin", "open", [])
        self.store = world.open(self.path, self.plan.config, clock=self.clock)
        self.say("end", "open", world.present(self.store))
        if self.plan.scene.name == "quarantine":
            self.say("damaged", *damage_records(self.store, world, chance))
        names, weights = list(self.plan.scene.weights), list(self.plan.scene.weights.values())
        while names:
            self.clock.now += chance.expovariate(1 / 30)
            self.step(chance.choices(names, weights)[0])
        time.sleep(PATIENCE_S)

    def step(self, op: str) -> None:
        chance, world = self.plan.chance, self.plan.world
        request = world.request(chance.randrange(world.requests))
        first = chance.randrange(len(request))
        numbers = request[: first + 1] if op in ("get", "touch") or chance.random() < 0.7 else request[first:]
        self.say("begin", op, list(numbers))
        stored = getattr(self, op)(numbers)
        self.say("end", op, world.present(self.store), stored)

    def put(self, numbers: range) -> list[int]:
        if numbers[0] % self.plan.world.length == 0:
            self.touch(numbers)
        found = self.plan.world.put(self.store, numbers)
        return [n for n, kept in zip(numbers, found.stored | found.present, strict=True) if kept]

    def touch(self, numbers: range) -> None:
        self.store.touch([self.plan.world.hashes[n] for n in numbers])

    def get(self, numbers: range) -> None:
        if wrong := self.plan.world.get(self.store, numbers).wrong:
            self.say("wrong", f"wrong bytes before the kill: {sorted(wrong)}")

    def evict(self, numbers: range) -> None:
        self.store.evict(len(numbers) * 3)

    def clear(self, numbers: range) -> None:
        self.store.clear()

    def reopen(self, numbers: range) -> None:
        self.store.close()
        self.store = self.plan.world.open(self.path, self.plan.config, clock=self.clock)


def damage_records(store: KVStore, world: World, chance: random.Random) -> tuple[list[int], int]:
    """Flip a bit in every second record or so: in which, and in how many the header. A transaction each, since
    there may be no room for more; records for which there is none stay as they are."""
    raw, damaged, headers = Raw(store), [], 0
    present = world.present(store)
    for number in chance.sample(present, len(present) // 2):
        key, spoil = index_key(store, world.hashes[number]), chance.random() < 0.1
        entry = raw.entry(key) or b""
        try:
            if spoil:
                raw.put_entry(key, flip(entry, chance.randrange(len(entry) * 8)))
            else:
                spoil_chunk(raw, entry[40:48][::-1] + b"\0\1", chance)
        except lmdb.MapFullError:
            continue
        damaged, headers = [*damaged, number], headers + spoil
    return damaged, headers


def spoil_chunk(raw: Raw, key: bytes, chance: random.Random) -> None:
    chunk = raw.chunk(key)
    raw.put_chunk(key, flip(chunk, chance.randrange(len(chunk) * 8)))


# --- what must be true afterwards ------------------------------------------------------------------------------------


@dataclass
class Claim:
    """What the lines of a killed writer let one claim of the store."""

    acknowledged: set[int]
    doing: str = ""
    """What it was at when it was killed, "" between two calls."""
    numbers: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    headers: int = 0
    broken: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, ending: Ending, before: set[int], plan: Plan) -> Claim:
        claim = cls(set(before))
        for word, *values in ending.said:
            if word == "begin":
                claim.doing, claim.numbers = values[0], set(values[1])
            elif word == "damaged":
                claim.damaged, claim.headers = set(values[0]), values[1]
            elif word == "end":
                claim._end(plan, *values)
        return claim

    def _end(self, plan: Plan, op: str, present: list[int], stored: list[int] | None = None) -> None:
        before, self.acknowledged = self.acknowledged, set(present)
        if op == "put" and plan.config.eviction == "none":
            self._check(before | set(stored or ()), "acknowledged blocks are not in the index")
        if op in ("touch", "reopen"):
            self._check(before, f"{op} lost blocks")
        if op == "clear" and present:
            self.broken.append(f"clear left {present}")
        self.doing, self.numbers = "", set()

    def _check(self, required: set[int], what: str) -> None:
        if lost := required - self.acknowledged:
            self.broken.append(f"{what}: {sorted(lost)}")

    def judge(self, plan: Plan, found: set[int]) -> list[str]:
        """What is wrong with the blocks that were found in the index after the kill."""
        new, lost = found - self.acknowledged, self.acknowledged - found
        may_lose = set(self.acknowledged) if self._evicts(plan) else set()
        may_lose |= self.damaged if self.doing == "get" else set()
        problems = [f"{sorted(new - self.numbers)} were never put"] if new - self.numbers else []
        if self.doing not in ("put", "") and new:
            problems.append(f"{self.doing} made {sorted(new)}")
        if lost - may_lose:
            problems.append(f"acknowledged blocks lost in {self.doing!r}: {sorted(lost - may_lose)}")
        return self.broken + problems

    def _evicts(self, plan: Plan) -> bool:
        shrinking = self.doing == "open" and plan.scene.name == "shrink"
        return self.doing in ("evict", "clear") or shrinking or (self.doing == "put" and plan.config.eviction != "none")


def inspect(plan: Plan, path: Path, claim: Claim, say: Say) -> None:
    """Open the store after the kill, compare everything with the claim, and use it."""
    world = plan.world
    try:
        store = world.open(path, plan.then, clock=Clock(3e9))
    except KVStoreError as error:
        say("broken", f"it does not open: {type(error).__name__}: {error}")
        return
    if plan.scene.name != "shrink":
        say("present", len(found := set(world.present(store))))
        complain(say, "broken", claim.judge(plan, found))
    else:
        found = set(world.present(store))
        complain(
            say, "broken", [f"{sorted(found - claim.acknowledged)} were never put"] * (not found <= claim.acknowledged)
        )
    complain(say, "broken", audit(store, claim.headers))
    serve(plan, store, found, claim, say)
    use(plan, store, say)
    complain(say, "broken", audit(store, claim.headers))
    store.close()
    complain(say, "broken", audit_file(path / SHARD))
    leftovers = sorted(file.name for file in (path / SHARD).iterdir())
    if leftovers != ["STORE", "data.mdb", "lock.mdb"]:
        say("broken", f"files left: {leftovers}")


def serve(plan: Plan, store: KVStore, found: set[int], claim: Claim, say: Say) -> None:
    """Every block that was found must be served, and be right; damaged ones must be refused."""
    served = plan.world.get_all(store)
    lost = found - claim.damaged - served.right
    reasons = {n: served.rejected.get(n, "missing") for n in sorted(lost)}
    complain(say, "wrong", [f"wrong bytes in {sorted(served.wrong)}"] * bool(served.wrong))
    complain(
        say,
        "wrong",
        [f"damaged, and verified: {sorted(served.right & claim.damaged)}"] * bool(served.right & claim.damaged),
    )
    complain(say, "broken", [f"in the index, and not served: {reasons}"] * bool(lost))
    complain(
        say, "broken", [f"served, and not in the index: {sorted(served.right - found)}"] * (not served.right <= found)
    )
    say("served", len(served.right))


def use(plan: Plan, store: KVStore, say: Say) -> None:
    """The store takes puts again, and once cleared it takes whole requests."""
    world, request = plan.world, plan.world.request(plan.chance.randrange(plan.world.requests))
    outcome = world.put(store, request)
    odd = set(outcome.failed.values()) - {"not_admitted", "store_full" if plan.then.eviction == "none" else ""}
    complain(say, "broken", [f"a put after the kill: {outcome.failed}"] * bool(odd))
    store.clear()
    put = world.put(store, request)
    complain(say, "broken", [f"a put into the cleared store: {put.failed}"] * (not put.stored.all()))
    complain(say, "broken", ["it is not served"] * (world.get(store, request).right != set(request)))


def complain(say: Say, word: str, problems: list[str]) -> None:
    for problem in problems:
        say(word, problem)


# --- the campaign ----------------------------------------------------------------------------------------------------


@dataclass
class Templates:
    """Filled stores that faults begin with, each made when it is first needed."""

    root: Path
    made: dict[str, set[int]] = field(default_factory=dict)

    def copy(self, plan: Plan, path: Path) -> set[int]:
        """A copy at `path`; the blocks in it."""
        if not plan.scene.filled:
            return set()
        if plan.template not in self.made:
            ending = in_child(lambda say: fill(plan, self.root / plan.template, say))
            assert not ending.crash, ending.crash
            self.made[plan.template] = set(ending.all("present")[0][0])
        shutil.copytree(self.root / plan.template, path)
        return self.made[plan.template]


def run_and_kill(plan: Plan, path: Path) -> tuple[Ending, int]:
    """Start the writer and kill it: what it said, and the largest size that data.mdb had."""
    child, largest, chance = Child(lambda say: Writer(plan, path, say).run()), 0, plan.chance
    lines = 1 if plan.scene.name == "shrink" else chance.randrange(2 * OPS_AT_MOST)
    if plan.scene.name == "quarantine":
        lines = max(lines, 3)  # until all that is damaged has been said
    pause = (
        chance.uniform(0, OPENING_S)
        if plan.scene.name == "shrink"
        else chance.choice((0, 0.0003, 0.002)) * chance.random()
    )
    while len(child.ending.said) < lines and child.listen(PATIENCE_S):
        largest = max(largest, size_of(path))
    time.sleep(pause)
    ending = child.kill()
    return ending, max(largest, size_of(path))


def size_of(path: Path) -> int:
    try:
        return os.stat(path / SHARD / DATA_NAME).st_size
    except FileNotFoundError:
        return 0


@campaign("kill", quick=200, full=20_000)
def kill(context: Context) -> Iterator[Outcome]:
    """SIGKILL of the writer in put, eviction, evict, clear, quarantine and a shrinking opening; both durability modes."""
    templates = Templates(context.root)
    for world in WORLDS.values():
        world.warm()
    for number in context.faults():
        with context.folder(number) as folder:
            yield one(context, templates, number, folder / "store")


def one(context: Context, templates: Templates, number: int, path: Path) -> Outcome:
    plan = Plan.of(context.random(number))
    before = templates.copy(plan, path)
    ending, largest = run_and_kill(plan, path)
    where = f"{plan.scene.name}, {plan.template}, {plan.config.durability}"
    if wrong := ending.all("wrong"):
        return Outcome(number, Kind.WRONG_SERVED, f"{where}: {wrong}")
    if ending.status != -9 or ending.hung:
        return Outcome(number, Kind.CRASHED, f"{where}: the writer ended by itself: {ending.crash}")
    claim = Claim.of(ending, before, plan)
    context.count(f"in_{claim.doing or 'pause'}")
    after = in_child(lambda say: inspect(plan, path, claim, say))
    context.count("served", sum(values[0] for values in after.all("served")))
    return judge(number, f"{where}, killed in {claim.doing!r}", plan, after, largest)


def judge(number: int, where: str, plan: Plan, after: Ending, largest: int) -> Outcome:
    wrong, broken = ([values[0] for values in after.all(word)] for word in ("wrong", "broken"))
    if plan.scene.name != "shrink" and largest > plan.config.capacity_bytes:
        broken.append(f"data.mdb had {largest} bytes of {plan.config.capacity_bytes}")
    if wrong:
        return Outcome(number, Kind.WRONG_SERVED, f"{where}: {wrong + broken}")
    if after.crash:
        return Outcome(number, Kind.CRASHED, f"{where}: the next process: {after.crash}")
    return Outcome(number, Kind.BROKEN if broken else Kind.HARMLESS, f"{where}: {broken}" if broken else "")
