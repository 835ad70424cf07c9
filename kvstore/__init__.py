"""kvstore: an offload tier for KV caches that never returns wrong KV.

Damage is a result, never an exception; exceptions (kvstore.errors) are for misuse.
"""

from kvstore.cache import PagedKVCache
from kvstore.checksum import (
    BLOCK_CHECKSUM_BYTES,
    MAX_KV_HEADS_PER_LAYER,
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
    ReplicaKey,
    block_checksum_tags,
    num_valid_tokens,
)
from kvstore.config import StoreConfig
from kvstore.errors import KVStoreError
from kvstore.identity import CacheIdentity, LayerSpec, Rank
from kvstore.results import GetResult, PutResult, Rejection
from kvstore.store import KVStore
from kvstore.transfer import block_checksums, slice_checksums

__version__ = "0.1.0"

__all__ = [
    "BLOCK_CHECKSUM_BYTES",
    "MAX_KV_HEADS_PER_LAYER",
    "CacheIdentity",
    "GetResult",
    "KVChecksumBlocks",
    "KVChecksumGroup",
    "KVChecksumRecord",
    "KVChecksumScheduled",
    "KVStore",
    "KVStoreError",
    "LayerSpec",
    "PagedKVCache",
    "PutResult",
    "Rank",
    "Rejection",
    "ReplicaKey",
    "StoreConfig",
    "block_checksum_tags",
    "block_checksums",
    "num_valid_tokens",
    "slice_checksums",
]
