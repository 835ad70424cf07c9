"""The story: an operator adds two lines to `vllm serve`. The server is killed, a bit of the disk flips, and the next server
answers the same, from what the first one stored."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.tools.demo_text import STORY
from kvstore.tools.model import smollm2_folder
from tests.vllm.damage import SHARD, Records
from tests.vllm.harness import PATIENCE_S, ROOT

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
COMMAND = (
    *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4", "--block-size", "32"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--host", "127.0.0.1", "--enable-prompt-tokens-details"),
    *("--shutdown-timeout", "10"),
)
PROMPT, PROMPT_BLOCKS = STORY[:1200], 8
SOON_S = 30.0


class Server:
    """A server over a store's folder, as an operator sees it: its answers, its metrics and its log."""

    def __init__(self, folder: Path, store: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.log = folder / f"server-{self._port}.log"
        named = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.engines.vllm"}
        named |= {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        transfer = json.dumps(named | {"kv_connector_extra_config": {"path": str(store), "capacity": "1G"}})
        command = [sys.executable, "-m", "tests.vllm.serve", str(smollm2_folder(progress=False)), *COMMAND]
        self.process = subprocess.Popen(
            [*command, "--port", str(self._port), "--kv-transfer-config", transfer],
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                self._get("/health")
                return
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)

    def complete(self, prompt: str) -> tuple[str, int]:
        """An answer, and how many tokens of the prompt were not computed."""
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0}
        request = urllib.request.Request(
            self._url("/v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as opened:
            answer: dict[str, Any] = json.load(opened)
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens") or 0

    def event(self, name: str) -> int:
        """A counter of the connector, as Prometheus reads it."""
        found = re.findall(rf'^vllm:kvstore_events_total\{{.*event="{name}".*\}} (\S+)$', self._get("/metrics"), re.M)
        return sum(int(float(value)) for value in found)

    def wait_for(self, name: str, count: int) -> None:
        """Wait until a counter has come so far; vLLM reports with a step."""
        deadline = time.monotonic() + SOON_S
        while self.event(name) < count:
            assert time.monotonic() < deadline, f"{name} is {self.event(name)}: expected {count}"
            time.sleep(0.2)

    def stop(self, number: int) -> int:
        """Send a signal; how the server ended."""
        self.process.send_signal(number)
        return self.process.wait(SOON_S)

    def wait_until_gone(self) -> None:
        """Wait until nothing that it started is left, I/O processes included."""
        deadline = time.monotonic() + SOON_S
        while left := self.left():
            assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Processes of its session that have not ended (proc(5): stat has the state behind the name, then the session)."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(session) == self.process.pid and state not in "ZX":
                    found.append(int(entry.name))
        return found

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self._url(path), timeout=PATIENCE_S) as opened:
            return str(opened.read().decode())


def stat(store: Path) -> str:
    """What `kvstore stat` says."""
    command = [Path(sys.executable).with_name("kvstore"), "stat", store]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@contextmanager
def serving(folder: Path, store: Path) -> Iterator[Server]:
    """A server that serves."""
    server = Server(folder, store)
    try:
        server.wait()
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_a_server_goes_on_from_what_a_killed_one_stored(tmp_path: Path, store: Path) -> None:
    with serving(tmp_path, store) as first:
        text, cached = first.complete(PROMPT)
        assert cached == 0
        first.wait_for("blocks_saved", PROMPT_BLOCKS)
        assert re.search(r"INFO .* KV of rank tp0of1-pp0of1 is kept in", first.log.read_text())
        os.killpg(first.process.pid, signal.SIGKILL)
    records = Records(store / SHARD)
    records.flip_content(records.headers()[3], 4321)

    with serving(tmp_path, store) as second:
        assert second.complete(PROMPT)[0] == text
        second.wait_for("blocks_rejected_content", 1)
        second.wait_for("blocks_saved", 1)
        assert second.stop(signal.SIGTERM) == 0
        second.wait_until_gone()
    assert stat(store).count(" clean") == 1

    with serving(tmp_path, store) as third:
        assert third.complete(PROMPT) == (text, 32 * PROMPT_BLOCKS)
        third.wait_for("blocks_loaded", PROMPT_BLOCKS)
        assert third.complete(PROMPT)[0] == text
        assert third.event("blocks_loaded") == PROMPT_BLOCKS
        assert third.event("blocks_rejected_content") == 0
