"""The story: a damaged shard is repaired. What is damaged leaves it for a folder, byte by byte; whatever was not damaged is
there afterwards as it was; the shard is clean. And however the repair is cut short, no undamaged record is lost.

A salvage finds what freed pages still hold as well: records that were evicted may be back, and are as right as ever.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import errors
from kvstore.fsck import repair
from kvstore.fsck.findings import KINDS, Finding, Progress
from kvstore.fsck.options import Options
from kvstore.fsck.pages import PageFile
from kvstore.fsck.repair import Plan, carry_out, plan
from kvstore.fsck.scan import check
from kvstore.geometry import RUN
from kvstore.quarantine import parse_entry
from kvstore.record import Header, parse_header
from kvstore.shape import GroupShape
from kvstore.storefile import DATA_NAME, SLOT_STRIDE, STORE_NAME, StoreFile
from kvstore.usage import Usage
from tests.campaign.children import Child
from tests.fsck_repairs import (
    PAGE,
    PREFIX,
    Subject,
    broken,
    checked,
    contents,
    damage_values,
    filled,
    repaired,
    shapes,
    state,
    without_roots,
)
from tests.records import opened, put, record_of
from tests.support import MIB, block_hashes, flip
from tests.test_fsck_kill import STEPS


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return filled(tmp_path_factory.mktemp("subject") / "shard", 60)


@pytest.fixture
def shard(subject: Subject, tmp_path: Path) -> Path:
    return subject.copy(tmp_path / "shard")


# --- the plan --------------------------------------------------------------------------------------------------------


def test_nothing_is_planned_for_nothing(shard: Path) -> None:
    transient = Finding("STORAGE_HASH", "", b"key", 10, persisted=False)
    newer = Finding("UNKNOWN_VERSION", "version 2", b"key", 10)
    for findings in ([], [newer], [transient]):
        made = plan(shard, findings)
        assert made.nothing
        before = {path.name: path.read_bytes() for path in shard.iterdir()}
        carry_out(shard, made)
        assert {path.name: path.read_bytes() for path in shard.iterdir()} == before
    assert plan(shard, [newer, transient]).ignored == {"UNKNOWN_VERSION": 1, "STORAGE_HASH": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_remedy(shard: Path, kind: str) -> None:
    made = plan(shard, [Finding(kind, "", b"key", 7), Finding(kind, "again", b"key", 7)])
    assert made.salvage == (kind in ("META", "FILE_TRUNCATED", "TREE", "FREELIST"))
    assert made.rebuild == (kind == "STORE_FILE")
    assert made.nothing == (kind == "UNKNOWN_VERSION")
    assert len(made.records) == (KINDS[kind].remedy == "quarantine")
    assert len(made.actions) == (not made.nothing)


# --- in place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_damaged_records_go_and_the_others_stay(subject: Subject, shard: Path, seed: int) -> None:
    lost = damage_values(shard, random.Random(seed), 10)
    entries = {}
    with opened(shard, writable=False) as db:
        entries = {bytes(key): bytes(value) for key, value in db.entries() if bytes(key) in lost}
    done = repaired(shard)
    assert done.left == []
    assert done.salvaged is None
    assert done.quarantined == 10
    assert contents(shard) == {key: digest for key, digest in subject.records.items() if key not in lost}
    assert done.reclaimed.keys
    assert done.recounted
    assert done.folder is not None
    kept = {}
    for number in range(1, 11):
        folder = done.folder / str(number)
        said = json.loads((folder / "record.json").read_text())
        kept[bytes.fromhex(said["key"])] = (folder / "header.bin").read_bytes()
        assert said["kind"] in KINDS
        assert (folder.stat().st_mode & 0o777, (folder / "header.bin").stat().st_mode & 0o777) == (0o700, 0o600)
    assert kept == entries
    assert repaired(shard).plan.nothing


def test_the_quarantine_folder_has_every_byte_of_a_record(subject: Subject, shard: Path) -> None:
    key = sorted(subject.records)[0]
    with opened(shard, capacity_bytes=256 * MIB) as db, db._env.begin(write=True) as txn:
        sequence = bytes(txn.get(key, db=db._index))[40:48][::-1]
        chunks = {bytes(k): bytes(v) for k, v in txn.cursor(db=db._payload) if k[:8] == sequence}
        last = max(chunks)
        chunks[last] = flip(chunks[last], 5)
        txn.put(last, chunks[last], db=db._payload)
    folder = repaired(shard).folder
    assert folder is not None
    directory, *others = (chunks[name] for name in sorted(chunks))
    assert (folder / "1" / "directory.bin").read_bytes() == directory
    assert [path.read_bytes() for path in sorted((folder / "1").glob("chunk-*.bin"))] == others


def test_a_record_that_is_sound_by_now_stays(subject: Subject, shard: Path) -> None:
    key = sorted(subject.records)[0]
    findings = [Finding("STORAGE_HASH", "", key, 9), Finding("HEADER", "", b"not there any more", 9)]
    done = carry_out(shard, plan(shard, findings), check=checked)
    assert (done.quarantined, done.sound, done.folder, done.left) == (0, 2, None, [])
    assert contents(shard) == subject.records
    assert "left 2 records alone, sound by now or not there any more" in done.words


def test_a_record_of_a_newer_version_stays_and_so_does_all_payload(subject: Subject, shard: Path) -> None:
    key = sorted(subject.records)[0]
    with opened(shard, capacity_bytes=256 * MIB) as db, db._env.begin(write=True) as txn:
        entry = bytearray(txn.get(key, db=db._index))
        entry[4] = 2
        entry[8:16] = xxh3_64_intdigest(bytes(entry[:8] + entry[16:])).to_bytes(8, "little")
        txn.put(key, bytes(entry), db=db._index)
        txn.put((9).to_bytes(8, "big") + b"\0\1", b"of that version, maybe", db=db._payload)
    findings = [Finding("STORAGE_HASH", "", key, 9), Finding("ORPHAN_CHUNK", "", nbytes=22)]
    done = carry_out(shard, plan(shard, findings))
    assert done.sound == 1
    assert done.reclaimed.keys == 0
    assert any(words.startswith("reclaimed nothing: ") for words in done.words)
    with opened(shard, writable=False) as db, db.read() as snapshot:
        assert snapshot.header(key) == entry
        assert snapshot.chunk(9, 1) == b"of that version, maybe"


def test_condemned_records_keep_their_chunks(subject: Subject, shard: Path) -> None:
    key = sorted(subject.records)[3]
    with opened(shard, capacity_bytes=256 * MIB) as db:
        with db.read() as snapshot:
            entry = snapshot.header(key)
        assert entry is not None
        db.condemn([(key, entry, "content")])
    carry_out(shard, plan(shard, [Finding("ORPHAN_CHUNK", "")]))
    with opened(shard, writable=False) as db, db.read() as snapshot:
        header = parse_header(entry)
        assert isinstance(header, Header)
        assert snapshot.chunk(header.sequence, 1) is not None
        (condemned,) = [parse_entry(value) for _, value in db._env.begin().cursor(db=db._quarantined)]
        assert condemned is not None
        assert condemned.value == entry
        usage = Usage.parse(db.note(b"usage"))
        assert (usage.quarantine_records, usage.quarantine_bytes) == (1, header.stored_length)


def test_chunks_that_a_record_has_too_many_are_reclaimed(subject: Subject, shard: Path) -> None:
    with opened(shard, capacity_bytes=256 * MIB) as db, db._env.begin(write=True) as txn:
        sequence = bytes(txn.get(sorted(subject.records)[0], db=db._index))[40:48][::-1]
        for key in (sequence + b"\xf0\0", sequence, sequence + b"\0\1\0", b"\0", b"\xff" * 10):
            txn.put(key, b"x" * 100, db=db._payload)
    done = carry_out(shard, plan(shard, [Finding("ORPHAN_CHUNK", "")]))
    assert done.reclaimed.keys == 5
    assert done.reclaimed.nbytes == 500
    assert contents(shard) == subject.records


def test_chunks_are_kept_of_a_record_whose_sequence_number_is_damaged(subject: Subject, shard: Path) -> None:
    key = sorted(subject.records)[0]
    with opened(shard, capacity_bytes=256 * MIB) as db, db._env.begin(write=True) as txn:
        entry = bytes(txn.get(key, db=db._index))
        sequence = entry[40:48][::-1]
        directory = bytes(txn.get(sequence + b"\0\0", db=db._payload))
        txn.put(key, flip(entry, 40 * 8 + 3), db=db._index)
    done = repaired(shard)
    assert done.folder is not None
    assert (done.folder / "1" / "directory.bin").read_bytes() == directory
    assert done.left == []
    with opened(shard, writable=False) as db, db._begin() as txn:
        assert txn.get(sequence + b"\0\0", db=db._payload) is None


def test_the_chunks_of_two_entries_with_one_sequence_number_stay_for_the_right_one(
    subject: Subject, shard: Path
) -> None:
    record = record_of(shapes()[1], b"a hash of its own" * 2, seed=3)
    with opened(shard, capacity_bytes=256 * MIB) as db, db._env.begin(write=True) as txn:
        sequence = int.from_bytes(bytes(txn.get(sorted(subject.records)[0], db=db._index))[40:48], "little")
        txn.put(record.header.key, record.header.encode(sequence, 1), db=db._index)
    done = repaired(shard)
    assert (done.left, done.quarantined) == ([], 1)
    assert contents(shard) == subject.records


def test_what_a_damaged_entry_may_name_stays_with_it(subject: Subject, shard: Path) -> None:
    """Entries that are damaged and not planned to go, in index and quarantine, one without its sequence number."""
    keys = sorted(subject.records)[:3]
    with opened(shard, capacity_bytes=256 * MIB) as db:
        with db._env.begin(write=True) as txn:
            entries = [bytes(txn.get(key, db=db._index)) for key in keys]
            for key, entry, bit in zip(keys, entries, (40 * 8, 900, 910), strict=True):
                txn.put(key, flip(entry, bit), db=db._index)
        db.condemn([(keys[2], flip(entries[2], 910), "header")])
    done = carry_out(shard, plan(shard, [Finding("ORPHAN_CHUNK", "")]))
    assert done.reclaimed.keys == 0
    with opened(shard, capacity_bytes=256 * MIB) as db, db._env.begin(write=True) as txn:
        for key, entry in zip(keys, entries, strict=True):
            txn.put(key, entry, db=db._index)
    assert contents(shard) == subject.records


def test_a_geometry_that_the_identity_has_not_is_quarantined(subject: Subject, shard: Path) -> None:
    """Such a record is intact by itself: the check alone knows."""
    key = sorted(subject.records)[0]
    done = carry_out(shard, plan(shard, [Finding("GEOMETRY", "not the identity's", key, 9)]))
    assert done.quarantined == 1
    assert key not in contents(shard)


def test_the_file_does_not_grow_in_a_full_shard(tmp_path: Path) -> None:
    shape, shard = shapes()[1], tmp_path / "shard"
    with opened(shard, capacity_bytes=4 * MIB) as db:
        with suppress(lmdb.MapFullError):
            for n, block_hash in enumerate(block_hashes(200)):
                put(db, record_of(shape, block_hash, seed=n))
        stored = db.keys(b"", 10**6)
        with db._env.begin(write=True) as txn:
            for key in stored[:40]:
                entry = bytes(txn.get(key, db=db._index))
                txn.put(key, flip(entry, 900), db=db._index)
    assert (shard / DATA_NAME).stat().st_size > 3.5 * MIB
    done = repaired(shard)
    assert (done.left, done.quarantined) == ([], 40)
    assert len(contents(shard)) == len(stored) - 40
    assert (shard / DATA_NAME).stat().st_size <= 4 * MIB


def test_compacting_returns_space(subject: Subject, shard: Path) -> None:
    with opened(shard, capacity_bytes=256 * MIB) as db:
        for key in sorted(subject.records)[:40]:
            db.drop(key)
    left, size = contents(shard), (shard / DATA_NAME).stat().st_size
    done = carry_out(shard, plan(shard, []), compact=True, check=checked)
    assert done.compacted
    assert done.left == []
    assert (shard / DATA_NAME).stat().st_size < size // 2
    assert contents(shard) == left


# --- into a new database ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_tree_is_salvaged_and_swapped(subject: Subject, shard: Path, seed: int) -> None:
    data, _ = without_roots(subject, random.Random(seed))
    (shard / DATA_NAME).write_bytes(data)
    before = state(shard)
    done = repaired(shard)
    assert done.left == []
    assert subject.records.items() <= contents(shard).items()
    if done.salvaged is not None:
        assert done.kept is not None
        assert done.kept.read_bytes() == data
        assert not (shard / "data.mdb.salvage").exists()
    assert state(shard).store_id == before.store_id
    assert state(shard).clean
    assert repaired(shard).plan.nothing


def test_a_tree_that_turns_out_to_be_broken_is_salvaged(subject: Subject, shard: Path) -> None:
    """The check found damaged values and no more; nothing is deleted in a tree that does not hold together."""
    broken(subject, shard)
    data = (shard / DATA_NAME).read_bytes()
    told = list[Progress]()
    done = carry_out(shard, plan(shard, [Finding("HEADER", "", b"key", 9)]), False, told.append, checked)
    assert {progress.stage for progress in told} >= {"search", "write"}
    assert done.salvaged is not None
    assert done.left == []
    assert done.kept is not None
    assert done.kept.read_bytes() == data
    assert subject.records.items() <= contents(shard).items()


def test_a_truncated_file_is_salvaged(subject: Subject, shard: Path) -> None:
    (shard / DATA_NAME).write_bytes(subject.data[: len(subject.data) * 2 // 3 // PAGE * PAGE])
    done = repaired(shard)
    found = contents(shard)
    assert done.left == []
    assert found
    assert all(subject.records.get(key, digest) == digest for key, digest in found.items())


def not_the_identitys(shard: Path) -> bytes:
    """Add a record that is intact, of layers that its identity has not: only a deep check of a sound database tells. Then
    break the index; the record's key."""
    block_hash = b"of other layers, under this identity"
    shape = GroupShape(4, RUN.pack(0, 3, 1, 0, 1, 32, 32), 5, PREFIX)
    with opened(shard, capacity_bytes=256 * MIB) as db:
        put(db, record_of(shape, block_hash, seed=7))
    with PageFile(shard / DATA_NAME) as file:
        at = file.root(b"index") * PAGE
    data = bytearray((shard / DATA_NAME).read_bytes())
    data[at : at + PAGE] = b"\xee" * PAGE
    (shard / DATA_NAME).write_bytes(data)
    return PREFIX + block_hash


