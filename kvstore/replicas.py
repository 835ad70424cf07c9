"""Which copy of its heads a rank has, where several tensor-parallel ranks have the same ones."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.checksum import ReplicaKey
from kvstore.errors import UnsupportedCache
from kvstore.group import CacheGroup, LayerCache
from kvstore.identity import Rank


def replica_key(layer: LayerCache, rank: Rank, kv_heads: int | None) -> ReplicaKey:
    """(copies, which of them) of the heads of a rank's layer; (1, 0) where no other rank has them.

    kv_heads: the layer's KV heads in the unsharded model, None where nobody knows. Where the ranks have more heads than
    the model, `copies` ranks in a row have the same ones, as engines deal them out (docs/checksum.md, section 4); what the
    cache was told (`replicas`) goes before. Raises UnsupportedCache where that cannot be known, or does not fit.
    """
    if layer.replica is not None:
        return layer.replica
    if rank.tp_size == 1:
        return ReplicaKey(1, 0)
    if kv_heads is None and layer.heads == 1:
        raise UnsupportedCache(
            f"layer {layer.name} has one KV head on each of {rank.tp_size} ranks, and nobody said how many the model has: "
            "they may be copies of one; pass kv_heads={name: KV heads in the unsharded model} with the cache"
        )
    held = rank.tp_size * layer.heads
    if kv_heads is None or held <= kv_heads:
        return ReplicaKey(1, 0)
    copies, left = divmod(held, kv_heads)
    if left or kv_heads % layer.heads or layer.own_first_head != rank.tp_rank // copies * layer.heads:
        raise UnsupportedCache(
            f"layer {layer.name}: rank {rank.tp_rank} of {rank.tp_size} has the heads {layer.own_first_head} to "
            f"{layer.own_first_head + layer.heads - 1} of {kv_heads}: expected an equal share for each rank, or as many "
            "copies of each head on ranks in a row; pass replicas={name: (copies, which of them)} with the cache"
        )
    return ReplicaKey(copies, rank.tp_rank % copies)


def replica_keys(group: CacheGroup, rank: Rank, kv_heads: Mapping[str, int]) -> list[ReplicaKey]:
    """`replica_key` of each of a group's layers. kv_heads: by layer name, of the unsharded model; what the cache was told
    serves where a name is not in it. Raises UnsupportedCache."""
    return [replica_key(layer, rank, kv_heads.get(layer.name, layer.kv_heads)) for layer in group.layers]
