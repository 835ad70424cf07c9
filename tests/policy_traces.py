"""Requests as serving engines get them, generated: documents of Zipf popularity, chats of several turns, scans."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, merge
from itertools import count

import numpy as np

from tests.policy_simulation import Request

SYSTEM_BLOCKS = 4
"""Blocks of a system prompt that all requests of a generator share."""


class Keys:
    """Keys that nobody else gets."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        self._next += blocks
        return np.arange(self._next - blocks, self._next).astype(np.uint64)


def zipf_documents(requests: int, seed: int = 0, documents: int = 800, gap_s: float = 0.5) -> Iterator[Request]:
    """Questions about documents: the system prompt, a document, one to three blocks of a question."""
    rng, keys, now = np.random.default_rng(seed), Keys(1), 1.7e9
    system = keys.take(SYSTEM_BLOCKS)
    texts = [keys.take(int(blocks)) for blocks in rng.integers(5, 60, documents)]
    popularity = 1 / np.arange(1, documents + 1) ** 0.9
    popularity /= popularity.sum()
    for document in rng.choice(documents, requests, p=popularity).tolist():
        now += rng.exponential(gap_s)
        yield now, np.concatenate((system, texts[document], keys.take(int(rng.integers(1, 4)))))


def chats(requests: int, seed: int = 0, gap_s: float = 1.0, think_s: float = 60.0) -> Iterator[Request]:
    """Chats of about five turns; each turn's request is the last one and a few blocks more."""
    rng, keys, now, order = np.random.default_rng(seed), Keys(2**40), 1.7e9, count()
    system = keys.take(SYSTEM_BLOCKS)
    due: list[tuple[float, int, np.ndarray[tuple[int], np.dtype[np.uint64]]]] = []
    begin = now
    for _ in range(requests):
        if not due or due[0][0] > begin:
            heappush(due, (begin, next(order), np.concatenate((system, keys.take(int(rng.integers(1, 20)))))))
            begin += rng.exponential(5 * gap_s)
        now, _, chat = heappop(due)
        yield now, chat
        if rng.random() < 0.8:
            grown = np.concatenate((chat, keys.take(int(rng.integers(1, 6)))))
            heappush(due, (now + rng.exponential(think_s), next(order), grown))


def scans(requests: int, seed: int = 0, blocks: int = 60, gap_s: float = 1.0) -> Iterator[Request]:
    """A batch job: long requests, none of which comes twice."""
    rng, keys, now = np.random.default_rng(seed), Keys(2**50), 1.7e9
    for _ in range(requests):
        now += rng.exponential(gap_s)
        yield now, keys.take(blocks)


def together(*traces: Iterator[Request]) -> Iterator[Request]:
    """Several traces by time."""
    return merge(*traces, key=lambda request: request[0])
