"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import KVStore, PagedKVCache
from tests.support import CAMPAIGNS, make_cache, open_store


@pytest.fixture
def cache() -> PagedKVCache:
    """A small cache: 2 layers, 2 heads, 8 blocks of 4 tokens, bf16."""
    return make_cache()


@pytest.fixture
def store(tmp_path: Path, cache: PagedKVCache) -> Iterator[KVStore]:
    """An open store over `cache`."""
    with open_store(tmp_path / "store", cache) as opened:
        yield opened


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the fault campaigns found."""
    if CAMPAIGNS:
        terminalreporter.section("fault campaigns")
        for line in CAMPAIGNS:
            terminalreporter.write_line(line)
