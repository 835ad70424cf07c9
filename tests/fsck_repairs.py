"""Shards to be damaged and repaired: records of known bytes, damage of the pages that hold the trees, a check of everything
that does without kvstore.fsck, and repairs that are killed."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb.verify

from kvstore.audit import audit
from kvstore.blockdb import USAGE_KEY, BlockDB
from kvstore.fsck.findings import Finding
from kvstore.fsck.pages import NO_ROOT, PageFile
from kvstore.fsck.repair import Repaired, carry_out, plan
from kvstore.fsck.salvage import salvage
from kvstore.geometry import RUN
from kvstore.identity import CacheIdentity, LayerSpec, group_fingerprint
from kvstore.quarantine import parse_entry
from kvstore.record import Header, parse_header, record_key
from kvstore.reports import sequence_of
from kvstore.shape import GroupShape
from kvstore.storefile import DATA_NAME, STORE_NAME, StoreState, parse_store
from kvstore.usage import Usage
from tests.campaign.children import Child
from tests.records import opened, record_of
from tests.support import MIB, block_hashes, flip

PAGE = 4096
RUNS = (((0, 3, 1, 0, 1, 32, 32), 4), ((10, 4, 1, 0, 3, 128, 128), 16), ((20, 2, 1, 0, 3, 512, 512), 64))
"""One run of layers (kvstore.geometry.RUN) and the block size of each shape: small records, and some of several chunks."""
IDENTITY = CacheIdentity(
    "test/model",
    layers=tuple(
        LayerSpec(f"model.layers.{first + n}.attn", "full", "bfloat16", more + 1, k, v)
        for (first, count, _, _, more, k, v), _ in RUNS
        for n in range(count)
    ),
)
IDENTITY_JSON = IDENTITY.canonical_json().encode()
IDENTITY_ID = IDENTITY.digest()
PREFIX = record_key(IDENTITY_ID, 0, b"")
Check = Callable[[Path], Iterable[object]]
KINDS = {
    **{"header": "HEADER", "key": "KEY", "storage_hash": "STORAGE_HASH", "decode": "DECODE", "content": "CONTENT"},
    "geometry": "GEOMETRY",
}


@dataclass
class Subject:
    """A closed shard's files, and what is in it: by index key the digest of entry, directory and chunks."""

    folder: Path
    data: bytes
    store: bytes
    records: dict[bytes, bytes]

    def copy(self, folder: Path, data: bytes | None = None) -> Path:
        """The shard in another folder, with other bytes in its database."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / STORE_NAME).write_bytes(self.store)
        (folder / DATA_NAME).write_bytes(self.data if data is None else data)
        return folder

    def roots(self) -> dict[str, int]:
        """Pages that everything hangs on, by name."""
        with PageFile(self.folder / DATA_NAME) as file:
            meta = file.metas[0]
            named = {name.decode(): tree.root for name, tree in file.databases(meta).items()}
            found = {"meta 0": 0, "meta 1": 1, "free list": meta.free.root, "main": meta.main.root, **named}
        return {name: page for name, page in found.items() if page != NO_ROOT}


def shapes() -> list[GroupShape]:
    """The shapes of RUNS, all of group 0."""
    known = group_fingerprint(IDENTITY, 0)
    return [GroupShape(size, RUN.pack(*run), known, PREFIX) for run, size in RUNS]


def filled(
    folder: Path,
    count: int = 60,
    seed: int = 0,
    sizes: Sequence[int] = (0, 0, 1, 1, 2),
    codecs: Sequence[str] = ("raw", "bf16-planes"),
) -> Subject:
    """A shard with so many records, a quarter of them written twice, a few evicted. sizes: of RUNS, one is chosen for each
    record, and so is a codec."""
    chance, some = random.Random(seed), shapes()
    hashes = block_hashes(count, f"fsck/{seed}")
    records = [
        record_of(
            some[chance.choice(sizes)],
            block_hash,
            position=n,
            codec=chance.choice(codecs),
            seed=seed * 1000 + n,
        )
        for n, block_hash in enumerate(hashes)
    ]
    with opened(folder, capacity_bytes=256 * MIB) as db:
        for start in (*range(0, count, 7), *range(0, count // 4, 7)):
            note = {b"identity:" + IDENTITY_ID: IDENTITY_JSON, b"eviction:lru": bytes([start % 256]) * 100}
            db.write(records[start : start + 7], note, lambda key, old: False)
        db.evict([(PREFIX + hashes[count // 2],), (PREFIX + hashes[count // 3],)], 2**62)
    found = contents(folder)
    assert len(found) == count - 2
    return Subject(folder, (folder / DATA_NAME).read_bytes(), (folder / STORE_NAME).read_bytes(), found)


def contents(folder: Path) -> dict[bytes, bytes]:
    """By index key the digest of each record that is intact, entry and sequence number included."""
    found = {}
    with opened(folder, writable=False) as db:
        for key, value in [(bytes(k), bytes(v)) for k, v in db.entries()]:
            with db.read() as snapshot:
                if audit(snapshot, key, value) is None:
                    found[key] = _digest(db, value)
    return found


def refusals(folder: Path, keys: Iterable[bytes]) -> dict[bytes, str]:
    """Of each key why its record is not among `contents`: "absent", or the kind of what is wrong with it."""
    found = {}
    with opened(folder, writable=False) as db, db.read() as snapshot:
        for key in keys:
            value = snapshot.header(key)
            wrong = None if value is None else audit(snapshot, key, value)
            found[key] = (
                "absent" if value is None else "intact by now" if wrong is None else f"{wrong.kind}: {wrong.detail}"
            )
    return found


def _digest(db: BlockDB, entry: bytes) -> bytes:
    state = hashlib.sha256(entry)
    prefix = sequence_of(entry).to_bytes(8, "big")
    with db._begin() as txn, txn.cursor(db=db._payload) as cursor:
        for key, value in cursor.iternext() if cursor.set_range(prefix) else ():
            if key[:8] != prefix:
                break
            state.update(bytes(key) + bytes(value))
    return state.digest()


def state(shard: Path) -> StoreState:
    return parse_store((shard / STORE_NAME).read_bytes(), shard)


def broken(subject: Subject, shard: Path) -> None:
    """Overwrite the page on which index hangs."""
    at = subject.roots()["index"] * PAGE
    (shard / DATA_NAME).write_bytes(subject.data[:at] + b"\xee" * PAGE + subject.data[at + PAGE :])


# --- damage ----------------------------------------------------------------------------------------------------------


def overwrite(data: bytes, page: int, chance: random.Random) -> bytes:
    """A page overwritten, all of it or its beginning."""
    nbytes = chance.choice((PAGE, PAGE, 512, 64))
    new = chance.choice((bytes(nbytes), b"\xff" * nbytes, chance.randbytes(nbytes)))
    return data[: page * PAGE] + new + data[page * PAGE + nbytes :]


def without_roots(subject: Subject, chance: random.Random) -> tuple[bytes, list[str]]:
    """The database with some of its roots overwritten, and which."""
    roots = subject.roots()
    chosen = chance.sample(sorted(roots), chance.randint(1, len(roots)))
    data = subject.data
    for name in chosen:
        data = overwrite(data, roots[name], chance)
    return data, chosen


def damage_values(folder: Path, chance: random.Random, count: int) -> set[bytes]:
    """Damage so many records in entries, chunks, or by taking chunks away, below everything that kvstore checks, and
    leave orphans and a wrong accounting behind; the records' keys."""
    with opened(folder, capacity_bytes=256 * MIB) as db:
        keys = chance.sample(sorted(bytes(key) for key, _ in db.entries()), count)
        with db._env.begin(write=True) as txn:
            for key in keys:
                _damage_one(txn, db, key, chance)
            txn.put((5).to_bytes(8, "big") + b"\0\1", b"an orphan" * 100, db=db._payload)
            txn.put(USAGE_KEY, Usage(1, 2, 3, 4, 5).encode(), db=db._meta)
    return set(keys)


