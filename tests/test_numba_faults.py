"""The story: numba is there, and does not work. A damaged or full cache of compiled code, a numba that cannot be
imported, or one that is switched off cost speed, never the store."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_processes import run_python

SCRIPT = """
import sys, tempfile
from pathlib import Path
{before}
from tests.support import *
with tempfile.TemporaryDirectory() as folder, open_store(Path(folder), make_cache()) as store:
    assert store.put_blocks(block_hashes(2), [0, 1]).stored.all()
    assert store.get_blocks(block_hashes(2), [2, 3]).verified.all()
    print(type(store._views[0].route.path).__name__)
"""


def path_used(before: str = "", **env: str) -> str:
    done = run_python(SCRIPT.replace("{before}", before), **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the compiled loops."""
    folder = tmp_path_factory.mktemp("numba")
    assert path_used(NUMBA_CACHE_DIR=str(folder)) == "NumbaPath"
    assert list(folder.rglob("*.nbi"))
    return folder


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("damage", [empty, cut])
def test_a_damaged_cache_of_compiled_code_costs_a_compilation(
    compiled: Path, tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    copy = shutil.copytree(compiled, tmp_path / "cache")
    for file in copy.rglob(pattern):
        damage(file)
    assert path_used(NUMBA_CACHE_DIR=str(copy)) == "NumbaPath"


def test_a_cache_that_cannot_be_written_costs_a_compilation(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    limited = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from kvstore import loops_numpy\n"
    )
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, -1))\nimport kvstore.loops_numba\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))"
    assert path_used(limited, NUMBA_CACHE_DIR=str(tmp_path / "full")) == "NumbaPath"
    assert path_used(NUMBA_CACHE_DIR=str(tmp_path / "file")) == "NumbaPath"


def test_a_numba_that_cannot_be_imported_leaves_numpy(tmp_path: Path) -> None:
    package = tmp_path / "numba"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("Numba needs NumPy 1.0 or less")')
    assert path_used(f"sys.path.insert(0, {str(tmp_path)!r})") == "NumpyPath"
    assert path_used("sys.modules['llvmlite'] = None") == "NumpyPath"


def test_a_numba_that_is_switched_off_leaves_numpy() -> None:
    assert path_used(NUMBA_DISABLE_JIT="1") == "NumpyPath"
