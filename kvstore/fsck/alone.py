"""A shard to oneself: no engine writes it, and nobody reads it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmdb.verify import VerifyError, verify

from kvstore.errors import StoreBusy, StoreLocked
from kvstore.storefile import DATA_NAME, StoreFile, StoreState, boot_id, path_errors


@contextmanager
def alone(shard: Path) -> Iterator[StoreFile]:
    """Hold the writer's lock of an intact STORE file, and data.mdb against readers. Raises StoreLocked, StoreBusy,
    StorePathError, StoreDamaged, UnsupportedFormat."""
    with locked_errors(shard):
        store_file = StoreFile(shard, True)
    try:
        held = hold_data(shard)
        try:
            yield store_file
        finally:
            os.close(held)
    finally:
        store_file.close()


@contextmanager
def locked_errors(shard: Path) -> Iterator[None]:
    """Say of StoreLocked who has it, and that a repair needs it."""
    try:
        yield
    except StoreLocked:
        raise StoreLocked(
            f"{shard}: {_who(shard / 'STORE')} writes it: a repair needs the store to itself: stop the engine first"
        ) from None


def hold_data(shard: Path) -> int:
    """A descriptor of data.mdb that keeps readers out until it is closed. Raises StoreBusy, StorePathError."""
    data = shard / DATA_NAME
    with path_errors(data, "expected a shard that a writer has made"):
        held = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise StoreBusy(
            f"{shard}: {_who(data)} reads it: a repair needs the store to itself: stop what has it open"
        ) from None
    return held


def _who(path: Path) -> str:
    """Which processes hold a lock on a file, as the kernel lists it."""
    inode = path.stat().st_ino
    rows = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    pids = {row[4] for row in rows if "->" not in row and len(row) > 5 and row[5].endswith(f":{inode}")}
    return f"process {', '.join(sorted(pids))}" if pids else "another process"


def tree_problem(shard: Path) -> str | None:
    """Why data.mdb's trees may not be written to, None where they hold together. Nobody writes meanwhile. Memory: two
    bytes a page."""
    try:
        problems = verify(str(shard / DATA_NAME), subdir=False)  # type: ignore[no-untyped-call]
    except (VerifyError, OSError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
        problems = [str(error) or type(error).__name__]
    return str(problems[0]) if problems else None


def lost_writes(state: StoreState | None) -> bool:
    """Whether writes that were not synced may have been lost, in any order: no tree can be trusted then."""
    return state is not None and not state.clean and state.boot_id != boot_id()
