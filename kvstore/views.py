"""One group of an engine's cache as a store sees it: its shape, and how its bytes travel."""

from __future__ import annotations

from kvstore.cache import AnyGroup, PagedKVCache, StateGroup
from kvstore.geometry import encode_geometry
from kvstore.identity import CacheIdentity, Rank, group_fingerprint
from kvstore.prefixes import Blocks
from kvstore.record import record_key
from kvstore.replicas import replica_keys
from kvstore.results import Bools
from kvstore.route import Route
from kvstore.shape import GroupShape
from kvstore.stategeometry import STATES, encode_states
from kvstore.transfer import group_route


class GroupPart:
    """Layers of a group whose blocks are moved together. Immutable: any thread may use it. Raises UnsupportedCache for one
    that no record can hold."""

    def __init__(self, cache: PagedKVCache, group: AnyGroup, identity: CacheIdentity) -> None:
        self.group = group
        self.route: Route = group_route(cache, group)
        prefix = record_key(identity.digest(), group.number, b"")
        fingerprint = group_fingerprint(identity, group.number)
        geometry, flags = _geometry(group)
        self.shape = GroupShape(group.block_size, geometry, fingerprint, prefix, flags)
        assert self.shape.plan.slice_bytes == group.slice_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shape.plan.raw_length


class GroupView(GroupPart):
    """A whole group of a rank's cache, which gets load. written: the layers that this rank's puts store, of which it has the
    first copy; None where it has none. Immutable after construction: any thread may use it."""

    def __init__(self, cache: PagedKVCache, number: int, identity: CacheIdentity, rank: Rank) -> None:
        group = cache.any_group(number)
        super().__init__(cache, group, identity)
        self.written: GroupPart | None = self
        if isinstance(group, StateGroup):
            return
        heads = {layer.name: layer.kv_heads for layer in identity.layers or ()}
        keys = replica_keys(group, rank, heads)
        own = [layer for layer, key in zip(group.layers, keys, strict=True) if key.replica_index == 0]
        if not own:
            self.written = None
        elif len(own) < len(group.layers):
            self.written = GroupPart(cache, group.restricted(own), identity)

    def blocks(self, there: Bools, start: int = 0) -> Blocks:
        """What is there of a request, by position from `start` on: (blocks,) bool."""
        return Blocks(self.shape.block_size, self.group.looks_back, there, start)


def _geometry(group: AnyGroup) -> tuple[bytes, int]:
    """A group's geometry, and the flags of the headers that have it."""
    return (encode_states(group.entries), STATES) if isinstance(group, StateGroup) else (encode_geometry(group), 0)
