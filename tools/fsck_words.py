"""What kvstore-fsck says in words, on a terminal and in the report: the verdict, the scope, what to do."""

from __future__ import annotations

from typing import Final

from kvstore.fsck.findings import SALVAGE, count
from kvstore.tools.fsck_outcome import Checked, Run, damaged_records, repairable, size

STAGES: Final = {
    "quick": "file, trees, format and accounting",
    "default": "file, trees, accounting, and every header, key, slice table and storage hash",
    "deep": "file, trees, accounting, every hash, and every record decoded and summed",
}
"""What each stage looks at."""
NEW: Final = "NEW"
"""Where the salvaged records go, in the command that is shown."""


def verdict_words(run: Run) -> tuple[str, str]:
    """How it went, good, warn or bad, and in a sentence."""
    damaged = [finding for finding in run.findings if finding.damage]
    repaired = any(checked.repaired for checked in run.shards)
    if damaged:
        records = damaged_records(damaged)
        others = sum(not finding.key for finding in damaged)
        said = [count(records, "record")] * bool(records) + [count(others, "other finding")] * bool(others)
        return "bad", f"{'Repaired, and damage is left' if repaired else 'Damaged'}: {' and '.join(said)}"
    if any(checked.error for checked in run.shards):
        return "warn", "Not checked: see below"
    if run.interrupted or any(checked.cancelled for checked in run.shards):
        return "warn", "Not finished: no damage so far"
    if run.findings:
        return "warn", f"No damage, and {count(len(run.findings), 'finding')} that this version cannot judge"
    return ("good", "Repaired, and clean now") if repaired else ("good", "Clean")


def state_words(checked: Checked) -> tuple[str, str]:
    """How one shard fared, good, warn or bad, and in a few words."""
    if checked.error:
        return "warn", "not checked"
    if checked.damaged:
        return "bad", "damaged"
    if checked.cancelled:
        return "warn", "not finished"
    if checked.findings:
        return "warn", "newer version"
    return "good", "clean now" if checked.repaired else "clean"


def scope_words(run: Run) -> str:
    """What was looked at."""
    return f"{run.stage} check{f' of {run.scope}' if run.scope else ''}: {STAGES[run.stage]}"


def clean_line(run: Run) -> str:
    """The one line that a clean store is worth."""
    verdict = verdict_words(run)[1]
    shards = f"{count(len(run.shards), 'shard')}, " if len(run.shards) > 1 else ""
    what = f"{shards}{count(run.records, 'record')}, {size(run.nbytes)} in {run.seconds:,.1f} s"
    return f"{run.store}: {verdict[0].lower()}{verdict[1:]} ({what}; {scope_words(run)})"


def repair_lines(run: Run) -> list[tuple[str, str]]:
    """What to do, sentence by sentence, each with the command for it, or an empty one."""
    lines: list[tuple[str, str]] = []
    if run.interrupted or any(checked.cancelled and not checked.error for checked in run.shards):
        resumed = "--resume" in run.again
        words = "Go on from its checkpoint:" if resumed else "It has no checkpoint. Check again:"
        lines.append((f"It ended before its time. {words}", run.command(*run.again)))
    if command := run.repair_command():
        lines.append(("Repair it, with the store to itself (stop the engine that writes it):", command))
        lines.append(("See first what that would do, with nothing changed:", run.command("--dry-run")))
    if command and any(finding.remedy == SALVAGE for finding in run.findings):
        said = "Or copy what is intact into a new store, without touching this one:"
        lines.append((said, Run(run.store, run.stage, 0).command("--salvage", "--output", NEW)))
    transient = sum(finding.damage and finding.persisted is False for finding in run.findings)
    if transient:
        said = (
            f"{count(transient, 'finding')} of a first read that a second one did not make: the file is as it should be"
        )
        lines.append((f"{said}, and the way to it is not. Look at memory, disk, cables and the kernel's log.", ""))
    if any(not repairable(finding) and not finding.damage for finding in run.findings):
        lines.append(("What a newer kvstore wrote is left as it is: upgrade kvstore to read it.", ""))
    return lines
