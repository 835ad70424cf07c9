"""Records of an open store checked wholly, by name: from storage alone, twice where something is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstore.audit import audit
from kvstore.blockdb import BlockDB
from kvstore.checksum import MASK64
from kvstore.errors import KVStoreError
from kvstore.identity import IDENTITY_ID_BYTES, LayerSpec, identity_digest, layers_fingerprint
from kvstore.inspect import Item, reading
from kvstore.record import Header, parse_header
from kvstore.results import Rejection
from kvstore.snapshot import ReadView

MAX_LAYERS: Final = 2**16


@dataclass(frozen=True)
class Checked:
    """What became of a record. item: the entry that was read last; wrong: what is wrong with it, None where it is intact;
    transient: what a first read found and the second one did not, None where there was nothing of that."""

    item: Item
    wrong: Rejection | None
    transient: Rejection | None = None

    @property
    def damaged(self) -> bool:
        """Whether no load can use the record, whatever reads it."""
        return self.wrong is not None and (self.wrong.condemned or self.wrong.kind == "fingerprint")


@dataclass(eq=False)
class Checker:
    """Checks records of one shard. Belongs to one thread, inside a call of the shard."""

    db: BlockDB
    _fingerprints: dict[bytes, Mapping[int, int]] = field(default_factory=dict)

    def check(self, key: bytes) -> Checked | None:
        """What is wrong with the record under an index key, None where there is none any more. Raises StoreDamaged where
        LMDB cannot read the index."""
        first = self._once(key)
        if first is None or first.wrong is None:
            return first
        second = self._once(key)
        if second is None or second.wrong is not None:
            return second
        return Checked(second.item, None, first.wrong)

    def _once(self, key: bytes) -> Checked | None:
        with reading(self.db) as snapshot:
            value = snapshot.header(key)
            if value is None:
                return None
            return Checked(Item(self.db.folder.name, key, value), self.wrong(snapshot, key, value))

    def wrong(self, snapshot: ReadView, key: bytes, value: bytes) -> Rejection | None:
        """What is wrong with the record whose index entry is `value`, as it lies in a snapshot."""
        if wrong := audit(snapshot, key, value):
            return wrong
        header = parse_header(value, key)
        assert isinstance(header, Header)
        return self._stranger(header)

    def _stranger(self, header: Header) -> Rejection | None:
        """Whether the record was stored for other layers than its identity has; unknown where that is not at hand."""
        identity_id, group = header.key[:IDENTITY_ID_BYTES], int.from_bytes(header.key[IDENTITY_ID_BYTES:][:2], "big")
        if identity_id not in self._fingerprints:
            self._fingerprints[identity_id] = fingerprints(identity_id, self.db.identity(identity_id))
        expected = self._fingerprints[identity_id].get(group)
        if expected in (None, header.fingerprint):
            return None
        return Rejection(
            "fingerprint", f"stored for layers {header.fingerprint:016x}, its identity's are {expected:016x}"
        )


def fingerprints(identity_id: bytes, text: bytes | None) -> dict[int, int]:
    """The fingerprint of each group of an identity by its canonical JSON, none where that is missing or damaged."""
    if text is None or identity_digest(text) != identity_id:
        return {}
    try:
        layers = [LayerSpec(*layer) for layer in json.loads(text)["layers"][:MAX_LAYERS]]
    except (KVStoreError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    salt = int.from_bytes(identity_id[:8], "little")
    groups = {layer.group for layer in layers}
    return {g: (layers_fingerprint(x for x in layers if x.group == g) + salt) & MASK64 for g in groups}
