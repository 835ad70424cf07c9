"""The demo ends in 0 only if every step held: once as a person runs it, then with steps that are made to lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.tools import demo, demo_damage, demo_model
from kvstore.tools.model import ModelUnavailable, load_smollm2, smollm2_folder

SECOND_PROCESS = demo.Demo.second_process
HELD = (
    r"✓ (\d+) of \1 blocks stored",
    r"✓ 1,\d+ of 1,\d+ tokens verified and skipped",
    r"first token after .* instead of",
    r"✓ logits of \d+ tokens bit-identical to the uninterrupted run",
    r"✓ blocks refused: 1 by storage_hash",
    r"✓ the \d+ blocks before it used: \d+ tokens skipped",
    r"✓ blocks refused: 2 by key",
    r"✓ 3 blocks stored, \d+ were present",
    r"get_rejected_key +│ +2",
    r"get_rejected_storage_hash +│ +1",
    r"Every step held\.",
)


def test_every_step_holds(tmp_path: Path) -> None:
    smollm2_folder(progress=False)
    # Waiting threads that spin make the model many times slower where the tests are not alone on the machine.
    environment = os.environ | {"TMPDIR": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "80", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "kvstore.tools.demo"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in HELD:
        assert re.search(line, result.stdout), f"no {line!r} in:\n{result.stdout}"
    assert result.stdout.count("bit-identical") == 3
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    # torch makes an empty folder for a compiler that is never called.
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.fixture(scope="module")
def loaded() -> Any:
    """The real tokenizer and model, loaded once."""
    return load_smollm2(smollm2_folder(progress=False))


@pytest.fixture
def short(loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A demo of one paragraph, in this process, without its second one; one thread, which no other can hold up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(demo, "load_smollm2", lambda folder: loaded)
    monkeypatch.setattr(demo_model, "STORY", demo_model.STORY.split("\n\n")[0])
    monkeypatch.setattr(demo_model, "ANSWER_TOKENS", 2)
    monkeypatch.setattr(demo.Demo, "second_process", lambda self: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    torch.set_num_threads(threads)
    assert not list(tmp_path.iterdir())


def test_a_short_run_holds(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    assert "Every step held." in capsys.readouterr().out


def test_damage_that_is_not_seen_fails(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_damage, "flip_bit", lambda folder, key, bit: 0)
    monkeypatch.setattr(demo_damage, "exchange", lambda folder, one, two: None)
    assert demo.main() == 1
    told = capsys.readouterr().out
    assert "step 3: blocks refused: none" in told
    assert "step 4: blocks refused: none" in told
    assert "Every step held" not in told


def test_a_wrong_answer_fails(short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = demo.load_cache

    def wrong(store: Any, ids: Any) -> Any:
        cache, tokens = load(store, ids)
        cache.layers[3].values[0, 0, 5, 7] += 1
        return cache, tokens

    monkeypatch.setattr(demo, "load_cache", wrong)
    assert demo.main() == 1
    assert re.search(r"✗ logits of \d+ tokens bit-identical", capsys.readouterr().out)


def test_a_store_that_forgets_fails(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = demo.load_cache
    monkeypatch.setattr(demo, "load_cache", lambda store, ids: load(store, ids[:, :17]))
    assert demo.main() == 1
    assert re.search(r"✗ the 1 blocks before it used", capsys.readouterr().out)


def test_a_second_process_that_fails_is_told(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.Demo, "second_process", lambda self: demo.run_second(self.work / "nothing"))
    assert demo.main() == 1
    told = capsys.readouterr().out
    assert "the second process ended with 1" in told
    assert "task.json" in told


def test_a_second_process_that_says_something_else_fails(
    short: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lies(work: Path) -> demo.Figures:
        """It loaded less, and one bit of its logits is another."""
        bits = np.load(work / "first.npy")
        bits[-1, -1] ^= 1
        np.save(work / "second.npy", bits)
        return demo.Figures(tokens=16, answer=[], stats={}, load=1.0, rest=1.0, full=1.0)

    monkeypatch.setattr(demo.Demo, "second_process", SECOND_PROCESS)
    monkeypatch.setattr(demo, "run_second", lies)
    monkeypatch.setattr(demo, "go_on", leaving_its_logits(demo.go_on, short))
    assert demo.main() == 1
    told = capsys.readouterr().out
    assert re.search(r"✗ 16 of \d+ tokens verified and skipped", told)
    assert re.search(r"✗ logits of \d+ tokens bit-identical to the uninterrupted run", told)


def leaving_its_logits(go_on: Any, folder: Path) -> Any:
    """`go_on`, which writes its logits into the demo's temporary folder."""

    def wrapper(*arguments: Any) -> Any:
        said = go_on(*arguments)
        np.save(next(folder.glob("kvstore-demo-*")) / "first.npy", demo_model.as_bits(said.logits).numpy())
        return said

    return wrapper


def test_without_the_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unavailable() -> Path:
        raise ModelUnavailable("pip could not get the wheel")

    monkeypatch.setattr(demo, "smollm2_folder", unavailable)
    assert demo.main() == 1
    assert "pip could not get the wheel" in capsys.readouterr().out
