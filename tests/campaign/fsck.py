"""Damaged shards, checked and repaired: every damage is found under its right name, and a repair loses nothing else."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.blockdb import BlockDB
from kvstore.fsck.findings import Finding, Summary
from kvstore.fsck.options import Options
from kvstore.fsck.pages import PageFile, leaf_nodes
from kvstore.fsck.repair import carry_out, plan
from kvstore.fsck.scan import check
from kvstore.record import Directory, Header, chunk_key, parse_directory, parse_header
from kvstore.shape import GroupShape
from kvstore.storefile import DATA_NAME, STORE_NAME
from kvstore.usage import MAX_SEQUENCE
from tests.campaign.framework import Context, Kind, Outcome, campaign
from tests.fsck_damage import break_leaf, edit_file, free_a_live_page, newer, place, recount
from tests.fsck_repairs import PAGE, PREFIX, Subject, contents, filled, kill_and_finish, refusals, salvage_without_roots
from tests.records import change, opened
from tests.support import MIB, flip

RECORDS: Final = 40
KEEP: Final = "KVSTORE_CAMPAIGN_KEEP"
"""The environment variable that names a folder where the shards of faults that went wrong are kept, as they were and are."""
LEAST_SALVAGED: Final = 0.99
FORMS: Final = (((0, 0, 1, 1, 2), ("raw", "bf16-planes")), ((1,), ("raw",)), ((2,), ("bf16-planes",)))
"""Sizes and codecs of the records of each subject: mixed, and single ones."""
Damage = Callable[["Planted", bytes], set[str]]


@dataclass
class Planted:
    """What is done to one shard. expected: kinds by key, "" for what is about no record; loose: whether damage of the file
    may hide or add others; hurt: keys whose records are not as they were."""

    db: BlockDB
    chance: random.Random
    expected: set[tuple[str, bytes]] = field(default_factory=set)
    hurt: set[bytes] = field(default_factory=set)

    def header(self, key: bytes) -> Header:
        with self.db.read() as snapshot:
            header = parse_header(snapshot.header(key) or b"", key)
        assert isinstance(header, Header)
        return header

    def shape(self, key: bytes) -> GroupShape:
        header = self.header(key)
        return GroupShape(header.block_size, header.geometry, header.fingerprint, PREFIX)

    def rewrite(self, key: bytes, **fields: int) -> None:
        """Other fields, under a right header hash."""
        header = replace(self.header(key), **fields)  # type: ignore[arg-type]
        place(self.db, "_index", key, header.encode(header.sequence, header.written))

    def chunk(self, key: bytes, number: int) -> bytes:
        return chunk_key(self.header(key).sequence, number)

    def any_chunk(self, key: bytes, first: int = 0) -> bytes:
        return self.chunk(key, self.chance.randint(first, self.shape(key).plan.num_chunks))

    def edit_chunk(self, key: bytes, number: int, edit: Callable[[bytes], bytes]) -> None:
        """Other bytes in a chunk, under right storage hashes."""
        name, data = self.chunk(key, number), b""

        def edited(old: bytes) -> bytes:
            nonlocal data
            data = edit(old)
            return data

        change(self.db, "_payload", name, edited)
        header = self.header(key)
        with self.db.read() as snapshot:
            directory = parse_directory(snapshot.chunk(header.sequence, 0), header, self.shape(key).plan)
        assert isinstance(directory, Directory)
        hashes = directory.hashes.copy()
        hashes[number - 1] = xxh3_64_intdigest(data)
        table = replace(directory, hashes=hashes).encode()
        place(self.db, "_payload", self.chunk(key, 0), table)
        self.rewrite(key, directory_hash=xxh3_64_intdigest(table))


# --- damage of records, each under its name ----------------------------------------------------------------------------


def header(to: Planted, key: bytes) -> set[str]:
    change(to.db, "_index", key, lambda v: flip(v, to.chance.randrange(8 * 16, 8 * len(v))))
    return {"HEADER"}


def storage_hash(to: Planted, key: bytes) -> set[str]:
    change(to.db, "_payload", to.any_chunk(key), lambda v: flip(v, to.chance.randrange(8 * len(v))))
    return {"STORAGE_HASH"}


def missing_chunk(to: Planted, key: bytes) -> set[str]:
    change(to.db, "_payload", to.any_chunk(key), lambda v: None)
    return {"MISSING_CHUNK"}


def length(to: Planted, key: bytes) -> set[str]:
    change(to.db, "_payload", to.any_chunk(key), lambda v: v[: -to.chance.randint(1, len(v) - 1)])
    return {"LENGTH"}


def slice_table(to: Planted, key: bytes) -> set[str]:
    to.rewrite(key, tagged_checksum=to.header(key).tagged_checksum ^ 1 << to.chance.randrange(64))
    return {"SLICE_TABLE"}


def geometry(to: Planted, key: bytes) -> set[str]:
    """Of layers that are not the identity's, and otherwise right."""
    old = to.header(key)
    to.rewrite(key, fingerprint=old.fingerprint ^ 5, tagged_checksum=old.tagged_checksum ^ 5)
    return {"GEOMETRY"}


