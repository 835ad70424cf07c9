"""How a store calls an eviction policy, in short, and what the tests of policies ask it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from kvstore.eviction import POLICIES
from kvstore.eviction_types import NO_KEY, Admission, Chain, Policy

T0 = 1.7e9
BOTH = pytest.mark.parametrize("name", POLICIES)
"""Most requirements hold for every policy."""


def keys(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


def chain(*numbers: int, parent: int = NO_KEY, start: int = 0) -> Chain:
    return Chain(keys(*numbers), parent, start)


def every(blocks: Chain) -> Any:
    return np.ones(blocks.keys.size, bool)


def put(policy: Policy, blocks: Chain, now: float = T0, size: int = 1, room: int = 10**9) -> Admission:
    """What the store does for a put of blocks that are not here."""
    admission = policy.admit(blocks, every(blocks), size, room, now)
    policy.removed(admission.victims)
    policy.written(blocks, admission.admitted, size, now)
    return admission


def serve(policy: Policy, blocks: Chain, now: float = T0, size: int = 1, room: int = 10**9) -> Admission:
    """What the store does for a request of which nothing is here."""
    policy.request(blocks, now)
    return put(policy, blocks, now, size, room)


def here(policy: Policy, numbers: Iterable[int]) -> list[int]:
    wanted = list(numbers)
    return [number for number, found in zip(wanted, policy.resident(keys(*wanted)), strict=True) if found]


def in_order(policy: Policy, now: float = T0 + 1) -> list[int]:
    """All victims, as the policy would give them up."""
    victims: list[int] = policy.victims(2**62, now).tolist()
    return victims
