"""Which prefix of a request can be used where a model has several kinds of groups: full attention needs every block, a
sliding window those that it looks back at, and a state the one at the prefix's end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError
from kvstore.results import GetResult

Bools = npt.NDArray[np.bool_]


class PrefixBlocks(NamedTuple):
    """A group's blocks of a request, for `KVStore.get_prefix`: hashes and cache block ids of consecutive blocks, and the
    first one's position. A sliding-window group may leave out those before its window, a state all but the last."""

    block_hashes: Sequence[bytes]
    block_ids: Sequence[int]
    start: int = 0


@dataclass(frozen=True, eq=False)
class PrefixResult:
    """tokens: how many leading tokens of the request every group has verified what they need of; groups: what became of each
    group's blocks. Blocks past `tokens` must not be used, verified or not: what belongs to them is not there."""

    tokens: int
    groups: Mapping[int, GetResult]


@dataclass(frozen=True, eq=False)
class Blocks:
    """What a group has of a request. there: by position from `start` on, (blocks,) bool; looks_back: how many tokens before a
    prefix's end are needed of it, None for all."""

    block_size: int
    looks_back: int | None
    there: Bools
    start: int = 0

    @property
    def end(self) -> int:
        """The token at which the last of its blocks ends."""
        return (self.start + self.there.size) * self.block_size


def usable_tokens(groups: Sequence[Blocks]) -> int:
    """The longest prefix, in tokens, of which every group has what is needed; it ends where blocks of all groups end."""
    if not groups:
        return 0
    step = math.lcm(*(group.block_size for group in groups))
    runs = [_runs(group.there) for group in groups]
    end = min(group.end for group in groups) // step * step
    while end and not all(_serves(group, run, end) for group, run in zip(groups, runs, strict=True)):
        end -= step
    return end


def _runs(there: Bools) -> npt.NDArray[np.int64]:
    """How many blocks in a row are there up to each one."""
    at = np.arange(there.size, dtype=np.int64)
    gaps = np.maximum.accumulate(np.where(there, -1, at)) if there.size else at
    return np.asarray(at - gaps, np.int64)


def _serves(group: Blocks, runs: npt.NDArray[np.int64], end: int) -> bool:
    """Whether a group has what a prefix that ends at a token needs."""
    first = 0 if group.looks_back is None else max(0, end - group.looks_back) // group.block_size
    last = end // group.block_size
    if first == last:
        return True
    return first >= group.start and last > group.start and bool(runs[last - 1 - group.start] >= last - first)


def common_block_size(sizes: Mapping[int, int]) -> int:
    """The block size of all groups. Raises ConfigError where they differ."""
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"the groups' block sizes differ, {dict(sizes)}: a prefix is no number of blocks then; ask `match_tokens`"
        )
    return next(iter(sizes.values()))
