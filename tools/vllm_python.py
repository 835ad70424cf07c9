"""A newer vLLM on the CPU before it is built for one: its Python sources over the compiled modules of the vLLM that is
installed. ``python3 tools/vllm_python.py .venv-vllm`` makes .venv-vllm/newer, which comes first in PYTHONPATH.

What is tested with it is what vLLM's Python does, such as the interfaces that kvstore uses; its kernels are the older
version's. vLLM's own wheel, which is for GPUs, is downloaded (350 MB) and not kept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tools.setup_venv import say
else:  # run by its path, before kvstore can be imported
    from setup_venv import say

VERSION = "0.33.0"
NAME = "newer"
COMPILED = (".so", ".cubin")
BESIDE = ("orjson",)
"""What it imports and the older version does not bring."""


def main(venv: Path) -> None:
    """Make the folder unless it is there."""
    python, folder = venv / "bin" / "python", venv / NAME
    if (folder / f"vllm-{VERSION}+cpu.dist-info").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=venv) as scratch:
        made = Path(scratch, NAME)
        say(f"fetching vLLM {VERSION}")
        unpack(download(python, Path(scratch)), made)
        for module in installed(python).glob("*.so"):
            shutil.copy2(module, made / "vllm")
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--target", str(made), *BESIDE], check=True)
        information = made / f"vllm-{VERSION}+cpu.dist-info"
        information.mkdir()
        # vLLM takes itself for a build for CPUs by its distribution's version.
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
        made.rename(folder)
    say(f"{folder} is ready")


def download(python: Path, folder: Path) -> Path:
    """vLLM's wheel."""
    options = ("--quiet", "--no-deps", "--dest", str(folder))
    subprocess.run([str(python), "-m", "pip", "download", *options, f"vllm=={VERSION}"], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack vLLM's package without what is compiled."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = (name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(COMPILED))
        archive.extractall(folder, wanted)


def installed(python: Path) -> Path:
    """The folder of the vLLM that is installed."""
    code = "from importlib.util import find_spec; print(find_spec('vllm').submodule_search_locations[0])"
    told = subprocess.run([python, "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return Path(told.stdout.strip())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 tools/vllm_python.py FOLDER")
    main(Path(sys.argv[1]))
