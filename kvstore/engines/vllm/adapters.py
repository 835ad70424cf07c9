"""Which weights a LoRA adapter has. vLLM's block hashes have its name and path, and not what lies there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.engines.vllm.weights import WEIGHTS, weight_files

log = logging.getLogger(__name__)
PATIENCE_S: Final = 2.0
"""How long a request waits until its adapter's files were read: once in an engine's life, or after they changed."""
SALT_BYTES: Final = 16
MAX_HASHED: Final = 4096
"""Files whose content's hash is remembered."""
SETTLED_S: Final = 1.0
"""A file that was changed longer ago has another time where it is changed again."""
SETTINGS: Final = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
"""Of vLLM's LoRAConfig; ranks, slots and how an adapter is split over ranks change no KV."""
FIXED: Final = b"fixed"


@dataclass(eq=False)
class Look:
    """A look at an adapter's files, for the requests that came before it began. found: their digest, or why there is none;
    set once, by the thread."""

    lora: Any
    since: float
    begun: bool = False
    found: bytes | str | None = None


class Adapters:
    """Tells what each request's adapter adds to its keys, so that KV of an adapter's former weights is never found again.

    vLLM reads an adapter's files when it is told to (`loading`), or else behind the first request that has its number
    (lora_int_id), and may read them again; it has one adapter a number. So an adapter is left out, for the engine's life,
    whose files' content changed, whose number came with two paths, or that is loaded in place; and with it every name and
    path that its number stood for, since vLLM's own prefix cache may have blocks of them that others computed. One that lies
    in no local folder is left out, too. fixed: the operator's word that a name and path mean the same weights for ever.
    plain: whether requests without an adapter are computed as if there were none.

    Belongs to the scheduler's thread. A thread of its own looks at the files, so that a file system that hangs costs misses.
    settings: vLLM's LoRAConfig, or None.
    """

    def __init__(
        self, settings: Any, *, fixed: bool = False, plain: bool = True, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings_of(settings)
        self._fixed, self._plain, self._now = fixed, plain, now
        self._paths: dict[int, str] = {}
        self._names: dict[int, set[tuple[str, str]]] = {}
        self._digests: dict[tuple[str, str], bytes] = {}
        self._doubted: set[int | tuple[str, str]] = set()
        self._told: set[tuple[int, str]] = set()
        self._queued: dict[tuple[object, ...], Look] = {}
        self._looking: float | None = None
        self._asked: queue.SimpleQueue[Look | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, lora: Any) -> Look | None:
        """Begin to look at the files of a request's adapter (vLLM's LoRARequest); None for a request without one."""
        if lora is None:
            return None
        which = (lora.lora_int_id, lora.lora_name, lora.lora_path, getattr(lora, "load_inplace", False))
        queued = self._queued.get(which)
        if queued is not None and queued.found is None and not queued.begun:
            return queued
        look = self._queued[which] = Look(lora, self._now())
        if self._fixed:
            look.found = FIXED
        elif self._stuck():
            look.found = "its file system does not answer"
        else:
            self._start()
            self._asked.put(look)
        return look

    def waits(self, look: Look) -> bool:
        """Whether a look has no answer yet, and may have one soon."""
        return look.found is None and self._now() - look.since < PATIENCE_S

    def salt(self, look: Look) -> bytes | None:
        """What the adapter adds to the keys of its request, once `waits` is false; None where it is to be left out."""
        lora, found = look.lora, look.found
        self._note(lora, found)
        if self.doubts(lora):
            self._tell(
                lora, "every request until the engine is started again", "it is no longer known which weights it has"
            )
            return None
        if not isinstance(found, bytes):
            self._tell(lora, "the request", found or "its files were not read in time")
            return None
        return self._salt_of(lora, found)

    @contextmanager
    def loading(self, lora: Any) -> Iterator[None]:
        """vLLM reads an adapter within; its files are read here too, before and after, in vLLM's own thread."""
        known = lora.lora_int_id in self._paths
        if known and (getattr(lora, "load_inplace", False) or self._paths[lora.lora_int_id] != lora.lora_path):
            self._doubt(lora, "other weights were loaded under its number")
        before = self._seen(lora)
        self._note(lora, before)
        yield
        if self._seen(lora) != before:
            self._doubt(lora, "its files changed while they were loaded")

    def doubts(self, lora: Any) -> bool:
        """Whether an adapter is left out; None: whether requests without one are."""
        if lora is None:
            return not self._plain
        return not self._doubted.isdisjoint((lora.lora_int_id, (lora.lora_name, lora.lora_path)))

    def close(self) -> None:
        """Let the thread end; one that hangs is left behind."""
        self._asked.put(None)

    def _seen(self, lora: Any) -> bytes | str:
        return FIXED if self._fixed else look_at(lora.lora_path)

    def _note(self, lora: Any, found: bytes | str | None) -> None:
        """Take what was seen of an adapter, and doubt it where that is not what it was."""
        number, name = lora.lora_int_id, (lora.lora_name, lora.lora_path)
        path = self._paths.setdefault(number, lora.lora_path)
        self._names.setdefault(number, set()).add(name)
        if path != lora.lora_path:
            self._doubt(lora, f"lora_int_id {number} was {path!r} before, and vLLM has one adapter a number")
        elif getattr(lora, "load_inplace", False):
            self._doubt(lora, "it is loaded in place, so that vLLM reads its files again at any time")
        elif isinstance(found, bytes) and self._digests.setdefault(name, found) != found:
            self._doubt(lora, "its files changed while the engine ran")

    def _doubt(self, lora: Any, reason: str) -> None:
        names = self._names.setdefault(lora.lora_int_id, set()) | {(lora.lora_name, lora.lora_path)}
        self._doubted |= {lora.lora_int_id, *names}
        self._tell(lora, "every request until the engine is started again", reason)

    def _tell(self, lora: Any, what: str, reason: str) -> None:
        if (lora.lora_int_id, what) not in self._told:
            self._told.add((lora.lora_int_id, what))
            text = "KV of the adapter %r (%s) is neither loaded nor stored, of %s: %s"
            log.warning(text, lora.lora_name, lora.lora_path, what, reason)

    def _salt_of(self, lora: Any, digest: bytes) -> bytes:
        layout = getattr(lora, "is_3d_lora_weight", False)
        text = json.dumps([digest.hex(), bool(layout), self._settings], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=SALT_BYTES, person=b"adapter").digest()

    def _stuck(self) -> bool:
        began = self._looking
        return began is not None and self._now() - began >= PATIENCE_S

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-adapters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (look := self._asked.get()) is not None:
            look.begun, self._looking = True, self._now()
            look.found = look_at(look.lora.lora_path)
            self._looking = None


def settings_of(lora_config: Any) -> dict[str, str]:
    """What of vLLM's LoRAConfig changes an adapter's KV."""
    return {name: str(getattr(lora_config, name, None)) for name in SETTINGS}


def look_at(name: str) -> bytes | str:
    """A digest of what lies at an adapter's path, as vLLM takes it; where that is no local folder of weights, why not."""
    path = Path(name if os.path.isabs(name) else os.path.expanduser(name))
    try:
        if not path.is_dir():
            return f"{name!r} is no local folder, so that its weights cannot be told from others of that name"
        files = weight_files(path)
        if not any(file.suffix in WEIGHTS for file in files):
            return f"{name!r} has no weights"
        total = hashlib.blake2b(digest_size=SALT_BYTES)
        for file in files:
            total.update(os.fsencode(file.name) + b"\0" + content_of(file))
        return total.digest()
    except (OSError, ValueError) as error:
        return str(error)


_hashed: dict[tuple[int, ...], bytes] = {}
"""Hashes of files' contents, by what changes with them."""


def content_of(file: Path) -> bytes:
    """A hash of a file's bytes; they are read again where its inode or one of its times changed."""
    stat = file.stat()
    key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    if (known := _hashed.get(key)) is not None:
        return known
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=SALT_BYTES)).digest()
    # A file system's clock steps: what is written right after may have the same times.
    if time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S:
        if len(_hashed) >= MAX_HASHED:
            _hashed.clear()
        _hashed[key] = found
    return found
