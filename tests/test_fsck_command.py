"""`kvstore-fsck`: its options, what it prints, its exit status, and a yes before anything is changed.

The check is a stand-in in most of these tests, so that each status and each interruption can be had. The last part
runs the command on real stores.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError, StorePathError, UnsupportedFormat
from kvstore.fsck.findings import KINDS, Finding, Progress, Summary
from kvstore.fsck.options import Options
from kvstore.fsck.repair import Plan, Repaired
from kvstore.record import chunk_key
from kvstore.reports import sequence_of
from kvstore.tools import fsck, fsck_options, fsck_outcome
from kvstore.tools.cli import app
from tests.support import Raw, block_hashes, flip, index_key, make_cache, open_store

KEY = bytes(range(16)) + b"\0\0" + b"\xab" * 32
DAMAGE = Finding("STORAGE_HASH", "chunk 1 changed", KEY, 2**20, 12, 3, True)
CLEAN = Summary(1000, 2**30, 1000, 1.25)


@dataclass
class Stand:
    """What the stand-ins yield, by shard's name; what they were called with."""

    results: dict[str, list[Any]] = field(default_factory=dict)
    options: list[Options] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    repaired: list[tuple[str, bool]] = field(default_factory=list)
    closed: int = 0

    def check(
        self, shard: Path, options: Options, cancelled: threading.Event
    ) -> Iterator[Finding | Progress | Summary]:
        self.options.append(options)
        self.checked.append(shard.name)
        repaired = shard.name in (name for name, _ in self.repaired)
        try:
            for item in [CLEAN] if repaired else self.results.get(shard.name, [CLEAN]):
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, signal.Signals):
                    os.kill(os.getpid(), item)
                    assert cancelled.wait(5)
                else:
                    yield item
        finally:
            self.closed += 1

    def carry_out(
        self, shard: Path, todo: Plan, compact: bool, progress: Callable[[Progress], None], *_: object
    ) -> Repaired:
        progress(Progress("copy", 1, 2, 3, 4))
        self.repaired.append((shard.name, compact))
        return Repaired(todo, quarantined=len(todo.records), folder=shard / "quarantine-now", compacted=compact)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr("kvstore.tools.fsck_run.check", made.check)
    monkeypatch.setattr("kvstore.tools.fsck_repairing.carry_out", made.carry_out)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a store with two shards, whose files are never looked at."""
    for name in ("tp0of2-pp0of1", "tp1of2-pp0of1"):
        (tmp_path / "a store" / name).mkdir(parents=True)
        (tmp_path / "a store" / name / "STORE").touch()
        (tmp_path / "a store" / name / "data.mdb").touch()
    return tmp_path / "a store"


ONE, TWO = "tp0of2-pp0of1", "tp1of2-pp0of1"


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its lines of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def call(*arguments: str | Path) -> Ran:
        capsys.readouterr()
        status = fsck.main([str(argument) for argument in arguments])
        return Ran(status, *capsys.readouterr())

    return call


Run = Callable[..., Ran]


# --- what it prints --------------------------------------------------------------------------------------------------


def test_a_clean_store_is_worth_a_line(stand: Stand, path: Path, run: Run) -> None:
    ran = run(path)
    assert (ran.status, ran.err) == (0, "")
    (line,) = ran.out.splitlines()
    assert line.startswith(f"{path}: clean (2 shards, 2,000 records, 2.00 GiB in 2.5 s; default check: ")
    assert stand.options == [Options(), Options()]


def test_damage_is_a_table_and_the_command_that_repairs_it(stand: Stand, path: Path, run: Run) -> None:
    other = Finding("ORPHAN_CHUNK", "chunk 4 of sequence 7", nbytes=4096)
    stand.results[TWO] = [DAMAGE, DAMAGE, other, CLEAN]
    ran = run(path)
    assert ran.status == 4
    assert "Damaged: 1 record and 1 other finding" in ran.out
    rows = {line.split()[0]: line.split() for line in ran.out.splitlines() if re.match(r"[A-Z_]+ ", line)}
    assert rows["STORAGE_HASH"][1:5] == ["2", "1", "2.00", "MiB"]
    assert rows["ORPHAN_CHUNK"][1:4] == ["1", "4.00", "KiB"]
    text = re.sub(r"\s+", " ", ran.out)
    assert KINDS["STORAGE_HASH"].meaning in text
    assert f"\n  kvstore-fsck --repair '{path}'\n" in ran.out
    assert f"\n  kvstore-fsck --dry-run '{path}'\n" in ran.out
    assert "--salvage" not in ran.out
    assert f"STORAGE_HASH {KEY[18:].hex()[:32]}...: chunk 1 changed" in ran.out
    assert ONE not in ran.out, "the clean one"


@pytest.mark.parametrize(("options", "repeated"), [((), ()), (("--deep",), ("--deep",)), (("--quick",), ("--quick",))])
def test_the_repair_goes_by_the_same_check(
    stand: Stand, path: Path, run: Run, options: tuple[str, ...], repeated: tuple[str, ...]
) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    printed = next(line for line in run(*options, path).out.splitlines() if "--repair" in line)
    assert shlex.split(printed) == ["kvstore-fsck", *repeated, "--repair", str(path)]


def test_a_broken_tree_has_a_way_that_does_not_touch_it(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [Finding("TREE", "page 4"), CLEAN]
    assert f"  kvstore-fsck --salvage --output NEW '{path}'\n" in run(path).out


def test_what_a_second_read_did_not_find_is_no_work_for_a_repair(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [Finding("DECODE", "odd", KEY, persisted=False), CLEAN]
    ran = run(path)
    assert ran.status == 4
    assert "--repair" not in ran.out
    assert "Look at memory, disk, cables and the kernel's log." in ran.out


def test_a_newer_version_is_no_damage_and_not_clean(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [Finding("UNKNOWN_VERSION", "version 9", KEY), CLEAN]
    ran = run(path)
    assert ran.status == 8
    assert "No damage, and 1 finding that this version cannot judge" in ran.out
    assert "upgrade kvstore" in ran.out
    assert "--repair" not in ran.out


def test_what_was_not_checked_is_said(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [Summary(1, 1, 1, 1.0, {}, ["lmdb.verify: the store is in use"])]
    ran = run(path)
    assert ran.status == 0
    assert f"not checked in {ONE}: lmdb.verify: the store is in use" in ran.out


def test_hostile_text_stays_text(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [Finding("HEADER", "\x1b[2J[red]x[/red]\n\u202eevil\ud800", KEY), CLEAN]
    ran = run(path)
    assert "\\x1b[2J[red]x[/red]\\n\\u202eevil\\ud800" in ran.out
    assert not any(char in ran.out for char in "\x1b\u202e\ud800")


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_a_line_for_each_finding_and_one_for_the_whole(stand: Stand, path: Path, run: Run) -> None:
    stand.results[TWO] = [Progress("records", 1, 2, 3, 4), DAMAGE, Finding("ACCOUNTING", "\ud800\n"), CLEAN]
    ran = run("--json", path)
    assert (ran.status, ran.err) == (4, "")
    first, second, summary = ran.lines
    assert {line["schema"] for line in ran.lines} == {1}
    assert first == {
        "schema": 1,
        "type": "finding",
        "shard": str(path / TWO),
        "kind": "STORAGE_HASH",
        "damage": True,
        "key": KEY.hex(),
        "bytes": 2**20,
        "page": 12,
        "pages": 3,
        "persisted": True,
        "remedy": "quarantine",
        "meaning": KINDS["STORAGE_HASH"].meaning,
        "detail": "chunk 1 changed",
        "after_repair": False,
    }
    assert (second["kind"], second["key"], second["page"], second["persisted"]) == ("ACCOUNTING", "", None, None)
    assert summary["type"] == "summary"
    assert summary["findings"] == {"STORAGE_HASH": 1, "ACCOUNTING": 1}
    assert (summary["records"], summary["total_records"], summary["bytes"]) == (2000, 2000, 2**31)
    assert (summary["damaged_records"], summary["damaged_bytes"]) == (1, 2**20)
    assert (summary["exit_status"], summary["cancelled"], summary["repaired"]) == (4, False, False)
    assert shlex.split(summary["repair_command"]) == ["kvstore-fsck", "--repair", str(path)]
    assert [shard["damaged"] for shard in summary["shards"]] == [False, True]


def test_json_findings_come_as_they_are_made(stand: Stand, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def check(shard: Path, options: Options, cancelled: threading.Event) -> Iterator[Finding | Summary]:
        yield DAMAGE
        seen.append(sys.stdout.getvalue())  # type: ignore[attr-defined]
        yield CLEAN

    monkeypatch.setattr("kvstore.tools.fsck_run.check", check)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    fsck.main(["--json", str(path / ONE)])
    assert json.loads(seen[0])["kind"] == "STORAGE_HASH"


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("store", 1),
        ("--jobs 1 store", 1),
        ("--jobs=1 store", 1),
        ("--jobs 2 store", 2),
        ("--jobs=16 --quick store", 2),
        ("--repair store", 1),
        ("--salvage --output new store", 0),
        ("--help", 0),
        ("", 0),
    ],
)
def test_processes_start_while_the_options_are_read(
    line: str, expected: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def ready(count: int) -> AbstractContextManager[None]:
        started.append(count)
        return nullcontext()

    monkeypatch.setattr(fsck, "ready", ready)
    monkeypatch.setattr(fsck, "app", lambda *_, **__: None)
    run(*line.split())
    assert started == [expected]


def test_the_command_starts_without_what_its_processes_import() -> None:
    heavy = {"numpy", "lmdb", "rich", "kvstore.fsck.scan", "kvstore.fsck.repair"}
    code = f"import sys, kvstore.tools.fsck; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_command_without_standard_streams_checks_all_the_same(real: Path, closed: str) -> None:
    code = "import sys; from kvstore.tools.fsck import main; sys.exit(main())"
    command = shlex.join([sys.executable, "-c", code, "--jobs", "2", str(real)])
    ran = subprocess.run(["bash", "-c", f"{command} {closed}"], capture_output=True, text=True)
    assert (ran.returncode, f"{real}: clean" in ran.stdout) == (0, True), ran
    damage(real, 1)
    assert subprocess.run(["bash", "-c", f"{command} {closed}"], capture_output=True).returncode == 4


def test_options_reach_the_check(stand: Stand, path: Path, run: Run) -> None:
    ran = run("--deep", "--prefix", "AB12", "--resume", "--jobs", "3", "--rate-limit", "1.5", path / ONE)
    assert ran.status == 0
    assert stand.options == [Options("deep", prefix=b"\xab\x12", resume=True, jobs=3, rate_limit=1.5e6)]
    run("--sample", "20G", "--deep", "--device", "cuda", path / ONE)
    assert stand.options[1].sample is not None
    assert (stand.options[1].sample.nbytes, stand.options[1].device) == (20 * 2**30, "cuda")
    assert run("--quick", path / ONE).out.count("quick check") == 1
    assert stand.options[2] == Options("quick")


MISUSES = [
    "",
    "--no-such-option X",
    "--quick --deep X",
    "--quick --sample 5% X",
    "--quick --prefix ab X",
    "--quick --resume X",
    "--sample 5% --prefix ab X",
    "--sample 0% X",
    "--sample 1/0 X",
    "--sample much X",
    "--prefix abc X",
    "--prefix xy X",
    "--prefix= X",
    f"--prefix {'ab' * 83} X",
    "--max-duration 0 X",
    "--max-duration -5 X",
    "--max-duration 5x X",
    "--jobs 0 X",
    "--jobs 65 X",
    "--rate-limit 0 X",
    "--rate-limit nan X",
    "--device cuda X",
    "--deep --device tpu X",
    "--repair X",
    "--repair --yes --sample 5% X",
    "--repair --yes --prefix ab X",
    "--repair --yes --max-duration 5m X",
    "--repair --yes --resume X",
    "--repair --yes --salvage --output new X",
    "--dry-run --yes X",
    "--dry-run --sample 5% X",
    "--yes X",
    "--compact X",
    "--output new X",
    "--salvage X",
    "--salvage --output new --deep X",
    "--salvage --output new --compact X",
    "--salvage --output new --report r.html X",
    "X X",
]


@pytest.mark.parametrize("line", MISUSES)
def test_misuse_is_16_and_touches_nothing(stand: Stand, path: Path, run: Run, line: str) -> None:
    before = sorted(path.parent.rglob("*"))
    ran = run(*(str(path) if word == "X" else word for word in line.split()))
    assert ran.status == 16
    assert "Error" in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert (stand.checked, stand.repaired) == ([], [])
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2d ", 172800)])
def test_durations(text: str, seconds: float) -> None:
    assert fsck_options.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "1e3", "1 m", "9" * 10, "٣m", "-1"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError):
        fsck_options.seconds(text)


def test_every_conflict_names_options_that_exist(run: Run) -> None:
    words = {*fsck_options.CONFLICTS, *fsck_options.NEEDS}
    for others in (*fsck_options.CONFLICTS.values(), *fsck_options.NEEDS.values()):
        words.update(others)
    shown = run("--help").out
    assert {word for word in words if fsck_options.option(word) not in shown} == set()


def test_help_says_what_each_stage_does_not_see(run: Run) -> None:
    ran = run("--help")
    assert ran.status == 0
    assert ran.out.count("Does not see") == 3
    assert "Exit status" in ran.out
    assert "kvstore-fsck --deep" in ran.out


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("kvstore-fsck ")


def test_kvstore_fsck_is_the_same_command(stand: Stand, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    for arguments, status in ((["--deep", str(path)], 4), (["--quick", "--deep", str(path)], 16), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            app(["fsck", *arguments])
        assert ended.value.code == status
    assert stand.options[0].stage == "deep"
    assert "Exit status" in capsys.readouterr().out


# --- exit status -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_kind_is_4(stand: Stand, path: Path, run: Run, kind: str) -> None:
    stand.results[ONE] = [Finding(kind, "it", KEY, 1, persisted=True), CLEAN]
    assert run(path).status == (8 if kind == "UNKNOWN_VERSION" else 4)


@pytest.mark.parametrize(
    "error", [StorePathError("it:\ngone"), UnsupportedFormat("it is newer"), OSError(5, "it"), PermissionError("it")]
)
def test_what_cannot_be_checked_is_8_in_one_line_and_the_next_shard_is_checked(
    stand: Stand, path: Path, run: Run, error: Exception
) -> None:
    stand.results = {ONE: [error], TWO: [DAMAGE, CLEAN]}
    ran = run(path)
    assert ran.status == 8 | 4
    assert re.fullmatch(r"error: .*it.* \(see `kvstore-fsck --help`\)\n", ran.err)
    assert "STORAGE_HASH" in ran.out
    summary = run("--json", path).lines[-1]
    assert summary["shards"][0]["error"]
    assert summary["exit_status"] == 12


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: None])
def test_a_path_without_a_shard_is_8(tmp_path: Path, run: Run, make: Callable[[Path], None]) -> None:
    make(tmp_path / "store")
    ran = run(tmp_path / "store")
    assert (ran.status, ran.out, ran.err.count("\n")) == (8, "", 1)
    assert ran.err.startswith("error: ")


def test_a_shard_that_this_user_may_not_look_into_is_never_left_out(
    stand: Stand, path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STORE", "data.mdb"):
        (path / TWO / name).unlink()
    monkeypatch.setattr(os, "access", lambda file, _: file != path / TWO)
    run(path)
    assert stand.checked == [ONE, TWO]


def test_ctrl_c_is_32_without_a_traceback_and_ends_the_check(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [DAMAGE, KeyboardInterrupt()]
    ran = run(path)
    assert ran.status == 32 | 4
    assert ran.err == ""
    assert f"kvstore-fsck --resume '{path}'" in ran.out
    assert (stand.checked, stand.closed) == ([ONE], 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_told_to_end_says_how_far_it_came(
    stand: Stand, path: Path, run: Run, number: signal.Signals
) -> None:
    before = signal.getsignal(number)  # SIGINT is ignored in what a shell runs behind it
    stand.results[ONE] = [number, Summary(5, 5, 10, 1.0, {}, [], cancelled=True)]
    ran = run("--json", path)
    assert ran.status == 32
    assert (ran.lines[-1]["cancelled"], ran.lines[-1]["records"]) == (True, 5)
    assert signal.getsignal(number) is before
    assert stand.checked == [ONE]


def test_a_check_without_an_end_is_never_clean(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = []
    ran = run(path / ONE)
    assert ran.status == 32
    assert "clean" not in ran.out


def test_the_command_that_goes_on_is_about_the_same_records(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [Summary(5, 5, 10, 1.0, {}, [], cancelled=True)]
    ran = run("--prefix", "ab", "--jobs", "2", "--rate-limit", "1.5", path)
    assert f"\n  kvstore-fsck --resume --prefix ab --jobs 2 --rate-limit 1.5 '{path}'\n" in ran.out
    assert "--sample 5%" in run("--sample", "5%", path).out
    ran = run("--quick", path)
    assert f"It has no checkpoint. Check again:\n  kvstore-fsck --quick '{path}'\n" in ran.out


def test_ctrl_c_outside_of_the_check_is_32(path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> list[Path]:
        raise KeyboardInterrupt

    monkeypatch.setattr(fsck, "shards_of", interrupted)
    assert run(path).status == 32


def test_what_nobody_thought_of_is_8_and_not_the_1_of_a_repair(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [ValueError("a bug")]
    ran = run(path)
    assert ran.status == 8
    assert "ValueError: a bug" in ran.err


def test_a_command_can_be_pasted_whatever_is_in_the_path(tmp_path: Path) -> None:
    for name in ("a b", "it's", "a\nb", "\x1b[31m'\\", "$(id)", os.fsdecode(b"caf\xe9\x7f")):
        command = fsck_outcome.Run(tmp_path / name, "default", 0).command("--repair")
        assert command.isprintable()
        echoed = subprocess.run(["bash", "-c", f'kvstore-fsck() {{ printf %s "$2"; }}; {command}'], capture_output=True)
        assert echoed.stdout == os.fsencode(tmp_path / name)


def test_damage_stays_4_where_the_current_folder_is_gone(
    stand: Stand, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Path) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    (tmp_path / ONE).mkdir()
    (tmp_path / ONE / "STORE").touch()
    stand.results[ONE] = [DAMAGE, CLEAN]
    monkeypatch.setattr(os.path, "abspath", gone)
    ran = run(tmp_path / ONE)
    assert ran.status == 4
    assert f"kvstore-fsck --repair {tmp_path / ONE}" in ran.out


def test_out_of_time_is_32_and_the_rest_is_named(stand: Stand, path: Path, run: Run, monkeypatch: Any) -> None:
    now = iter([0.0, 1.0, 700.0, 700.0])
    monkeypatch.setattr("kvstore.tools.fsck_run.time.monotonic", lambda: next(now))
    stand.results[ONE] = [Summary(5, 5, 10, 1.0, {}, [], cancelled=True)]
    ran = run("--max-duration", "10m", path)
    assert ran.status == 32
    assert [options.max_duration_s for options in stand.options] == [599.0]
    assert f"not checked in {TWO}: this shard: --max-duration was over" in ran.out


def test_resume_begins_with_the_shard_that_was_checked_longest_ago(stand: Stand, path: Path, run: Run) -> None:
    (path / ONE / "fsck.json").touch()
    run("--resume", path)
    (path / TWO / "fsck.json").touch()
    os.utime(path / TWO / "fsck.json", (5, 5))
    run("--resume", path)
    os.utime(path / ONE / "fsck.json", (3, 3))
    run("--resume", path)
    assert stand.checked == [TWO, ONE, TWO, ONE, ONE, TWO]


# --- repair ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(text))


def test_a_repair_needs_a_typed_yes(stand: Stand, path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    for answer in ("", "y\n", "no\n", "YES\n"):
        typed(monkeypatch, answer)
        ran = run("--repair", path)
        assert ran.status == 4
        assert "nothing was changed" in ran.err
        assert stand.repaired == []
    typed(monkeypatch, "yes\n")
    ran = run("--repair", path)
    assert ran.status == 1
    assert stand.repaired == [(ONE, False)]
    assert "STORAGE_HASH" in ran.out, "what was found is shown before the question"
    assert "A repair of tp0of2-pp0of1 would:\n  - move damaged records to" in ran.out
    assert "moved 1 damaged record," in ran.out
    assert "epaired, and clean now" in ran.out
    assert stand.checked[-3:] == [ONE, TWO, ONE]


def test_yes_repairs_without_a_terminal(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    ran = run("--repair", "--yes", "--json", path)
    assert ran.status == 1
    first, summary = ran.lines
    assert (first["kind"], first["after_repair"]) == ("STORAGE_HASH", False)
    assert (summary["repaired"], summary["findings"], summary["exit_status"]) == (True, {}, 1)
    assert list(summary["plan"]) == [str(path / ONE), str(path / TWO)]
    assert "A repair of tp0of2-pp0of1 would:" in ran.err


def test_a_dry_run_prints_the_plan_of_the_repair_and_does_nothing(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    dry = run("--dry-run", path)
    assert dry.status == 4
    both = run("--repair", "--dry-run", path)
    assert both.out == dry.out
    assert stand.repaired == []
    steps = [line for line in dry.out.splitlines() if re.match(r"  - ", line)]
    assert steps
    wet = run("--repair", "--yes", path)
    assert [line for line in wet.out.splitlines() if re.match(r"  - ", line)] == steps


def test_a_repair_of_a_clean_store_does_nothing(stand: Stand, path: Path, run: Run) -> None:
    ran = run("--repair", "--yes", path)
    assert ran.status == 0
    assert stand.repaired == []
    assert ran.out.count("has nothing to do") == 2


def test_compact_alone_is_a_repair_of_a_clean_store(stand: Stand, path: Path, run: Run) -> None:
    ran = run("--repair", "--yes", "--compact", path / ONE)
    assert ran.status == 0
    assert stand.repaired == [(ONE, True)]
    assert "returned free space" in ran.out


def test_a_repair_that_fails_is_one_line_and_damage_is_left(
    stand: Stand, path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: Any) -> Repaired:
        raise StorePathError("it is being written")

    stand.results = {ONE: [DAMAGE, CLEAN]}
    monkeypatch.setattr("kvstore.tools.fsck_repairing.carry_out", locked)
    ran = run("--repair", "--yes", path)
    assert ran.status == 8 | 4
    assert ran.err.count("\n") == 1
    assert "it is being written" in ran.err


def test_damage_that_a_repair_leaves_is_5(stand: Stand, path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.results = {ONE: [DAMAGE, CLEAN]}
    monkeypatch.setattr("kvstore.tools.fsck_repairing.carry_out", lambda shard, todo, *_: Repaired(todo))
    ran = run("--repair", "--yes", path)
    assert ran.status == 1 | 4
    assert "epaired, and damage is left" in ran.out


def test_nothing_is_repaired_after_ctrl_c(stand: Stand, path: Path, run: Run) -> None:
    stand.results = {ONE: [DAMAGE, CLEAN], TWO: [KeyboardInterrupt()]}
    assert run("--repair", "--yes", path).status == 32 | 4
    assert stand.repaired == []


def test_ctrl_c_in_a_repair_is_32(stand: Stand, path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Repaired:
        raise KeyboardInterrupt

    stand.results = {ONE: [DAMAGE, CLEAN]}
    monkeypatch.setattr("kvstore.tools.fsck_repairing.carry_out", interrupted)
    ran = run("--repair", "--yes", path)
    assert ran.status == 32 | 4
    assert "repair again" in ran.err


# --- the report ------------------------------------------------------------------------------------------------------


def test_a_report_is_written_after_the_check(stand: Stand, path: Path, run: Run, tmp_path: Path) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    ran = run("--report", tmp_path / "r.html", path)
    assert ran.status == 4
    assert ran.err == f"report: {tmp_path / 'r.html'}\n"
    assert "STORAGE_HASH" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("name", ["", "nowhere/r.html"])
def test_a_report_that_cannot_be_written_is_told_before_the_check(
    stand: Stand, path: Path, run: Run, tmp_path: Path, name: str
) -> None:
    ran = run("--report", tmp_path / name, path)
    assert (ran.status, ran.err.count("\n")) == (8, 1)
    assert stand.checked == []


# --- sums and words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (999 * 1024, "999 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (2**60, "1.00 EiB"),
        (2**74, "16384 EiB"),
    ],
)
def test_sizes(nbytes: int, words: str) -> None:
    assert fsck_outcome.size(nbytes) == words


def test_rows_count_records_once() -> None:
    found = [DAMAGE, DAMAGE, Finding("TREE", ""), Finding("STORAGE_HASH", "", b"k", 5, persisted=False)]
    tree, hashes = fsck_outcome.rows(found)
    assert (tree.kind, tree.count, tree.records) == ("TREE", 1, 0)
    assert (hashes.count, hashes.records, hashes.nbytes, hashes.transient) == (3, 2, 2**21 + 5, 1)
    assert fsck_outcome.damaged_records(found) == 2


def test_every_remedy_has_its_words() -> None:
    assert {kind.remedy for kind in KINDS.values()} == set(fsck_outcome.REMEDIES)


# --- real stores -----------------------------------------------------------------------------------------------------

COUNT = 12
HASHES = block_hashes(COUNT)


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A store of COUNT records of one chunk each."""
    with open_store(tmp_path / "real store", make_cache(blocks=COUNT, head_size=128), io="inline") as store:
        assert store.put_blocks(HASHES, range(COUNT)).stored.all()
    return tmp_path / "real store"


