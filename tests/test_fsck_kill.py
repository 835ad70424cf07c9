"""The story: a repair is killed, at any step and at any moment. The next one ends it: the shard is clean, no undamaged
record is lost, and what the first one left half-made is gone.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.fsck.findings import Finding
from kvstore.fsck.repair import carry_out, plan
from kvstore.storefile import DATA_NAME, SLOT_STRIDE, STORE_NAME
from tests.campaign.children import Child
from tests.fsck_repairs import (
    Subject,
    broken,
    checked,
    contents,
    damage_values,
    filled,
    kill_and_finish,
    repaired,
    state,
)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return filled(tmp_path_factory.mktemp("subject") / "shard", 60)


@pytest.fixture
def shard(subject: Subject, tmp_path: Path) -> Path:
    return subject.copy(tmp_path / "shard")


STEPS = ("os.fsync", "os.link", "os.replace", "os.write", "os.pwrite", "os.mkdir", "os.rename", "os.unlink", "os.rmdir")


def dying(shard: Path, at: int) -> Callable[..., None]:
    """A repair that dies before its at-th call of one of STEPS, and says how many there were."""

    def run(say: Callable[..., None]) -> None:
        patch, calls = pytest.MonkeyPatch(), 0

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def run_it(*arguments: object, **options: object) -> object:
                nonlocal calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return run_it

        todo = plan(shard, list(checked(shard)))
        own_write = os.write
        for name in STEPS:
            patch.setattr(name, counted(getattr(os, name.removeprefix("os."))))
        carry_out(shard, todo)
        patch.undo()
        assert os.write is own_write
        say("steps", calls)

    return run


@pytest.mark.parametrize("tree", ["whole", "broken", "broken, STORE gone", "broken, writes lost"])
def test_a_repair_killed_at_any_step_is_ended_by_the_next(subject: Subject, tmp_path: Path, tree: str) -> None:
    """Before each call that changes the disk: the first ones, the last ones, and some between."""

    def made() -> tuple[Path, set[bytes]]:
        shard = subject.copy(tmp_path / "shard")
        lost = damage_values(shard, random.Random(4), 3) if tree == "whole" else set()
        if tree != "whole":
            broken(subject, shard)
        if "gone" in tree:
            (shard / STORE_NAME).unlink()
        if "lost" in tree:
            slot = replace(state(shard), clean=False, boot_id=bytes(16)).encode()
            (shard / STORE_NAME).write_bytes(bytes(SLOT_STRIDE) + slot)
        return shard, lost

    shard, lost = made()
    ending = Child(dying(shard, 0)).join()
    assert not ending.crash, ending.crash
    steps = ending.all("steps")[0][0]
    chosen = sorted(
        {*range(1, min(steps, 6)), *range(max(1, steps - 12), steps + 1), *range(1, steps, 1 + steps // 12)}
    )
    for at in chosen:
        shard, lost = made()
        assert Child(dying(shard, at)).join().status == -signal.SIGKILL
        done = repaired(shard)
        assert not done.left, at
        wanted = {key: digest for key, digest in subject.records.items() if key not in lost}
        assert wanted.items() <= contents(shard).items(), at
        assert not [*shard.glob("data.mdb.salvage"), *shard.glob("quarantine-*/*.part")], at


@pytest.mark.parametrize("seed", range(10))
def test_a_repair_killed_at_random_moments_loses_nothing(subject: Subject, tmp_path: Path, seed: int) -> None:
    assert kill_and_finish(subject, tmp_path, seed) == ""


def test_leftovers_are_no_data(subject: Subject, shard: Path) -> None:
    """A store with what a killed repair left opens as ever, and the next repair clears it."""
    (shard / "data.mdb.salvage").mkdir()
    (shard / "data.mdb.salvage" / DATA_NAME).write_bytes(b"half of a database")
    (shard / "quarantine-20260101T000000Z" / "1.part").mkdir(parents=True)
    (shard / "quarantine-20260101T000001Z" / "1").mkdir(parents=True)
    (shard / "quarantine-20260101T000001Z" / "2.part").mkdir(parents=True)
    (shard / "quarantine-mine").mkdir()
    os.link(shard / DATA_NAME, shard / "data.mdb.damaged-20260101T000000Z")
    (shard / "data.mdb.damaged-20250101T000000Z").write_bytes(b"an old one")
    assert contents(shard) == subject.records
    carry_out(shard, plan(shard, [Finding("ACCOUNTING", "")]))
    names = sorted(
        str(path.relative_to(shard)) for path in shard.rglob("*") if path.name not in (STORE_NAME, DATA_NAME)
    )
    assert [name for name in names if "lock" not in name] == [
        "data.mdb.damaged-20250101T000000Z",
        "quarantine-20260101T000001Z",
        "quarantine-20260101T000001Z/1",
        "quarantine-mine",
    ]
