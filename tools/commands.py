"""Commands whose exit status is that of kvstore-fsck, and what they share: one line for an error, sizes, times."""

from __future__ import annotations

import errno
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from kvstore.errors import AmbiguousKey, ConfigError, ExportDamaged, KVStoreError, StoreDamaged
from kvstore.tools.fsck_outcome import printable

DAMAGE: Final = 4
FAILED: Final = 8
USAGE: Final = 16
UsageError: Any = typer.BadParameter.__bases__[0]
"""What typer raises for arguments that it cannot take."""
SIZE: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kmgtp]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
SPAN: Final = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", re.ASCII)
SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
AGES: Final = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (60 * 2, 60, "min"), (0, 1, "s"))
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECONDS: Final = 1_000_000


def status_of(error: Exception) -> int:
    """The exit status that an error means."""
    if isinstance(error, StoreDamaged | ExportDamaged):
        return DAMAGE
    return USAGE if isinstance(error, ConfigError | AmbiguousKey) else FAILED


def say(context: Any, error: object) -> None:
    """An error in one line on stderr, with a hint."""
    text = " ".join(printable(str(error)).split())
    typer.echo(f"error: {text} (see `{context.command_path} --help`)", err=True)


def _ended(context: Any, error: Exception) -> typer.Exit:
    """How a command ends with an error."""
    if isinstance(error, UsageError):
        say(error.ctx or context, error.format_message())
        return typer.Exit(USAGE)
    say(context, error)
    return typer.Exit(status_of(error))


class Reporting(TyperCommand):
    """A command whose errors end in one line, and in an exit status of kvstore-fsck."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except UsageError as error:
            raise _ended(error.ctx or parent, error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KVStoreError, OSError, UsageError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            raise _ended(ctx, error) from None


class ReportingGroup(TyperGroup):
    """Commands of that kind under a name of their own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise _ended(ctx, error) from None


# --- what options say --------------------------------------------------------------------------------------------


def nbytes(text: str) -> int:
    """A size: `4096`, `64K`, `1.5MiB`, `20G`; units are powers of 1024. Raises ConfigError."""
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no size: expected bytes, or a number with K, M, G or T, such as 16G")
    return int(float(found[1]) * 1024 ** UNITS[found[2].lower()]) if "." in found[1] else _whole(found)


def _whole(found: re.Match[str]) -> int:
    return int(found[1]) * int(1024 ** UNITS[found[2].lower()])


def moment(text: str) -> int:
    """A time, microseconds since 1970: how long ago (`90s`, `30m`, `12h`, `7d`, `2w`), or a date (`2026-01-31`,
    `2026-01-31T12:00`, in UTC unless it says otherwise). Raises ConfigError."""
    if found := SPAN.fullmatch(text.strip()):
        return max(0, round((time.time() - float(found[1]) * SECONDS[found[2]]) * MICROSECONDS))
    try:
        when = datetime.fromisoformat(text.strip())
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0, (when - EPOCH) // timedelta(microseconds=1))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{text!r} is no time: expected how long ago, such as 12h or 7d, or a date, such as 2026-01-31"
        ) from None


# --- what is shown -----------------------------------------------------------------------------------------------


def when(micros: int) -> str:
    """A time that is stored, in UTC."""
    try:
        return (EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%d %H:%M:%S") if micros else "-"
    except OverflowError:
        return "no time"


def age(micros: int) -> str:
    """How long ago a stored time is."""
    if not micros:
        return "-"
    seconds = time.time() - micros / MICROSECONDS
    if seconds < -1:
        return "in the future"
    _, unit, name = next(row for row in AGES if max(0, seconds) >= row[0])
    return f"{int(max(0, seconds) // unit):,} {name} ago"


def table(rows: list[list[str]], right: str = "") -> list[str]:
    """Rows as aligned lines, the first one the heading. right: a character a column, `r` where numbers are."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = right.ljust(len(widths))
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]