def deeply(shard: Path) -> Iterator[object]:
    return check(shard, Options(stage="deep"))


def test_what_only_the_new_database_shows_is_repaired_in_the_same_run(subject: Subject, shard: Path) -> None:
    key = not_the_identitys(shard)
    todo = plan(shard, [found for found in deeply(shard) if isinstance(found, Finding)])
    assert todo.salvage
    assert "repaired in place" in todo.actions[0].what
    done = carry_out(shard, todo, check=deeply)
    assert done.salvaged is not None
    assert (done.left, done.quarantined, done.sound) == ([], 1, 0)
    assert done.reclaimed.keys
    assert done.folder is not None
    assert json.loads((done.folder / "1" / "record.json").read_text())["key"] == key.hex()
    assert any(words.startswith("moved 1 damaged record,") for words in done.words)
    found = contents(shard)
    assert key not in found
    assert subject.records.items() <= found.items()


def test_the_new_database_can_be_looked_at_without_a_check_at_the_end(subject: Subject, shard: Path) -> None:
    key = not_the_identitys(shard)
    done = carry_out(shard, plan(shard, [Finding("TREE", "")]), uncover=deeply)
    assert (done.left, done.quarantined) == (None, 1)
    assert key not in contents(shard)
    again = carry_out(shard, plan(shard, [Finding("ACCOUNTING", "")]), uncover=lambda shard: pytest.fail("no salvage"))
    assert again.salvaged is None