def _damage_one(txn: Any, db: BlockDB, key: bytes, chance: random.Random) -> None:
    entry = bytes(txn.get(key, db=db._index))
    what = chance.choice(("header", "chunk", "missing", "swap"))
    chunk = sequence_of(entry).to_bytes(8, "big") + chance.choice((b"\0\0", b"\0\1"))
    value = bytes(txn.get(chunk, db=db._payload))
    if what == "header":
        txn.put(key, flip(entry, chance.randrange(len(entry) * 8)), db=db._index)
    elif what == "chunk":
        txn.put(chunk, flip(value, chance.randrange(len(value) * 8)), db=db._payload)
    elif what == "missing":
        txn.delete(chunk, db=db._payload)
    else:
        other = record_of(shapes()[0], b"another block's hash....", seed=9)
        txn.put(key, other.header.encode(sequence_of(entry), 1), db=db._index)


# --- a check of everything -------------------------------------------------------------------------------------------


def checked(shard: Path) -> Iterator[Finding]:
    """What is wrong with a shard that nobody has open."""
    try:
        parse_store((shard / STORE_NAME).read_bytes(), shard)
    except Exception as error:
        yield Finding("STORE_FILE", str(error))
    try:
        problems = lmdb.verify.verify(str(shard / DATA_NAME), subdir=False)  # type: ignore[no-untyped-call]
    except Exception as error:
        problems = [error]
    yield from [Finding("TREE", str(problem)) for problem in problems]
    if not problems:
        yield from _values(shard)


def _values(shard: Path) -> Iterator[Finding]:
    options: dict[str, Any] = {"readonly": True, "lock": False, "max_dbs": 4, "lib_version": 0}
    with lmdb.open(str(shard), **options) as env:
        databases = {
            name: env.open_db(name.encode(), create=False) for name in ("index", "payload", "meta", "quarantine")
        }
        with env.begin(buffers=True) as txn:
            yield from _records(txn, databases)


