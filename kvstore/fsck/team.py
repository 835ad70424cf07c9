"""Scanning processes as the one that started them sees them: given tasks, listened to, ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore import errors
from kvstore.fsck.mark import Mark
from kvstore.fsck.options import Options

START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kvstore.fsck.scanner import main; main(sys.argv[2:])"
)
END_PATIENCE_S: Final = 2.0
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""No matrices are multiplied, and starting threads takes time."""
MAX_MESSAGE: Final = 2**22
READ_BYTES: Final = 2**16
FATAL: Final = (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals by which a mapped file ends a process. Others come from outside."""


@dataclass(frozen=True)
class Ended:
    """What is in the file ended a process. why: in words; bus: by SIGBUS; what, key: its mark."""

    why: str
    bus: bool
    what: int
    key: bytes


def order(shard: Path, options: Options) -> dict[str, Any]:
    """What a scanning process must know. Each of several has its part of the rate."""
    rate = options.rate_limit / options.jobs if options.rate_limit else 0
    return {
        "shard": str(shard),
        "stage": options.stage,
        "prefix": options.prefix.hex(),
        "device": options.device,
        "rate": rate,
    }


class Child:
    """One scanning process. Belongs to one thread. Raises OSError where it cannot be started."""

    def __init__(self) -> None:
        self._mark = Mark()
        command = [sys.executable, "-c", START, json.dumps(sys.path), str(self._mark.fd)]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | ONE_THREAD,
                bufsize=0,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._mark.fd],
            )
        except BaseException:
            self._mark.close()
            raise
        assert self._process.stdin is not None, "it was asked for"
        assert self._process.stdout is not None, "it was asked for"
        self._in, self.out = self._process.stdin, self._process.stdout
        os.set_blocking(self.out.fileno(), False)
        self._received = b""
        self.idle = True

    def begin(self, said: dict[str, Any]) -> None:
        """Say what is to be checked, once and first: what `order` made. Until then the process opens no file of a store."""
        self.give(said)
        self.idle = True

    def give(self, task: dict[str, Any]) -> None:
        """Send a task; the answer to it ends with `done`, `failed` or `refused`, or with the process."""
        self.idle = False
        # A process that has ended says so by the end of its output.
        with suppress(BrokenPipeError):
            self._in.write(json.dumps(task).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any] | Ended]:
        """What the process said and was not read yet. Raises StoreUnavailable where it ended for a reason of its own."""
        data = self.out.read(READ_BYTES)
        if data is None:
            return
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        yield from map(json.loads, lines)
        if not data or len(self._received) > MAX_MESSAGE:
            yield self._ended()

    def _ended(self) -> Ended:
        try:
            status = self._process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        words = _status_in_words(status)
        if -status not in FATAL:
            raise errors.StoreUnavailable(f"a scanning process ended: {words}: check the shard again")
        return Ended(words, status == -signal.SIGBUS, *self._mark.get())

    def dismiss(self) -> None:
        """Have the process end."""
        with suppress(BrokenPipeError):
            self._in.close()
        self._process.terminate()

    def end(self) -> None:
        """End the process if it has not."""
        self.dismiss()
        try:
            self._process.wait(END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.out.close()
        self._mark.close()


def _status_in_words(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status}"


_ready: list[Child] = []
"""Processes that were started and not told yet what to check."""


@contextmanager
def ready(count: int) -> Iterator[None]:
    """Have so many scanning processes start while the block finds out what they are to check: the teams made in it take
    them. Those that none took are ended behind it. For one thread at a time."""
    try:
        # What cannot be started now is started when it is needed, and says then why it cannot.
        with suppress(OSError):
            for _ in range(count):
                _ready.append(Child())
        yield
    finally:
        for child in _ready:
            child.dismiss()
        while _ready:
            _ready.pop().end()


class Team:
    """The scanning processes of one check. Belongs to one thread."""

    def __init__(self, said: dict[str, Any], most: int) -> None:
        self._order, self._most = said, most
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()

    def idle(self) -> Child | None:
        """A process that has nothing to do, started where there are fewer than there may be; None where all are busy. Raises
        OSError."""
        for child in self._children:
            if child.idle:
                return child
        if len(self._children) == self._most:
            return None
        child = _ready.pop(0) if _ready else Child()
        self._children.append(child)
        child.begin(self._order)
        self._selector.register(child.out, selectors.EVENT_READ, child)
        return child

    def hear(self, timeout_s: float) -> Iterator[tuple[Child, dict[str, Any] | Ended]]:
        """What processes say, after a wait of at most so long. One that has ended is reaped. Raises the error of kvstore that
        a process could not go on for."""
        for key, _ in self._selector.select(timeout_s):
            child: Child = key.data
            for message in child.messages():
                if isinstance(message, Ended):
                    self._drop(child)
                elif "refused" in message:
                    raise refusal(*message["refused"])
                elif "done" in message or "failed" in message:
                    child.idle = True
                yield child, message

    def _drop(self, child: Child) -> None:
        self._selector.unregister(child.out)
        self._children.remove(child)
        child.end()

    def end(self) -> None:
        """End all processes."""
        for child in self._children:
            child.dismiss()
        for child in list(self._children):
            self._drop(child)
        self._selector.close()


def refusal(name: str, text: str) -> Exception:
    """The exception that a process raised, by its name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.KVStoreError):
        return kind(text)
    return errors.StorePathError(text)
