"""The story: an adapter is trained again and written where it was. vLLM's block hashes are the same as before, and KV of
the former weights would be served as if it were right.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from kvstore.engines.vllm import adapters as adapters_module
from kvstore.engines.vllm.adapters import PATIENCE_S, Adapters, Look, look_at
from kvstore.engines.vllm.jobs import Save
from kvstore.engines.vllm.scheduler import Scheduler
from tests.test_vllm_scheduling import Adapter, Engine, Known, answer_of

DEADLINE_S = 10.0


@dataclass(frozen=True)
class InPlace(Adapter):
    """A LoRARequest that has vLLM read the files again."""

    load_inplace: bool = True


def write(folder: Path, weights: bytes = b"old") -> Path:
    """An adapter's folder, whose files have the same times whatever is in them, as an image's may."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    (folder / "adapter_model.bin").write_bytes(weights)
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))
    return folder


def lora(path: Path | str, number: int = 1, name: str = "sql") -> Adapter:
    return Adapter(name, number, str(path))


def salt_of(known: Adapters, adapter: Adapter) -> bytes | None:
    """What a request of the adapter that comes now has."""
    look = known.look(adapter)
    assert look is not None
    while known.waits(look):
        time.sleep(0.001)
    return known.salt(look)


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Adapters]]:
    """Makes what an engine that starts now knows of adapters."""
    made: list[Adapters] = []

    def make(settings: object = None, fixed: bool = False) -> Adapters:
        made.append(Adapters(settings, fixed=fixed))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_adapter_is_known_by_its_content_in_every_engine(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder = write(tmp_path / "sql")
    first, second = engine_of(), engine_of()
    salt = salt_of(first, lora(folder))
    assert salt
    assert salt_of(first, lora(folder)) == salt
    assert salt_of(second, lora(write(tmp_path / "copy"), number=7)) == salt
    assert salt_of(first, lora(write(tmp_path / "chat", b"new"), number=2, name="chat")) not in (None, salt)


def test_other_weights_at_the_same_path_have_other_keys_after_a_restart(
    tmp_path: Path, engine_of: Callable[..., Adapters]
) -> None:
    folder = write(tmp_path / "sql")
    salts = {salt_of(engine_of(), lora(folder))}
    for number, change in enumerate(
        (
            lambda: write(folder, b"new"),
            lambda: (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32})),
            lambda: (folder / "adapter_model.bin").rename(folder / "adapter_model.pt"),
        ),
        start=2,
    ):
        change()
        salts.add(salt_of(engine_of(), lora(folder)))
        assert len(salts - {None}) == number


