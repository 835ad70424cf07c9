"""What kvstore-fsck prints for a person: what is damaged, how much, what it means, and the command that repairs it."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.fsck.findings import KINDS
from kvstore.tools.fsck_outcome import Checked, Row, Run, printable, rows, size
from kvstore.tools.fsck_words import clean_line, repair_lines, state_words, verdict_words

STYLES = {"good": "green", "warn": "yellow", "bad": "red"}
MAX_EXAMPLES = 3
"""Findings of a kind that are spelled out beneath the table."""
HASH_DIGITS = 32
"""Digits of a block hash that are shown: `kvstore show` takes the first ones."""


def show(run: Run, console: Console) -> None:
    """Print what a run came to, what to do about it, and the first findings of each kind."""
    show_found(run, console)
    show_advice(run, console)
    lines = [line for checked in run.shards if checked.findings for line in _examples(checked)]
    if lines:
        _printer(console)(Text("\n".join(["", "Findings:", *lines]), style="dim"))


def show_found(run: Run, console: Console) -> None:
    """Print what a run came to."""
    say = _printer(console)
    if run.findings:
        tone, words = verdict_words(run)
        say(Text(f"{printable(str(run.store))}: {words}", style=f"bold {STYLES[tone]}"))
    for checked in run.shards:
        if checked.findings or checked.done:
            _show_shard(run, checked, console)
    if not run.findings and any(checked.summary for checked in run.shards):
        say(Text(printable(clean_line(run)), style=STYLES[verdict_words(run)[0]]))
    for checked in run.shards:
        for said in checked.summary.unchecked if checked.summary else ():
            say(Text(f"not checked{_of(run, checked)}: {printable(said)}", style="yellow"))


def show_advice(run: Run, console: Console) -> None:
    """Print what to do: the commands are whole lines, to be copied."""
    say = _printer(console)
    for number, (words, command) in enumerate(repair_lines(run)):
        say(Text(words if number else f"\n{words}"))
        if command:
            say(Text(f"  {printable(command)}", style="bold"))


def _printer(console: Console) -> Callable[[Text], None]:
    """Prints a line as it is: a command that is broken into lines is none."""
    return lambda line: console.print(line, soft_wrap=True)


def _of(run: Run, checked: Checked) -> str:
    return f" in {printable(checked.shard.name)}" if len(run.shards) > 1 else ""


def _show_shard(run: Run, checked: Checked, console: Console) -> None:
    say = _printer(console)
    if len(run.shards) > 1:
        say(Text(f"\n{printable(checked.shard.name)}: {state_words(checked)[1]}", style="bold"))
    for done in checked.done:
        say(Text(f"  {printable(done)}"))
    if checked.findings:
        console.print(_table(rows(checked.findings)))


def _table(found: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("found", "how many", "records", "bytes", "what it means"):
        table.add_column(name, justify="right" if name in ("how many", "records", "bytes") else "left")
    for row in found:
        meaning = KINDS[row.kind].meaning + (f" ({row.transient:,} not on a second read)" if row.transient else "")
        records = f"{row.records:,}" if row.records else ""
        kind = Text(row.kind, style="red" if KINDS[row.kind].damage else "yellow", no_wrap=True)
        table.add_row(kind, f"{row.count:,}", records, Text(size(row.nbytes), no_wrap=True), Text(meaning))
    return table


def _examples(checked: Checked) -> list[str]:
    """The first findings of each kind, in words."""
    # Where nothing was found it is not needed, and takes long to import.
    from kvstore.audit import PREFIX_BYTES

    lines = []
    for row in rows(checked.findings):
        of_kind = [finding for finding in checked.findings if finding.kind == row.kind]
        for finding in of_kind[:MAX_EXAMPLES]:
            digits = finding.key[PREFIX_BYTES:].hex() or finding.key.hex()
            block = f" {digits[:HASH_DIGITS]}{'...' if len(digits) > HASH_DIGITS else ''}" if digits else ""
            lines.append(f"  {row.kind}{block}: {printable(finding.detail)}")
        if row.count > MAX_EXAMPLES:
            lines.append(f"  {row.kind}: {row.count - MAX_EXAMPLES:,} more (--json lists every one)")
    return lines
