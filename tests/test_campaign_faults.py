"""The story: the campaigns of power losses, failing system calls and full disks are only worth what their mechanics are. The
traces are complete, the disk model loses what it may lose and nothing else, and a store that lies about its syncs is caught.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest

from kvstore.environment import Environment
from tests.campaign import powerloss, strace, syscalls, workload
from tests.campaign.disk import SECTOR, Disk, Event, Reader, write_files
from tests.campaign.framework import CAMPAIGNS, Context, Kind, Outcome, run
from tests.campaign.fulldisk import can_mount
from tests.campaign.servant import Crew, Died, Raised, Servant
from tests.campaign.workload import Engine

ALL, NONE = (lambda: True), (lambda: False)


def hexed(text: str) -> str:
    """As strace -xx prints a string."""
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def line(template: str, pid: int = 7) -> str:
    """A line of a trace: what stands between two ^ is printed as strace prints strings."""
    parts = template.split("^")
    return f"{pid} " + "".join(hexed(part) if i % 2 else part for i, part in enumerate(parts)) + "\n"


SAMPLE = [
    line('mkdir("^/r/s^", 0700)                = 0'),
    line('openat(AT_FDCWD<^/w^>, "^/r/s/a^", O_RDWR|O_CREAT|O_CLOEXEC, 0600) = 4<^/r/s/a^>'),
    line('openat(AT_FDCWD<^/w^>, "^/r/s/a^", O_WRONLY|O_DSYNC|O_CLOEXEC) = 5<^/r/s/a^>'),
    line('openat(AT_FDCWD<^/w^>, "^/etc/passwd^", O_RDONLY) = 6<^/etc/passwd^>'),
    line('openat(AT_FDCWD<^/w^>, "^/r/s/none^", O_RDONLY) = -1 ENOENT (No such file or directory)'),
    line('pwrite64(4<^/r/s/a^>, "^abcd^", 4, 8) = 2'),
    line("lseek(4<^/r/s/a^>, 16, SEEK_SET)    = 16"),
    line('writev(4<^/r/s/a^>, [{iov_base="^efg^", iov_len=3}, {iov_base="^hi^", iov_len=2}], 2) = 5'),
    line('write(4<^/r/s/a^>, "^jk^", 2 <unfinished ...>'),
    line("fdatasync(4<^/r/s/a^>)               = 0", pid=8),
    line("<... write resumed>)             = 2"),
    line('pwrite64(5<^/r/s/a^>, "^m^", 1, 0) = 1'),
    line('pwrite64(5<^/r/s/a^>, "^m^", 1, 0) = -1 EIO (Input/output error) (INJECTED)'),
    line("ftruncate(4<^/r/s/a^>, 100)          = 0"),
    line("fallocate(4<^/r/s/a^>, 0, 50, 100)   = 0"),
    line('rename("^/r/s/a^", "^/r/s/b^")         = 0'),
    line("fsync(9<^/r/s^>)                     = 0"),
    line('unlink("^/r/s/b^")                   = 0'),
    line('write(3<^/r/marker^>, "^said^", 4)     = 4'),
    "7 +++ exited with 0 +++\n",
]


def test_a_trace_is_read_as_what_the_calls_did() -> None:
    calls = list(strace.parse(SAMPLE))
    assert [call.injected for call in calls].count(True) == 1
    assert list(Reader(Path("/r")).events(calls)) == [
        Event("folder", "s"),
        Event("make", "s/a"),
        Event("write", "s/a", offset=8, data=b"ab"),
        Event("write", "s/a", offset=16, data=b"efghi"),
        Event("sync", "s/a"),
        Event("write", "s/a", offset=21, data=b"jk"),
        Event("write", "s/a", offset=0, data=b"m", durable=True),
        Event("length", "s/a", offset=100),
        Event("length", "s/a", offset=150),
        Event("rename", "s/a", "s/b"),
        Event("sync", "s"),
        Event("remove", "s/b"),
        Event("said", "marker", data=b"said"),
    ]


def test_a_string_that_strace_cut_short_and_a_call_without_a_meaning_are_refused() -> None:
    cut = strace.parse([line('pwrite64(4<^/r/a^>, "^abcd^"..., 4, 8) = 4')])
    with pytest.raises(ValueError, match="cut a string short"):
        list(Reader(Path("/r")).events(cut))
    unknown = strace.parse([line("copy_file_range(4<^/r/a^>, NULL, 5<^/r/b^>, NULL, 10, 0) = 10")])
    with pytest.raises(ValueError, match="no meaning"):
        list(Reader(Path("/r")).events(unknown))


def test_without_strace_the_campaigns_fail_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strace.shutil, "which", lambda name: None)
    for name in ("powerloss", "syscalls"):
        said: list[str] = []
        result = run(CAMPAIGNS[name], 1, [0], complain=said.append)
        assert len(result.failures) == 1
        assert "install the package strace" in said[0]


# --- the disk ------------------------------------------------------------------------------------------------------


def disk_of(*events: Event) -> Disk:
    disk = Disk()
    for event in events:
        disk.apply(event)
    return disk


def write_of(*places: int, durable: bool = False) -> list[Event]:
    """Writes of two sectors each, that begin in the middle of one."""
    return [Event("write", "a", offset=at, data=bytes([at % 251 + 1]) * 2 * SECTOR, durable=durable) for at in places]


MADE = (Event("make", "a"), Event("sync", "."))


def test_all_sectors_are_the_last_state_and_none_the_last_synced_one() -> None:
    before, after = write_of(256, 2000), write_of(1000, 3000, 100)
    file = disk_of(*MADE, *before, Event("sync", "a"), *after).names["a"]
    plain = bytearray(4024)
    for event in before:
        plain[event.offset : event.offset + 2 * SECTOR] = event.data
    synced = bytes(plain[:3024])
    for event in after:
        plain[event.offset : event.offset + 2 * SECTOR] = event.data
    assert file is not None
    assert file.lengths() == [3024, 3024, 4024, 4024]
    assert file.image(ALL, 4024, bytes) == bytes(plain)
    assert file.image(NONE, 3024, bytes) == synced
    assert file.image(NONE, 4024, bytes) == synced + bytes(1000)
    assert file.image(NONE, 2000, bytes) == synced[:2000]


def test_a_write_is_torn_at_sectors_alone() -> None:
    file = disk_of(*MADE, Event("length", "a", offset=2048), Event("sync", "a"), *write_of(256)).names["a"]
    assert file is not None
    kept = [True, False, True]
    assert file.image(lambda: kept.pop(0), 2048, bytes) == bytes(256) + b"\6" * 256 + bytes(512) + b"\6" * 256 + bytes(
        768
    )


def test_a_write_that_syncs_is_there_and_syncs_nothing_else() -> None:
    file = disk_of(*MADE, *write_of(0), *write_of(4096, durable=True)).names["a"]
    assert file is not None
    assert file.image(NONE, 5120, bytes) == bytes(4096) + write_of(4096)[0].data


def names_after(disk: Disk) -> set[frozenset[str]]:
    """Which names many crashes leave."""
    return {frozenset(disk.crash(Random(seed))) for seed in range(300)}


def test_names_that_no_folder_sync_followed_may_be_there_or_not() -> None:
    assert names_after(disk_of(Event("make", "a"), Event("make", "b"))) == {
        *(frozenset(), frozenset("a"), frozenset("b"), frozenset("ab"))
    }
    assert names_after(disk_of(*MADE)) == {frozenset("a")}
    gone = disk_of(*MADE, Event("remove", "a"), Event("make", "a"), Event("rename", "a", "b"))
    assert names_after(gone) == {frozenset("a"), frozenset(), frozenset("b")}


def test_a_rename_leaves_one_of_both_files() -> None:
    events = [*MADE, Event("make", "b"), Event("sync", "."), Event("write", "b", data=b"new"), Event("sync", "b")]
    disk = disk_of(*events, Event("write", "a", data=b"old"), Event("sync", "a"), Event("rename", "b", "a"))
    left = [disk.crash(Random(seed)) for seed in range(100)]
    assert {tuple(sorted(files.items())) for files in left} == {
        (("a", b"new"),),
        (("a", b"old"), ("b", b"new")),
    }


def test_a_synced_disk_comes_back_as_it_was(tmp_path: Path) -> None:
    disk = disk_of(Event("folder", "s"), Event("sync", "."), Event("make", "s/a"), Event("sync", "s"))
    for event in (Event("write", "s/a", data=b"x" * 3000), Event("sync", "s/a")):
        disk.apply(event)
    for seed in range(20):
        assert disk.crash(Random(seed)) == {"s": None, "s/a": b"x" * 3000}
    write_files(tmp_path, disk.crash(Random(0)))
    assert (tmp_path / "s" / "a").read_bytes() == b"x" * 3000


# --- servants ------------------------------------------------------------------------------------------------------


def end_by(how: str) -> str:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGBUS)
    if how == "exit":
        os._exit(3)
    if how == "raise":
        raise KeyError("lost")
    return how


def test_a_servant_that_dies_says_how() -> None:
    with Servant(end_by) as servant:
        assert servant.ask("well") == "well"
        with pytest.raises(Raised, match="KeyError: 'lost'"):
            servant.ask("raise")
        with pytest.raises(Died, match="SIGBUS"):
            servant.ask("signal")
    with Servant(end_by) as servant, pytest.raises(Died, match="status 3"):
        servant.ask("exit")


def test_a_crew_answers_in_order_and_goes_on_after_a_death() -> None:
    crew = Crew(lambda number: end_by("signal") if number == 3 else number, lambda number, how: (number, str(how)))
    answers = [answer for number in range(8) for answer in crew.begin(number)] + list(crew.end())
    assert answers == [0, 1, 2, (3, "ended by SIGBUS"), 4, 5, 6, 7]


# --- whole campaigns -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    made = Engine()
    made.warm(tmp_path_factory.mktemp("warm"))
    return made


@pytest.mark.parametrize("mode", powerloss.MODES)
def test_a_trace_leads_to_the_files_that_the_writer_left(tmp_path: Path, engine: Engine, mode: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    trace = powerloss.traced(engine, root, mode, partial(powerloss.write, engine, root, mode, Random(1)))
    disk = disk_of(*trace.events)
    left = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.name != "lock.mdb"}
    made = {path: file for path, file in disk.names.items() if path != "."}
    assert set(made) == {path for path in left if path != "marker"}
    for path, file in made.items():
        if file is not None:
            assert file.image(ALL, file.lengths()[-1], bytes) == left[path].read_bytes(), path
    after = trace.promise(len(trace.events))
    assert (after.what, after.safe, after.sure, after.then) == ("after close", True, after.then, after.sure)
    assert after.sure
    assert {"rename", "remove"} & {event.kind for event in trace.events} or mode == "switch"


def powerloss_result(numbers: range) -> Any:
    return run(CAMPAIGNS["powerloss"], 5, numbers, complain=lambda text: None)


def test_a_power_loss_loses_nothing_that_was_acknowledged() -> None:
    result = powerloss_result(range(30))
    assert not result.failures
    assert result.counts.total() == 30
    assert result.counts[Kind.HARMLESS] >= 5
    assert result.counts[Kind.DETECTED] >= 5
    assert result.figures["promised_blocks"] >= 100


def unsynced(opened: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return opened(*arguments, **(options | {"sync": False}))


def test_a_store_that_acknowledges_before_its_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb, "open", partial(unsynced, lmdb.open))
    monkeypatch.setattr(powerloss, "MODES", ("commit",))
    assert powerloss_result(range(40)).counts[Kind.BROKEN] >= 10


def test_a_store_that_says_clean_before_its_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = Environment._mark

    def early(self: Environment, clean: bool) -> None:
        if clean or self.store_file.state is None or not self.store_file.state.clean:
            mark(self, clean)

    monkeypatch.setattr(Environment, "_mark", early)
    monkeypatch.setattr(powerloss, "MODES", ("process",))
    result = powerloss_result(range(60))
    assert result.counts[Kind.BROKEN] + result.counts[Kind.CRASHED] >= 10


def context_of(root: Path, numbers: range) -> Context:
    return Context("syscalls", 1, numbers, False, root)


def test_every_system_call_of_a_writer_is_planned_to_fail(tmp_path: Path, engine: Engine) -> None:
    plans = syscalls.plans(context_of(tmp_path, range(1)), engine, tmp_path)
    assert len(set(plans)) == len(plans) > 1000
    wanted = {
        *(("pwrite64", "STORE"), ("fsync", "STORE"), ("writev", "data.mdb"), ("fdatasync", "data.mdb")),
        *(
            ("pwrite64", "data.mdb"),
            ("openat", "data.mdb"),
            ("write", "data.mdb.compact"),
            ("rename", "data.mdb.compact"),
        ),
        *(("fallocate", "lock.mdb"), ("openat", "lock.mdb"), ("fsync", "data.mdb.compact")),
    }
    assert wanted <= {(plan.call, Path(plan.path).name) for plan in plans}


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize(("call", "nth"), [("fdatasync", 6), ("pwrite64", 12), ("writev", 5)])
def test_a_system_call_that_fails_is_seen_and_survived(
    tmp_path: Path, engine: Engine, call: str, nth: int, sticky: bool
) -> None:
    plan = syscalls.Plan("commit", call, f"{syscalls.SHARD}/data.mdb", nth, "error=EIO", sticky)
    outcome, hits = syscalls.Check(engine, [plan], tmp_path)(0)
    assert (outcome.kind, hits > 0) == (Kind.DETECTED, True), outcome.detail


def test_a_store_that_loses_what_it_acknowledged_is_caught(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = syscalls.Disturbed._look

    def boast(self: syscalls.Disturbed) -> bool:
        known = look(self)
        self.report.required = self.report.required | {79}
        return known

    monkeypatch.setattr(syscalls.Disturbed, "_look", boast)
    plan = syscalls.Plan("commit", "fdatasync", f"{syscalls.SHARD}/data.mdb", 6, "error=EIO", False)
    outcome, _ = syscalls.Check(engine, [plan], tmp_path)(0)
    assert (outcome.kind, "lost: [79]" in outcome.detail) == (Kind.BROKEN, True)


def test_bytes_that_are_not_those_that_were_put_are_seen(tmp_path: Path, engine: Engine) -> None:
    with workload.open_store(tmp_path, engine.cache, workload.config("process")) as store:
        assert store.put_blocks(workload.HASHES[:3], [0, 2, 1]).stored.all()
    found = workload.examine(engine, tmp_path, workload.config("process"), {}, boot=False)
    assert (found.verified, found.wrong) == ({0: 16, 1: 16, 2: 16}, [1, 2])


def test_full_disks_fail_puts_and_lose_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    result = run(CAMPAIGNS["fulldisk"], 2, range(8), complain=said.append)
    assert not said
    assert result.counts == {Kind.DETECTED: 8}
    assert bool(result.figures["file_systems"]) == can_mount(tmp_path / "mount")


def test_outcomes_carry_the_number_of_their_fault() -> None:
    assert powerloss.crashed(4, Died("SIGBUS")) == (Outcome(4, Kind.CRASHED, "SIGBUS"), 0)
