"""Which weights a model has: its revision, or a digest that is cheap to take."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.errors import EngineError

log = logging.getLogger(__name__)
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TEXTS: Final = (".index.json", ".py", "adapter_config.json")
"""Small files that say which weights are where, code of the checkpoint's own, and how an adapter is applied: told apart by
their content."""
SCALES: Final = re.compile(r"(quant|hf_quant|kv_cache_scales)\w*\.json")
COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_HEADER: Final = 2**27
SAMPLES: Final = 16
SAMPLE_BYTES: Final = 4096
"""So many pieces of a file of weights are read, at equal distances."""
CLOCK_STEP_S: Final = 0.02
"""File systems stamp changes with a clock that lags by up to a tick of the kernel, and a process' start is told in ticks."""
HAND_SET: Final = (
    'name them by hand: "weights": "<any text that changes when the weights do>" in kv_connector_extra_config'
)


def weights_digest(model_config: Any, load_config: Any, began: float | None = None) -> str:
    """A text that differs between two sets of weights. model_config, load_config: vLLM's, of the model or its draft. began:
    when vLLM may have begun to read them, in seconds since the epoch; by default when this process started.

    - "commit:<hash>": a model of the hub, from the revision asked for, the snapshot's folder or its configuration's commit.
    - "files:<digest>": a local folder or file: names, sizes and times of change of the weights' files, the headers of
      safetensors files, a sample of the weights' bytes, since files of an image may have one time whatever is in them, and
      the content of their index and of code that lies with them. The folder's own name is no part: moved, or copied with its
      times (cp -p, rsync -a), it is the same; copied without them it is another, whose KV is a miss. Files that changed after
      vLLM may have read them need not be those that it serves: ":changed <time>" behind the digest keeps what is stored from
      engines that start later.
    - "dummy:<seed>": the random weights of load_format="dummy".

    Raises EngineError where none of these is to be had.
    """
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    if load_format == "dummy":
        return f"dummy:{model_config.seed}"
    if getattr(model_config, "model_weights", ""):
        raise EngineError(f"the weights of {model_config.model_weights!r} are not local files: {HAND_SET}")
    name = str(model_config.model)
    path = Path(name)
    if path.exists():
        return _of_path(path, process_started() if began is None else began)
    commit = _commit(model_config.revision) or _commit(getattr(model_config.hf_config, "_commit_hash", None))
    if not commit:
        raise EngineError(
            f"{name!r} is no local folder, and its revision is {model_config.revision!r}, no commit: {HAND_SET}"
        )
    variant = name.partition(":")[2]
    return ":".join(("commit", commit, *([variant] if variant else [])))


def _commit(text: object) -> str | None:
    return text if isinstance(text, str) and COMMIT.fullmatch(text) else None


def _of_path(path: Path, began: float) -> str:
    """A snapshot's folder is named by its commit; of any other path the files count."""
    if commit := _snapshot_commit(path):
        return f"commit:{commit}"
    try:
        files = weight_files(path)
        digest, changed = _files_digest(files), _changed_at(path, files)
    except OSError as error:
        raise EngineError(f"the weights in {path} cannot be read: {error}: {HAND_SET}") from error
    if not any(file.suffix in WEIGHTS for file in files):
        raise EngineError(f"{path} has no weights ({', '.join(f'*{s}' for s in WEIGHTS)}): {HAND_SET}")
    if changed < began - CLOCK_STEP_S:
        return f"files:{digest}"
    log.warning(
        "%s changed after this process started, so that other weights may have been loaded: no engine that starts later uses "
        "the KV that is stored now",
        path,
    )
    return f"files:{digest}:changed {changed:.6f}"


def _snapshot_commit(path: Path) -> str | None:
    """The commit of a model that lies in the hub's cache: its files are never written again."""
    where = path.absolute()
    return _commit(where.name) if where.is_dir() and where.parent.name == "snapshots" else None


def _changed_at(path: Path, files: Iterable[Path]) -> float:
    """When files of a folder, or the names by which they are reached, were changed last, in seconds since the epoch, whatever
    the files' times of modification say. Raises OSError."""
    return max((when for each in (path, *files) for when in _moved_at(Path(os.path.abspath(each)))), default=0.0)


def _moved_at(path: Path) -> Iterator[float]:
    """When a file was changed, and when each link or folder on the way to it was put in its place. A folder's change time is
    its modification time where an entry of it was made or removed, which says nothing of the others; it is later where it
    was itself renamed, until the next entry is made."""
    if not path.is_dir():
        yield path.stat().st_ctime
    for part in (path, *path.parents):
        own = part.lstat()
        if stat.S_ISLNK(own.st_mode):
            yield own.st_ctime
            yield from _moved_at(part.parent / os.readlink(part))
        elif own.st_ctime_ns != own.st_mtime_ns:
            yield own.st_ctime


def process_started() -> float:
    """When this process started, in seconds since the epoch; not later than it did."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19])  # proc(5): starttime, the 22nd of all fields
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def _files_digest(files: Iterable[Path]) -> str:
    """32 hexadecimal digits over files. Raises OSError."""
    total = hashlib.blake2b(digest_size=16)
    for file in files:
        for part in _parts(file):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def weight_files(path: Path) -> list[Path]:
    """Of a checkpoint's folder the files that say which weights it has, by name; of one file itself. Raises OSError."""
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and (file.suffix in WEIGHTS or file.name.endswith(TEXTS) or SCALES.fullmatch(file.name))
    )


def _parts(file: Path) -> Iterator[bytes]:
    """What tells one file from another: of weights all but most of their bytes."""
    yield os.fsencode(file.name)
    if file.suffix not in WEIGHTS:
        yield file.read_bytes()
        return
    stat = file.stat()
    yield f"{stat.st_size} {stat.st_mtime_ns}".encode()
    if file.suffix == ".safetensors":
        yield _header(file)
    yield from _sample(file, stat.st_size)


def _sample(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        for at in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
            opened.seek(at)
            yield opened.read(SAMPLE_BYTES)


def _header(file: Path) -> bytes:
    """Names, dtypes and shapes of a safetensors file's tensors: 8 bytes little-endian say how long that text is."""
    with file.open("rb") as opened:
        return opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER))
