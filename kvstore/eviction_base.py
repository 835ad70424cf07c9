"""What every eviction policy does: it keeps entries of blocks and ghosts, their chains, pins and leaves, in arrays."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from kvstore.eviction_choice import EXPIRED, NO_CANDIDATES, Candidates, Choice, Ranking
from kvstore.eviction_entries import GHOST, MAX_COUNT, ORPHAN, PINNED, RESIDENT, ROOT, WANTED, Entries
from kvstore.eviction_leaves import Leaves
from kvstore.eviction_order import NOWHERE, Places
from kvstore.eviction_table import Bools, Ints, Slots, UInt64Array
from kvstore.eviction_types import NO_KEY, TICKS_PER_S, Admission, Chain, Clock, Records, Touches

MIN_GHOSTS: Final = 1000
NO_ENTRY: Final = -2
"""A parent that is named and has no entry."""
MAX_SIZE: Final = 2**32 - 2


class ArrayPolicy:
    """A policy over arrays; what it must do, and its threads, are those of `Policy`. Subclasses say how blocks compare.

    classes, edges: of the cells, see Leaves. ghosts_per_block and max_ghosts bound the ghosts, MIN_GHOSTS are always
    kept. max_age_s: blocks that were not requested for so long go first.
    """

    def __init__(
        self, classes: int, edges: Ints, ghosts_per_block: int, max_ghosts: int, max_age_s: float | None
    ) -> None:
        self.entries = Entries()
        self.leaves = Leaves(self.entries, classes, edges)
        self.clock = Clock()
        self._ghosts_per_block, self._max_ghosts = ghosts_per_block, max_ghosts
        self._max_age_ticks = None if max_age_s is None else int(max_age_s * TICKS_PER_S)
        self._pins: Counter[int] = Counter()

    # --- what subclasses say -------------------------------------------------------------------------------------

    def _aged(self, classes: Ints, buckets: Ints) -> None:
        """Blocks left buckets of age."""

    def _asked(self, slots: Slots) -> None:
        """A request names these entries, as they were before it."""

    def _classes(self, counts: Ints, known: int, total: int) -> Ints:
        """The class of each block of a request of `total` blocks that begins with `known` known ones."""
        return np.zeros(counts.size, np.int64)

    def _loaded_classes(self, counts: Ints, stored: Ints) -> Ints:
        """The class of blocks whose records say how often they were asked for, and a class."""
        return np.zeros(counts.size, np.int64)

    def _ranks(self) -> tuple[Ints, Ints, int]:
        """The rank of each cell, that of new blocks in it, and the number of places that go by age alone."""
        same = np.zeros((1, 1), np.int64)
        return same, same, self.entries.touches.end

    def snapshot(self) -> bytes:
        return b""

    def restore(self, data: bytes) -> bool:
        return not data

    # --- requests ------------------------------------------------------------------------------------------------

    def request(self, chain: Chain, now: float) -> None:
        self._advance(now)
        self._ask(chain)

    def _advance(self, now: float) -> None:
        self._aged(*self.leaves.advance(self.clock.tick(now)))

    def _ask(self, chain: Chain) -> None:
        self._expire_ghosts()
        rows = _first_rows(chain.keys)
        keys, parents = chain.keys[rows], chain.parents()[rows]
        slots = self.entries.find(keys)
        known = slots >= 0
        known[known] = self.entries.count[slots[known]] > 0
        self._asked(slots[known])
        fresh = self._make(keys, slots)
        self.leaves.unlist(slots)
        counts = np.minimum(self.entries.count[slots].astype(np.int64) + 1, MAX_COUNT)
        self.entries.count[slots] = counts
        leading = int(known.argmin()) if not known.all() else known.size
        self.entries.kind[slots] = self._classes(counts, chain.start + leading, chain.start + keys.size)
        self._touch(slots)
        self.entries.queue_ghosts(fresh[::-1])
        flags = self.entries.flags
        flags[slots[flags[slots] & GHOST != 0]] |= WANTED
        late = (flags[slots] & RESIDENT != 0) & (self.entries.parent[slots] == ROOT) & (parents != NO_KEY)
        if late.any():
            self._join(slots[late], parents[late])
        self.leaves.list(slots)

    def _make(self, keys: UInt64Array, slots: Slots) -> Slots:
        """Entries where slots has none, filled in there; the new ones."""
        missing = slots < 0
        fresh = self.entries.make(keys[missing])
        slots[missing] = fresh
        return fresh

    def _touch(self, slots: Slots) -> None:
        """Of a request the tail first, so that it is the oldest. The entries are not listed."""
        if self.entries.touch(slots[::-1], self.leaves.tick):
            self.leaves.moved()

    def _expire_ghosts(self) -> None:
        self.entries.expire_ghosts(
            max(MIN_GHOSTS, min(self._max_ghosts, self._ghosts_per_block * self.entries.resident))
        )

    def resident(self, keys: UInt64Array) -> Bools:
        return self.entries.have(self.entries.find(keys), RESIDENT)

    def touches(self, keys: UInt64Array, now: float) -> Touches:
        self._advance(now)
        slots = self.entries.find(keys)
        known = slots >= 0
        known[known] = self.entries.touched[slots[known]] != NOWHERE
        ticks = np.full(keys.size, self.leaves.tick, np.uint32)
        ticks[known] = self.entries.touches.ticks[self.entries.touched[slots[known]]]
        counts = np.where(known, self.entries.count[slots], 1).astype(np.int64)
        classes = np.where(known, self.entries.kind[slots], 0).astype(np.int64)
        return Touches(self.clock.seconds(ticks), np.maximum(counts, 1), classes)

    # --- choices -------------------------------------------------------------------------------------------------

    def _ranking(self) -> Ranking:
        rank, new_rank, old = self._ranks()
        limit = self._max_age_ticks
        expired = 0 if limit is None else self.leaves.until(self.leaves.tick - limit - 1)
        return Ranking(self.leaves, rank, new_rank, expired, old)

    def victims(self, nbytes: int, now: float) -> UInt64Array:
        self._advance(now)
        return self.entries.key[Choice(self._ranking(), NO_CANDIDATES).take(nbytes)]

    def expired(self, now: float) -> UInt64Array:
        self._advance(now)
        ranking = self._ranking()
        if not ranking.expired:
            return np.empty(0, np.uint64)
        slots = np.array(Choice(ranking, NO_CANDIDATES).take(2**63, EXPIRED), np.int64)
        return self.entries.key[slots[self.entries.touched[slots] < ranking.expired]]

    def admit(self, chain: Chain, absent: Bools, sizes: int | Ints, room: int, now: float) -> Admission:
        self._advance(now)
        self._adopt(chain, ~absent, sizes)
        slots = self.entries.find(chain.keys)
        if not self.entries.have(slots[absent], WANTED | RESIDENT).all():
            self._ask(chain)
            slots = self.entries.find(chain.keys)
        new = self._candidates(chain, slots, absent, np.broadcast_to(np.asarray(sizes, np.int64), absent.shape))
        need = sum(new.sizes) - room
        taken = Choice(self._ranking(), new).take(need) if need > 0 and new.slots else []
        mine = set(new.slots)
        lost = np.array([slot for slot in taken if slot in mine], np.int64)
        self.entries.flags[lost] &= ~np.uint8(WANTED)
        self.entries.queue_ghosts(lost)
        victims = [slot for slot in taken if slot not in mine]
        return Admission(absent & ~np.isin(slots, lost), self.entries.key[victims])

    def _adopt(self, chain: Chain, held: Bools, sizes: int | Ints) -> None:
        """Take blocks to be here that the store has, whatever the policy was told before."""
        if not self.resident(chain.keys[held]).all():
            self._written(chain, held, sizes)

    def _candidates(self, chain: Chain, slots: Slots, absent: Bools, sizes: Ints) -> Candidates:
        resident = self.entries.have(slots, RESIDENT)
        rows = _first_rows(chain.keys)
        rows = rows[(absent & ~resident)[rows]]
        named = chain.parents()[rows]
        parents = np.where(named == NO_KEY, ROOT, self.entries.find(named))
        parents[(parents == ROOT) & (named != NO_KEY)] = NO_ENTRY
        own, above = slots[rows].tolist(), parents.tolist()
        hopeless = self._hopeless(own, above)
        capped = np.minimum(sizes[rows], MAX_SIZE)
        return Candidates(own, above, capped.tolist(), hopeless, np.unique(slots[absent & resident]).tolist())

    def _hopeless(self, slots: list[int], parents: list[int]) -> list[bool]:
        """Which new blocks, parents first, would lack an earlier block that is neither here nor on its way."""
        found: dict[int, bool] = {}
        for slot, parent in zip(slots, parents, strict=True):
            above = parent in found or parent == ROOT
            flags = 0 if above or parent == NO_ENTRY else int(self.entries.flags[parent])
            here = bool(flags & (RESIDENT | WANTED)) and not flags & ORPHAN
            found[slot] = found.get(parent, False) if above else not here
        return list(found.values())

    # --- what became of blocks -----------------------------------------------------------------------------------

    def written(self, chain: Chain, stored: Bools, sizes: int | Ints, now: float) -> None:
        self._advance(now)
        self._expire_ghosts()
        self._written(chain, stored, sizes)

    def _written(self, chain: Chain, stored: Bools, sizes: int | Ints) -> None:
        rows = _first_rows(chain.keys)
        rows = rows[stored[rows]]
        slots = self.entries.find(chain.keys[rows])
        # A block that was only ever named as another's parent is known, and in no order of touches.
        if (slots < 0).any() or (self.entries.touched[slots] == NOWHERE).any():
            self._ask(chain)
            slots = self.entries.find(chain.keys[rows])
        here = self.entries.have(slots, RESIDENT)
        given = np.broadcast_to(np.asarray(sizes, np.int64), stored.shape)[rows]
        capped = np.clip(given, 0, MAX_SIZE).astype(np.uint32)
        self.entries.size[slots[here]] = capped[here]
        if not here.all():
            self._settle(slots[~here], chain.parents()[rows[~here]], capped[~here])

    def _settle(self, slots: Slots, parents: UInt64Array, sizes: Places) -> None:
        """Ghosts, parents before children, become resident."""
        entries = self.entries
        entries.unqueue_ghosts(slots)
        entries.flags[slots] = RESIDENT
        entries.size[slots] = sizes
        entries.resident += slots.size
        if self._pins:
            pinned = [key in self._pins for key in entries.key[slots].tolist()]
            entries.flags[slots[pinned]] |= PINNED
        self._join(slots, parents)
        if entries.orphans and (entries.children[slots] > 0).any():
            self._revive()
        self.leaves.list(slots)

    def _join(self, slots: Slots, parents: UInt64Array) -> None:
        """Make resident blocks, not listed now, children of blocks with these keys."""
        entries, named = self.entries, parents != NO_KEY
        keys = np.unique(parents[named])
        different = entries.find(keys)
        self._make(keys, different)
        above = np.full(slots.size, ROOT, np.int64)
        above[named] = entries.find(parents[named])
        self.leaves.unlist(different)
        entries.link(slots, above)
        self.leaves.list(different)
        above = entries.parent[slots].astype(np.int64)
        named = above != ROOT
        missing = entries.flags[above] & (RESIDENT | ORPHAN) != RESIDENT
        if (missing & named).any():
            self._mark_orphans()

    def _mark_orphans(self) -> None:
        """Find all blocks that lack an earlier one, by pointers that jump twice as far each time: a pass over all
        entries, since a block knows its parent and not its children."""
        entries = self.entries
        size = entries.used
        resident = entries.flags[:size] & RESIDENT != 0
        up = np.where(
            resident & (entries.parent[:size] != ROOT), entries.parent[:size], np.arange(size, dtype=np.int32)
        )
        orphan = resident & ~resident[up]
        while True:
            orphan |= orphan[up]
            further = up[up]
            if np.array_equal(further, up):
                break
            up = further
        self._set_orphans(np.flatnonzero(orphan & (entries.flags[:size] & ORPHAN == 0)), True)

    def _revive(self) -> None:
        """Find orphans that lack no earlier block any more."""
        entries = self.entries
        orphans = np.flatnonzero(entries.flags & ORPHAN)
        while True:
            above = entries.parent[orphans]
            fine = (above == ROOT) | (entries.flags[above] & (RESIDENT | ORPHAN) == RESIDENT)
            if not fine.any():
                break
            self._set_orphans(orphans[fine], False)
            orphans = orphans[~fine]

    def _set_orphans(self, slots: Slots, orphan: bool) -> None:
        self.leaves.unlist(slots)
        self.entries.flags[slots] ^= np.uint8(ORPHAN)
        self.entries.orphans += slots.size if orphan else -slots.size
        self.leaves.list(slots)

    def removed(self, keys: UInt64Array) -> None:
        entries = self.entries
        slots = entries.find(keys[_first_rows(keys)])
        slots = slots[entries.have(slots, RESIDENT)]
        self.leaves.unlist(slots)
        entries.resident -= slots.size
        entries.orphans -= int(np.count_nonzero(entries.flags[slots] & ORPHAN))
        entries.flags[slots] = GHOST
        entries.size[slots] = NOWHERE
        freed = entries.unlink(slots)
        entries.queue_ghosts(slots)
        ghosts = entries.flags[freed] & GHOST != 0
        entries.queue_ghosts(freed[ghosts & (entries.size[freed] == NOWHERE)])
        self.leaves.list(freed[~ghosts])
        if (entries.children[slots] > 0).any():
            self._mark_orphans()

    def pin(self, keys: UInt64Array) -> None:
        self._pins.update(keys.tolist())
        slots = self.entries.find(np.unique(keys))
        slots = slots[self.entries.have(slots, RESIDENT)]
        self.leaves.unlist(slots)
        self.entries.flags[slots] |= PINNED

    def unpin(self, keys: UInt64Array) -> None:
        self._pins.subtract(key for key in keys.tolist() if key in self._pins)
        ended = [key for key in dict.fromkeys(keys.tolist()) if key in self._pins and self._pins[key] <= 0]
        for key in ended:
            del self._pins[key]
        slots = self.entries.find(np.array(ended, np.uint64))
        slots = slots[self.entries.have(slots, RESIDENT)]
        self.entries.flags[slots] &= ~np.uint8(PINNED)
        self.leaves.list(slots)

    # --- opening -------------------------------------------------------------------------------------------------

    def load(self, records: Records, now: float) -> None:
        self._advance(now)
        ticks = self.clock.ticks(records.touches.times)
        order = np.lexsort((-records.positions, ticks))
        newest = np.unique(records.keys[order][::-1], return_index=True)[1]
        order = order[np.sort(order.size - 1 - newest)]
        keys = records.keys[order]
        slots = self.entries.make(keys)
        counts = np.clip(records.touches.counts[order], 1, MAX_COUNT)
        self.entries.count[slots] = counts
        self.entries.kind[slots] = self._loaded_classes(counts, records.touches.classes[order])
        self.entries.touch(slots, 0)
        self.entries.touches.stamp(ticks[order], slots.size)
        self.leaves.moved()
        sizes = np.clip(records.sizes[order], 0, MAX_SIZE).astype(np.uint32)
        self._settle(slots, self._loaded_parents(records, order), sizes)

    def _loaded_parents(self, records: Records, order: Ints) -> UInt64Array:
        """The parents of records, NO_KEY for one that does not lie before its child: chains end at position 0."""
        slots = self.entries.find(records.parents[order])
        positions = np.full(self.entries.used, -1, np.int64)
        positions[self.entries.find(records.keys[order])] = records.positions[order]
        wrong = (slots >= 0) & (positions[slots] >= records.positions[order])
        return np.where(wrong, np.uint64(NO_KEY), records.parents[order])

    def figures(self) -> dict[str, int]:
        entries = self.entries
        return {
            "resident": entries.resident,
            "ghosts": len(entries) - entries.resident,
            "orphans": entries.orphans,
            "pinned": len(self._pins),
            "eviction_bytes": entries.nbytes + self.leaves.nbytes,
        }


def _first_rows(keys: UInt64Array) -> Ints:
    """Where each key occurs first."""
    if len(set(keys.tolist())) == keys.size:
        return np.arange(keys.size)
    return np.sort(np.unique(keys, return_index=True)[1])
