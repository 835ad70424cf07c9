"""What a shard's files must be before anything opens them."""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import StorePathError
from kvstore.storefile import DATA_NAME, STORE_NAME, path_errors


def check_plain(shard: Path) -> None:
    """Raise StorePathError where STORE or data.mdb is neither a file nor missing: opening a pipe may wait for ever."""
    for path in (shard / STORE_NAME, shard / DATA_NAME):
        with path_errors(path, "expected a shard's folder that can be read"):
            if path.exists() and not path.is_file():
                raise StorePathError(f"{path}: it is no plain file: look at what it is, and take it out of the shard")
