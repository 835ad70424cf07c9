"""Which way a group of Mamba states travels, by where it lies."""

from __future__ import annotations

from kvstore.cache import PagedKVCache, StateGroup
from kvstore.route import HostRoute, Route
from kvstore.statepath import state_path


def state_route(cache: PagedKVCache, group: StateGroup) -> Route:
    """The way of a group of states."""
    return HostRoute(state_path(group), group)
