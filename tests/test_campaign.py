"""The story: fault campaigns are only worth their lines if they can fail. The framework reports what a campaign yields, each
campaign runs, and a store that verifies nothing is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore.loading import Load
from kvstore.quarantine import Quarantine
from kvstore.record import check_chunk
from kvstore.results import Rejection
from kvstore.usage import Usage
from tests.campaign import __main__ as command
from tests.campaign import children, framework
from tests.campaign.framework import Campaign, Context, Kind, Outcome, Unavailable, run

KNOWN = command.load_campaigns()


def lines(result: framework.Result) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in result.line.split())


# --- the framework ---------------------------------------------------------------------------------------------------


def made_of(*kinds: Kind, known: bool = False) -> Campaign:
    def make(context: Context) -> Iterator[Outcome]:
        """Says what it is told to say."""
        for number in context.faults():
            yield Outcome(number, kinds[number % len(kinds)], "detail", known)

    return Campaign("made", 4, 8, make)


def test_a_line_counts_every_outcome() -> None:
    result = run(made_of(Kind.DETECTED, Kind.HARMLESS, Kind.MISSED_SILENTLY), 7, range(9))
    found = lines(result)
    assert not result.failures
    assert found["seed"] == "7"
    assert found["faults"] == "9"
    assert [found[name] for name in ("detected", "harmless", "missed_silently")] == ["3", "3", "3"]
    assert [found[name] for name in ("wrong_served", "crashed", "broken")] == ["0", "0", "0"]


@pytest.mark.parametrize("kind", [Kind.WRONG_SERVED, Kind.CRASHED, Kind.BROKEN])
def test_what_fails_is_told_with_how_to_repeat_it(kind: Kind) -> None:
    said: list[str] = []
    result = run(made_of(Kind.HARMLESS, Kind.HARMLESS, kind), 5, range(3), complain=said.append)
    assert len(result.failures) == 1
    assert lines(result)[kind] == "1"
    assert f"{kind}: detail" in said[0]
    assert "--only made --seed 5 --fault 2" in said[0]


def test_a_known_limit_counts_without_failing_and_wrong_bytes_are_never_one() -> None:
    assert not run(made_of(Kind.CRASHED, known=True), 1, range(2)).failures
    assert len(run(made_of(Kind.WRONG_SERVED, known=True), 1, range(2), complain=lambda text: None).failures) == 2


def test_a_campaign_that_ends_by_an_exception_fails_at_its_last_fault() -> None:
    def make(context: Context) -> Iterator[Outcome]:
        for number in context.faults():
            yield Outcome(number, Kind.HARMLESS)
            assert number < 2, "no further"

    said: list[str] = []
    run(Campaign("made", 9, 9, make), 1, complain=said.append)
    assert "no further" in said[0]
    assert "--fault 2" in said[0]


def test_a_campaign_that_cannot_run_says_so() -> None:
    def make(context: Context) -> Iterator[Outcome]:
        raise Unavailable("no strace")
        yield

    result = run(Campaign("made", 9, 9, make), 1)
    assert result.line == "campaign=made skipped='no strace'"
    assert not result.failures


def test_faults_do_not_depend_on_those_before_them(tmp_path: Path) -> None:
    both = [Context("x", 3, range(2), False, tmp_path), Context("x", 3, [1], False, tmp_path)]
    assert both[0].random(1).random() == both[1].random(1).random() != both[0].random(0).random()


def test_the_command_lists_repeats_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--list"]) == 0
    assert {"kill", "damage", "threads", "model"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    known = {"good": made_of(Kind.HARMLESS), "made": made_of(Kind.HARMLESS, Kind.WRONG_SERVED)}
    monkeypatch.setattr(command, "load_campaigns", lambda: known)
    assert command.main(["--only", "good"]) == 0
    assert command.main(["--only", "made", "--fault", "0"]) == 0
    assert command.main(["--only", "made", "--fault", "1"]) == 1
    assert command.main([]) == 1
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()][-2:] == ["faults=4", "faults=4"]


def test_a_child_that_crashes_or_hangs_is_told_from_one_that_ends() -> None:
    assert children.in_child(lambda say: say("word", 1)).all("word") == [[1]]
    assert children.in_child(lambda say: say("word", 1)).crash == ""
    assert "ZeroDivisionError" in children.in_child(lambda say: 1 // 0).crash
    assert children.in_child(lambda say: children.os.kill(children.os.getpid(), 11)).crash == "SIGSEGV"
    assert children.in_child(lambda say: children.time.sleep(60), patience=0.2).crash.startswith("hangs")


# --- the campaigns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "faults"), [("kill", 16), ("damage", 40), ("threads", 2), ("model", 2)])
def test_a_handful_of_each_campaign(name: str, faults: int) -> None:
    result = run(KNOWN[name], 11, range(faults))
    assert not result.failures, result.failures
    assert result.counts.total() == faults
    assert result.figures["served"] > 0, "a campaign that was served nothing has looked at nothing"


# --- they see a store that is broken ---------------------------------------------------------------------------------


def failing(name: str, faults: int) -> framework.Result:
    return run(KNOWN[name], 11, range(faults), complain=lambda text: None)


@pytest.fixture
def credulous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that looks at lengths alone."""

    def lengths(data: memoryview | None, number: int, length: int, stored_hash: int) -> Rejection | None:
        return check_chunk(data, number, length, xxh3_64_intdigest(data or b""))

    monkeypatch.setattr("kvstore.fetching.check_chunk", lengths)
    monkeypatch.setattr(Load, "_verify", lambda self, getting, pool: sorted(getting.tagged))


@pytest.mark.parametrize(("name", "faults"), [("damage", 40), ("kill", 30), ("model", 3)])
@pytest.mark.usefixtures("credulous")
def test_a_store_that_verifies_nothing_is_found_out(name: str, faults: int) -> None:
    result = failing(name, faults)
    assert result.counts[Kind.WRONG_SERVED] > 0
    assert result.failures


def test_threads_find_out_a_store_that_calls_misses_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "_verify", lambda self, getting, pool: sorted({*getting.tagged, *getting.missing}))
    assert failing("threads", 1).counts[Kind.WRONG_SERVED] == 1


def test_accounting_that_drifts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Usage, "remove", lambda self, header: None)
    assert failing("kill", 30).counts[Kind.BROKEN] > 0
    assert failing("model", 2).counts[Kind.BROKEN] > 0


def test_chunks_that_nothing_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.blockdb.BlockDB._release", lambda self, txn, header: None)
    assert failing("kill", 30).counts[Kind.BROKEN] > 0


def test_a_quarantine_that_forgets_to_count_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "_cost", staticmethod(lambda value: 1))
    assert failing("kill", 40).counts[Kind.BROKEN] > 0
