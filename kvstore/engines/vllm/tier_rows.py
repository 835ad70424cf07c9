"""The rows of vLLM's host memory as a store sees them: one cache of opaque bytes, and the place of each key in a request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from kvstore.cache import PagedKVCache
from kvstore.checksum import MAX_KV_HEADS_PER_LAYER, PIECE_BYTES
from kvstore.errors import ConfigError
from kvstore.geometry import CHUNK_BYTES
from kvstore.identity import Scalar

GROUP_BYTES: Final = 4
"""A key ends with its KV cache group's number, big-endian."""
HASH_BYTES: Final = 32
PERSON: Final = b"kvstore vllm row"
"""Sets these hashes apart from any other BLAKE2b."""
LAYER: Final = "rows.0"
GROUP: Final = 0
"""The store's one group: vLLM's groups have their rows in one memory, and are told apart by the hash."""


def cut(row_bytes: int) -> tuple[int, int]:
    """Into how many heads a row is cut, and the bytes of each: one, where a chunk of a record holds it.

    Raises ConfigError where no number of equal parts, of 8 bytes times a whole number each, fits.
    """
    least = max(1, -(-row_bytes // CHUNK_BYTES))
    for heads in range(least, MAX_KV_HEADS_PER_LAYER + 1):
        if row_bytes % (heads * PIECE_BYTES) == 0:
            return heads, row_bytes // heads
    raise ConfigError(
        f"vLLM's rows of host memory have {row_bytes} bytes: expected a multiple of {PIECE_BYTES} that falls into equal "
        f"parts of at most {CHUNK_BYTES} bytes"
    )


def describe_rows(primary_kv_view: memoryview) -> PagedKVCache:
    """Host memory of shape (rows, bytes of a row) as a paged cache without a copy: block i is row i, a single token of one
    layer. Raises ConfigError where there is no row."""
    rows, row_bytes = primary_kv_view.shape or (0, 0)
    if not rows or not row_bytes or not primary_kv_view.c_contiguous or primary_kv_view.itemsize != 1:
        raise ConfigError(
            f"vLLM's host memory has the shape {primary_kv_view.shape}: expected rows of bytes without gaps, one at least; "
            "raise cpu_bytes_to_use"
        )
    heads, cell_bytes = cut(row_bytes)
    tensor = torch.frombuffer(primary_kv_view.cast("B"), dtype=torch.uint8).view(rows, heads, 1, cell_bytes)
    # A lookup asks for each row by itself: in a group without a window it would be for a prefix.
    return PagedKVCache.from_tensors({LAYER: tensor}, "BHNC", value_channels=0, windows={GROUP: 2})


def store_hash(key: bytes) -> bytes:
    """The store's block hash of a key, whose first bytes also tell groups apart."""
    return hashlib.blake2b(key, digest_size=HASH_BYTES, person=PERSON).digest()


class Place(NamedTuple):
    """Where a key's row belongs in a request: vLLM's group, and how many rows of that group come before."""

    group: int
    position: int


@dataclass(frozen=True, eq=False)
class Run:
    """Keys whose rows follow each other in a request, and which rows of host memory are theirs."""

    first: Place
    keys: list[bytes]
    rows: list[int]

    @property
    def hashes(self) -> list[bytes]:
        """The store's hashes of the keys."""
        return [store_hash(key) for key in self.keys]


@dataclass(frozen=True)
class Places:
    """Finds the places of keys. tokens: of a row, by vLLM's group."""

    tokens: Mapping[int, int]

    @classmethod
    def of(cls, spec: Any) -> Places:
        """The places in rows of a vLLM OffloadingSpec."""
        return cls({group.group_id: group.tokens_per_block * spec.blocks_per_chunk for group in spec.config.groups})

    def of_key(self, key: bytes, context: Any) -> Place | None:
        """A key's place, the same in every request that has the key, since the hash in it covers all tokens up to its end.
        None where vLLM does not say at which token it ends. context: the request's ReqContext."""
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        end, tokens = context.get_offload_key_position(key), self.tokens.get(group)
        return None if end is None or tokens is None else Place(group, max(0, -(-end // tokens) - 1))

    def runs(self, keys: Iterable[bytes], rows: Sequence[int], context: Any) -> list[Run]:
        """The keys of a job as runs, in their order; those without a place are left out."""
        found: list[Run] = []
        for key, row in zip(keys, rows, strict=True):
            place = self.of_key(key, context)
            if place is None:
                continue
            last = found[-1] if found else None
            if last is None or place != (last.first.group, last.first.position + len(last.keys)):
                last = Run(place, [], [])
                found.append(last)
            last.keys.append(key)
            last.rows.append(int(row))
        return found


def row_identity(spec: Any, row_bytes: int, version: str) -> dict[str, Scalar]:
    """What an identity needs beside the model, since rows are opaque: all ranks' bytes, in an order of vLLM's own.

    spec: vLLM's OffloadingSpec; version: vLLM's.
    """
    config, parallel = spec.config, spec.config.parallel
    sizes = {name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}
    groups = [f"{g.group_id}:{g.tokens_per_block}:{','.join(g.layer_names)}" for g in config.groups]
    described: dict[str, Scalar] = {
        "rows": "vllm offloading",
        "row_bytes": row_bytes,
        "vllm": version,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": hashlib.blake2b("\n".join(groups).encode(), digest_size=16).hexdigest(),
        "cache_dtype": config.model.dtype,
        "cache_layout": config.kv_cache_layout,
        "canonical_layout": config.canonical_layout,
        "replicated_layout": bool(spec.replicated_layout),
        **sizes,
    }
    return {f"tier.{name}": value for name, value in described.items()}
