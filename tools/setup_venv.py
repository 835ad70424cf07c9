"""Set up the virtual environment of a checkout: torch first, then kvstore with its extras.

Runs with the standard library alone, before anything is installed: ``python3 tools/setup_venv.py .venv``. What is
there already is kept, so a second run is quick. pip decides where packages come from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PYTHON_REQUIRED = (3, 11)
TORCH_VERSION = "2.13.0"
EXTRAS = "cpu,engines,dev"

LARGE_BUILD_WARNING = f"""\
pip lists no CPU build of torch {TORCH_VERSION}, so it takes the general one, which on x86-64 brings CUDA along: about
3 GB to download and 7 GB on disk. It works without a GPU. For the CPU build (about 200 MB) stop here, set
PIP_EXTRA_INDEX_URL to an index that has CPU builds, or PIP_FIND_LINKS to a folder with the wheel, and start again."""


def say(text: str) -> None:
    """Print one message so that it stands before the output of the commands that follow."""
    print(f"[setup] {text}", flush=True)


def check_python() -> None:
    """Exit with a message when this interpreter is too old."""
    if sys.version_info < PYTHON_REQUIRED:
        wanted = ".".join(map(str, PYTHON_REQUIRED))
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"kvstore needs Python {wanted} or newer; {sys.executable} is {found}. "
            f"Name another one: make PYTHON=python{wanted} ..."
        )


def create(folder: Path) -> Path:
    """Create the environment unless it is there; return its interpreter."""
    python = folder / "bin" / "python"
    if not runs(python, "import pip"):
        say(f"creating {folder}")
        try:
            venv.create(folder, with_pip=True, symlinks=True, clear=not runs(python, ""))
        except subprocess.CalledProcessError:
            sys.exit("Python's venv module could not install pip; on Debian and Ubuntu: apt-get install python3-venv")
    return python


def runs(python: Path, statement: str) -> bool:
    """Whether `statement` runs without an error in that interpreter, kept from importing from this folder."""
    if not python.exists():
        return False
    return subprocess.run([python, "-I", "-c", statement], capture_output=True).returncode == 0


def torch_requirement(python: Path) -> str:
    """The torch to ask pip for: the CPU build where pip lists one; says so where it will be the large build."""
    if f"{TORCH_VERSION}+cpu" in available_torch_versions(python):
        return f"torch=={TORCH_VERSION}+cpu"
    if sys.platform == "linux":
        say(LARGE_BUILD_WARNING)
    return f"torch=={TORCH_VERSION}"


def available_torch_versions(python: Path) -> list[str]:
    """The versions of torch that pip could install, none where it cannot tell.

    The list is used since a dry run of an older pip downloads the wheel itself.
    """
    command = [str(python), "-m", "pip", "index", "versions", "torch"]
    listing = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    _, _, versions = listing.partition("Available versions:")
    return versions.partition("\n")[0].replace(",", " ").split()


def pip_install(python: Path, *arguments: str) -> None:
    """Run ``pip install``; exit with its status when it fails."""
    status = subprocess.run([python, "-m", "pip", "install", *arguments]).returncode
    if status:
        sys.exit(f"pip install {' '.join(arguments)} failed with exit status {status}; its reason stands above.")


def main(folder: Path) -> None:
    """Bring the environment in `folder` to what pyproject.toml asks for, and check it."""
    check_python()
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    python = create(folder)
    if not runs(python, "import torch"):
        requirement = torch_requirement(python)
        say(f"installing {requirement}")
        pip_install(python, requirement)
    say(f"installing kvstore[{EXTRAS}] and what it needs: a minute or so")
    pip_install(python, "--quiet", "--editable", f".[{EXTRAS}]")
    if subprocess.run([python, "-m", "pip", "check"]).returncode:
        sys.exit(f"The packages in {folder} contradict one another; remove that folder and run make again.")
    say(f"{folder} is ready")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/setup_venv.py FOLDER")
    main(Path(sys.argv[1]))
