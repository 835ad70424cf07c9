"""A shard checked: findings as they are made, how far it is, and what it came to. Nothing is changed and nothing printed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.errors import StoreDamaged
from kvstore.fsck.checkpoint import Checkpoint, load, save
from kvstore.fsck.findings import Finding, Progress, Summary
from kvstore.fsck.mark import RECORD
from kvstore.fsck.options import Options as Options
from kvstore.fsck.options import Range
from kvstore.fsck.options import Sample as Sample
from kvstore.fsck.options import parse_sample as parse_sample
from kvstore.fsck.shards import shards as shards
from kvstore.fsck.structure import store_file
from kvstore.fsck.team import Child, Ended, Team, order
from kvstore.fsck.work import ALL, Plan, Work
from kvstore.storefile import DATA_NAME, MAX_MAP, boot_id, newest_meta

LISTEN_S: Final = 0.1
PROGRESS_S: Final = 0.1
RESTARTS: Final = 100
"""Scanning processes that may end in one check."""
SMALL_RANGE: Final = 1024
"""Records of a range, where there are not so many that it must have more."""
NO_INDEX: Final = "records: what reads the index is ended by it"
NO_TREES: Final = "index against payload, and accounting: the trees do not hold together"
FOLLOWING: Final = ("ACCOUNTING", "ORPHAN_CHUNK", "MISSING_CHUNK")
"""Kinds of what broken trees make of intact records."""
WALKING: Final = "while it read the index and payload's keys"
POWER_LOSS: Final = "what a power loss cost: writes that were not synced may be lost, so an engine empties this shard"
WORDS: Final = {"structure": "files", "survey": "index and accounting"}
TIME_IS_OVER: Final = "max_duration was over"
Item = Finding | Progress | Summary


def check(shard: Path, options: Options | None = None, cancelled: threading.Event | None = None) -> Iterator[Item]:
    """Check a shard: findings and progress as they come, and one Summary at the end.

    It may be written meanwhile. cancelled: once it is set, the check ends soon, with a Summary. A check that is closed, or
    ended by an exception from outside, ends at once. Either leaves a checkpoint, with which Options.resume goes on.
    Raises StorePathError or StorePermissionError for what is no shard that can be read, StoreBusy while its file is being
    rewritten, ConfigError for a device that is not there.
    """
    return Check(shard, options or Options(), cancelled or threading.Event()).run()


@dataclass
class Check:
    """One check. Belongs to one thread; `cancelled` is any thread's to set."""

    shard: Path
    options: Options
    cancelled: threading.Event
    _counts: Counter[str] = field(default_factory=Counter)
    _seen: set[tuple[object, ...]] = field(default_factory=set)
    _notes: Counter[str] = field(default_factory=Counter)
    _records: int = 0
    _nbytes: int = 0
    _total: tuple[int, int] = (0, 0)
    _in_range: int = 0
    _restarts: int = RESTARTS
    _stopped: bool = False
    _told: float = 0.0
    _begun: Counter[str] = field(default_factory=Counter)
    _busy: dict[int, Work | dict[str, Any]] = field(default_factory=dict)
    _held: list[Finding] | None = field(default_factory=list)
    """Findings that may follow from broken trees, until it is known whether the trees are; then None."""
    _broken: bool = False
    _careful: bool = False

    def run(self) -> Iterator[Item]:
        self._began, self._now = time.monotonic(), int(time.time())
        duration = self.options.max_duration_s
        self._deadline = None if duration is None else self._began + duration
        state, found = store_file(self.shard)
        for finding in found:
            yield from self._tell(finding)
        if state is not None and not state.clean and state.boot_id != boot_id():
            self._notes[
                "what a power loss may have cost: an engine empties this shard, since unsynced writes may be lost"
            ] = 1
        data = self.shard / DATA_NAME
        if "UNKNOWN_VERSION" in self._counts:
            self._notes["anything but the STORE file: it is of a newer version"] = 1
        elif not data.exists():
            self._notes[f"records: there is no {DATA_NAME}"] = 1
        elif not data.stat().st_size:
            if state is not None and state.clean:
                yield from self._tell(Finding("FILE_TRUNCATED", f"{DATA_NAME} is empty, and had records"))
        else:
            yield from self._database()
        yield self._summary()

    def _database(self) -> Iterator[Item]:
        plan = self._plan()
        self._team = Team(order(self.shard, self.options), self.options.jobs)
        try:
            yield from self._work(plan)
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._team.end()
            if self.options.stage != "quick" and (self._stopped or self.options.resume):
                problem = save(self.shard, plan.checkpoint())
                if problem:
                    self._notes[problem] = 1

    def _plan(self) -> Plan:
        found, problem = load(self.shard, self._now)
        other = found.parts and found.prefix != self.options.prefix
        if other and self.options.resume:
            problem = "the checkpoint was not used: it is of other records"
        if problem and self.options.resume:
            self._notes[problem] = 1
        return Plan(self.options, Checkpoint() if other else found, self._now)

    def _over(self) -> bool:
        """Whether the check is to end before its time."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        self._stopped |= late or self.cancelled.is_set()
        if late:
            self._notes[TIME_IS_OVER] = 1
        return self._stopped

    # --- what is found -----------------------------------------------------------------------------------------------

    def _finding(self, finding: Finding) -> Iterator[Finding]:
        """A finding from a mapped file: told once it is known whether it only follows from broken trees."""
        if self._held is not None:
            self._held.append(finding)
        elif not (self._broken and finding.kind in FOLLOWING):
            yield from self._tell(finding)

    def _tell(self, finding: Finding) -> Iterator[Finding]:
        """A finding, once: two stages may make the same."""
        name = (finding.kind, finding.key, finding.sequence if finding.key else finding.detail)
        if name not in self._seen:
            self._seen.add(name)
            self._counts[finding.kind] += 1
            yield finding

    def _said(self, message: dict[str, Any], now: bool = False) -> Iterator[Finding]:
        if "finding" in message:
            fields = message["finding"]
            finding = Finding(**fields | {"key": bytes.fromhex(fields["key"])})
            yield from self._tell(finding) if now else self._finding(finding)
        elif "note" in message:
            self._notes[message["note"]] += 1

    def _progress(self, now: bool = False) -> Iterator[Progress]:
        if now or time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            doing = [job for job in self._busy.values() if isinstance(job, dict)]
            stage = "records" if self._records else WORDS[doing[-1]["task"]] if doing else "files"
            yield Progress(stage, self._records, self._nbytes, *self._total)

    def _summary(self) -> Summary:
        unchecked = [f"{note} ({count:,} times)" if count > 1 else note for note, count in self._notes.items()]
        seconds = time.monotonic() - self._began
        return Summary(
            self._records, self._nbytes, self._in_range, seconds, dict(self._counts), unchecked, self._stopped
        )

    # --- what scanning processes do ----------------------------------------------------------------------------------

    def _work(self, plan: Plan) -> Iterator[Item]:
        yield from self._progress(now=True)
        # What is mapped may end a process: where the length tells so beforehand, the trees come first and alone.
        self._careful = self._short()
        while not self._over() and "META" not in self._counts:
            self._hand_out(plan)
            if not self._busy:
                break
            for child, message in self._team.hear(LISTEN_S):
                yield from self._heard(plan, child, message)
            yield from self._progress()
        yield from self._progress(now=True)
        if "META" in self._counts:
            self._notes["records: LMDB cannot open its file"] = 1
        elif self._held is not None:
            # Nobody knows whether they follow from trees that do not hold together.
            self._notes["lmdb.verify"] = 1
            yield from self._release(broken=False)

    def _hand_out(self, plan: Plan) -> None:
        while len(self._busy) < self.options.jobs and (job := self._next(plan)) is not None:
            child = self._team.idle()
            assert child is not None, "fewer processes are busy than there may be"
            if isinstance(job, Work):
                job.plain |= self._broken
            child.give(job.task() if isinstance(job, Work) else job)
            self._busy[id(child)] = job

    def _next(self, plan: Plan) -> Work | dict[str, Any] | None:
        """What is to be done next, None where nothing is or what is going on must end first."""
        if not self._begun["structure"]:
            self._begun["structure"] = 1
            return {"task": "structure"}
        if self._careful and self._held is not None:
            return None
        if not self._begun["survey"]:
            self._begun["survey"] = 1
            boundaries = plan.boundaries() if self.options.stage != "quick" else []
            return {"task": "survey", "boundaries": [key.hex() for key in boundaries], "every": SMALL_RANGE}
        return plan.next() if self.options.stage != "quick" else None

    def _heard(self, plan: Plan, child: Child, message: dict[str, Any] | Ended) -> Iterator[Item]:
        job = self._busy.get(id(child))
        if job is None:
            return
        if answered(message):
            del self._busy[id(child)]
        if isinstance(job, Work):
            yield from self._of_range(plan, job, message)
        elif job["task"] == "structure":
            yield from self._of_structure(message)
        else:
            yield from self._of_survey(plan, message)

    def _of_structure(self, message: dict[str, Any] | Ended) -> Iterator[Finding]:
        if isinstance(message, Ended):
            yield from self._tell(self._crash(message, "while it walked the trees"))
        elif "failed" in message:
            yield from self._tell(Finding("TREE", f"it cannot be walked: {message['failed']}"))
        else:
            yield from self._said(message, now=True)
        if answered(message):
            broken = bool({"TREE", "FILE_TRUNCATED"} & set(self._counts))
            if broken:
                self._notes[NO_TREES] = 1
            yield from self._release(broken)

    def _release(self, broken: bool) -> Iterator[Finding]:
        """Tell what was held back until it was known whether it follows from trees that do not hold together."""
        held, self._held, self._broken = self._held or [], None, broken
        for finding in held if "META" not in self._counts else ():
            yield from self._finding(finding)

    def _of_survey(self, plan: Plan, message: dict[str, Any] | Ended) -> Iterator[Finding]:
        if isinstance(message, Ended):
            yield from self._finding(self._crash(message, WALKING))
        elif "failed" in message:
            yield from self._finding(Finding("TREE", f"the index, or payload's keys: {message['failed']}"))
        else:
            yield from self._said(message)
        if isinstance(message, Ended) or "failed" in message:
            self._notes["index against payload, and accounting: they cannot be read"] = 1
            plan.take_ranges([Range(b"", b"", ALL, 0)])
        elif "done" in message:
            rows = message["done"].get("ranges")
            ranges = [Range(bytes.fromhex(start), bytes.fromhex(end), *sums) for start, end, *sums in rows or ()]
            self._in_range = sum(r.records for r in ranges)
            plan.take_ranges([Range(b"", b"", ALL, 0)] if rows is None else ranges)
            self._total = plan.total if rows else (0, 0)

    def _crash(self, ended: Ended, where: str) -> Finding:
        kind = "FILE_TRUNCATED" if ended.bus and self._short() else "TREE"
        return Finding(kind, f"the process that reads it was ended by {ended.why} {where}")

    def _short(self) -> bool:
        """Whether the file has fewer pages than its last transaction knew, or no intact meta page."""
        try:
            meta, size = newest_meta(self.shard / DATA_NAME)
        except StoreDamaged:
            return True
        return meta is not None and ((meta.last + 1) * meta.page_size > size or meta.map_size >= MAX_MAP)

    # --- records -----------------------------------------------------------------------------------------------------

    def _of_range(self, plan: Plan, work: Work, message: dict[str, Any] | Ended) -> Iterator[Finding]:
        if isinstance(message, Ended):
            yield from self._ended(plan, work, message)
        elif "failed" in message:
            yield from self._finding(Finding("TREE", f"the index, or payload's keys: {message['failed']}"))
            self._plainly(plan, work)
        elif "upto" in message:
            # Of broken trees nobody knows what they have lost: they are wholly checked once they are whole.
            work.damaged |= self._broken
            plan.read(work, bytes.fromhex(message["upto"]), message["end"], message["records"], message["nbytes"])
            self._records, self._nbytes = self._records + message["records"], self._nbytes + message["nbytes"]
        elif "done" in message:
            plan.give_back(work)
        else:
            work.damaged |= "finding" in message
            yield from self._said(message)

    def _ended(self, plan: Plan, work: Work, ended: Ended) -> Iterator[Finding]:
        """A process ended: what it was at is damaged, and reading goes on behind that."""
        if ended.what == RECORD and ended.key not in work.skip:
            work.skip.add(ended.key)
            work.damaged = True
            crash = self._crash(ended, "at this record")
            yield from self._finding(Finding(crash.kind, crash.detail, ended.key))
            self._again(plan, work)
        else:
            yield from self._finding(self._crash(ended, WALKING))
            self._plainly(plan, work)

    def _plainly(self, plan: Plan, work: Work) -> None:
        """Read on by plain reads where the index could not be read without. Where these do not help either, LMDB cannot even
        begin, and no other process would come further."""
        if work.plain:
            self._notes[NO_INDEX] += 1
            plan.give_back(work)
        else:
            self._again(plan, work)

    def _again(self, plan: Plan, work: Work) -> None:
        self._restarts -= 1
        if self._restarts <= 0:
            self._notes["index keys behind those where scanning processes ended: too many did"] += 1
        work.plain = True
        plan.give_back(work, again=self._restarts > 0)


def answered(message: dict[str, Any] | Ended) -> bool:
    """Whether a task has come to its end."""
    return isinstance(message, Ended) or not {"done", "failed"}.isdisjoint(message)
