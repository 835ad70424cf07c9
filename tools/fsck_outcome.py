"""What a run of kvstore-fsck came to: the findings of each shard, their sums, the exit status, the command that repairs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvstore.fsck.findings import KINDS, NOTHING, QUARANTINE, Finding, Summary

CLEAN: Final = 0
REPAIRED: Final = 1
DAMAGE: Final = 4
FAILED: Final = 8
USAGE: Final = 16
CANCELLED: Final = 32
"""Bits of the exit status, those of e2fsck."""
REMEDIES: Final = {
    "quarantine": "its record is moved to a quarantine folder; the engine computes the block again",
    "reclaim": "the room is used again",
    "recount": "the accounting is rebuilt from the records",
    "rebuild": "the STORE file is written anew",
    "salvage": "every intact record is copied into a new database that takes the old one's place; the old one is kept",
    NOTHING: "left as it is: upgrade kvstore",
}
"""What a repair does, by remedy."""
UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True)
class Row:
    """Findings of one kind. records: different keys among them; nbytes: stored bytes; transient: how many a second read
    did not find again."""

    kind: str
    count: int
    records: int
    nbytes: int
    transient: int


@dataclass
class Checked:
    """One shard's last check, and its repair. summary: None where the check did not come to its end; error: why it could
    not be made, one line; done: what the repair did, a sentence each."""

    shard: Path
    findings: list[Finding] = field(default_factory=list)
    summary: Summary | None = None
    error: str = ""
    done: list[str] = field(default_factory=list)
    repaired: bool = False

    @property
    def damaged(self) -> bool:
        """Whether anything that was found is damage."""
        return any(finding.damage for finding in self.findings)

    @property
    def cancelled(self) -> bool:
        """Whether the check ended before its time."""
        return self.summary is None or self.summary.cancelled

    @property
    def status(self) -> int:
        """The bits of the exit status that this shard sets."""
        unknown = any(finding.kind == "UNKNOWN_VERSION" for finding in self.findings)
        bits = (FAILED * (bool(self.error) or unknown), DAMAGE * self.damaged, REPAIRED * self.repaired)
        return sum(bits) | CANCELLED * (not self.error and self.cancelled)


@dataclass
class Run:
    """A run over a store. stage: quick, default or deep; started: seconds since 1970; scope: what part was looked at, in
    words, empty for all of it; options: those that a repair needs to find the same again; again: those that go on where a
    check ended before its time."""

    store: Path
    stage: str
    started: float
    scope: str = ""
    options: tuple[str, ...] = ()
    again: tuple[str, ...] = ("--resume",)
    shards: list[Checked] = field(default_factory=list)
    interrupted: bool = False

    @property
    def findings(self) -> list[Finding]:
        """Those of all shards."""
        return [finding for checked in self.shards for finding in checked.findings]

    @property
    def status(self) -> int:
        """The exit status."""
        status = CANCELLED * self.interrupted
        for checked in self.shards:
            status |= checked.status
        return status

    @property
    def records(self) -> int:
        """Records that were looked at."""
        return sum(checked.summary.records for checked in self.shards if checked.summary)

    @property
    def nbytes(self) -> int:
        """Stored bytes that were looked at."""
        return sum(checked.summary.nbytes for checked in self.shards if checked.summary)

    @property
    def total_records(self) -> int:
        """Records of the shards that could be counted."""
        return sum(checked.summary.total_records for checked in self.shards if checked.summary)

    @property
    def seconds(self) -> float:
        """How long the checks took, one after the other."""
        return sum(checked.summary.seconds for checked in self.shards if checked.summary)

    def repair_command(self) -> str:
        """The command that repairs what was found, empty where nothing is to be repaired."""
        return self.command("--repair") if any(map(repairable, self.findings)) else ""

    def command(self, *options: str) -> str:
        """A kvstore-fsck command for this store, as it is typed into a shell, in any folder."""
        try:
            store = os.path.abspath(self.store)
        except OSError:
            # The current folder is gone.
            store = str(self.store)
        return " ".join(map(quoted, ["kvstore-fsck", *self.options, *options, store]))


def repairable(finding: Finding) -> bool:
    """Whether a repair does something about it: what a second read did not find is no damage of the file, and a record
    without a key cannot be taken out."""
    alone = finding.remedy == QUARANTINE and not finding.key
    return finding.remedy != NOTHING and finding.persisted is not False and not alone


def rows(findings: Iterable[Finding]) -> list[Row]:
    """The findings by kind, in the order of KINDS."""
    sorted_out: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
    for finding in findings:
        sorted_out[finding.kind].append(finding)
    return [_row(kind, found) for kind, found in sorted_out.items() if found]


def _row(kind: str, found: Sequence[Finding]) -> Row:
    keys = {finding.key for finding in found if finding.key}
    transient = sum(finding.persisted is False for finding in found)
    return Row(kind, len(found), len(keys), sum(finding.nbytes for finding in found), transient)


def damaged_records(findings: Iterable[Finding]) -> int:
    """How many different records have damage."""
    return len({finding.key for finding in findings if finding.damage and finding.key})


def size(nbytes: int) -> str:
    """Bytes for a person: three digits and a unit."""
    if nbytes < 1024:
        return f"{nbytes:,} B"
    value = float(nbytes)
    for unit in UNITS:
        value /= 1024
        if value < 999.5 or unit == UNITS[-1]:
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def printable(text: str) -> str:
    """Text from untrusted bytes, on one line: what is no printable character (control characters, marks that turn the
    direction of writing, halves of surrogates) is written as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def quoted(word: str) -> str:
    """A word as it is typed into bash, printable: what `printable` would change is written as escapes that bash reads."""
    if word.isprintable():
        return shlex.quote(word)
    said = (char if char.isprintable() and char not in "'\\" else _bytes_of(char) for char in word)
    return f"$'{''.join(said)}'"


def _bytes_of(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def one_line(error: Exception) -> str:
    """What an exception says, on one line; its name where it says nothing."""
    return printable(" ".join(str(error).split())) or type(error).__name__
