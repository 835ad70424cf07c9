"""A KV connector that serves nothing: it describes vLLM's real caches and writes what it found into a folder, as JSON.

The rank fills two blocks of each group with noise, stores them, loads them into two others and compares; then the scheduler
looks them up by its own description.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvstore import KVStore, StoreConfig
from kvstore.engines.vllm.caches import Described, describe, scheduler_side
from kvstore.engines.vllm.identity import identity_of, unstable_hashes
from kvstore.engines.vllm.options import Options, check_supported, kv_checksum_enabled
from tests.support import block_hashes

SMALL = StoreConfig(capacity_bytes=8 << 20)
HASHES = block_hashes(2)


class CapturingConnector(KVConnectorBase_V1, SupportsHMA):
    """Writes scheduler.json and rank-<shard>.json into the folder `path`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config, self.groups = vllm_config, kv_cache_config
        self.options = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            described = scheduler_side(vllm_config, kv_cache_config)
            self.write("scheduler", described, {"matched": self.matched(described)})

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        described = describe(self.config, self.groups, kv_caches)
        shapes = {name: [list(t.shape), list(t.stride()), str(t.dtype)] for name, t in kv_caches.items()}
        self.write(
            f"rank-{described.rank.folder}",
            described,
            {"tensors": shapes, "same": self.round_trip(described, kv_caches)},
        )

    def write(self, side: str, described: Described, more: dict[str, Any]) -> None:
        """What a side knows."""
        identity = self.identity(described)
        cache = described.cache
        found = {
            "identity": identity.canonical_json(),
            "rank": described.rank.folder,
            "block_sizes": {str(n): size for n, size in described.block_sizes.items()},
            "groups": {str(n): [layer.name for layer in group.layers] for n, group in cache.groups.items()},
            "windows": {str(n): group.window for n, group in cache.groups.items()},
            "layout": described.layout,
            "backend": described.backend,
            "device": described.device,
            "unstable": unstable_hashes(self.config),
            "checksummed": kv_checksum_enabled(self.config),
        }
        Path(self.options.path, f"{side}.json").write_text(json.dumps(found | more))

    def identity(self, described: Described) -> Any:
        return identity_of(
            self.config, self.options, described.layers, described.device, described.layout, described.backend
        )

    def round_trip(self, described: Described, kv_caches: dict[str, torch.Tensor]) -> bool:
        """Whether blocks 1 and 2 come back bit by bit in the blocks 4 and 3."""
        same, generator = True, torch.Generator().manual_seed(7)
        with KVStore(self.store, described.cache, self.identity(described), SMALL, rank=described.rank) as store:
            for number, group in described.cache.groups.items():
                tensors = [kv_caches[layer.name] for layer in group.layers]
                for tensor in tensors:
                    noise = torch.randint(0, 256, (2, *tensor[0].view(torch.uint8).shape), generator=generator)
                    tensor[1:3] = noise.to(torch.uint8).view(tensor.dtype)
                if set(store.put_blocks(HASHES, [1, 2], group=number).failed.values()) == {"replica"}:
                    continue  # another rank stores what both have
                assert store.get_blocks(HASHES, [4, 3], group=number).verified.all()
                same &= all(torch.equal(t[[1, 2]].view(torch.uint8), t[[4, 3]].view(torch.uint8)) for t in tensors)
        return same

    def matched(self, described: Described) -> dict[str, int]:
        """How many of the blocks that the rank stored are found in each group."""
        with KVStore(self.store, described.cache, self.identity(described), SMALL, mode="r") as store:
            return {str(number): store.match_prefix({number: HASHES}) for number in described.cache.groups}

    @property
    def store(self) -> Path:
        return Path(self.options.path, "store")

    # What vLLM asks for besides.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
