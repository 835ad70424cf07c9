"""The package's names come from their modules when they are asked for, and nothing heavy comes before."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).parent.parent
UNNEEDED = ("lmdb", "xxhash", "zstandard", "typer", "rich", "numba", "transformers")


def run(code: str) -> str:
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", kvstore.__all__)
def test_every_public_name_is_its_modules(name: str) -> None:
    found = getattr(kvstore, name)
    home = getattr(found, "__module__", "kvstore.checksum")
    assert home.startswith("kvstore.")
    assert found is getattr(sys.modules[home], name)
    assert vars(kvstore)[name] is found, "asked for once, then an attribute as any other"


def test_the_table_says_what_the_imports_say() -> None:
    tree = ast.parse((ROOT / "kvstore" / "__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    homes = {a.name: f"{n.module}:{a.name}" for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert homes == kvstore._HOMES
    assert sorted(homes) == sorted(kvstore.__all__)


def test_dir_star_and_from_know_every_name() -> None:
    assert set(kvstore.__all__) <= set(dir(kvstore))
    code = "import kvstore; print(set(kvstore.__all__) <= set(dir(kvstore)))\nfrom kvstore import *\n"
    code += (
        "print(all(name in globals() for name in kvstore.__all__))\nfrom kvstore import KVStore, Rank\nprint(KVStore)"
    )
    assert run(code).splitlines() == ["True", "True", "<class 'kvstore.store.KVStore'>"]


def test_an_unknown_name_is_an_error_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="'kvstore' has no attribute 'KVStroe'"):
        _ = kvstore.KVStroe  # type: ignore[attr-defined]
    assert not hasattr(kvstore, "__wrapped__")
    with pytest.raises(ImportError):
        exec("from kvstore import KVStroe")


@pytest.mark.parametrize("module", ["kvstore", "kvstore.launches", "kvstore.devicepath", "kvstore.transfer"])
def test_what_moves_and_sums_blocks_needs_no_database_and_no_command_line(module: str) -> None:
    code = f"import sys, {module}; print([n for n in {UNNEEDED} if n in sys.modules])"
    assert run(code).strip() == "[]"


def test_checksums_need_no_database() -> None:
    blocked = f"import sys; sys.modules |= dict.fromkeys({UNNEEDED})"
    code = "from kvstore import PagedKVCache, block_checksums, kv_checksum_platform_supported; import torch\n"
    code += "cache = PagedKVCache.from_tensors({'layers.0': torch.ones(2, 1, 4, 16)}, 'BHNC')\n"
    code += "print(len(block_checksums(cache, [1, 0])), kv_checksum_platform_supported('cpu'))"
    assert run(f"{blocked}\n{code}").strip() == "2 False"
