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
from pathlib import Path
from typing import cast

import pytest

from kvstore.engines.vllm import adapters as adapters_module
from kvstore.engines.vllm.adapters import PATIENCE_S, Adapters, Look
from kvstore.engines.vllm.jobs import Save
from kvstore.engines.vllm.scheduler import Scheduler
from tests.test_vllm_scheduling import Adapter, Engine, Known, answer_of

DEADLINE_S = 10.0
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, weights: bytes = b"old") -> Path:
    """An adapter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    (folder / "adapter_model.bin").write_bytes(weights)
    return folder


def settle() -> float:
    """Wait until changes so far are certainly older than what comes next; return the time."""
    time.sleep(3 * adapters_module.CLOCK_STEP_S)
    return time.time()


def lora(path: Path | str, number: int = 1, name: str = "sql") -> Adapter:
    return Adapter(name, number, str(path))


def salt_of(known: Adapters, adapter: Adapter) -> bytes | None:
    """What a request of the adapter that comes now has."""
    look = known.look(adapter)
    assert look is not None
    deadline = time.monotonic() + DEADLINE_S
    while look.found is None and known.waits(look):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return known.salt(look)


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Adapters]]:
    """Makes what an engine that starts now knows of adapters."""
    made: list[Adapters] = []

    def make(settings: object = None, fixed: bool = False) -> Adapters:
        made.append(Adapters(settings, fixed=fixed, began=settle()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_adapter_is_known_by_its_files_in_every_engine(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder = write(tmp_path / "sql")
    first, second = engine_of(), engine_of()
    salt = salt_of(first, lora(folder))
    assert salt
    assert salt_of(first, lora(folder)) == salt
    assert salt_of(second, lora(folder, number=7)) == salt
    other = write(tmp_path / "chat", b"new")
    assert salt_of(engine_of(), lora(other, number=2)) not in (None, salt)


def test_other_weights_at_the_same_path_have_other_keys_after_a_restart(
    tmp_path: Path, engine_of: Callable[..., Adapters]
) -> None:
    folder = write(tmp_path / "sql")
    salt = salt_of(engine_of(), lora(folder))
    for change in (
        lambda: write(folder, b"new"),
        lambda: (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 32})),
        lambda: (folder / "adapter_model.bin").write_bytes(b"longer"),
    ):
        change()
        changed = salt_of(engine_of(), lora(folder))
        assert changed not in (None, salt)
        salt = changed


def test_how_adapters_are_applied_is_part_of_their_keys(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder = write(tmp_path / "sql")

    class Settings:
        lora_dtype = "float16"

    assert salt_of(engine_of(), lora(folder)) != salt_of(engine_of(Settings()), lora(folder))
    assert salt_of(engine_of(fixed=True), lora(folder)) != salt_of(engine_of(Settings(), fixed=True), lora(folder))


def test_an_adapter_that_changes_while_the_engine_runs_is_left_out(
    tmp_path: Path, engine_of: Callable[..., Adapters], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "sql")
    known = engine_of()
    assert salt_of(known, lora(folder))
    write(folder, b"new!")
    assert [salt_of(known, lora(folder)) for _ in range(3)] == 3 * [None]
    assert known.doubts(lora(folder))
    assert not known.doubts(None)
    assert [record.getMessage() for record in caplog.records] == [
        f"KV of the adapter 'sql' ({folder}) is neither loaded nor stored, of every request until the engine is started "
        "again: its files changed while the engine ran"
    ]
    assert salt_of(engine_of(), lora(folder))


def overwritten(folder: Path) -> None:
    write(folder, b"new")


def with_the_former_times(folder: Path) -> None:
    """As `rsync -a` and `cp -p` write: the time of modification is the source's."""
    file = folder / "adapter_model.bin"
    before = file.stat()
    file.write_bytes(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced_by_a_link(folder: Path) -> None:
    folder.rename(folder.parent / "gone")
    folder.symlink_to(folder.parent / "ready", target_is_directory=True)


def renamed_into_place(folder: Path) -> None:
    folder.rename(folder.parent / "gone")
    (folder.parent / "ready").rename(folder)


def parent_renamed_into_place(folder: Path) -> None:
    folder.parent.rename(folder.parent.parent / "gone")
    (folder.parent.parent / "adapters-next").rename(folder.parent)


@pytest.mark.parametrize(
    "change",
    [overwritten, with_the_former_times, replaced_by_a_link, renamed_into_place, parent_renamed_into_place],
)
def test_an_adapter_that_changed_before_its_first_request_may_be_loaded_as_it_was(
    change: Callable[[Path], None], tmp_path: Path, engine_of: Callable[..., Adapters]
) -> None:
    """vLLM loads an adapter when it is registered, and nobody tells kvstore."""
    folder = write(tmp_path / "adapters" / "sql")
    write(tmp_path / "adapters" / "ready", b"new")
    write(tmp_path / "adapters-next" / "sql", b"new")
    untouched = write(tmp_path / "others" / "chat")
    known = engine_of()
    change(folder)
    assert salt_of(known, lora(folder)) is None
    assert salt_of(known, lora(untouched, number=2))
    assert salt_of(engine_of(), lora(folder))


def test_a_link_on_the_way_that_is_switched_is_seen(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    for release in ("v1", "v2"):
        write(tmp_path / release / "sql", release.encode())
    current = tmp_path / "current"
    current.symlink_to("v1")
    known = engine_of()
    current.unlink()
    current.symlink_to("v2")
    assert salt_of(known, lora(current / "sql")) is None
    assert salt_of(engine_of(), lora(current / "sql"))


def test_new_adapters_beside_it_leave_an_adapter_as_it_is(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    folder = write(tmp_path / "adapters" / "sql")
    known = engine_of()
    write(tmp_path / "adapters" / "later")
    assert salt_of(known, lora(folder))
    assert salt_of(known, lora(tmp_path / "adapters" / "later", number=2)) is None


def test_a_snapshot_of_the_hub_is_never_written_again(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    known = engine_of()
    first, second = (write(tmp_path / "snapshots" / commit) for commit in (COMMIT, COMMIT[::-1]))
    salts = {salt_of(known, lora(first)), salt_of(known, lora(second, number=2))}
    assert len(salts - {None}) == 2


def test_a_number_with_two_paths_means_neither(tmp_path: Path, engine_of: Callable[..., Adapters]) -> None:
    """vLLM looks adapters up by their number: what it has loaded under it answers for both."""
    folders = [write(tmp_path / name, name.encode()) for name in ("sql", "chat")]
    for fixed in (False, True):
        known = engine_of(fixed=fixed)
        assert salt_of(known, lora(folders[0])) is not None
        assert salt_of(known, lora(folders[1], name="chat")) is None
        assert salt_of(known, lora(folders[0])) is None


def test_what_lies_in_no_folder_is_left_out_unless_it_is_declared_fixed(
    tmp_path: Path, engine_of: Callable[..., Adapters], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    known = engine_of()
    for number, path in enumerate(("organisation/adapter", tmp_path / "missing", tmp_path / "empty"), start=1):
        assert [salt_of(known, lora(path, number)) for _ in range(2)] == [None, None]
    assert len(caplog.records) == 3
    assert "'organisation/adapter' is no local folder" in caplog.text
    assert salt_of(engine_of(fixed=True), lora("organisation/adapter"))


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
        assert salt_of(known, lora(folder)) is None
        assert time.monotonic() - began >= PATIENCE_S
        look = known.look(lora(folder))
        assert look is not None
        assert not known.waits(look)  # nobody else waits
        assert known.salt(look) is None
        answers.set()
    deadline = time.monotonic() + DEADLINE_S
    while salt_of(known, lora(folder)) is None:
        assert time.monotonic() < deadline
    assert not known.doubts(lora(folder))


def test_requests_without_an_adapter_are_left_out_where_vllm_takes_them_for_others() -> None:
    known = Adapters(None, plain=False)
    assert known.look(None) is None
    assert known.doubts(None)


# The scheduler's side with them.


class Seen(Adapters):
    """Adapters whose files are looked at when the test says so."""

    def __init__(self) -> None:
        super().__init__(None, began=time.time())
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
            look.found = adapters_module.Files(contents[look.lora.lora_path], 0.0)
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


def test_a_resumed_requests_adapter_is_looked_at_again() -> None:
    """vLLM may have dropped the adapter meanwhile, and reads its files again."""
    engine = LoraEngine(Known(), lora("p"))
    engine.seen.see(p="v1")
    engine.saved(engine.compute(18).saves)
    engine.request.num_preemptions = 1
    engine.request.num_computed_tokens = 0
    assert engine.scheduler.matched(engine.request, 0) is None
    engine.seen.see(p="v2")
    assert engine.scheduler.matched(engine.request, 0) == 0
    assert not engine.compute(18).saves
