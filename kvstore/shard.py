"""What the calls of one open shard share on the side of the files: database, keeper, counters, refused keys."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import lmdb

from kvstore.audit import follow_reports
from kvstore.blockdb import BlockDB, Victim
from kvstore.codec import Codec
from kvstore.config import StoreConfig
from kvstore.counters import Counters, Refused
from kvstore.errors import StoreClosed
from kvstore.hostpath import StagingSums
from kvstore.identity import identity_digest
from kvstore.keeper import Keeper
from kvstore.reports import MAX_REPORTS, Reports
from kvstore.shape import GroupShape
from kvstore.statepath import shape_sums

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class Shard:
    """One open shard, shared by every KVStore that is attached to it."""

    db: BlockDB
    identity_json: bytes
    """The canonical JSON of the identity."""
    config: StoreConfig
    codec: Codec
    counters: Counters = field(default_factory=Counters)
    refused: Refused = field(default_factory=Refused)
    keeper: Keeper | None = None
    """None where nothing is evicted: in a reader, and by configuration."""
    _writer: ThreadPoolExecutor | None = None
    _writer_lock: threading.Lock = field(default_factory=threading.Lock)
    _sums: dict[GroupShape, StagingSums] = field(default_factory=dict)

    @cached_property
    def identity_id(self) -> bytes:
        """The id that index keys begin with."""
        return identity_digest(self.identity_json)

    def staging_sums(self, shape: GroupShape) -> StagingSums:
        """Checksums of staged blocks of a shape."""
        known = self._sums.get(shape)
        return known if known is not None else self._sums.setdefault(shape, shape_sums(shape))

    def write_meanwhile(self, call: Callable[..., T], *arguments: object) -> Future[T] | None:
        """Run a call's transaction in the one thread that is kept for that. For calls that have entered the database, and
        leave it after `wait_for_writer`. None where no thread can be had, as when the interpreter ends: nothing is run."""
        given_up = threading.Event()

        def run() -> T:
            if given_up.is_set():
                raise CancelledError
            return call(*arguments)

        try:
            with self._writer_lock:
                if self._writer is None:
                    self._writer = ThreadPoolExecutor(1, "kvstore-writer")
                return self._writer.submit(run)
        except RuntimeError:
            given_up.set()
            return None

    def wait_for_writer(self) -> None:
        """Wait until every transaction that was given to the writer's thread has ended, whatever signals raise meanwhile:
        what they raised last is raised then."""
        raised: BaseException | None = None
        while (writer := self._writer) is not None:
            try:
                wait([writer.submit(int)])
                break
            except RuntimeError:
                # The interpreter ends, and has waited for its threads.
                break
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def close(self) -> None:
        """Close the database. In a fork's child, which has none of the threads, nothing."""
        if self.db.forked:
            return
        self._write_down()
        try:
            self.db.close()
        finally:
            if self._writer is not None and self.db.closing:
                self._writer.shutdown(wait=False)

    def _write_down(self) -> None:
        """Keep what eviction learned. It is a hint: a store that cannot keep it closes all the same."""
        if self.keeper is None:
            return
        token = object()
        try:
            self.db.enter(token)
            if learned := self.keeper.note(last=True):
                self.db.write_notes(learned)
                self.keeper.noted()
        except StoreClosed:
            pass
        except (lmdb.Error, OSError):
            log.exception("%s: what eviction learned could not be written down", self.db.folder)
        finally:
            self.db.calls.discard(token)

    def usage(self) -> dict[str, int]:
        """The database's figures, none where LMDB cannot read them; that is counted and logged."""
        try:
            kept = self.keeper.figures() if self.keeper is not None else {}
            return self.db.usage() | {f"eviction_{name.removeprefix('eviction_')}": n for name, n in kept.items()}
        except lmdb.Error:
            self.counters.add("stats_failed")
            log.exception("%s: the accounting cannot be read", self.db.folder)
            return {}

    def gone(self, keys: Sequence[bytes], victims: Sequence[Victim] = ()) -> None:
        """Records with these index keys were evicted or dropped. victims: what was to go, and if it was not there, is gone
        as well."""
        self.counters.add("evicted", len(keys))
        if self.keeper is not None:
            self.keeper.removed([*keys, *(victim[0] for victim in victims if victim)])

    @cached_property
    def reports(self) -> Reports:
        """What readers tell the writer."""
        return Reports(self.db.folder)

    def follow_reports(self, most: int = MAX_REPORTS) -> None:
        """As the writer, look at records that readers refused, so many at most, and condemn those that are to blame."""
        if reports := self.reports.take(most):
            condemned = follow_reports(self.db, reports)
            self.counters.add("reports_followed", len(reports))
            self.counters.add("reports_condemned", len(condemned))
            if condemned:
                self.condemn(condemned)

    def condemn(self, entries: Sequence[tuple[bytes, bytes, str]]) -> None:
        """Take condemned records out of the store, as BlockDB.condemn; what fails is counted and logged. A reader tells the
        writer."""
        if not self.db.writable:
            self.counters.add("reports_lost", self.reports.add(entries))
            return
        try:
            self.counters.add("quarantine_failed", self.db.condemn(entries))
        except (lmdb.Error, OSError):
            self.counters.add("quarantine_failed", len(entries))
            log.exception("%s: damaged records could not be moved to quarantine", self.db.folder)
        if self.keeper is not None:
            self.keeper.removed([key for key, _, _ in entries])
