"""Which weights a LoRA adapter has. vLLM's block hashes have its name and path, and not what lies there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.engines.vllm.weights import CLOCK_STEP_S, WEIGHTS, changed_at, files_digest, snapshot_commit, weight_files

log = logging.getLogger(__name__)
PATIENCE_S: Final = 0.25
"""How long a request waits until its adapter's files were looked at."""
SALT_BYTES: Final = 16
SETTINGS: Final = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
"""Of vLLM's LoRAConfig; ranks, slots and how an adapter is split over ranks change no KV."""


class Files(NamedTuple):
    """What lies where an adapter is: a text that tells its weights, and when it changed last, in seconds since the epoch."""

    digest: str
    changed: float


@dataclass(eq=False)
class Look:
    """A look at an adapter's files, for one request. found: what was seen, or why nothing was; set once, by the thread."""

    lora: Any
    since: float
    found: Files | str | None = None


class Known(NamedTuple):
    """What an adapter's number means since its first request."""

    path: str
    digest: str


class Adapters:
    """Tells what each request's adapter adds to its keys, so that KV of an adapter's former weights is never found again.

    Nobody tells when vLLM reads an adapter's files, and it may read them again. So these say which weights a request is
    computed with only as long as they are what they were before the engine started. An adapter is left out, for the engine's
    life, whose files, or a link on the way to them, changed later; whose number (lora_int_id) came with two paths; and one
    that lies in no local folder. fixed: the operator's word that a name and path mean the same weights for ever. plain:
    whether requests without an adapter are computed as if there were none.

    Belongs to the scheduler's thread. A thread of its own looks at the files, so that a file system that hangs costs misses.
    settings: vLLM's LoRAConfig, or None. began: when the engine may first have read an adapter, in seconds since the epoch.
    """

    def __init__(
        self,
        settings: Any,
        *,
        fixed: bool = False,
        plain: bool = True,
        began: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings_of(settings)
        self._fixed, self._plain, self._now = fixed, plain, now
        self._began = time.time() if began is None else began
        self._known: dict[int, Known] = {}
        self._doubted: set[int] = set()
        self._told: set[tuple[int, str]] = set()
        self._waiting: list[Look] = []
        self._asked: queue.SimpleQueue[Look | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, lora: Any) -> Look | None:
        """Begin to look at the files of a request's adapter (vLLM's LoRARequest); None for a request without one."""
        if lora is None:
            return None
        look = Look(lora, self._now())
        if self._fixed:
            look.found = Files("fixed", 0.0)
        elif self._stuck():
            look.found = "its file system does not answer"
        else:
            self._start()
            self._waiting.append(look)
            self._asked.put(look)
        return look

    def waits(self, look: Look) -> bool:
        """Whether a look has no answer yet, and may have one soon."""
        return look.found is None and self._now() - look.since < PATIENCE_S

    def salt(self, look: Look) -> bytes | None:
        """What the adapter adds to the keys of its request, once `waits` is false; None where it is to be left out."""
        lora, found = look.lora, look.found
        if not isinstance(found, Files):
            self._tell(lora, "the request", found or "its file system does not answer")
            return None
        known = self._known.setdefault(lora.lora_int_id, Known(lora.lora_path, found.digest))
        if (reason := self._reason(lora, found, known)) is not None:
            self._doubted.add(lora.lora_int_id)
            self._tell(lora, "every request until the engine is started again", reason)
        return None if self.doubts(lora) else self._salt_of(lora, found.digest)

    def doubts(self, lora: Any) -> bool:
        """Whether an adapter is left out; None: whether requests without one are."""
        return not self._plain if lora is None else lora.lora_int_id in self._doubted

    def close(self) -> None:
        """Let the thread end; one that hangs is left behind."""
        self._asked.put(None)

    def _reason(self, lora: Any, found: Files, known: Known) -> str | None:
        """Why it is not known which weights vLLM has for an adapter; None where it is."""
        if known.path != lora.lora_path:
            return f"lora_int_id {lora.lora_int_id} was {known.path!r} before, and vLLM takes one of them for the other"
        if known.digest != found.digest:
            return "its files changed while the engine ran"
        if found.changed >= self._began - CLOCK_STEP_S:
            return (
                "its files are newer than this engine, which may have read others before; see adapters in docs/vllm.md"
            )
        return None

    def _tell(self, lora: Any, what: str, reason: str) -> None:
        if (lora.lora_int_id, reason) not in self._told:
            self._told.add((lora.lora_int_id, reason))
            text = "KV of the adapter %r (%s) is neither loaded nor stored, of %s: %s"
            log.warning(text, lora.lora_name, lora.lora_path, what, reason)

    def _salt_of(self, lora: Any, digest: str) -> bytes:
        layout = getattr(lora, "is_3d_lora_weight", False)
        text = json.dumps([digest, bool(layout), self._settings], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=SALT_BYTES, person=b"adapter").digest()

    def _stuck(self) -> bool:
        self._waiting = [look for look in self._waiting if look.found is None]
        return bool(self._waiting) and self._now() - self._waiting[0].since >= PATIENCE_S

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstore-adapters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (look := self._asked.get()) is not None:
            look.found = look_at(look.lora.lora_path)


def settings_of(lora_config: Any) -> dict[str, str]:
    """What of vLLM's LoRAConfig changes an adapter's KV."""
    return {name: str(getattr(lora_config, name, None)) for name in SETTINGS}


def look_at(name: str) -> Files | str:
    """What lies at an adapter's path, taken as vLLM takes it; where that is no local folder of weights, why not."""
    path = Path(os.path.abspath(os.path.expanduser(name)))
    try:
        if commit := snapshot_commit(path):
            return Files(f"commit:{commit}", 0.0)
        if not path.is_dir():
            return f"{name!r} is no local folder, so that its weights cannot be told from others of that name"
        files = weight_files(path)
        if not any(file.suffix in WEIGHTS for file in files):
            return f"{name!r} has no weights"
        return Files(files_digest(files), changed_at(path, files))
    except OSError as error:
        return str(error)
