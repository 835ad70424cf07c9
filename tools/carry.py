"""`kvstore export` and `kvstore import`: records taken from one store to another by a file."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvstore.config import StoreConfig
from kvstore.container import Reader
from kvstore.errors import ConfigError, KVStoreError, StorePathError
from kvstore.fsck.findings import count
from kvstore.fsck.shards import shards as shard_folders
from kvstore.inspect import opened
from kvstore.storefile import STORE_NAME, path_errors, sync_folder
from kvstore.tools import look
from kvstore.tools.commands import DAMAGE, FAILED, nbytes, say, status_of
from kvstore.tools.fsck_outcome import printable, size
from kvstore.transport import Report, bring, destinations, export

STREAM: Final = Path("-")
"""Standard input or output in the place of a file."""
PARTIAL: Final = ".partial"
BUFFER_BYTES: Final = 2**20


def export_records(
    context: typer.Context,
    store: look.StoreArgument,
    file: Annotated[Path, typer.Argument(help="The file to make; `-` is standard output.")],
    identity: look.IdentityOption = "",
    group: look.GroupOption = None,
    prefix: look.PrefixOption = "",
    older: look.OlderOption = None,
    newer: look.NewerOption = None,
    min_bytes: look.MinBytesOption = "0",
    codec: look.CodecOption = None,
    limit: look.LimitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with `-` on stderr.")] = False,
) -> None:
    """Copy records to a file that `kvstore import` takes: all, or those that the options mean.

    The store may be in use. Each record is checked wholly, from the bytes that go into the file; a damaged one is left out
    and told, and the exit status is 4 then. The file gets its name once it is whole and on the disk. It is as private as
    the store: KV is what users wrote, and nothing is encrypted.

    Examples:

    - `kvstore export /var/lib/kvstore records.kvx`
    - `kvstore export /var/lib/kvstore recent.kvx --identity 3f2a --newer 1d`
    - `kvstore export /var/lib/kvstore - | ssh other kvstore import - /var/lib/kvstore`
    """
    meant = look.chosen(identity, group, prefix, older, newer, min_bytes, codec)
    with opened(shard_folders(store)) as shards, _made(file) as out, _bar(None, as_json) as tick:
        report = export(shards, out, meant, limit, tick)
    _tell(context, report, "exported", as_json, err=file == STREAM)


def import_records(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What `kvstore export` made; `-` is standard input.")],
    store: Annotated[Path, typer.Argument(help="The folder of a store, or of one of its shards.")],
    replace: Annotated[bool, typer.Option("--replace", help="Also write records that the store has already.")] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the store, or a shard of it, where there is none.")
    ] = False,
    capacity: Annotated[
        str | None,
        typer.Option(help="The most that each shard's file may take, such as 16G; by default what it was made for."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a file's records to a store: each into the shard of its rank, as it was stored.

    It needs the store to itself: stop the engine that writes it. Each record is checked wholly before it is written; one that
    changed in the file is left out and told, and the exit status is 4 then, as where the file ends early: what came before
    is written all the same. Nothing is evicted: where the store is full, it ends with status 8. Every transaction is
    synced; being killed leaves the store sound, with a part of the records: import again.

    Examples:

    - `kvstore import records.kvx /var/lib/kvstore`
    - `kvstore import records.kvx /srv/other --create --capacity 64G`
    - `kvstore import records.kvx /var/lib/kvstore/tp0of1-pp0of1 --replace`
    """
    room = None if capacity is None else nbytes(capacity)
    with _taken(file) as (source, length):
        reader = Reader(source)
        folders = destinations(reader.head, store)
        missing = [folder for folder in folders if not (folder / STORE_NAME).is_file()]
        if missing and not create:
            raise StorePathError(f"{missing[0]}: no shard there: give --create to make it, or another path")
        if missing and room is None:
            room = StoreConfig().capacity_bytes if len(missing) == len(folders) else None
        if missing and room is None:
            raise ConfigError(f"{missing[0]} is to be made beside other shards: give their --capacity")
        if room is not None:
            StoreConfig(capacity_bytes=room)
        with opened(folders, True, room) as shards, _bar(length, as_json) as tick:
            report = bring(reader, shards, replace, tick)
    _tell(context, report, "imported", as_json)