def content(to: Planted, key: bytes) -> set[str]:
    """Bytes that were wrong before they were hashed; compressed ones may not decode then, or to other bytes."""
    raw = to.header(key).codec == 0
    to.edit_chunk(key, 1, (lambda v: bytes([v[0] ^ 1]) + v[1:]) if raw else (lambda v: v[:-9] + bytes(9)))
    return {"CONTENT"} if raw else {"DECODE", "CONTENT"}


def unknown_version(to: Planted, key: bytes) -> set[str]:
    change(to.db, "_index", key, newer)
    return {"UNKNOWN_VERSION"}


OF_RECORDS: Final[dict[str, Damage]] = {
    work.__name__: work
    for work in (header, storage_hash, missing_chunk, length, slice_table, geometry, content, unknown_version)
}


def swapped(to: Planted, keys: list[bytes]) -> None:
    """Two entries under each other's keys."""
    with to.db.read() as snapshot:
        one, two = (snapshot.header(key) or b"" for key in keys)
    place(to.db, "_index", keys[0], two)
    place(to.db, "_index", keys[1], one)
    to.expected |= {("KEY", key) for key in keys}
    to.hurt |= set(keys)


# --- damage of the file ------------------------------------------------------------------------------------------------


def store_file(shard: Path, chance: random.Random) -> set[str]:
    (shard / STORE_NAME).write_bytes(chance.randbytes(600))
    return {"STORE_FILE"}


def no_meta(shard: Path, chance: random.Random) -> set[str]:
    edit_file(shard, lambda data: data.__setitem__(slice(0, 2 * PAGE), chance.randbytes(2 * PAGE)))
    return {"META"}


def tree(shard: Path, chance: random.Random) -> set[str]:
    break_leaf(shard)
    return {"TREE"}


def free_list(shard: Path, chance: random.Random) -> set[str]:
    free_a_live_page(shard)
    return {"FREELIST"}


