"""The story: a reader finds a damaged record and may not take it out. It writes down which one, in a small file beside the
store that anybody of this user can write, tear, fill or replace. The writer reads what is there, and nothing that is
wrong with the file reaches a caller.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.record import SEQUENCE_FIELD
from kvstore.reports import KINDS, MAX_BYTES, MAX_REPORTS, REPORT, REPORTS_NAME, Report, Reports, parse_report
from kvstore.results import REJECTION_KINDS
from tests.support import flip
from tests.test_format import table, take_apart, value_of, xxh3
from tests.test_processes import child_outcome, fork

Entry = tuple[bytes, bytes, str]


def entry(number: int, kind: str = "storage_hash", key_bytes: int = 50) -> Entry:
    """What a reader reports: key, index entry and kind."""
    value = bytearray(150)
    value[SEQUENCE_FIELD] = number.to_bytes(8, "little")
    return number.to_bytes(key_bytes, "big"), bytes(value), kind


def reported(number: int, kind: str = "storage_hash", key_bytes: int = 50) -> Report:
    return Report(number.to_bytes(key_bytes, "big"), number, kind)


@pytest.fixture
def reports(tmp_path: Path) -> Reports:
    return Reports(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / REPORTS_NAME


def test_what_readers_add_the_writer_takes_once(reports: Reports, path: Path) -> None:
    assert reports.add([entry(n, kind) for n, kind in enumerate(KINDS)]) == 0
    assert reports.add([entry(2**64 - 1, key_bytes=82), entry(7, key_bytes=26)]) == 0
    assert path.stat().st_mode & 0o777 == 0o600
    expected = [reported(n, kind) for n, kind in enumerate(KINDS)]
    expected += [reported(2**64 - 1, key_bytes=82), reported(7, key_bytes=26)]
    assert reports.take() == expected
    assert path.stat().st_size == 0
    assert reports.take() == []


def test_where_nobody_reported_anything_nothing_is_made(reports: Reports, path: Path) -> None:
    assert reports.take() == []
    assert not path.exists()


def test_the_latest_are_taken_first_where_only_some_are(reports: Reports) -> None:
    reports.add([entry(n) for n in range(10)])
    assert reports.take(4) == [reported(n) for n in range(6, 10)]
    assert reports.take(4) == [reported(n) for n in range(2, 6)]
    reports.add([entry(11)])
    assert reports.take(9) == [reported(0), reported(1), reported(11)]


def test_an_index_entry_without_a_sequence_number_is_reported_too(reports: Reports) -> None:
    assert reports.add([(bytes(26), b"short", "header"), (bytes(26), bytes(40) + b"\x01\x02", "header")]) == 0
    assert [report.sequence for report in reports.take()] == [0, 0x0201]


def test_what_condemns_nothing_is_not_written(reports: Reports) -> None:
    assert set(KINDS) < set(REJECTION_KINDS)
    assert reports.add([entry(1, "position"), entry(2), (bytes(25), bytes(150), "key"), entry(3)]) == 2
    assert reports.take() == [reported(2), reported(3)]


def test_the_file_is_bounded(reports: Reports, path: Path) -> None:
    assert reports.add([entry(n) for n in range(MAX_REPORTS - 1)]) == 0
    assert reports.add([entry(n) for n in range(5)]) == 4
    assert reports.add([entry(1)]) == 1
    assert path.stat().st_size <= MAX_BYTES
    assert len(reports.take()) == MAX_REPORTS


@pytest.mark.parametrize("left", range(0, REPORT.size, 13))
def test_a_torn_report_is_dropped_and_written_over(reports: Reports, path: Path, left: int) -> None:
    reports.add([entry(1), entry(2)])
    os.truncate(path, REPORT.size + left)
    reports.add([entry(3)])
    assert reports.take() == [reported(1), reported(3)]
    path.write_bytes(reported(1).encode() + reported(2).encode()[:left])
    assert reports.take() == [reported(1)]
    assert path.stat().st_size == 0


def test_no_flipped_bit_makes_another_report() -> None:
    data = reported(77).encode()
    assert parse_report(data) == reported(77)
    for bit in range(8 * len(data)):
        assert parse_report(flip(data, bit)) is None


@pytest.mark.parametrize("nbytes", [1, REPORT.size, MAX_BYTES, 3 * 2**20])
def test_random_content_is_dropped(reports: Reports, path: Path, nbytes: int) -> None:
    path.write_bytes(np.random.default_rng(nbytes).bytes(nbytes))
    assert reports.take() == []
    assert path.stat().st_size == 0
    assert reports.add([entry(1)]) == 0
    assert reports.take() == [reported(1)]


def test_lengths_and_kinds_are_bounded_under_a_right_hash() -> None:
    for kind, length in ((0, 50), (len(KINDS) + 1, 50), (1, 25), (1, 83), (255, 255)):
        body = REPORT.pack(0, 1, kind, length, bytes(82))[8:]
        assert parse_report(xxh3(body).to_bytes(8, "little") + body) is None


def test_intact_reports_between_garbage_are_found(reports: Reports, path: Path) -> None:
    path.write_bytes(reported(1).encode() + bytes(REPORT.size) + reported(2).encode())
    assert reports.take() == [reported(1), reported(2)]


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link", "fifo", "folder"])
def test_what_is_no_file_of_the_folder_is_neither_read_nor_written(
    reports: Reports, path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, content = path.parent / "elsewhere", reported(1).encode()
    if kind != "dangling":
        target.write_bytes(content)
    if kind in ("symlink", "dangling"):
        path.symlink_to(target)
    elif kind == "hard link":
        path.hardlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    for _ in range(2):
        assert reports.add([entry(2), entry(3)]) == 2
        assert reports.take() == []
    assert len([r for r in caplog.records if r.name == "kvstore.reports"]) == 1, "it is said once"
    assert not target.exists() if kind == "dangling" else target.read_bytes() == content


def test_a_folder_that_cannot_be_written_loses_reports_and_nothing_else(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", Path("/proc/self"), Path("/dev/null")):
        assert Reports(folder).add([entry(1), entry(2)]) == 2
        assert Reports(folder).take() == []


def test_a_full_disk_loses_reports_and_nothing_else(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: bytes, at: int) -> int:
        return write(fd, data[: REPORT.size + 10], at)

    write: Any = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert reports.add([entry(1), entry(2), entry(3)]) == 2
    monkeypatch.undo()
    reports.add([entry(4)])
    assert reports.take() == [reported(1), reported(4)]


def test_nobody_waits_for_a_process_that_was_stopped_with_the_lock(reports: Reports, path: Path) -> None:
    reports.add([entry(1)])
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = time.monotonic()
        assert reports.add([entry(2)]) == 1
        assert reports.take() == []
        assert time.monotonic() - before < 2
    assert reports.take() == [reported(1)]


def test_processes_add_side_by_side_while_the_writer_takes(reports: Reports, path: Path) -> None:
    def add(base: int) -> int:
        time.sleep(0.05)
        for number in range(base, base + 100):
            while Reports(path.parent).add([entry(number)]):
                pass
        return 0

    children = [fork(lambda base=base: add(base)) for base in range(0, 400, 100)]  # type: ignore[misc]
    taken: list[Report] = []
    for pid, said in children:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            taken += reports.take()
        assert os.read(said, 100) == b"0"
        os.close(said)
    taken += reports.take()
    assert sorted(report.sequence for report in taken) == list(range(400))


def test_the_lock_goes_with_the_process(reports: Reports, path: Path) -> None:
    def die() -> None:
        with reports._locked(os.O_CREAT):
            os._exit(0)

    child_outcome(die)
    assert reports.add([entry(1)]) == 0


def test_the_document_tells_where_everything_lies() -> None:
    data = reported(0x0102030405060708, "decode", key_bytes=60).encode()
    fields = take_apart("Report", data)
    assert fields["report_hash"] == xxh3(data[8:])
    assert fields["sequence"] == 0x0102030405060708
    assert (fields["key_length"], fields["key"][:60]) == (60, (0x0102030405060708).to_bytes(60, "big"))
    assert not any(fields["key"][60:])
    kinds = {int(row["number"]): row["kind"] for row in table("Report kinds")}
    assert kinds == dict(enumerate(KINDS, 1))
    assert kinds[fields["kind"]] == "decode"
    assert int(value_of("Constants", "MAX_REPORTS_BYTES")) == MAX_BYTES