def shard_folder(store: Path) -> Path:
    return store / "tp0of1-pp0of1"


def damage(store: Path, *numbers: int) -> None:
    """Flip a bit in the chunk of some records."""
    with open_store(store, make_cache(blocks=COUNT, head_size=128), io="inline") as opened:
        raw = Raw(opened)
        for number in numbers:
            name = chunk_key(sequence_of(raw.entry(index_key(opened, HASHES[number])) or b""), 1)
            raw.put_chunk(name, flip(raw.chunk(name), 1000))


def served(store: Path) -> int:
    """How many of the blocks are given back, verified."""
    with open_store(store, make_cache(blocks=COUNT, head_size=128, seed=9), io="inline") as opened:
        return int(opened.get_blocks(HASHES, range(COUNT)).verified.sum())


def files(store: Path) -> dict[str, bytes]:
    """Every file of a store but LMDB's table of readers."""
    found = (path for path in store.rglob("*") if path.is_file() and path.name != "lock.mdb")
    return {str(path.relative_to(store)): path.read_bytes() for path in found}


def kinds(ran: Ran) -> set[str]:
    return {line["kind"] for line in ran.lines if line["type"] == "finding"}


@pytest.mark.parametrize("options", [(), ("--quick",), ("--deep", "--jobs", "2"), ("--sample", "1/2"), ("--dry-run",)])
def test_a_real_clean_store(real: Path, run: Run, options: tuple[str, ...]) -> None:
    before = files(real)
    ran = run("--json", *options, real)
    assert ran.status == 0, ran
    assert ran.lines[-1]["total_records"] == COUNT
    assert run(*options, real).out.startswith(f"{real}: clean (")
    assert files(real) == before


