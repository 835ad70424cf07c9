"""A check of a store's shards, one after the other: what is found goes to a listener as it is found."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.errors import KVStoreError
from kvstore.fsck.findings import Finding, Progress, Summary
from kvstore.fsck.scan import Options, check
from kvstore.tools.fsck_outcome import Checked, Run, one_line, printable

REDRAW_SECONDS: Final = 0.1
CHECKPOINT_NAME: Final = "fsck.json"
NOT_REACHED: Final = "this shard: --max-duration was over before it was reached; --resume begins with it"


class Listener(Protocol):
    """Who is told of what is found, and of how far it is."""

    def found(self, shard: Path, finding: Finding) -> None:
        """A finding, as soon as it is made."""

    def progress(self, shard: Path, progress: Progress) -> None:
        """How far the check of a shard is."""


def check_shards(run: Run, shards: Sequence[Path], options: Options, listener: Listener) -> None:
    """Check shards and add what comes of it to the run; Ctrl-C and SIGTERM end it, with a checkpoint of the shard that was
    begun. A shard that cannot be checked has its error, and the next one is checked."""
    deadline = math.inf if options.max_duration_s is None else time.monotonic() + options.max_duration_s
    with cancelling(run) as cancelled:
        for shard in shards:
            if cancelled.is_set():
                break
            checked = Checked(shard)
            run.shards.append(checked)
            left = deadline - time.monotonic()
            if left <= 0:
                checked.summary = Summary(0, 0, 0, 0.0, {}, [NOT_REACHED], cancelled=True)
            else:
                bounded = options if left == math.inf else replace(options, max_duration_s=left)
                check_one(checked, bounded, listener, cancelled)


def check_again(run: Run, again: Sequence[Checked], options: Options, listener: Listener) -> None:
    """Check shards that were repaired, anew and wholly."""
    with cancelling(run) as cancelled:
        for checked in again:
            check_one(checked, options, listener, cancelled)


def check_one(checked: Checked, options: Options, listener: Listener, cancelled: threading.Event) -> None:
    """Check one shard; what was known of it is forgotten. KeyboardInterrupt passes, once the check has ended itself."""
    checked.findings, checked.summary, checked.error = [], None, ""
    try:
        for item in check(checked.shard, options, cancelled):
            _take(checked, item, listener)
    except (KVStoreError, OSError) as error:
        checked.error = one_line(error)


def _take(checked: Checked, item: Finding | Progress | Summary, listener: Listener) -> None:
    if isinstance(item, Finding):
        checked.findings.append(item)
        listener.found(checked.shard, item)
    elif isinstance(item, Progress):
        listener.progress(checked.shard, item)
    else:
        checked.summary = item


def oldest_first(shards: Sequence[Path]) -> list[Path]:
    """Shards in the order in which their checkpoints were written, those without one first."""

    def written(shard: Path) -> float:
        try:
            return (shard / CHECKPOINT_NAME).lstat().st_mtime
        except OSError:
            return 0.0

    return sorted(shards, key=written)


@contextmanager
def cancelling(run: Run) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets, for a check to end with a checkpoint and what it found; the second
    one is a KeyboardInterrupt, which ends the block."""
    cancelled = threading.Event()

    def cancel(signum: int, frame: object) -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt
        cancelled.set()

    try:
        with _handled(cancel, signal.SIGINT, signal.SIGTERM):
            yield cancelled
    except KeyboardInterrupt:
        cancelled.set()
    finally:
        run.interrupted |= cancelled.is_set()


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM, which a service manager sends, is a KeyboardInterrupt, as Ctrl-C is."""
    with _handled(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def _handled(handler: Callable[[int, Any], object], *signals: signal.Signals) -> Iterator[None]:
    before = [(number, signal.signal(number, handler)) for number in signals]
    try:
        yield
    finally:
        for number, handled in before:
            signal.signal(number, handled)


def _may_be_terminal() -> bool:
    """Whether stderr is one, or is to be taken for one: rich knows these variables."""
    told = any(name in os.environ for name in ("FORCE_COLOR", "TTY_COMPATIBLE"))
    return told or (sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty())


@contextmanager
def progress_bar() -> Iterator[Callable[[Path, Progress], None]]:
    """A bar on stderr where that is a terminal, redrawn by the calls alone: it has no thread of its own."""
    if not _may_be_terminal():
        yield lambda shard, progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    drawn = 0.0
    with Bar(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(shard: Path, progress: Progress) -> None:
            nonlocal drawn
            if time.monotonic() - drawn >= REDRAW_SECONDS:
                drawn = time.monotonic()
                what = f"{printable(shard.name)}: {progress.stage}"
                bar.update(task, description=what, completed=progress.nbytes, total=progress.total_bytes or None)
                bar.refresh()

        yield show