def test_records_that_the_plan_names_and_those_of_the_new_database_share_a_folder(
    subject: Subject, shard: Path
) -> None:
    planned = sorted(subject.records)[5]
    key = not_the_identitys(shard)
    findings = [Finding("GEOMETRY", "named before", planned, 9), Finding("TREE", "broken")]
    done = carry_out(shard, plan(shard, findings), check=deeply)
    assert (done.left, done.quarantined) == ([], 2)
    assert done.folder is not None
    names = [json.loads((done.folder / number / "record.json").read_text())["key"] for number in ("1", "2")]
    assert names == [planned.hex(), key.hex()]
    assert len(list(shard.glob("quarantine-*"))) == 1


def test_a_new_database_that_a_check_calls_broken_is_left_as_it_is(subject: Subject, shard: Path) -> None:
    """One salvage has given what there is to give: a second one cannot do better, and a check that errs must not go round."""
    broken(subject, shard)
    checks = list[int]()

    def never(shard: Path) -> list[Finding]:
        checks.append(1)
        return [Finding("TREE", "broken, again")]

    done = carry_out(shard, plan(shard, [Finding("TREE", "")]), check=never)
    assert done.left == [Finding("TREE", "broken, again")]
    assert len(checks) == 1
    assert len(list(shard.glob("data.mdb.damaged-*"))) == 1
    assert subject.records.items() <= contents(shard).items()


