"""Counts of the connector in vLLM's own log and metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


class KVStoreStats(KVConnectorStats):
    """Counts since the last report: data is {name: count}, of all ranks once added up."""

    data: dict[str, int]

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: Any) -> KVStoreStats:
        """Add another one's counts; returns this one."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KVStoreMetrics(KVConnectorPromMetrics):
    """The counts as the Prometheus counter `vllm:kvstore_events`, by `event`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter: Any = self._counter_cls(
            name="vllm:kvstore_events",
            documentation="What kvstore's connector loaded, refused and saved, blocks of all ranks added up.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for event, count in transfer_stats_data.items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], event).inc(count)


def register(name: str, module_path: str) -> None:
    """Make a connector known to vLLM by its name alone: its MultiConnector finds the classes of its parts so."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module_path, name)