def test_real_damage_is_found_repaired_by_the_printed_command_and_gone(real: Path, run: Run) -> None:
    damage(real, 3, 7)
    before = files(real)
    found = run("--json", "--deep", real)
    assert (found.status, kinds(found)) == (4, {"STORAGE_HASH"})
    assert {line["key"][36:] for line in found.lines[:-1]} == {HASHES[3].hex(), HASHES[7].hex()}
    assert files(real) == before, "a check changes nothing"
    command = shlex.split(found.lines[-1]["repair_command"])
    ran = run(*command[1:], "--yes")
    assert ran.status == 1, ran
    assert "moved 2 damaged records" in ran.out
    assert run(real).status == 0
    assert served(real) == COUNT - 2


def test_the_report_of_a_real_store(real: Path, run: Run, tmp_path: Path) -> None:
    damage(real, 5)
    assert run("--report", tmp_path / "r.html", real).status == 4
    text = (tmp_path / "r.html").read_text()
    assert HASHES[5].hex() in text
    assert text.count('class="damaged ') >= 1


def test_a_shard_without_its_store_file_is_damaged_and_repaired(real: Path, run: Run) -> None:
    (shard_folder(real) / "STORE").unlink()
    ran = run("--json", real)
    assert ran.status == 4
    assert "STORE_FILE" in kinds(ran)
    assert run("--repair", "--yes", real).status == 1
    assert run(real).status == 0
    assert served(real) == COUNT


