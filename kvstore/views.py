"""One group of an engine's cache as a store sees it: its shape, and how its bytes travel."""

from __future__ import annotations

from kvstore.cache import CacheGroup, PagedKVCache
from kvstore.geometry import encode_geometry
from kvstore.identity import CacheIdentity, group_fingerprint
from kvstore.record import record_key
from kvstore.route import Route
from kvstore.shape import GroupShape
from kvstore.transfer import route_of


class GroupView:
    """Immutable after construction: any thread may use it. Raises UnsupportedCache for a group that no record can hold."""

    def __init__(self, cache: PagedKVCache, number: int, identity: CacheIdentity) -> None:
        self.group: CacheGroup = cache.group(number)
        self.route: Route = route_of(cache, number)
        prefix = record_key(identity.digest(), number, b"")
        self.shape = GroupShape(
            self.group.block_size, encode_geometry(self.group), group_fingerprint(identity, number), prefix
        )
        assert self.shape.plan.slice_bytes == self.group.slice_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shape.plan.raw_length