@contextmanager
def _made(file: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is written and on the disk. Raises StorePathError."""
    if file == STREAM:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = file.with_name(f"{file.name}{PARTIAL}")
    expected = "expected a file that can be made, on a disk with room"
    if file.exists() or file.is_symlink():
        raise StorePathError(f"{file} exists: give another name, or remove it")
    with path_errors(partial, expected):
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=BUFFER_BYTES) as out:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorePathError(f"{partial} is being written by another export: give another name") from None
        try:
            with path_errors(partial, expected):
                os.ftruncate(fd, 0)
                yield out
                out.flush()
                os.fsync(fd)
                _name(partial, file)
                sync_folder(file.parent)
        finally:
            partial.unlink(missing_ok=True)


def _name(partial: Path, file: Path) -> None:
    """Give a file its name. One that another took meanwhile stays its own, where the file system has links."""
    try:
        os.link(partial, file)
    except FileExistsError:
        raise
    except OSError:
        os.rename(partial, file)


@contextmanager
def _taken(file: Path) -> Iterator[tuple[BinaryIO, int | None]]:
    """A file to read, and its length. Raises StorePathError."""
    if file == STREAM:
        yield sys.stdin.buffer, None
        return
    with path_errors(file, "expected a file that `kvstore export` made"):
        source = file.open("rb", buffering=BUFFER_BYTES)
        if not file.is_file():
            source.close()
            raise StorePathError(f"{file} is no file: expected one that `kvstore export` made")
    with source, path_errors(file, "it could not be read to its end"):
        yield source, os.fstat(source.fileno()).st_size


@contextmanager
def _bar(total: int | None, quiet: bool) -> Iterator[Callable[[int], Any]]:
    """Told bytes, it shows how far it is on a terminal's stderr."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _tell(context: typer.Context, report: Report, done: str, as_json: bool, err: bool = False) -> None:
    """Print what it came to, and end with its status."""
    lines = [look.dumped(report_object(report, done))] if as_json else report_lines(report, done)
    typer.echo("\n".join(lines), err=err)
    if report.problem is not None:
        say(context, report.problem)
    raise typer.Exit(_status(report))


def _status(report: Report) -> int:
    unknown = FAILED * (sum(report.left.values()) > report.damaged)
    problem = 0 if report.problem is None else status_of(report.problem)
    return DAMAGE * bool(report.damaged) | unknown | problem


def report_lines(report: Report, done: str) -> Sequence[str]:
    """An export or import in words."""
    lines = [f"{count(report.records, 'record')} {done}, {size(report.nbytes)} ({report.nbytes:,} bytes)"]
    if report.kept:
        lines.append(f"{count(report.kept, 'record')} not written: the store has them already (--replace writes them)")
    if report.gone:
        lines.append(f"{count(report.gone, 'record')} went meanwhile: evicted, or deleted")
    if report.transient:
        lines.append(
            f"{count(report.transient, 'record')} looked damaged once, and not again: look at memory, disk and cables"
        )
    if left := sum(report.left.values()):
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(report.left.items()))
        lines.append(f"{count(left, 'record')} left out: {kinds}")
        lines += [f"  {key.hex() or '?'}: {printable(why)}" for key, why in report.told]
        lines += [f"  and {left - len(report.told):,} more"] * (left > len(report.told))
    return lines


def report_object(report: Report, done: str) -> dict[str, Any]:
    """The same for programs."""
    told = [{"key": key.hex(), "why": why} for key, why in report.told]
    problem: KVStoreError | None = report.problem
    return {
        "schema": 1,
        done: report.records,
        "bytes": report.nbytes,
        "kept": report.kept,
        "gone": report.gone,
        "transient": report.transient,
        "left_out": dict(report.left),
        "damaged": report.damaged,
        "told": told,
        "problem": None if problem is None else str(problem),
    }