def test_quarantine_is_as_private_as_the_shard(real: Path, run: Run) -> None:
    damage(real, 1)
    assert run("--repair", "--yes", real).status == 1
    folders = [path for path in shard_folder(real).rglob("*") if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700, 0o700]


def test_looking_into_a_store_escapes_the_names_of_folders(
    real: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.echo", print)
    odd = real.rename(tmp_path / "\x1b[31mstore")
    shutil.copytree(shard_folder(odd), odd / "\x1b[31mshard")
    for command in ("stat", "ls"):
        app([command, str(odd)], standalone_mode=False)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["STORE", "data.mdb"])
def test_a_pipe_in_the_place_of_a_file_is_8_and_not_waited_for(real: Path, run: Run, tmp_path: Path, name: str) -> None:
    (shard_folder(real) / name).unlink()
    os.mkfifo(shard_folder(real) / name)
    for options in ((), ("--repair", "--yes"), ("--salvage", "--output", tmp_path / "new")):
        ran = run(*options, real)
        assert ran.status == 8
        assert f"{name}: it is no plain file" in ran.err


def test_a_file_of_less_than_a_page_is_repaired(real: Path, run: Run) -> None:
    (shard_folder(real) / "data.mdb").write_bytes(b"x")
    assert run(real).status == 4
    assert run("--repair", "--yes", real).status == 1
    assert run(real).status == 0


