"""KVStoreConnector: vLLM keeps its KV in a store, verified where it lies. docs/vllm.md is its page."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Final

from kvstore.engines.vllm.adapters import Adapters
from kvstore.engines.vllm.caches import Described, describe, scheduler_side
from kvstore.engines.vllm.identity import identity_of, unstable_hashes
from kvstore.engines.vllm.jobs import Answer, Step
from kvstore.engines.vllm.logs import speak_in_vllms_log
from kvstore.engines.vllm.lookup import Lookup
from kvstore.engines.vllm.options import Options, check_attention, check_supported, failure_policy_notice, roles
from kvstore.engines.vllm.scheduler import Scheduler
from kvstore.engines.vllm.specs import groups_of
from kvstore.engines.vllm.versions import check_version
from kvstore.engines.vllm.worker import Worker
from kvstore.identity import CacheIdentity
from kvstore.store import KVStore

check_version()

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes  # noqa: E402

from kvstore.engines.vllm.stats import KVStoreMetrics, KVStoreStats, register  # noqa: E402

log = logging.getLogger(__name__)
register("KVStoreConnector", "kvstore.engines.vllm")
LOOKUP_TIMEOUT_S: Final = 0.25
"""How long the scheduler waits for an I/O process, once: then it finds nothing until the process has answered."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's work, from the scheduler to the ranks."""

    step: Step = field(default_factory=Step)


