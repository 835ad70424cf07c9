"""The shards that a path names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstore.errors import StorePathError
from kvstore.storefile import DATA_NAME, STORE_NAME, path_errors

CLOSED: Final = "tp*of*-pp*of*"
"""Names of shards."""


def shards(store: Path) -> list[Path]:
    """The shards of a store, or the one shard that the path is; one that has lost its STORE file, too, and one that this user
    may not look into: nobody may take what was left out for clean. Raises StorePathError where there is none."""
    expected = "expected the folder of a store, or of one of its shards"
    with path_errors(store, expected):
        if (store / STORE_NAME).is_file() or (store / DATA_NAME).is_file():
            return [store]
        there = {file.parent for name in (STORE_NAME, DATA_NAME) for file in store.glob(f"*/{name}")}
        found = sorted(there | {folder for folder in store.glob(CLOSED) if not os.access(folder, os.R_OK | os.X_OK)})
    if not found:
        raise StorePathError(f"{store}: no shard there: {expected}")
    return found
