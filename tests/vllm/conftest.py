"""Fixtures of the tests in vLLM. They need its environment (`make test-vllm`); in another one they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvstore.engines.vllm.versions import installed_version

if find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    from tests.vllm import models
    from tests.vllm.harness import Clean, Engines


def pytest_report_header() -> str:
    """Which vLLM it is."""
    return f"vLLM {installed_version() if find_spec('vllm') else 'is not installed'}"


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Runs engines."""
    started = Engines(tmp_path_factory.mktemp("engines"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def clean(engines: Engines) -> Clean:
    """Engines without a store."""
    return Clean(engines)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models: <name>, of other weights <name>-other, and of bfloat16 <name>-bf16 by `model_of`."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def llama(weights: Path) -> Path:
    """The tiny Llama."""
    return models.write("llama", weights / "llama")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where a store may be made."""
    return tmp_path / "store"