@dataclass
class AnswerMetadata(KVConnectorWorkerMetadata):
    """What ranks did, from them to the scheduler."""

    answer: Answer

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's; returns this one."""
        if isinstance(other, AnswerMetadata):
            self.answer.add(other.answer)
        return self


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler at start: vLLM's scheduler does not know every layer."""

    identity: CacheIdentity


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector over a kvstore: `"kv_connector": "KVStoreConnector", "kv_connector_module_path":
    "kvstore.engines.vllm"`.

    vLLM makes one in its scheduler and one in each rank, and owns them; each is called by one thread. A rank's saves full
    blocks behind the forward that computed them and loads into blocks that no forward uses; the scheduler's looks the blocks
    of requests up, and holds those that are being saved. No call waits for a disk.

    Raises EngineError for a version of vLLM that is not known, ConfigError for options, UnsupportedCache for what cannot be
    stored, and what opening a store raises.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        speak_in_vllms_log()
        transfer = vllm_config.kv_transfer_config
        self._config, self._groups_config = vllm_config, kv_cache_config
        self._options = Options.of(transfer.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        check_attention(vllm_config)
        self._stores, self._loads = roles(transfer)
        self._worker: Worker | None = None
        self._scheduler: Scheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            log.warning("%s", failure_policy_notice(transfer))
            if (notice := unstable_hashes(vllm_config)) is not None:
                log.warning("%s", notice)
            self._scheduler = self._make_scheduler()
            if getattr(vllm_config, "weight_transfer_config", None) is not None:
                log.warning("weights may be changed in place: what this engine stores is of use to it alone")
                self._scheduler.forget()

    # What a rank does.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the rank's shard over the engine's own cache."""
        described = describe(self._config, self._groups_config, kv_caches)
        options = self._options
        store = KVStore(
            options.folder(self._config.parallel_config),
            described.cache,
            self._identity(described),
            options.store_config,
            rank=described.rank,
            io=options.io,
        )
        log.info("KV of rank %s is kept in %s", described.rank.folder, store.folder)
        self._worker = Worker(store, len(self._groups_config.kv_cache_groups), options.store_config.threads)

    def get_handshake_metadata(self) -> RankMetadata | None:
        """The identity, with all layers, for the scheduler; not beside other connectors, with which the way is shared."""
        if self._worker is None or self._config.kv_transfer_config.kv_connector != type(self).__name__:
            return None
        return RankMetadata(self._worker.store.identity)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs once all it asked for is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are saved whole, behind the forward."""

    def wait_for_save(self) -> None:
        """Begin the step's saves."""
        if self._worker is not None:
            self._worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The loads that ended."""
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.finished()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that must not be used."""
        return set() if self._worker is None else self._worker.take_bad_ids()

    def build_connector_worker_meta(self) -> AnswerMetadata | None:
        """What the rank did, for the scheduler."""
        answer = None if self._worker is None else self._worker.take_answer()
        return None if answer is None else AnswerMetadata(answer)

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        """Counts since the last call."""
        counts = {} if self._worker is None else self._worker.take_counts()
        return KVStoreStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats | None:
        """Counts from what was sent between processes."""
        return KVStoreStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVStoreMetrics:
        """The counts for Prometheus."""
        return KVStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # What the scheduler does.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the manager of the requests' blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduling.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take the ranks' identity, which is what the scheduler looks for."""
        told = [each.identity for each in metadata.values() if isinstance(each, RankMetadata)]
        if len({identity.digest() for identity in told}) > 1:
            log.error("the ranks' identities differ, so that nothing is found: %s", [i.canonical_json() for i in told])
        if told and self._scheduling.lookup is not None:
            self._scheduling.lookup.begin(told[0])

    def on_new_request(self, request: Any) -> None:
        """A request came."""
        self._scheduling.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the store has past the computed ones; they are loaded between steps."""
        found = self._scheduling.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks to load into."""
        self._scheduling.allocated(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's work for the ranks."""
        if scheduler_output.has_sync_kv_loads:
            self._scheduling.leave_out(scheduler_output.num_scheduled_tokens)
        return StepMetadata(self._scheduling.step(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks did."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, AnswerMetadata):
            self._scheduling.answered(meta.answer)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; blocks that are being saved are held apart from it."""
        self._scheduling.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Whether vLLM shall go on stepping: blocks are held for saves."""
        return self._scheduling.pending

    def has_pending_block_frees(self) -> bool:
        """Whether waiting a little is better than preempting."""
        return self._scheduling.frees_soon

    def reset_cache(self) -> bool:
        """Weights were changed in place: nothing that was stored so far is used from here on. False while blocks are held for
        saves: vLLM has kept its own prefix cache then."""
        self._scheduling.forget()
        return not self._scheduling.pending

    def loading(self, lora_request: Any) -> AbstractContextManager[None]:
        """vLLM loads an adapter within."""
        return self._scheduling.adapters.loading(lora_request)

    # What both do.

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a later miss."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The cache's memory must stay where it is."""
        return False

    def stats(self) -> dict[str, int]:
        """Counters of the store of this side, and of the scheduler's work."""
        if self._worker is not None:
            return {**self._worker.store.stats(), **self._worker.totals}
        lookup = self._scheduling.lookup
        store = {} if lookup is None or lookup.store is None else lookup.store.stats()
        return {**store, **self._scheduling.counts}

    def shutdown(self) -> None:
        """Finish saves in flight and close."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        return metadata.step if isinstance(metadata, StepMetadata) else Step()

    @property
    def _scheduling(self) -> Scheduler:
        assert self._scheduler is not None, "this side of the connector belongs to a rank"
        return self._scheduler

    def _identity(self, described: Described) -> CacheIdentity:
        return identity_of(
            self._config, self._options, described.layers, described.device, described.layout, described.backend
        )

    def _reader(self, identity: CacheIdentity | None) -> KVStore:
        """A reader of all ranks' shards, whose answers the scheduler waits for: it takes late ones for misses. identity: the
        ranks'; None: as vLLM's configuration has it here."""
        described = scheduler_side(self._config, self._groups_config, identity.layers if identity else None)
        known = self._identity(described) if identity is None else identity
        config = replace(self._options.store_config, io_timeout_s=LOOKUP_TIMEOUT_S)
        folder = self._options.folder(self._config.parallel_config)
        return KVStore(folder, described.cache, known, config, mode="r", io="process")

    def _make_scheduler(self) -> Scheduler:
        sizes = {group.number: group.block_size for group in groups_of(self._groups_config) if group.specs}
        _, hash_block_size = resolve_kv_cache_block_sizes(self._groups_config, self._config)
        return Scheduler(
            Lookup(self._reader, sizes) if self._loads else None,
            sizes,
            hash_block_size,
            self._config.parallel_config.world_size,
            self._loads,
            self._stores,
            self._make_adapters(),
        )

    def _make_adapters(self) -> Adapters:
        """vLLM's LoRA on a CPU computes requests without an adapter by the last slot's where both are in a batch."""
        lora, device = self._config.lora_config, self._config.device_config.device_type
        mixed = lora is not None and device == "cpu"
        if mixed:
            log.warning("LoRA on a CPU: KV of requests without an adapter is neither loaded nor stored")
        if lora is not None:
            _watch_loads()
        return Adapters(lora, fixed=self._options.adapters == "fixed", plain=not mixed)


_watched: set[type] = set()
"""Classes of vLLM's whose loads of adapters are watched; of this process."""


def _watch_loads() -> None:
    """Let connectors know when their engine loads an adapter: vLLM tells nobody of it."""
    from vllm.v1.engine.core import EngineCore

    if EngineCore in _watched:
        return
    _watched.add(EngineCore)
    load = EngineCore.add_lora

    @wraps(load)
    def add_lora(core: Any, lora_request: Any) -> bool:
        with ExitStack() as loading:
            for connector in _own(core.scheduler.connector):
                loading.enter_context(connector.loading(lora_request))
            return bool(load(core, lora_request))

    EngineCore.add_lora = add_lora


def _own(connector: Any) -> Iterator[KVStoreConnector]:
    """Of an engine's connector, what is kvstore's: itself, or some of a MultiConnector's."""
    if isinstance(connector, KVStoreConnector):
        yield connector
    for each in getattr(connector, "_connectors", ()):
        yield from _own(each)