def test_how_adapters_are_applied_is_part_of_their_keys(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder = write(tmp_path / "sql")

    class Settings:
        lora_dtype = "float16"

    assert salt_of(engine_of(), lora(folder)) != salt_of(engine_of(Settings()), lora(folder))
    assert salt_of(engine_of(fixed=True), lora(folder)) != salt_of(engine_of(Settings(), fixed=True), lora(folder))


def test_an_adapter_that_changes_while_the_engine_runs_is_left_out_under_every_number(
    tmp_path: Path, engine_of: Callable[..., Adapters], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own prefix cache may have blocks of both under one hash."""
    folder = write(tmp_path / "sql")
    known = engine_of()
    assert salt_of(known, lora(folder))
    write(folder, b"new")
    assert [salt_of(known, lora(folder)) for _ in range(3)] == 3 * [None]
    assert known.doubts(lora(folder))
    assert not known.doubts(None)
    assert [record.getMessage() for record in caplog.records] == [
        f"KV of the adapter 'sql' ({folder}) is neither loaded nor stored, of every request until the engine is started "
        "again: its files changed while the engine ran"
    ]
    assert salt_of(known, lora(folder, number=2)) is None
    assert salt_of(engine_of(), lora(folder))


def test_what_leaves_the_content_as_it_is_changes_nothing(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder = write(tmp_path / "adapters" / "sql")
    known = engine_of()
    salt = salt_of(known, lora(folder))
    for change in (
        lambda: (folder / "adapter_model.bin").chmod(0o600),
        lambda: os.link(folder / "adapter_model.bin", tmp_path / "backup"),
        lambda: os.utime(folder / "adapter_model.bin"),
        lambda: write(tmp_path / "adapters" / "later"),
        lambda: (folder / "README.md").write_text("sql"),
    ):
        change()
        assert salt_of(known, lora(folder)) == salt


def test_a_number_with_two_paths_means_neither(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    """vLLM looks adapters up by their number: what it has loaded under it answers for both, and its own prefix cache has the
    second's blocks under the second's name ever after."""
    sql, chat = (write(tmp_path / name, name.encode()) for name in ("sql", "chat"))
    for fixed in (False, True):
        known = engine_of(fixed=fixed)
        assert salt_of(known, lora(sql)) is not None
        assert salt_of(known, lora(chat, name="chat")) is None
        assert salt_of(known, lora(sql)) is None
        assert salt_of(known, lora(chat, 2, "chat")) is None
        assert salt_of(known, lora(sql, 3)) is None
        assert salt_of(known, lora(sql, 4, "other")) is not None


def test_what_is_loaded_in_place_is_left_out_at_once(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    """Requests that wait, or run, with the former path are computed with the new weights."""
    old, new = (write(tmp_path / name, name.encode()) for name in ("v1", "v2"))
    for place in (InPlace("sql", 1, str(new)), InPlace("sql", 1, str(old)), lora(new)):
        known = engine_of()
        with known.loading(lora(old)):
            pass
        assert salt_of(known, lora(old))
        with known.loading(place):
            assert known.doubts(lora(old))
        assert salt_of(known, lora(old)) is None
        assert salt_of(known, lora(old, number=2)) is None
    assert salt_of(engine_of(), InPlace("sql", 1, str(old))) is None


def test_an_adapter_that_is_written_before_its_first_request_is_seen(
    tmp_path: Path, engine_of: Callable[..., Adapters]
) -> None:
    folder, known = write(tmp_path / "sql"), engine_of()
    with known.loading(lora(folder)):
        pass
    write(folder, b"new")
    assert salt_of(known, lora(folder)) is None
    torn = engine_of()
    with torn.loading(lora(folder)):
        write(folder, b"newer")
    assert salt_of(torn, lora(folder)) is None
    late = engine_of()
    with late.loading(lora(folder)):
        pass
    assert salt_of(late, lora(folder))


def test_a_load_that_fails_is_vllms_own(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    known = engine_of()
    with pytest.raises(ZeroDivisionError), known.loading(lora(tmp_path / "missing")):
        raise ZeroDivisionError
    assert salt_of(known, lora(write(tmp_path / "missing")))


def test_what_lies_in_no_folder_is_left_out_unless_it_is_declared_fixed(
    tmp_path: Path, engine_of: Callable[..., Adapters], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    known = engine_of()
    for number, path in enumerate(("organisation/adapter", tmp_path / "missing", tmp_path / "empty", "a\0b"), start=1):
        assert [salt_of(known, lora(path, number, str(path))) for _ in range(2)] == [None, None]
    assert len(caplog.records) == 4
    assert "'organisation/adapter' is no local folder" in caplog.text
    assert salt_of(engine_of(fixed=True), lora("organisation/adapter"))


def test_a_path_is_taken_as_vllm_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system resolves `link/..`, not the text."""
    write(tmp_path / "releases" / "sql", b"new")
    (tmp_path / "releases" / "v2").mkdir()
    (tmp_path / "current").symlink_to("releases/v2")
    plain = write(tmp_path / "sql")
    assert look_at(f"{tmp_path}/current/../sql") == look_at(str(tmp_path / "releases" / "sql")) != look_at(str(plain))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert look_at("sql") == look_at("~/sql") == look_at(str(plain))


def test_files_of_any_name_are_read(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder, known = write(tmp_path / "sql"), engine_of()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.bin")).write_bytes(b"x")
    assert salt_of(known, lora(folder))


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that does not answer until the event is set."""
    event, real = threading.Event(), adapters_module.look_at
    monkeypatch.setattr(adapters_module, "look_at", lambda name: event.wait(DEADLINE_S) and real(name))
    try:
        yield event
    finally:
        event.set()


def test_a_file_system_that_hangs_costs_misses(
    tmp_path: Path, engine_of: Callable[..., Adapters], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "sql")
    known = engine_of()
    with hanging(monkeypatch) as answers:
        began = time.monotonic()
        assert [salt_of(known, lora(folder)) for _ in range(20)] == 20 * [None]
        # The first waits, and one that is queued behind it may; then it is known that nothing answers.
        assert PATIENCE_S <= time.monotonic() - began < DEADLINE_S
        answers.set()
    deadline = time.monotonic() + DEADLINE_S
    while salt_of(known, lora(folder)) is None:
        assert time.monotonic() < deadline
    assert not known.doubts(lora(folder))


def test_requests_that_come_at_once_share_a_look(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder, known = write(tmp_path / "sql"), engine_of()
    looks = [known.look(lora(folder)) for _ in range(2000)]
    assert looks[0] is not None
    while any(look is not None and known.waits(look) for look in looks):
        time.sleep(0.001)
    assert len({known.salt(look) for look in looks if look is not None} - {None}) == 1


def test_requests_without_an_adapter_are_left_out_where_vllm_takes_them_for_others() -> None:
    known = Adapters(None, plain=False)
    assert known.look(None) is None
    assert known.doubts(None)


# The scheduler's side with them.


class Seen(Adapters):
    """Adapters whose files are looked at when the test says so."""

    def __init__(self) -> None:
        super().__init__(None)
        self.looks: list[Look] = []
        self.contents: Mapping[str, str] = {}

    def look(self, lora: object) -> Look | None:
        if lora is None:
            return None
        self.looks.append(Look(lora, time.monotonic() + DEADLINE_S))
        return self.looks[-1]

    def see(self, **contents: str) -> None:
        """Answer all looks: {path: what lies there}."""
        for look in self.looks:
            look.found = contents[look.lora.lora_path].encode()
        self.looks.clear()


class LoraEngine(Engine):
    """A scheduler's side over a request of an adapter."""

    def __init__(self, known: Known, adapter: Adapter | None = None, *, tokens: int = 18) -> None:
        super().__init__(tokens)
        self.known, self.seen = known, Seen()
        self.scheduler = Scheduler(cast("object", known), {0: 4}, 4, 1, adapters=self.seen)  # type: ignore[arg-type]
        self.scheduler.bind(self.manager)
        self.request.lora_request = adapter
        self.scheduler.new_request(self.request)

    def saved(self, saves: Sequence[Save]) -> list[bytes]:
        """Take saves as stored; their keys."""
        keys = [key for save in saves for span in save.spans for key in span.block_hashes]
        for save in saves:
            self.scheduler.answered(answer_of(save))
        self.known.stored |= set(keys)
        return keys


def test_a_request_waits_for_its_adapters_files_and_is_told_by_them() -> None:
    known, keys = Known(), dict[str, list[bytes]]()
    for content in ("v1", "v2"):
        engine = LoraEngine(known, lora("p"))
        assert engine.scheduler.matched(engine.request, 0) is None
        assert not engine.scheduler.step({}).touches
        engine.seen.see(p=content)
        assert engine.scheduler.matched(engine.request, 0) == 0
        step = engine.compute(18)
        assert [len(hashes) for _, hashes in step.touches] == [4]
        keys[content] = engine.saved(step.saves)
        assert len(keys[content]) == 4
    assert not set(keys["v1"]) & set(keys["v2"])
    again = LoraEngine(known, lora("p"))
    again.seen.see(p="v1")
    assert again.scheduler.matched(again.request, 0) == 16
    plain = LoraEngine(known)
    assert plain.scheduler.matched(plain.request, 0) == 0
    assert plain.saved(plain.compute(18).saves) == plain.request.block_hashes


def test_nothing_is_saved_while_an_adapter_is_not_known() -> None:
    engine = LoraEngine(Known(), lora("p"))
    assert not engine.compute(8).saves
    engine.seen.see(p="v1")
    assert len(engine.saved(engine.compute(8).saves)) == 4


def test_requests_that_are_under_way_are_left_out_once_their_adapter_changed() -> None:
    engine = LoraEngine(Known(), lora("p"))
    engine.seen.see(p="v1")
    assert engine.saved(engine.compute(8).saves)
    other = engine.add("b", 18)
    other.lora_request = lora("p")
    engine.scheduler.finished("b")
    engine.scheduler.new_request(other)
    engine.seen.see(p="v2")
    assert engine.scheduler.matched(other, 0) == 0
    assert not engine.compute(8).saves
    assert not engine.scheduler.step({"b": 18}).saves


@pytest.mark.parametrize("change", [{"num_preemptions": 1}, {"num_prompt_tokens": 22}])
def test_a_resumed_requests_adapter_is_looked_at_again(change: dict[str, int]) -> None:
    """It was preempted, or its session went on: vLLM may have dropped the adapter meanwhile, and reads its files again."""
    engine = LoraEngine(Known(), lora("p"))
    engine.seen.see(p="v1")
    engine.saved(engine.compute(8).saves)
    vars(engine.request).update(change)
    assert not engine.compute(2).saves
    assert engine.scheduler.matched(engine.request, 0) is None
    engine.seen.see(p="v2")
    assert engine.scheduler.matched(engine.request, 0) == 0
    assert not engine.compute(18).saves