def _records(txn: Any, databases: dict[str, Any]) -> Iterator[Finding]:
    from kvstore.snapshot import ReadView

    snapshot = ReadView(txn, databases["index"], databases["payload"], databases["quarantine"])
    usage, named = Usage(), set[int]()
    for key, value in [(bytes(k), bytes(v)) for k, v in txn.cursor(db=databases["index"])]:
        wrong = audit(snapshot, key, value)
        header = parse_header(value, key)
        usage.raw_bytes += header.raw_length if isinstance(header, Header) else 0
        usage.stored_bytes += header.stored_length if isinstance(header, Header) else 0
        if isinstance(header, Header):
            named.add(header.sequence)
        if wrong is not None:
            yield Finding(KINDS[wrong.kind], wrong.detail, key, len(value))
    for _, value in txn.cursor(db=databases["quarantine"]):
        condemned = parse_entry(value)
        named.add(sequence_of(condemned.value) if condemned else 0)
        usage.quarantine_records += 1
    for key, value in txn.cursor(db=databases["payload"]):
        if int.from_bytes(key[:8], "big") not in named:
            yield Finding("ORPHAN_CHUNK", "", nbytes=len(value))
    stored = Usage.parse(txn.get(USAGE_KEY, db=databases["meta"]))
    if (stored.raw_bytes, stored.stored_bytes) != (usage.raw_bytes, usage.stored_bytes):
        yield Finding("ACCOUNTING", f"{stored}, counted {usage}")


# --- repairs that are killed -----------------------------------------------------------------------------------------


def repaired(shard: Path, check: Check = checked) -> Repaired:
    """Check and repair to the end, and check again."""
    return carry_out(shard, plan(shard, [item for item in check(shard) if isinstance(item, Finding)]), check=check)


def killed_repair(shard: Path, moment: float, check: Check = checked) -> bool:
    """Check and repair in a process that is killed after so many seconds; whether it was killed before its end."""

    def action(say: Callable[..., None]) -> None:
        todo = plan(shard, [item for item in check(shard) if isinstance(item, Finding)])
        say("begins")
        carry_out(shard, todo)
        say("ended")

    child = Child(action)
    while not child.ending.all("begins") and child.listen(20):
        pass
    time.sleep(moment)
    ending = child.kill()
    assert not ending.all("error"), ending.all("error")
    return not ending.all("ended")


def kill_and_finish(subject: Subject, root: Path, seed: int, longest_s: float = 0.3, check: Check = checked) -> str:
    """Damage a copy of the subject, kill its repair at random moments, one to three times, and repair to the end: a sentence
    of what is wrong then, empty where nothing is. Every undamaged record must be there after each kill that leaves a
    database that opens, and after the end."""
    chance = random.Random(seed)
    shard, lost = subject.copy(root / "shard"), set[bytes]()
    if chance.random() < 0.6:
        lost = damage_values(shard, chance, chance.randint(1, 8))
    if chance.random() < 0.6:
        data, _ = without_roots(subject, chance) if not lost else _roots_of(shard, chance)
        (shard / DATA_NAME).write_bytes(data)
    if chance.random() < 0.3:
        (shard / STORE_NAME).write_bytes(chance.randbytes(600))
    wanted = {key: digest for key, digest in subject.records.items() if key not in lost}
    for _ in range(chance.randint(1, 3)):
        killed_repair(shard, chance.uniform(0, longest_s), check)
    done = repaired(shard, check)
    if done.left:
        return f"seed {seed}: damage is left: {done.left[:3]}"
    found = contents(shard)
    if missing := [key for key, digest in wanted.items() if found.get(key) != digest]:
        return f"seed {seed}: {len(missing)} of {len(wanted)} undamaged records are gone or changed"
    left = [path.name for path in shard.iterdir() if path.name.endswith((".salvage", ".compact"))]
    left += [path.name for path in shard.glob("quarantine-*/*.part")]
    return f"seed {seed}: left behind: {left}" if left else ""


def _roots_of(shard: Path, chance: random.Random) -> tuple[bytes, list[str]]:
    now = Subject(shard, (shard / DATA_NAME).read_bytes(), b"", {})
    return without_roots(now, chance)


def salvage_without_roots(subject: Subject, root: Path, seed: int) -> tuple[int, int]:
    """Overwrite some roots of a copy of the subject and salvage it: how many of its records came back as they were, of how
    many. Nothing else may be wrong with the new shard."""
    shutil.rmtree(root, ignore_errors=True)
    data, _ = without_roots(subject, random.Random(seed))
    salvage(subject.copy(root / "old", data), root / "new")
    problems = list(checked(root / "new"))
    assert not problems, (seed, problems[:3])
    found = contents(root / "new")
    return sum(found.get(key) == digest for key, digest in subject.records.items()), len(subject.records)
