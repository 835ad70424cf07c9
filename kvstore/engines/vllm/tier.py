"""KVStoreTier: a store below vLLM's own offloading, verified in host memory. docs/vllm.md is its page."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.engines.vllm.identity import unstable_hashes
from kvstore.engines.vllm.logs import speak_in_vllms_log
from kvstore.engines.vllm.options import Options
from kvstore.engines.vllm.tier_config import find_engine, tier_identity
from kvstore.engines.vllm.tier_lookup import Lookups
from kvstore.engines.vllm.tier_rows import GROUP, Place, Places, Run, describe_rows, store_hash
from kvstore.engines.vllm.versions import check_version
from kvstore.errors import KVStoreError
from kvstore.results import GetResult, PutResult
from kvstore.store import KVStore

check_version()

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager  # noqa: E402

log = logging.getLogger(__name__)
METRIC: Final = "vllm:kvstore_tier_rows"
LABEL: Final = "outcome"
CHOSEN: Final = {"not_admitted"}
"""Reasons for which a row is not stored that are no failure."""


@dataclass(frozen=True, eq=False)
class Part:
    """A run of a job, and the store's answer to come."""

    run: Run
    future: Future[Any]


@dataclass(frozen=True, eq=False)
class Transfer:
    """A job that was submitted. Keys in no part have failed."""

    job: Any
    parts: list[Part]
    begun: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> bool:
        """Whether every answer is there."""
        return all(part.future.done() for part in self.parts)


