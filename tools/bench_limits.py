"""What the machine can do with the same bytes: the limits that the store is measured against."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np


class Limits:
    """Two buffers and a file of nbytes each, all touched. The file is overwritten in place, in runs of batch_bytes:
    the size of the store's transactions. Owns the file and removes it. Raises OSError."""

    def __init__(self, path: Path, nbytes: int, batch_bytes: int) -> None:
        self._path, self._nbytes, self._batch = path, nbytes, batch_bytes
        self._one = np.full(nbytes, 1, np.uint8)
        self._two = np.full(nbytes, 2, np.uint8)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def memcpy(self) -> None:
        """One np.copyto of all the bytes."""
        np.copyto(self._two, self._one)

    def pwrite(self) -> None:
        """Write all the bytes to the page cache."""
        for start in range(0, self._nbytes, self._batch):
            self._write(start)

    def pwrite_sync(self) -> None:
        """Write all the bytes, with an fdatasync after each run."""
        for start in range(0, self._nbytes, self._batch):
            self._write(start)
            os.fdatasync(self._fd)

    def pread(self) -> None:
        """Read all the bytes from the page cache."""
        seen, at = self._two.data, 0
        while at < self._nbytes:
            got = os.preadv(self._fd, [seen[at : at + self._batch]], at)
            if not got:
                raise OSError(5, "the benchmark's file is shorter than what was written", str(self._path))
            at += got

    def _write(self, start: int) -> None:
        end = min(start + self._batch, self._nbytes)
        seen = self._one.data
        while start < end:
            start += os.pwrite(self._fd, seen[start:end], start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def base_folder(path: Path | None, error: type[Exception]) -> Path:
    """Where temporary files go: this folder, by default $TMPDIR or the current one. Raises `error` where there is none."""
    base = path or Path(os.environ.get("TMPDIR") or ".")
    if not base.is_dir():
        raise error(f"--path {base}: expected a folder that is there already; a temporary one is made in it")
    return base


def file_system(path: Path) -> str:
    """The type of the file system that holds a path, such as "ext4" or "tmpfs"; "" where the kernel does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    mounts = [line.split() for line in lines]
    return next((m[m.index("-") + 1] for m in mounts if m[2] == wanted), "")
