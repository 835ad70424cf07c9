"""A forked process that does a campaign's dangerous work: a fault may kill it, and the campaign counts that."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final, Self

PATIENCE: Final = 60.0
PR_SET_PTRACER: Final = 0x59616D61
ANYBODY: Final = ctypes.c_ulong(2**64 - 1)


class Died(Exception):
    """The servant ended by a signal, or hung and was killed; the text says which."""


class Raised(Exception):
    """The servant's work raised; the text is the traceback."""


class Servant:
    """Answers `ask(*arguments)` with `work(*arguments)`, one call at a time, in a fork of this process.

    Owned by one thread. After Died it is gone: make another. Nothing that it inherited may be a store that is open.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self._pipe, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            _serve(theirs, work)
        theirs.close()
        self._gone = False

    def send(self, *arguments: Any) -> None:
        """Begin a call; `answer` waits for it."""
        with suppress(BrokenPipeError):
            self._pipe.send(arguments)

    def answer(self) -> Any:
        """What the work returned. Raises Died or Raised."""
        try:
            if not self._pipe.poll(PATIENCE):
                os.kill(self.pid, signal.SIGKILL)
                raise Died(f"no answer in {PATIENCE:.0f} seconds; {self._end()}")
            good, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Died(self._end()) from None
        if not good:
            raise Raised(value)
        return value

    def ask(self, *arguments: Any) -> Any:
        """Do one call. Raises Died or Raised."""
        self.send(*arguments)
        return self.answer()

    def _end(self) -> str:
        self._gone = True
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with status {os.waitstatus_to_exitcode(status)}"

    def close(self) -> None:
        """Let it end; twice is allowed. It is told so: other servants hold the pipe too, which it would wait on."""
        if not self._gone:
            with suppress(BrokenPipeError):
                self._pipe.send(None)
            self._end()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Crew:
    """Several servants that do the same work on numbered faults, at once. Answers come in the order of the numbers.

    work: number -> answer; died: (number, how) -> the answer in place of one whose servant died or raised.
    """

    def __init__(self, work: Callable[[int], Any], died: Callable[[int, Died | Raised], Any]) -> None:
        self._work, self._died = work, died
        self._idle: list[Servant] = []
        self._busy: deque[tuple[int, Servant]] = deque()

    def begin(self, number: int) -> Iterator[Any]:
        """Begin a fault, once one of the servants is idle; the answers that came until then."""
        if len(self._busy) >= (os.cpu_count() or 1):
            yield self._finish()
        servant = self._idle.pop() if self._idle else Servant(self._work)
        servant.send(number)
        self._busy.append((number, servant))

    def end(self) -> Iterator[Any]:
        """Answers that are still to come. The servants then end, so that later ones inherit what is made meanwhile."""
        while self._busy:
            yield self._finish()
        while self._idle:
            self._idle.pop().close()

    def _finish(self) -> Any:
        number, servant = self._busy.popleft()
        try:
            answer = servant.answer()
        except Died as died:
            return self._died(number, died)
        except Raised as raised:
            answer = self._died(number, raised)
        self._idle.append(servant)
        return answer


def _serve(pipe: Connection, work: Callable[..., Any]) -> None:
    """The servant's life. It never returns: what follows the fork belongs to the parent."""
    status = 1
    try:
        logging.getLogger("kvstore").addHandler(logging.NullHandler())
        logging.getLogger("kvstore").propagate = False
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANYBODY, 0, 0, 0)
        while (arguments := pipe.recv()) is not None:
            pipe.send(_outcome(work, arguments))
        status = 0
    except (EOFError, OSError):
        pass
    finally:
        os._exit(status)


def _outcome(work: Callable[..., Any], arguments: Any) -> tuple[bool, Any]:
    try:
        return True, work(*arguments)
    except Exception:
        return False, traceback.format_exc()
