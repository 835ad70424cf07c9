"""The story: kvstore's connector is one of several that vLLM's MultiConnector has. It loads and saves as it does alone, and
its figures arrive where vLLM sends them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kvstore.engines.vllm import kv_checksum_enabled
from tests.vllm.harness import ROOT, Clean
from tests.vllm.multi import REQUESTS, part


def test_two_of_them_below_a_multi_connector(llama: Path, clean: Clean, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.vllm.multi", str(llama), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout)
    assert answer["rounds"] == 2 * [clean.tokens(llama, REQUESTS)]
    print(answer["events"])
    # Each of the two stores 3 + 6 blocks; one of them loads.
    assert answer["events"]["blocks_saved"] == 2 * 9
    assert answer["events"]["blocks_loaded"] == 9


def test_it_counts_as_verified(tmp_path: Path) -> None:
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [part(tmp_path)]}}
    assert kv_checksum_enabled(multi)
    assert not kv_checksum_enabled(multi | {"kv_connector_extra_config": {"connectors": []}})
