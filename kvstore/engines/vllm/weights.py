"""Which weights a model has: its revision, or a digest that is cheap to take."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvstore.errors import EngineError

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TEXTS: Final = (".index.json", ".py")
"""Small files that say which weights are where, and code of the checkpoint's own: told apart by their content."""
SCALES: Final = re.compile(r"(quant|hf_quant|kv_cache_scales)\w*\.json")
COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MAX_HEADER: Final = 2**27
HAND_SET: Final = (
    'name them by hand: "weights": "<any text that changes when the weights do>" in kv_connector_extra_config'
)


def weights_digest(model_config: Any, load_config: Any) -> str:
    """A text that differs between two sets of weights. model_config, load_config: vLLM's, of the model or its draft.

    - "commit:<hash>": a model of the hub, from the revision asked for, the snapshot's folder or its configuration's commit.
    - "files:<digest>": a local folder or file: names, sizes and times of change of the weights' files, the headers of
      safetensors files, and the content of their index and of code that lies with them; the bytes of the weights are not
      read. The folder's own name is no part: moved, or copied with its times (cp -p, rsync -a), it is the same; copied
      without them it is another, whose KV is a miss.
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
        return _of_path(path)
    commit = _commit(model_config.revision) or _commit(getattr(model_config.hf_config, "_commit_hash", None))
    if not commit:
        raise EngineError(
            f"{name!r} is no local folder, and its revision is {model_config.revision!r}, no commit: {HAND_SET}"
        )
    variant = name.partition(":")[2]
    return ":".join(("commit", commit, *([variant] if variant else [])))


def _commit(text: object) -> str | None:
    return text if isinstance(text, str) and COMMIT.fullmatch(text) else None


def _of_path(path: Path) -> str:
    """A snapshot's folder is named by its commit; of any other path the files count."""
    where = path.absolute()
    if where.is_dir() and where.parent.name == "snapshots" and _commit(where.name):
        return f"commit:{where.name}"
    return f"files:{files_digest(path)}"


def files_digest(path: Path) -> str:
    """32 hexadecimal digits over a checkpoint's files, or one file. Raises EngineError where there are no weights, or they
    cannot be read."""
    total, weights = hashlib.blake2b(digest_size=16), 0
    try:
        for file in _files(path):
            weights += file.suffix in WEIGHTS
            for part in _parts(file):
                total.update(len(part).to_bytes(8, "little") + part)
    except OSError as error:
        raise EngineError(f"the weights in {path} cannot be read: {error}: {HAND_SET}") from error
    if not weights:
        raise EngineError(f"{path} has no weights ({', '.join(f'*{s}' for s in WEIGHTS)}): {HAND_SET}")
    return total.hexdigest()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and (file.suffix in WEIGHTS or file.name.endswith(TEXTS) or SCALES.fullmatch(file.name))
    )


def _parts(file: Path) -> Iterator[bytes]:
    """What tells one file from another: of weights all but their bytes."""
    yield file.name.encode()
    if file.suffix not in WEIGHTS:
        yield file.read_bytes()
        return
    stat = file.stat()
    yield f"{stat.st_size} {stat.st_mtime_ns}".encode()
    if file.suffix == ".safetensors":
        yield _header(file)


def _header(file: Path) -> bytes:
    """Names, dtypes and shapes of a safetensors file's tensors: 8 bytes little-endian say how long that text is."""
    with file.open("rb") as opened:
        return opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER))
