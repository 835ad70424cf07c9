"""What the scheduler's side of the connector asks of the ranks in a step, and what each rank answers.

Plain data that vLLM sends between its processes. Block hashes are keys of the store: the scheduler has made them, and the
ranks use them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Consecutive blocks of a request in one KV cache group: their hashes, their ids in the cache, the first one's position
    in the request, and the hash before it."""

    group: int
    block_hashes: list[bytes]
    block_ids: list[int]
    start: int
    parent: bytes | None = None


@dataclass(frozen=True)
class Load:
    """Blocks that a request waits for."""

    request_id: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Save:
    """Blocks that are full once this step's forward ran. The scheduler holds them until every rank answered."""

    number: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Step:
    """One step. touches: (group, hashes of a request from its first block on), in the order in which the requests came,
    which is the same for all ranks. idle: no forward runs."""

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    touches: tuple[tuple[int, list[bytes]], ...] = ()
    idle: bool = False


Place = tuple[int, int]
"""A block of a load or save: group, and position in the request."""


@dataclass
class Answer:
    """What became of loads and saves since the last answer; of several ranks once they are added up.

    refused: {request: {block that must not be used: its hash}}. saved: {save: ranks that have done with it}. unsaved: {save:
    blocks that some rank did not store}.
    """

    refused: dict[str, dict[Place, bytes]] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    unsaved: dict[int, set[Place]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.refused or self.saved)

    def refuse(self, request_id: str, blocks: Mapping[Place, bytes]) -> None:
        """Add blocks that must not be used."""
        self.refused.setdefault(request_id, {}).update(blocks)

    def save(self, number: int, unsaved: Iterable[Place], ranks: int = 1) -> None:
        """Add a save that a rank has done with, and what was not stored of it."""
        self.saved[number] = self.saved.get(number, 0) + ranks
        self.unsaved.setdefault(number, set()).update(unsaved)

    def add(self, other: Answer) -> None:
        """Add another rank's answer."""
        for request_id, blocks in other.refused.items():
            self.refuse(request_id, blocks)
        for number, ranks in other.saved.items():
            self.save(number, other.unsaved.get(number, ()), ranks)