def killed_behind_the_salvage(shard: Path, at: int) -> Callable[..., None]:
    """A repair that dies before its at-th call of one of STEPS, counted from where the new database is repaired in place."""

    def run(say: Callable[..., None]) -> None:
        patch, calls, uncovered = pytest.MonkeyPatch(), 0, repair._uncovered

        def counted(call: Callable[..., object]) -> Callable[..., object]:
            def run_it(*arguments: object, **options: object) -> object:
                nonlocal calls
                calls += 1
                if calls == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return run_it

        def begin(*arguments: object) -> bool:
            for name in STEPS:
                patch.setattr(name, counted(getattr(os, name.removeprefix("os."))))
            try:
                return uncovered(*arguments)  # type: ignore[arg-type]
            finally:
                patch.undo()

        patch.setattr("kvstore.fsck.repair._uncovered", begin)
        carry_out(shard, plan(shard, [Finding("TREE", "")]), check=deeply)
        say("steps", calls)

    return run


def test_a_repair_killed_behind_its_salvage_has_the_new_database_and_is_ended_by_the_next(
    subject: Subject, tmp_path: Path
) -> None:
    source = subject.copy(tmp_path / "source")
    key = not_the_identitys(source)

    def made() -> Path:
        return Path(shutil.copytree(source, tmp_path / "shard", dirs_exist_ok=False))

    ending = Child(killed_behind_the_salvage(made(), 0)).join(60)
    assert not ending.crash, ending.crash
    steps = ending.all("steps")[0][0]
    assert steps > 8
    for at in sorted({1, *range(3, steps, 1 + steps // 3), steps}):
        shutil.rmtree(tmp_path / "shard")
        shard = made()
        assert Child(killed_behind_the_salvage(shard, at)).join(60).status == -signal.SIGKILL
        assert subject.records.items() <= contents(shard).items(), at
        done = repaired(shard, deeply)
        assert (done.left, done.salvaged) == ([], None), at
        found = contents(shard)
        assert key not in found, at
        assert subject.records.items() <= found.items(), at
        assert not [*shard.glob("quarantine-*/*.part")], at


def test_writes_that_were_lost_are_no_reason_to_lose_the_rest(subject: Subject, shard: Path) -> None:
    """Not closed before the machine went down: a writer would empty it. The trees cannot be trusted, records can."""
    (shard / STORE_NAME).write_bytes(
        bytes(SLOT_STRIDE) + replace(state(shard), clean=False, boot_id=bytes(16)).encode()
    )
    done = carry_out(shard, plan(shard, [Finding("STORE_FILE", "not closed")]), check=checked)
    assert done.salvaged is not None
    assert done.left == []
    assert state(shard).clean
    assert subject.records.items() <= contents(shard).items()


# --- the STORE file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 600, bytes(1024)], ids=["gone", "empty", "garbage", "zeros"])
@pytest.mark.parametrize("tree", ["whole", "broken"])
def test_a_store_file_is_made_anew(subject: Subject, shard: Path, content: bytes | None, tree: str) -> None:
    if tree == "broken":
        broken(subject, shard)
    if content is None:
        (shard / STORE_NAME).unlink()
    else:
        (shard / STORE_NAME).write_bytes(content)
    done = repaired(shard)
    assert done.rebuilt
    assert done.left == []
    assert (done.salvaged is not None) == (tree == "broken")
    assert state(shard).clean
    assert len((shard / STORE_NAME).read_bytes()) == 2 * SLOT_STRIDE
    assert subject.records.items() <= contents(shard).items()
    kept = [path.read_bytes() for path in shard.glob("STORE.damaged-*")]
    assert kept == ([content] if content and content.strip(b"\0") else [])


def test_a_stranger_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "other"), lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    before = (tmp_path / "other" / DATA_NAME).read_bytes()
    with pytest.raises(errors.StoreDamaged, match="no kvstore's"):
        carry_out(tmp_path / "other", plan(tmp_path / "other", [Finding("STORE_FILE", "")]))
    assert (tmp_path / "other" / DATA_NAME).read_bytes() == before
    assert not (tmp_path / "other" / STORE_NAME).exists()


def test_a_newer_store_is_left_alone(subject: Subject, shard: Path) -> None:
    slot = bytearray(state(shard).encode())
    slot[8] = 2
    slot[16:24] = xxh3_64_intdigest(bytes(slot[:16] + slot[24:])).to_bytes(8, "little")
    (shard / STORE_NAME).write_bytes(slot)
    for kind in ("TREE", "STORE_FILE", "HEADER"):
        with pytest.raises(errors.UnsupportedFormat):
            carry_out(
                shard,
                Plan(shard, True, kind == "TREE", actions=plan(subject.folder, [Finding(kind, "")]).actions or (None,)),
            )  # type: ignore[arg-type]
    assert (shard / DATA_NAME).read_bytes() == subject.data
    assert (shard / STORE_NAME).read_bytes() == slot


# --- who else has it open, and no room -------------------------------------------------------------------------------


def test_a_writer_and_a_reader_keep_a_repair_out(subject: Subject, shard: Path) -> None:
    todo = plan(shard, [Finding("ACCOUNTING", "")])
    writer = StoreFile(shard, True)
    with pytest.raises(
        errors.StoreLocked, match=f"process {os.getpid()} writes it: a repair needs the store to itself"
    ):
        carry_out(shard, todo)
    writer.close()
    with (shard / DATA_NAME).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        for finding in ("ACCOUNTING", "TREE"):
            with pytest.raises(errors.StoreBusy, match=f"process {os.getpid()} reads it"):
                carry_out(shard, plan(shard, [Finding(finding, "")]))
    assert (shard / DATA_NAME).read_bytes() == subject.data
    carry_out(shard, todo)


@pytest.mark.parametrize("where", ["keeping", "salvage"])
def test_a_full_disk_stops_a_repair_before_it_deletes(
    subject: Subject, shard: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lost = damage_values(shard, random.Random(1), 5)
    findings = [*checked(shard), *([Finding("TREE", "")] if where == "salvage" else [])]
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 4096))
    with pytest.raises(errors.StorePathError, match="4096 are free"):
        carry_out(shard, plan(shard, findings))
    monkeypatch.undo()
    assert repaired(shard).left == []
    wanted = {key: digest for key, digest in subject.records.items() if key not in lost}
    assert wanted.items() <= contents(shard).items()
