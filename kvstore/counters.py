"""What a store object counts, and which keys it refuses."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.record import SEQUENCE_FIELD

MAX_REFUSED: Final = 2**16
MAX_NEW: Final = 2**12


class Counters:
    """Named counts. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` more."""
        if amount:
            with self._lock:
                self._counts[name] += amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Count each name's amount more."""
        for name, amount in amounts.items():
            self.add(name, amount)

    def figures(self) -> dict[str, int]:
        """All counts, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def take(self) -> dict[str, int]:
        """All counts, which are 0 from here on."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


class Refused:
    """Keys whose record was refused: a miss in this store object until another record lies there.

    Bound to the sequence number in the index entry, and to MAX_REFUSED keys, the oldest going first (such a record
    would be refused again). Any thread may call it.
    """

    def __init__(self, entries: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._lock = threading.Lock()
        self._sequences: OrderedDict[bytes, bytes] = OrderedDict(entries)
        self._new: deque[bytes] = deque(maxlen=MAX_NEW)

    def add(self, key: bytes, value: bytes) -> None:
        """Refuse the index entry `value` under this key."""
        self.add_sequence(key, value[SEQUENCE_FIELD])

    def add_sequence(self, key: bytes, sequence: bytes) -> None:
        """Refuse what lies under this key with this sequence number, as the index entry has it."""
        with self._lock:
            self._sequences[key] = sequence
            self._new.append(key)
            if len(self._sequences) > MAX_REFUSED:
                self._sequences.popitem(last=False)

    def holds(self, key: bytes, value: bytes) -> bool:
        """Whether this index entry was refused."""
        return bool(self._sequences) and self._sequences.get(key) == value[SEQUENCE_FIELD]

    def discard(self, key: bytes) -> None:
        """The key was put again."""
        with self._lock:
            self._sequences.pop(key, None)

    def take_new(self) -> list[tuple[bytes, bytes]]:
        """Entries that were added since the last time; of very many, the newest."""
        if not self._new:
            return []
        with self._lock:
            new = [self._new.popleft() for _ in range(len(self._new))]
            return [(key, self._sequences[key]) for key in new if key in self._sequences]

    def entries(self) -> list[tuple[bytes, bytes]]:
        """Keys and the sequence numbers that are refused under them."""
        with self._lock:
            return list(self._sequences.items())

    def __len__(self) -> int:
        return len(self._sequences)
