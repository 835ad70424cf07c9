"""Whether the files hold together: the STORE file, the meta pages, the length of data.mdb, its trees and its free list.

Nothing is mapped: files are read with plain reads, whatever is in them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

from lmdb.verify import VerifyError, verify

from kvstore.errors import StoreDamaged, UnsupportedFormat
from kvstore.fsck.findings import Finding
from kvstore.plain import check_plain
from kvstore.storefile import (
    DATA_NAME,
    MAX_MAP,
    STORE_NAME,
    StoreState,
    newest_meta,
    parse_store,
    path_errors,
    value_cut_short,
)

LOOKS: Final = 4
"""At a file that a writer changes meanwhile."""
HELD_BYTES: Final = 8 * 2**30
"""Of a file that is walked beside a writer: a snapshot is held for about 0.25 s a GB, and keeps freed pages from use."""
IN_USE: Final = "the store is in use"
PAST_END: Final = ("beyond EOF", "beyond the end of the file", "can hold", "is truncated")
FREE: Final = ("freeDB", "reachable and in the freeDB", "reachable nor in the freeDB")
CONSEQUENCES: Final = re.compile(r": walked \d+|reachable nor in the freeDB|suppressed")
"""What follows from a walk that could not go on."""
MOST_BYTES: Final = 4096
"""Of a STORE file."""
MOST: Final = 200
"""Findings of one file."""
Hold = Callable[[], AbstractContextManager[object]]
"""Keeps the pages of the current transaction, and of later ones, from being used again."""


def store_file(shard: Path) -> tuple[StoreState | None, list[Finding]]:
    """What the STORE file says, and what is wrong with it. Raises StorePathError, StorePermissionError."""
    path, data = shard / STORE_NAME, shard / DATA_NAME
    check_plain(shard)
    with path_errors(path, "expected a shard's folder that can be read"):
        if not path.exists() and not data.exists():
            raise FileNotFoundError(errno.ENOENT, "no shard there")
        begun, text = data.exists() and data.stat().st_size > 0, b""
        if path.exists():
            with path.open("rb") as file:
                text = file.read(MOST_BYTES)
    if not text:
        missing = f"{STORE_NAME} is missing or empty, and {DATA_NAME} is there"
        return None, [Finding("STORE_FILE", missing)] if begun else []
    try:
        return parse_store(text, path), []
    except UnsupportedFormat as error:
        return None, [Finding("UNKNOWN_VERSION", str(error))]
    except StoreDamaged as error:
        return None, [Finding("STORE_FILE", str(error))] if begun else []


def walked(data: Path, hold: Hold = nullcontext) -> tuple[list[Finding], str]:
    """What is wrong with data.mdb, and why it could not be told, empty where it could. A writer may be at work: where a
    first look finds something and the file changed meanwhile, further looks hold a snapshot. Raises OSError."""
    held: Hold = nullcontext
    for _ in range(LOOKS):
        before = _last_transaction(data)
        with held():
            found = _look(data)
        if not found or before == _last_transaction(data):
            return found, ""
        if data.stat().st_size > HELD_BYTES:
            return [], f"lmdb.verify: {IN_USE}, and its file too large to be kept unchanged for so long"
        held = hold
    return found, ""


def _last_transaction(data: Path) -> int:
    try:
        meta = newest_meta(data)[0]
    except StoreDamaged:
        return -1
    return meta.txn if meta else 0


def _look(data: Path) -> list[Finding]:
    try:
        meta, size = newest_meta(data)
    except StoreDamaged as error:
        return [Finding("META", str(error))]
    if meta is None:
        return []
    if meta.map_size >= MAX_MAP:
        return [Finding("META", f"its meta page names a map of {meta.map_size} bytes")]
    pages = meta.last + 1
    short = pages * meta.page_size > size
    problems = _problems(data)
    if short and not problems and (cut := value_cut_short(data)):
        problems = [cut]
    return list(_named(problems, short, f"{size:,} bytes of {pages:,} pages of {meta.page_size:,}"))


def _problems(data: Path) -> list[str]:
    try:
        return list(map(str, verify(str(data), subdir=False)))  # type: ignore[no-untyped-call]
    except VerifyError as error:
        return [str(error)]
    except (ValueError, ArithmeticError, LookupError, MemoryError, RecursionError) as error:
        return [f"it cannot be walked: {type(error).__name__}: {error}"]


def _named(problems: Iterable[str], short: bool, length: str) -> Iterator[Finding]:
    """lmdb.verify's problems by kind. Pages that follow from others are left out. short: whether the file has fewer pages
    than its last transaction knew."""
    kept = list(problems)
    causes = [problem for problem in kept if not CONSEQUENCES.search(problem)]
    for problem in (causes or kept)[:MOST]:
        page = re.search(r"page (\d{1,15})\b", problem)
        number = int(page[1]) if page else None
        kind = _kind(problem, short)
        detail = f"{problem}: {length}" if kind == "FILE_TRUNCATED" else problem
        yield Finding(kind, detail, page=number, pages=int(number is not None))


def _kind(problem: str, short: bool) -> str:
    if short and any(words in problem for words in PAST_END):
        return "FILE_TRUNCATED"
    of_meta = "meta page" in problem.split(":")[0] and "reachable" not in problem
    if of_meta or "committed meta" in problem:
        return "META"
    return "FREELIST" if any(words in problem for words in FREE) else "TREE"
