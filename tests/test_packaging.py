"""The wheel that the tree makes: kernels and tools are subpackages, nothing else is installed, imports stay light."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kvstore", "kernels", "tools")
FILES = ("pyproject.toml", "README.md", "LICENSE")
HEAVY = ("transformers", "numba", "triton", "typer", "rich", "kvstore.tools", "kvstore.engines", "kvstore.kernels")


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """A command's output. path: searched for modules before the environment."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is made of, so that building leaves nothing behind."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree."""
    out = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(out))
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=tree)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as an installer lays it out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_every_module_once_under_kvstore(wheel: Path) -> None:
    expected = [f"kvstore/{p.relative_to(ROOT / 'kvstore')}" for p in (ROOT / "kvstore").glob("*.py")]
    expected += [
        f"kvstore/{folder}/{p.name}"
        for folder in ("engines", "engines/vllm", "fsck")
        for p in (ROOT / "kvstore" / folder).glob("*.py")
    ]
    expected += [f"kvstore/{folder}/{p.name}" for folder in FOLDERS[1:] for p in (ROOT / folder).glob("*.py")]
    counted = Counter(name for name in names(wheel) if name.endswith(".py"))
    assert counted == Counter(expected)


def test_the_wheel_has_no_package_but_kvstore(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvstore"}


def test_the_wheel_is_marked_as_typed_and_carries_its_licence(wheel: Path) -> None:
    found = names(wheel)
    assert found.count("kvstore/py.typed") == 1
    (licence,) = (name for name in found if name.endswith("/LICENSE"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        metadata = archive.read(licence.split("/")[0] + "/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_holds_nothing_but_modules_and_metadata(wheel: Path) -> None:
    others = [n for n in names(wheel) if not n.endswith((".py", "/py.typed")) and ".dist-info/" not in n]
    assert others == []


def test_building_leaves_the_links_of_the_tree_as_they_are(tree: Path, wheel: Path) -> None:
    assert wheel.exists()
    for folder in FOLDERS[1:]:
        assert (tree / "kvstore" / folder).is_symlink()
        assert (ROOT / "kvstore" / folder).resolve() == ROOT / folder


def test_the_installed_package_imports_from_another_folder(site: Path, tmp_path: Path) -> None:
    code = "import kvstore, kvstore.kernels, kvstore.tools; print(kvstore.__file__, kvstore.tools.__file__)"
    package, tools = run(sys.executable, "-c", code, cwd=tmp_path, path=site).split()
    assert (package, tools) == (f"{site}/kvstore/__init__.py", f"{site}/kvstore/tools/__init__.py")


def test_the_environments_own_package_imports_from_another_folder(tmp_path: Path) -> None:
    code = "import kvstore, kvstore.kernels, kvstore.tools; print(kvstore.__file__)"
    assert Path(run(sys.executable, "-c", code, cwd=tmp_path).strip()).resolve() == ROOT / "kvstore" / "__init__.py"


def test_every_installed_core_module_imports_by_itself(site: Path, tmp_path: Path) -> None:
    modules = sorted(
        p.stem for p in (site / "kvstore").glob("*.py") if p.stem not in ("__init__", "loops_numba", "planes_numba")
    )
    code = "import importlib, sys; [importlib.import_module(f'kvstore.{name}') for name in sys.argv[1:]]"
    run(sys.executable, "-c", code, *modules, cwd=tmp_path, path=site)


def test_importing_kvstore_imports_nothing_heavy(site: Path, tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); from kvstore import *; print(*sorted(set(sys.modules) - before))"
    )
    added = run(sys.executable, "-c", code, cwd=tmp_path, path=site).split()
    assert "kvstore.store" in added
    assert [name for name in added if name.startswith(HEAVY)] == []


def test_importing_kvstore_makes_no_top_level_kernels_or_tools(site: Path, tmp_path: Path) -> None:
    code = "import sys, kvstore, kvstore.kernels, kvstore.tools; print({'kernels', 'tools'} & set(sys.modules))"
    assert run(sys.executable, "-c", code, cwd=tmp_path, path=site).strip() == "set()"
