"""Engine processes of the campaigns: forked, so that one costs milliseconds, and watched, so that none takes a campaign
with it. The campaign's own process opens no store."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Say = Callable[..., None]
"""say(word, *values): one line to the campaign, which has it even if the process dies right after."""
PATIENCE_S = 20.0
ERROR = "error"


@dataclass
class Ending:
    """How an engine process ended: everything that it said, and what it died of."""

    said: list[list[Any]] = field(default_factory=list)
    status: int = 0
    """Its exit status; below 0 the signal that ended it."""
    hung: bool = False
    trace: list[str] = field(default_factory=list)
    """Where its threads were when it hung."""

    @property
    def crash(self) -> str:
        """What it died of, "" where it ended as it should."""
        if self.hung:
            return "\n".join(["hangs", *self.trace])
        errors = [values[0] for word, *values in self.said if word == ERROR]
        if self.status < 0:
            return signal.Signals(-self.status).name
        return errors[-1] if errors else f"exit status {self.status}" if self.status else ""

    def all(self, word: str) -> list[list[Any]]:
        """The values of all lines that begin with a word."""
        return [values for first, *values in self.said if first == word]


class Child:
    """A forked process that runs `action(say)`. Owned by its campaign, which must `kill` or `join` it."""

    def __init__(self, action: Callable[[Say], object]) -> None:
        self._reader, writer = os.pipe()
        self.ending, self._rest, self._ended = Ending(), b"", False
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            _run(action, writer)
        os.close(writer)

    def fileno(self) -> int:
        """What `select` waits for."""
        return self._reader

    def listen(self, timeout: float) -> bool:
        """Take what it says next; False where it said nothing in time, or is gone."""
        if not select.select([self._reader], [], [], timeout)[0]:
            return False
        data = os.read(self._reader, 2**16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.ending.said += [json.loads(line) for line in lines if line.startswith(b"[")]
        self.ending.trace += [line.decode() for line in lines if not line.startswith(b"[")]
        self._ended = not data
        return bool(data)

    def join(self, patience: float = PATIENCE_S) -> Ending:
        """Wait for its end; one that takes longer is killed."""
        deadline = time.monotonic() + patience
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            self.listen(left)
        if not self._ended:
            self.ending.hung = True
            os.kill(self.pid, signal.SIGUSR1)
            self.listen(1.0)
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def kill(self) -> Ending:
        """End it at once; what it said before counts, also what nobody has read yet."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> Ending:
        """Wait for its end, however long that takes."""
        while not self._ended:
            self.listen(PATIENCE_S)
        os.close(self._reader)
        self.ending.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.ending


def _run(action: Callable[[Say], object], writer: int) -> None:
    """The forked child's whole life. It ends without the parent's exit handlers."""
    status = 1
    try:
        logging.getLogger().handlers[:] = [logging.NullHandler()]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        faulthandler.register(signal.SIGUSR1, writer, all_threads=True)
        action(lambda *values: _send(writer, values))
        status = 0
    except BaseException:
        _send(writer, (ERROR, traceback.format_exc()))
    finally:
        os._exit(status)


def _send(writer: int, values: tuple[Any, ...]) -> None:
    data = json.dumps(values).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def in_child(action: Callable[[Say], object], patience: float = PATIENCE_S) -> Ending:
    """Run `action(say)` in a process of its own, to its end."""
    return Child(action).join(patience)
