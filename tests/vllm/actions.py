"""What tests do to an engine between two of its steps, in its process. Each takes the engine (None before it starts)."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from kvstore.engines.vllm import connector
from kvstore.storefile import DATA_NAME
from tests.campaign.fulldisk import mount_small
from tests.vllm import models
from tests.vllm.damage import damage_some

PATIENCE_S = 20.0
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
PR_CAPBSET_DROP = 24
CAPABILITY_VERSION_3 = 0x20080522


def stores(engine: Any) -> list[Any]:
    """The engine's open stores: the rank's, then the scheduler's reader where it has one."""
    lookup = engine.connector._scheduler.lookup
    return [engine.worker._worker.store, *([lookup.store] if lookup is not None and lookup.store is not None else [])]


def kill_io(engine: Any, which: int = 0) -> None:
    """Kill the process that has the store's files open: 0, the rank's, 1, the scheduler's."""
    pid = stores(engine)[which].io_process_id
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def kill_io_until_gone(engine: Any, which: int = 0) -> None:
    """Kill that process and wait until it is away, so that the next call finds none."""
    pid = stores(engine)[which].io_process_id
    kill_io(engine, which)
    deadline = time.monotonic() + PATIENCE_S
    while pid is not None and stores(engine)[which].io_process_id == pid and time.monotonic() < deadline:
        time.sleep(0.005)


def wait_for_io(engine: Any) -> None:
    """Wait until every store has a process again."""
    deadline = time.monotonic() + PATIENCE_S
    while any(store.io_process_id is None for store in stores(engine)):
        assert time.monotonic() < deadline, "the I/O process was not started again"
        time.sleep(0.01)


def remove(engine: Any, path: str) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(path)


def chmod(engine: Any, path: str, mode: int) -> None:
    """Change the mode of a folder and of all that is in it; files lose or keep their x."""
    for each in [Path(path), *Path(path).rglob("*")]:
        each.chmod(mode if each.is_dir() else mode & ~0o111)


def obey_modes(engine: Any) -> None:
    """Let modes of files hold for this process and those that it starts, even where it is root's."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    header, data = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0, os.strerror(ctypes.get_errno())
    for low in (0, 1, 2):  # effective, permitted, inheritable: the low half of each
        data[low] &= ~(1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH)
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


def mount(engine: Any, path: str) -> None:
    """Mount a file system of 8 MiB there, for this process and those that it starts. Before the engine starts."""
    mount_small(Path(path))


def fill_disk(engine: Any, path: str, left: int = 0) -> None:
    """Fill the file system, all but so many bytes."""
    with Path(path, "ballast").open("wb") as ballast, suppress(OSError):
        free = os.statvfs(path)
        os.posix_fallocate(ballast.fileno(), 0, max(1, free.f_bavail * free.f_frsize - left))


def free_disk(engine: Any, path: str) -> None:
    """Take away what filled the file system."""
    Path(path, "ballast").unlink()


def bound_files(engine: Any, more: int | None = 0) -> None:
    """Let no file of the process that writes the store grow by more than so many bytes; None lets them again."""
    store = stores(engine)[0]
    size = resource.RLIM_INFINITY if more is None else (store.folder / DATA_NAME).stat().st_size + more
    hard = resource.prlimit(store.io_process_id, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(store.io_process_id, resource.RLIMIT_FSIZE, (size, hard))


def damage(engine: Any, seed: int, count: int) -> None:
    """Damage records of the rank's shard while it is open."""
    damage_some(stores(engine)[0].folder, random.Random(seed), count)


def write_adapter(engine: Any, path: str, seed: int) -> None:
    """Write a LoRA adapter over what is there."""
    models.write_adapter(Path(path), seed)


def load_adapter(engine: Any, name: str, number: int, path: str, in_place: bool = False) -> None:
    """Load a LoRA adapter, as a server does that is asked to."""
    assert engine.core.add_lora(LoRARequest(name, number, path, load_inplace=in_place))


def allow_latent_attention(engine: Any) -> None:
    """Let an engine on a CPU serve a model with latent attention, for prompts of which one token is left to compute: that is
    a step of decoding, which reads the cache. Before the engine starts."""
    connector.check_attention = lambda config: None


def pause(engine: Any, seconds: float) -> None:
    """Let the store's processes work."""
    time.sleep(seconds)
