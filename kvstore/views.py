"""One group of an engine's cache as a store sees it: its shape, and how its bytes travel."""

from __future__ import annotations

from kvstore.cache import AnyGroup, PagedKVCache, StateGroup
from kvstore.geometry import encode_geometry
from kvstore.identity import CacheIdentity, group_fingerprint
from kvstore.record import record_key
from kvstore.route import Route
from kvstore.shape import GroupShape
from kvstore.stategeometry import STATES, encode_states
from kvstore.transfer import route_of


class GroupView:
    """Immutable after construction: any thread may use it. Raises UnsupportedCache for a group that no record can hold."""

    def __init__(self, cache: PagedKVCache, number: int, identity: CacheIdentity) -> None:
        self.group: AnyGroup = cache.any_group(number)
        self.route: Route = route_of(cache, number)
        prefix = record_key(identity.digest(), number, b"")
        geometry, flags = _geometry(self.group)
        self.shape = GroupShape(self.group.block_size, geometry, group_fingerprint(identity, number), prefix, flags)
        assert self.shape.plan.slice_bytes == self.group.slice_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shape.plan.raw_length


def _geometry(group: AnyGroup) -> tuple[bytes, int]:
    """A group's geometry, and the flags of the headers that have it."""
    return (encode_states(group.entries), STATES) if isinstance(group, StateGroup) else (encode_geometry(group), 0)