def test_a_store_of_a_newer_version_is_8_and_left_alone(real: Path, run: Run) -> None:
    store_file = shard_folder(real) / "STORE"
    data = bytearray(store_file.read_bytes())
    for start in (0, 512):
        data[start + 8 : start + 12] = (99).to_bytes(4, "little")
    store_file.write_bytes(data)
    before = files(real)
    for options in ((), ("--deep",), ("--repair", "--yes")):
        ran = run(*options, real)
        assert ran.status == 8
        assert "version 99" in ran.out + ran.err
    assert files(real) == before


@pytest.mark.parametrize("how", ["metas", "cut"])
def test_a_file_whose_trees_are_gone_is_salvaged_elsewhere_and_in_place(
    real: Path, run: Run, tmp_path: Path, how: str
) -> None:
    data = shard_folder(real) / "data.mdb"
    content = bytearray(data.read_bytes())
    if how == "metas":
        content[: 2 * 4096] = b"\0" * (2 * 4096)
    else:
        del content[-3 * 4096 :]
    data.write_bytes(content)
    found = run("--json", "--quick", real)
    assert found.status == 4
    assert kinds(found) & {"META", "FILE_TRUNCATED"}
    before = files(real)
    new = tmp_path / "new store"
    ran = run("--salvage", "--output", new, real)
    assert ran.status in (0, 4), ran
    assert ran.out.startswith(f"salvaged to {new}")
    assert files(real) == before, "salvage touches nothing"
    assert run(new).status == 0
    assert served(new) >= COUNT - 1
    assert run("--salvage", "--output", new, real).status == 8
    assert run("--salvage", "--output", real / "inside", real).status == 8
    ran = run("--quick", "--repair", "--yes", real)
    assert ran.status == 1, ran
    assert run(real).status == 0
    assert served(real) >= COUNT - 1
    assert list(shard_folder(real).glob("data.mdb.damaged-*"))


