"""kvstore: an offload tier for KV caches that never returns wrong KV.

Damage is a result, never an exception; exceptions (kvstore.errors) are for misuse.

A name is imported from its module when it is first asked for: what works on checksums and kernels alone then runs where
no database is installed, and a submodule loads nothing that it does not need.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.cache import PagedKVCache
    from kvstore.checksum import (
        BLOCK_CHECKSUM_BYTES,
        MAX_KV_HEADS_PER_LAYER,
        block_checksum_tags,
        num_valid_tokens,
    )
    from kvstore.checksumming import KVChecksumOffload, KVChecksumPending, KVChecksumWorker
    from kvstore.comparing import KVChecksumComparison, KVChecksumRange, compare
    from kvstore.comparing_sides import KVChecksumSide
    from kvstore.config import StoreConfig
    from kvstore.errors import KVStoreError
    from kvstore.identity import CacheIdentity, LayerSpec, Rank, StateSpec
    from kvstore.prefixes import PrefixBlocks, PrefixResult
    from kvstore.protocol import (
        KVChecksumBlocks,
        KVChecksumGroup,
        KVChecksumRecord,
        KVChecksumScheduled,
        ReplicaKey,
        decode_records,
        encode_records,
    )
    from kvstore.results import GetResult, PutResult, Rejection
    from kvstore.states import StateTensor
    from kvstore.store import KVStore
    from kvstore.transfer import block_checksums, kv_checksum_platform_supported, slice_checksums

__version__ = "0.1.0"

__all__ = [
    "BLOCK_CHECKSUM_BYTES",
    "MAX_KV_HEADS_PER_LAYER",
    "CacheIdentity",
    "GetResult",
    "KVChecksumBlocks",
    "KVChecksumComparison",
    "KVChecksumGroup",
    "KVChecksumOffload",
    "KVChecksumPending",
    "KVChecksumRange",
    "KVChecksumRecord",
    "KVChecksumScheduled",
    "KVChecksumSide",
    "KVChecksumWorker",
    "KVStore",
    "KVStoreError",
    "LayerSpec",
    "PagedKVCache",
    "PrefixBlocks",
    "PrefixResult",
    "PutResult",
    "Rank",
    "Rejection",
    "ReplicaKey",
    "StateSpec",
    "StateTensor",
    "StoreConfig",
    "block_checksum_tags",
    "block_checksums",
    "compare",
    "decode_records",
    "encode_records",
    "kv_checksum_platform_supported",
    "num_valid_tokens",
    "slice_checksums",
]

_MODULES = {
    "cache": ("PagedKVCache",),
    "checksum": ("BLOCK_CHECKSUM_BYTES", "MAX_KV_HEADS_PER_LAYER", "block_checksum_tags", "num_valid_tokens"),
    "checksumming": ("KVChecksumOffload", "KVChecksumPending", "KVChecksumWorker"),
    "comparing": ("KVChecksumComparison", "KVChecksumRange", "compare"),
    "comparing_sides": ("KVChecksumSide",),
    "config": ("StoreConfig",),
    "errors": ("KVStoreError",),
    "identity": ("CacheIdentity", "LayerSpec", "Rank", "StateSpec"),
    "prefixes": ("PrefixBlocks", "PrefixResult"),
    "protocol": (
        *("KVChecksumBlocks", "KVChecksumGroup", "KVChecksumRecord", "KVChecksumScheduled", "ReplicaKey"),
        *("decode_records", "encode_records"),
    ),
    "results": ("GetResult", "PutResult", "Rejection"),
    "states": ("StateTensor",),
    "store": ("KVStore",),
    "transfer": ("block_checksums", "kv_checksum_platform_supported", "slice_checksums"),
}
"""The imports above, once more, for `__getattr__`."""
_HOMES = {name: f"kvstore.{module}:{name}" for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = resolve_name(_HOMES[name])
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