class KVStoreTier(SecondaryTierManager):
    """A secondary tier of vLLM's TieringOffloadingSpec: `{"type": "KVStoreTier", "module_path": "kvstore.engines.vllm",
    "path": ...}` in its secondary_tiers, with the options of `Options`.

    vLLM's rows of host memory, (rows, bytes) with the KV of one offloaded chunk of all ranks each, are opaque to the store.
    A row that is loaded is verified where it lies, before vLLM is told that it is there; vLLM's own copy from there to the
    device is not. vLLM owns the tier and the memory, calls one method at a time, and ends with `shutdown`. No other method
    but `drain_jobs` waits for a disk: the store's I/O process may end or hang, which costs misses and failed jobs.

    Raises EngineError for a version of vLLM that is not known, ConfigError for options, and what opening a store raises.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        speak_in_vllms_log()
        chosen = Options.of(options)
        self._places = Places.of(offloading_spec)
        self._counts = Counter[str]()
        self._reported = Counter[str]()
        self._names: dict[str, dict[Place, bytes]] = {}
        self._transfers: list[Transfer] = []
        self._store: KVStore | None = _open(offloading_spec, chosen, primary_kv_view)
        self._lookups = Lookups(self._store)
        # A request waits for its loads: they have threads of their own, so that no store is before them.
        self._loading = ThreadPoolExecutor(chosen.store_config.threads, "kvstore-tier-load")
        log.info("rows of %d bytes are kept in %s", self.block_size_bytes, self._store.folder)

    # Requests.

    def on_new_request(self, req_context: Any) -> Any:
        """A request came: its chunks are offloaded as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what the request was told."""
        self._lookups.forget(req_context.req_id)
        self._names.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY until the store has answered; MISS where that takes longer than a second, and for a key that
        could not be loaded, until it is stored again."""
        place = self._places.of_key(key, req_context)
        if place is None or self._store is None:
            return LookupResult.MISS
        self._names.setdefault(req_context.req_id, {})[place] = key
        found = self._lookups.lookup(key, place, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Tell eviction, in its turn, of keys that a request uses."""
        for run in self._places.runs(keys, range(len(keys)), req_context):
            self._lookups.touch(run.keys)

    def on_schedule_end(self, context: Any) -> None:
        """Ask the store for the keys of this step's lookups."""
        self._lookups.flush()

    # Jobs.

    def submit_store(self, job_metadata: Any) -> None:
        """Store the job's rows; what is in the store already, and good, is left as it is."""
        names = self._names.setdefault(job_metadata.req_context.req_id, {})
        self._submit(job_metadata, lambda store, run: _put(store, run, names))

    def submit_load(self, job_metadata: Any) -> None:
        """Load the job's keys into its rows. Of a row that is not verified then, the contents are undefined."""
        self._submit(job_metadata, lambda store, run: self._loading.submit(_get, store, run))

    def _submit(self, job: Any, begin: Callable[[KVStore, Run], Any]) -> None:
        transfer = Transfer(job, [])
        self._transfers.append(transfer)
        if self._store is None:
            return
        runs = self._places.runs(job.keys, job.chunk_ids, job.req_context)
        if lost := len(job.keys) - sum(len(run.keys) for run in runs):
            log.warning("job %s: %d rows are not moved: vLLM does not say at which tokens they end", job.job_id, lost)
        for run in runs:
            try:
                transfer.parts.append(Part(run, begin(self._store, run)))
            except KVStoreError as error:
                log.warning("job %s: %d rows are not moved: %s", job.job_id, len(run.keys), error)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that ended since the last call. A load with some good rows has those in successful_keys."""
        ended = [transfer for transfer in self._transfers if transfer.done]
        self._transfers = [transfer for transfer in self._transfers if transfer not in ended]
        return [self._load_result(t) if t.job.is_promotion else self._store_result(t) for t in ended]

    def _load_result(self, transfer: Transfer) -> Any:
        good: list[bytes] = []
        for part in transfer.parts:
            if isinstance(result := _result(part), GetResult):
                good += [key for key, verified in zip(part.run.keys, result.verified, strict=True) if verified]
                self._counts["rejected"] += len(result.rejected)
                for index, rejection in result.rejected.items():
                    log.warning("row of key %s: %s: %s", part.run.keys[index].hex(), rejection.kind, rejection.detail)
        known = set(good)
        bad = [key for key in transfer.job.keys if key not in known]
        self._lookups.refuse(bad)
        self._counts["promoted"] += len(good)
        self._counts["not_promoted"] += len(bad)
        return self._job_result(transfer, not bad, len(good), good if bad else None)

    def _store_result(self, transfer: Transfer) -> Any:
        good: list[bytes] = []
        reasons = Counter[str]()
        for part in transfer.parts:
            if isinstance(result := _result(part), PutResult):
                there = result.stored | result.present
                good += [key for key, kept in zip(part.run.keys, there, strict=True) if kept]
                reasons.update(result.failed.values())
                self._counts["stored"] += int(result.stored.sum())
        self._lookups.stored(good)
        chosen = sum(reasons.pop(reason, 0) for reason in CHOSEN)
        failed = len(transfer.job.keys) - len(good) - chosen
        if reasons:
            log.warning("job %s: %d rows are not stored: %s", transfer.job.job_id, failed, dict(reasons))
        self._counts["not_stored"] += failed
        return self._job_result(transfer, not failed, len(good), None)

    def _job_result(self, transfer: Transfer, success: bool, rows: int, good: list[bytes] | None) -> Any:
        return JobResult(
            job_id=transfer.job.job_id,
            success=success,
            successful_keys=good,
            transfer_time=time.monotonic() - transfer.begun,
            transfer_bytes=rows * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait until no job touches host memory; `get_finished_jobs` then has every result."""
        wait([part.future for transfer in self._transfers for part in transfer.parts])

    # Figures, and the end.

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """One counter, of rows by what became of them."""
        text = "Rows of vLLM's host memory by what became of them: " + ", ".join(OUTCOMES)
        return {METRIC: OffloadingCounterMetadata(documentation=text, labelnames=(LABEL,))}

    def get_stats(self) -> Any:
        """What was counted since the last call, None where that is nothing."""
        new = self._counts - self._reported
        self._reported = self._counts.copy()
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for outcome, count in new.items():
            stats.increase_counter(METRIC, count, (outcome,))
        return stats

    def counts(self) -> dict[str, int]:
        """Rows since the start by what became of them, by OUTCOMES."""
        return {outcome: self._counts[outcome] for outcome in OUTCOMES}

    def shutdown(self) -> None:
        """End all jobs, close the store and give host memory back. Twice is allowed.

        Raises StoreBusy where calls have not ended after a minute: they may still use the memory then.
        """
        store = self._store
        if store is None:
            return
        self.drain_jobs()
        self._lookups.close()
        self._loading.shutdown()
        store.close()
        # vLLM cannot release its memory while a tensor views it.
        self._store = None
        log.info("%s is closed: %s", store.folder, self.counts())


OUTCOMES: Final = ("promoted", "not_promoted", "rejected", "stored", "not_stored")
"""rejected: of those that were not promoted, those whose record or row failed a check."""


def _open(spec: Any, options: Options, primary_kv_view: memoryview) -> KVStore:
    cache, engine = describe_rows(primary_kv_view), find_engine(spec)
    if engine is not None and (notice := unstable_hashes(engine.vllm_config)) is not None:
        log.warning("%s", notice)
    identity = tier_identity(options, spec, cache, engine)
    return KVStore(options.folder(spec.config.parallel), cache, identity, options.store_config, io=options.io)


def _get(store: KVStore, run: Run) -> GetResult:
    return store.get_blocks(run.hashes, run.rows, run.first.position, group=GROUP)


def _put(store: KVStore, run: Run, names: dict[Place, bytes]) -> Future[PutResult]:
    """names: the request's keys by place, where the one before the run may be; the run's own are added."""
    group, position = run.first
    before = names.get(Place(group, position - 1))
    names.update({Place(group, position + i): key for i, key in enumerate(run.keys)})
    parent = None if before is None else store_hash(before)
    return store.submit_put_blocks(run.hashes, run.rows, position, group=GROUP, parent=parent)


def _result(part: Part) -> GetResult | PutResult | None:
    """What the store says of a run; None, and logged, where the call failed."""
    try:
        answer: GetResult | PutResult = part.future.result()
        return answer
    except KVStoreError as error:
        log.warning("%d rows are not moved: %s", len(part.run.keys), error)
    except Exception:
        log.exception("%d rows are not moved", len(part.run.keys))
    return None