def test_a_repair_beside_a_writer_is_8_and_a_check_is_not(real: Path, run: Run) -> None:
    damage(real, 3)
    with open_store(real, make_cache(blocks=COUNT, head_size=128), io="process"):
        assert run(real).status == 4
        ran = run("--repair", "--yes", real)
    assert ran.status == 8 | 4
    assert ran.err.count("\n") == 1
    assert "error: " in ran.err


def test_ctrl_c_leaves_a_checkpoint_and_resume_goes_on(tmp_path: Path, run: Run) -> None:
    hashes = block_hashes(400)
    cache = make_cache(blocks=400, head_size=256)
    with open_store(tmp_path / "store", cache, io="inline") as store:
        assert store.put_blocks(hashes, range(400)).stored.all()
    command = [sys.executable, "-m", "kvstore.tools.fsck", "--json", "--rate-limit", "1", str(tmp_path / "store")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as checking:
        time.sleep(3)
        os.killpg(checking.pid, signal.SIGINT)
        began = time.monotonic()
        out, err = checking.communicate(timeout=60)
    assert (checking.returncode, err) == (32, "")
    assert time.monotonic() - began < 10
    summary = json.loads(out.splitlines()[-1])
    assert (summary["cancelled"], summary["findings"]) == (True, {})
    assert 0 < summary["records"] < 400
    checkpoint = tmp_path / "store" / "tp0of1-pp0of1" / "fsck.json"
    assert checkpoint.stat().st_mode & 0o777 == 0o600
    ran = run("--json", "--resume", tmp_path / "store")
    assert ran.status == 0
    assert ran.lines[-1]["records"] >= 400 - summary["records"]


# --- the page for operators ------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "fsck.md").read_text()


def test_the_page_has_every_kind_and_what_it_means() -> None:
    for kind, known in KINDS.items():
        if known.damage:
            assert f"| `{kind}` | {known.meaning} |" in PAGE
    assert f"| `UNKNOWN_VERSION` | {KINDS['UNKNOWN_VERSION'].meaning} |" in PAGE


def test_the_page_has_every_key_of_the_json(stand: Stand, path: Path, run: Run) -> None:
    stand.results[ONE] = [DAMAGE, CLEAN]
    for line in run("--json", path).lines:
        row = next(row for row in PAGE.splitlines() if row.startswith(f'| `"type": "{line["type"]}"`'))
        assert set(re.findall(r"`(\w+)`", row.split("|", 2)[2])) == set(line) - {"schema", "type"}


def test_the_page_names_options_that_exist(run: Run) -> None:
    known = run("--help").out
    own = (line for line in PAGE.splitlines() if "kvstore bench" not in line)
    named = set(re.findall(r"(--[a-z][a-z-]+)", "\n".join(own)))
    assert {option for option in named if option not in known} == set()