def truncated(shard: Path, chance: random.Random) -> set[str]:
    size = (shard / DATA_NAME).stat().st_size
    os.truncate(shard / DATA_NAME, size - chance.randint(1, size // 4 // PAGE) * PAGE)
    return {"FILE_TRUNCATED", "TREE", "META", "FREELIST"}


OF_FILES: Final = (store_file, no_meta, tree, free_list, truncated)


def last_page_in_use(shard: Path) -> int:
    """The last page that any tree reaches: what was cut off behind it was free."""
    with PageFile(shard / DATA_NAME) as file:
        meta = file.metas[0]
        roots = [meta.free.root, meta.main.root, *(tree.root for tree in file.databases(meta).values())]
        last = 1
        for number, page in (found for root in roots for found in file.walk(root)):
            runs = leaf_nodes(page) if page[10] == 2 else ()
            last = max(last, number, *(n.run + file.run_pages(n.size) - 1 for n in runs if n.run is not None))
        return last


def pages_of(shard: Path) -> dict[bytes, set[int]]:
    """By index key the pages on which its entry and its chunks lie."""
    found: dict[bytes, set[int]] = {}
    chunks: dict[int, set[int]] = {}
    with PageFile(shard / DATA_NAME) as file:
        roots = file.databases(file.metas[0])
        for number, page in file.walk(roots[b"payload"].root):
            for node in leaf_nodes(page) if page[10] == 2 else ():
                run = range(node.run, node.run + file.run_pages(node.size)) if node.run is not None else ()
                chunks.setdefault(int.from_bytes(node.key[:8], "big"), set()).update((number, *run))
        for number, page in file.walk(roots[b"index"].root):
            for node in leaf_nodes(page) if page[10] == 2 else ():
                entry = parse_header(file.value(page, node), node.key)
                if isinstance(entry, Header):
                    found[node.key] = {number} | chunks.get(entry.sequence, set())
    return found


# --- one fault -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a check and its repair: a sentence each; wrong: whether a record is another than it was."""

    broken: str = ""
    wrong: str = ""


def plant(subject: Subject, shard: Path, chance: random.Random) -> tuple[Planted, set[str], bool]:
    """Damage a copy: records, the accounting, bytes that nothing names, and the file. Returns what was planted, which kinds
    the file's damage may show as, and whether there is such damage."""
    with opened(shard, capacity_bytes=256 * MIB) as db:
        to = Planted(db, chance)
        keys = chance.sample(sorted(subject.records), 6)
        for key in keys[: chance.choice((0, 1, 1, 2, 4))]:
            name = chance.choice(sorted(OF_RECORDS))
            kinds = OF_RECORDS[name](to, key)
            to.expected |= {("|".join(sorted(kinds)), key)}
            to.hurt.add(key)
        if chance.random() < 0.2:
            swapped(to, keys[4:])
        recount(db)
        if chance.random() < 0.2:
            place(db, "_payload", chunk_key(chance.randrange(1, 1000), 1), bytes(chance.randint(1, 9000)))
            to.expected.add(("ORPHAN_CHUNK", b""))
        if chance.random() < 0.2 or not to.expected:
            recount(db, raw_bytes=chance.randrange(MAX_SEQUENCE))
            to.expected.add(("ACCOUNTING", b""))
    if chance.random() < 0.6:
        return to, set(), False
    places, last = pages_of(shard), last_page_in_use(shard)
    work = chance.choice(OF_FILES)
    kinds = work(shard, chance)
    end = (shard / DATA_NAME).stat().st_size // PAGE
    if work is truncated and end > last:
        return to, set(), False
    to.hurt |= {key for key, pages in places.items() if max(pages) >= end}
    return to, kinds, work is not store_file


def found_rightly(findings: list[Finding], to: Planted, kinds: set[str], loose: bool) -> str:
    """A sentence of what was not found, or found without being there."""
    found = {(finding.kind, finding.key) for finding in findings}
    if kinds and not kinds & {kind for kind, _ in found}:
        return f"the file's damage was not found as one of {sorted(kinds)}: {sorted(found)}"
    if loose:
        return ""
    names = {key: set(name.split("|")) for name, key in to.expected if key}
    lost = [
        f"{sorted(names[key])} of {key[18:26].hex()}" for key in names if not any((n, key) in found for n in names[key])
    ]
    lost += [name for name, key in to.expected if not key and (name, b"") not in found]
    extra = {(k, key) for k, key in found if key not in names and (k, key) not in to.expected and k not in kinds}
    # Where an entry cannot be read, whose bytes nobody names is not known, nor what they count.
    extra = {(k, key) for k, key in extra if not (key == b"" and k in ("ORPHAN_CHUNK", "ACCOUNTING") and names)}
    lost = [name for name in lost if not (name in ("ORPHAN_CHUNK", "ACCOUNTING") and names)]
    return f"not found: {lost}; found without being there: {sorted(extra)}" if lost or extra else ""


def examined(shard: Path, jobs: int = 1) -> tuple[list[Finding], Summary]:
    items = list(check(shard, Options(stage="deep", jobs=jobs)))
    summary = items[-1]
    assert isinstance(summary, Summary)
    return [item for item in items if isinstance(item, Finding)], summary


def judge(subject: Subject, shard: Path, chance: random.Random) -> Verdict:
    """Damage a copy of the subject, check it, repair it, and compare what is there then."""
    to, kinds, loose = plant(subject, shard, chance)
    findings, summary = examined(shard, chance.choice((1, 1, 2)))
    if sum(summary.findings.values()) != len(findings):
        return Verdict("the summary counts other findings than there are")
    if wrong := found_rightly(findings, to, kinds, loose):
        return Verdict(wrong)
    deep = Options(stage="deep")
    carry_out(shard, plan(shard, findings), chance.random() < 0.3, uncover=lambda shard: check(shard, deep))
    left = [finding for finding in examined(shard)[0] if finding.damage]
    if left:
        return Verdict(f"damage is left after the repair: {left[:3]}")
    now = contents(shard)
    # A salvage may bring back what was evicted, and an older record of a damaged one's key: both were audited.
    changed = [
        k for k, digest in now.items() if k in subject.records and k not in to.hurt and digest != subject.records[k]
    ]
    if changed:
        return Verdict(wrong=f"{len(changed)} records are others than they were")
    lost = [key for key in subject.records if key not in to.hurt and key not in now]
    why = {key[18:26].hex(): text for key, text in refusals(shard, lost).items()}
    return Verdict(f"{len(lost)} undamaged records are gone: {why}") if lost else Verdict()


def subjects(context: Context) -> list[Subject]:
    return [
        filled(context.root / f"subject-{number}", RECORDS, seed=number, sizes=sizes, codecs=codecs)
        for number, (sizes, codecs) in enumerate(FORMS)
    ]


@campaign("fsck", quick=100, full=2_000)
def fsck(context: Context) -> Iterator[Outcome]:
    """Damages shards in every way that kvstore-fsck has a name for, checks and repairs them."""
    known = subjects(context)
    for number in context.faults():
        chance = context.random(number)
        subject = known[number % len(known)]
        with context.folder(number) as path:
            verdict = judge(subject, subject.copy(path / "shard"), chance)
            if (verdict.broken or verdict.wrong) and (keep := os.environ.get(KEEP)):
                shutil.copytree(path, Path(keep) / f"fault-{number}")
                subject.copy(Path(keep) / f"subject-{number}")
        context.count("records", len(subject.records))
        kind = Kind.WRONG_SERVED if verdict.wrong else Kind.BROKEN if verdict.broken else Kind.DETECTED
        yield Outcome(number, kind, verdict.wrong or verdict.broken)


@campaign("fsck-salvage", quick=30, full=2_000)
def fsck_salvage(context: Context) -> Iterator[Outcome]:
    """Overwrites the pages on which the trees hang, and salvages the shard: 99 % of the intact records come back."""
    subject = filled(context.root / "subject", 200)
    for number in context.faults():
        with context.folder(number) as path:
            came, wanted = salvage_without_roots(subject, path / "shard", context.random(number).randrange(2**31))
        context.count("records", wanted)
        context.count("came_back", came)
        enough = came >= LEAST_SALVAGED * wanted
        yield Outcome(number, Kind.DETECTED if enough else Kind.BROKEN, f"{came} of {wanted} records came back")


@campaign("fsck-kill", quick=100, full=2_000)
def fsck_kill(context: Context) -> Iterator[Outcome]:
    """Kills repairs of damaged shards at random moments, and repairs to the end: no undamaged record is lost."""
    subject = filled(context.root / "subject", RECORDS)
    for number in context.faults():
        with context.folder(number) as path:
            wrong = kill_and_finish(subject, path, context.random(number).randrange(2**31))
        yield Outcome(number, Kind.BROKEN if wrong else Kind.DETECTED, wrong)
