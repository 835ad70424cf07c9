"""Counts of the connector in vLLM's own log and metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


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
