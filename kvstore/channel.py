"""One conversation with the I/O process: requests and their answers, each with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from kvstore import errors
from kvstore.errors import KVStoreError
from kvstore.messages import Connection, Kind, Late, Lost, Message, as_words, pack_strings
from kvstore.sharedmemory import SharedMemory
from kvstore.steps import finer_blobs
from kvstore.storage import Question, Unavailable

Notes = Callable[[Mapping[str, Any]], None]
T = TypeVar("T")


@dataclass(eq=False)
class Channel:
    """A connection for one call at a time, and a thread of the I/O process at its other end. Belongs to the call."""

    connection: Connection
    timeout_s: float
    notes: Notes
    """Told what came beside an answer: counts, lines for the log, refused keys."""
    suspect: Callable[[], None]
    """Called where no answer came in time: the process may hang."""
    outstanding: int = 0
    """Requests that were not answered. A connection is of no use to others while there are any."""
    unfinished: bool = False
    """Whether the other side believes that a put goes on."""
    hung_up: bool = False
    """Whether nothing more is said, or understood, here."""
    late: bool = False
    """Whether an answer did not come in time."""
    requests: int = 0

    @property
    def clean(self) -> bool:
        """Whether another call may use it."""
        return not (self.outstanding or self.unfinished or self.hung_up)

    def send(
        self, kind: Kind, fields: Mapping[str, Any], blobs: Sequence[Any] = (), memory: Sequence[SharedMemory] = ()
    ) -> None:
        """Send a request. memory: what it names, whose descriptors go with it. Raises Unavailable."""
        named = {**fields, "memory": [[id(m), m.nbytes] for m in memory]} if memory else fields
        self._send(1, kind, named, blobs, [m.descriptor for m in memory])

    def say(self, kind: Kind, fields: Mapping[str, Any], blobs: Sequence[Any] = ()) -> None:
        """Send what has no answer of its own. Raises Unavailable."""
        self._send(0, kind, fields, blobs, ())

    def _send(
        self, answers: int, kind: Kind, fields: Mapping[str, Any], blobs: Sequence[Any], descriptors: Sequence[int]
    ) -> None:
        if self.hung_up:
            raise Unavailable("the I/O process: the connection was given up")
        # A signal may raise anywhere in here: then nothing may follow what was sent, and no answer need come.
        self.hung_up = True
        self.requests += answers
        self.outstanding += answers
        try:
            self.connection.send(Message(kind, self.requests, fields, blobs, descriptors))
        except (Lost, Late) as error:
            raise Unavailable(f"the I/O process: {error}") from None
        self.hung_up = False

    def receive(self) -> Message:
        """The next answer, or a part of it. Raises Late, Unavailable, and what the I/O process raised of kvstore.errors."""
        # A signal may raise with half a message taken, or all of it and not counted: what comes then is not understood.
        self.hung_up = True
        try:
            message = self.connection.receive(self.timeout_s)
        except Late:
            self.hung_up = False
            raise
        except Lost as error:
            raise Unavailable(f"the I/O process: {error}") from None
        if message.request != self.requests - self.outstanding + 1:
            raise Unavailable("the I/O process answered what it was not asked")
        ended = message.kind in (Kind.DONE, Kind.FAILED)
        self.outstanding -= ended
        self.hung_up = False
        if ended:
            self.notes(message.fields)
        if message.kind == Kind.FAILED:
            raise failure(message.fields)
        return message

    def answer(self) -> Message:
        """`receive`; raises Unavailable also where nothing comes in time."""
        try:
            return self.receive()
        except Late:
            raise self.too_late() from None

    def too_late(self) -> Unavailable:
        """Note that an answer did not come in time; what to raise."""
        self.late = True
        self.suspect()
        return Unavailable(f"the I/O process did not answer within {self.timeout_s:g} seconds")

    def ask(self, kind: Kind, fields: Mapping[str, Any], blobs: Sequence[Any] = ()) -> Message:
        """Send a request and wait for its answer."""
        self.send(kind, fields, blobs)
        return self.answer()


def failure(fields: Mapping[str, Any]) -> Exception:
    """The exception that another process described: one of kvstore.errors, or Unavailable."""
    found = getattr(errors, str(fields.get("error")), None)
    text = str(fields.get("text"))
    if isinstance(found, type) and issubclass(found, KVStoreError):
        return found(text)
    return Unavailable(f"the I/O process: {fields.get('error')}: {text}")


def understood(take: Callable[[], T]) -> T:
    """What `take` makes of an answer. Raises Unavailable where it is none that was asked for."""
    try:
        return take()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Unavailable(f"the I/O process answered what is no answer: {type(error).__name__}: {error}") from None


NO_CHANNEL: Final = cast(
    "Channel", SimpleNamespace(outstanding=0, unfinished=False, hung_up=False, late=False, clean=True)
)
"""A call's before it has begun."""


def question_blobs(question: Question) -> list[Any]:
    """A question's blobs; `start` goes beside them."""
    return [
        question.shape.encode(),
        *pack_strings(question.hashes),
        as_words(question.valid),
        question.parent or b"",
        *finer_blobs(question.finer),
    ]
