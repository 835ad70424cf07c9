"""A real model's KV, stored by ranks of one split and loaded under another: the model goes on bit for bit, and what landed in
a wrong place is not served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore import KVStore, PagedKVCache, Rank
from kvstore.results import GetResult
from kvstore.tools.model import load_smollm2, smollm2_folder
from kvstore.transfer import route_of
from tests import real_splits as real
from tests.real_misplaced import ALL, BLOCK, EVERY_BLOCK, MISPLACED, OTHER, WHOLE, at, exchange
from tests.real_models import Continuation, fill, go_on
from tests.real_splits import HEADS, LAYERS, PREFIX, PROMPT, SIZE, STEP, Kv, Split
from tests.support import Raw


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Prefilled:
    """A prompt, the KV of its first PREFIX tokens, and what the model says if it goes on in place."""

    ids: torch.Tensor
    steps: list[bytes]
    kv: Kv
    said: Continuation
    model: Any


@pytest.fixture(scope="module")
def real_kv() -> Prefilled:
    model = load_smollm2(smollm2_folder(progress=False))[1]
    ids = torch.randint(0, 40_000, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    cache = fill(model, ids, DynamicCache(config=model.config), [PREFIX])
    kv = [(keys.clone(), values.clone()) for keys, values in real.kv_of(cache)]
    assert (len(kv), tuple(kv[0][0].shape)) == (LAYERS, (HEADS, PREFIX, SIZE))
    return Prefilled(ids, real.request_steps(ids), kv, go_on(model, ids, cache), model)


CASES: dict[str, tuple[Split, Split]] = {
    "1 as it was": (Split(), Split()),
    "1 to 3 ranks of heads": (Split(), Split(3, layout="2BNHD")),
    "3 ranks of heads to 1": (Split(3), Split(layout="BNHD")),
    "1 to 2 stages": (Split(), Split(1, 2, "B2NHD")),
    "2 to 3 stages": (Split(1, 2), Split(1, 3, "BHND")),
    "3 stages to 1": (Split(1, 3, "BNHC"), Split()),
    "heads to stages": (Split(3, 1, "2BHND"), Split(1, 3, "BNHC")),
    "both at once": (Split(3, 2), Split(1, 3, "BHND")),
    "both at once, back": (Split(1, 3, "BNHD"), Split(3, 2)),
    "1 to 6 ranks, each head on two": (Split(), Split(6, layout="B2NHD")),
    "6 ranks, each head on two, to 1": (Split(6, layout="2BNHD"), Split()),
    "6 ranks to 3 of 2 stages": (Split(6), Split(3, 2, "BNHD")),
    "6 ranks of 2 stages to 3 stages": (Split(6, 2), Split(1, 3)),
    "smaller blocks of another split": (Split(3, block_size=8), Split(1, 2, "BHND")),
    "larger blocks of another split": (Split(1, 2), Split(3, block_size=8)),
    "two groups": (Split(3, groups=2), Split(1, 2, "BHND", groups=2)),
    "beside another process": (Split(3, io="process"), Split(1, 2, io="process")),
}


@pytest.fixture(scope="module")
def continued(real_kv: Prefilled, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What another process said after it loaded each case."""
    folder = tmp_path_factory.mktemp("real")
    paths: dict[Split, Path] = {}
    for stored, _ in CASES.values():
        if stored not in paths:
            paths[stored] = folder / f"store {len(paths)}"
            real.put(paths[stored], stored, real_kv.kv, real_kv.steps)
    tasks = [(paths[stored], loaded) for stored, loaded in CASES.values()]
    return dict(zip(CASES, real.elsewhere(tasks, real_kv.ids, folder), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_another_split_in_another_process_goes_on_bit_for_bit(
    real_kv: Prefilled, continued: dict[str, dict[str, Any]], case: str
) -> None:
    stored, loaded = CASES[case]
    spliced = continued[case].pop("spliced")
    assert continued[case] == asdict(real_kv.said)
    assert (spliced > 0) == (stored != loaded)


@pytest.mark.parametrize("layer", [0, 17, 29])
@pytest.mark.parametrize("part", [0, 1], ids="KV")
def test_what_is_said_depends_on_every_part(real_kv: Prefilled, layer: int, part: int) -> None:
    """Two heads of one layer exchanged, of one token: else no test here could fail."""
    kv = [(keys.clone(), values.clone()) for keys, values in real_kv.kv]
    exchange(kv[layer][part][0, 50], kv[layer][part][1, 50])
    assert go_on(real_kv.model, real_kv.ids, real.cache_of(kv)).logits != real_kv.said.logits


# --- misplacements ---------------------------------------------------------------------------------------------------

SIX = Split(3, 2)
STORED = {"by itself": WHOLE, "by six ranks": SIX}


@pytest.fixture(scope="module")
def stores(real_kv: Prefilled, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Stores that nothing is wrong with."""
    folder = tmp_path_factory.mktemp("misplaced")
    for name, split in STORED.items():
        real.put(folder / name, split, real_kv.kv, real_kv.steps)
    return {name: folder / name for name in STORED}


def get(store: KVStore, prefilled: Prefilled, group: int = 0, split: Split = WHOLE) -> GetResult:
    return store.get_blocks(split.hashes(prefilled.steps), split.ids, num_tokens=PREFIX, group=group)


def spoil(monkeypatch: pytest.MonkeyPatch, store: KVStore, misplace: Callable[[], None]) -> None:
    """Misplace what has landed in the engine's blocks, before it is summed."""
    route = store._views[0].route
    begin = route.begin_get

    def begin_get() -> Any:
        transfer = begin()
        sums = transfer.block_checksums

        def spoiled(*arguments: Any, **options: Any) -> Any:
            misplace()
            return sums(*arguments, **options)

        transfer.block_checksums = spoiled  # type: ignore[method-assign]
        return transfer

    monkeypatch.setattr(route, "begin_get", begin_get)


def misdirect(monkeypatch: pytest.MonkeyPatch, store: KVStore, wrong: PagedKVCache) -> None:
    """Copy to where another description says, and sum where the engine's says."""
    route, astray = store._views[0].route, route_of(wrong, 0)
    begin = route.begin_get

    def begin_get() -> Any:
        transfer, other = begin(), astray.begin_get()
        for name in ("scatter", "scatter_from", "land"):
            setattr(transfer, name, getattr(other, name))
        return transfer

    monkeypatch.setattr(route, "begin_get", begin_get)


def check_refused(got: GetResult, blocks: set[int]) -> None:
    """These blocks were refused for what lies in the engine's cache, all others served, and no record is to blame."""
    assert set(got.rejected) == blocks
    assert {(r.kind, r.condemned) for r in got.rejected.values()} == {("content", False)}
    assert all("went astray" in r.detail for r in got.rejected.values())
    assert got.verified.tolist() == [block not in blocks for block in range(WHOLE.blocks)]


def check_served(got: GetResult, paged: PagedKVCache, prefilled: Prefilled, layers: range = ALL) -> None:
    """What was served is what the model had made."""
    for block in got.verified.nonzero()[0].tolist():
        first, end = block * WHOLE.block_size, min((block + 1) * WHOLE.block_size, PREFIX)
        for layer in layers:
            for view, whole in zip(at(paged, layer, block), prefilled.kv[layer], strict=True):
                assert real.same_bits(view[:, : end - first], whole[:, first:end]), (layer, block)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", MISPLACED)
def test_what_landed_in_a_wrong_place_is_refused(
    real_kv: Prefilled, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, stored: str
) -> None:
    misplace, blocks = MISPLACED[name]
    paged = real.part(WHOLE, Rank())
    with real.open_rank(stores[stored], WHOLE, Rank(), paged) as store:
        spoil(monkeypatch, store, lambda: misplace(paged))
        got = get(store, real_kv)
        check_refused(got, blocks)
        check_served(got, paged, real_kv)
        assert store.match_prefix(WHOLE.hashes(real_kv.steps)) == min(blocks)
    monkeypatch.undo()
    with real.open_rank(stores[stored], WHOLE, Rank(), paged) as store:
        got = get(store, real_kv)
        assert got.verified.all()
        check_served(got, paged, real_kv)


def exchanged(tensors: dict[str, Any], one: int, two: int) -> dict[str, Any]:
    first, second = real.layer_name(one), real.layer_name(two)
    return tensors | {first: tensors[second], second: tensors[first]}


def moved(tensors: dict[str, Any], layer: int, elements: int) -> dict[str, Any]:
    """A layer's K and V said to lie so many elements further on; the last block is left out."""
    name = real.layer_name(layer)
    pair = [t[:-1] for t in tensors[name]]
    shifted = tuple(t.as_strided(t.shape, t.stride(), t.storage_offset() + elements) for t in pair)
    return {n: tuple(t[:-1] for t in parts) for n, parts in tensors.items()} | {name: shifted}


DESCRIBED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "two layers exchanged": lambda t: exchanged(t, 11, 12),
    "K with V exchanged": lambda t: t | {real.layer_name(5): t[real.layer_name(5)][::-1]},
    "rows one further on": lambda t: moved(t, 8, SIZE),
    "heads one further on": lambda t: moved(t, 8, SIZE * WHOLE.block_size),
    "blocks one further on": lambda t: moved(t, 8, SIZE * WHOLE.block_size * HEADS),
    "channels one further on": lambda t: moved(t, 8, 4),
    "memory that is not the cache": lambda t: t | {real.layer_name(2): tuple(p.clone() for p in t[real.layer_name(2)])},
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_copy_by_a_wrong_description_is_refused(
    real_kv: Prefilled, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, stored: str
) -> None:
    paged = real.part(WHOLE, Rank())
    wrong = real.described(DESCRIBED[name](dict(paged.tensors)), WHOLE, Rank())
    with real.open_rank(stores[stored], WHOLE, Rank(), paged) as store:
        misdirect(monkeypatch, store, wrong)
        got = get(store, real_kv)
        check_refused(got, EVERY_BLOCK)


def of_another_rank(kv: Kv) -> Kv:
    """Each head where the next one belongs."""
    return [(keys.roll(1, dims=0), values.roll(1, dims=0)) for keys, values in kv]


def of_another_stage(kv: Kv) -> Kv:
    """Each layer where that of the other stage belongs."""
    return kv[LAYERS // 2 :] + kv[: LAYERS // 2]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wrong", [of_another_rank, of_another_stage])
@pytest.mark.parametrize("rank", [Rank(1, 3, 1, 2), Rank(0, 3, 0, 2)], ids=str)
def test_what_another_rank_should_have_is_refused(
    real_kv: Prefilled,
    stores: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    wrong: Callable[[Kv], Kv],
    rank: Rank,
) -> None:
    paged = real.part(SIX, rank)
    with real.open_rank(stores[stored], SIX, rank, paged) as store:
        spoil(monkeypatch, store, lambda: real.write(paged, SIX, rank, wrong(real_kv.kv)))
        check_refused(get(store, real_kv, split=SIX), EVERY_BLOCK)


TWO = replace(WHOLE, groups=2)


@pytest.mark.parametrize("stored", [TWO, replace(SIX, groups=2)], ids=STORED)
@pytest.mark.parametrize("way", ["described", "copied"])
def test_what_belongs_to_another_group_is_refused(
    real_kv: Prefilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Split, way: str
) -> None:
    """Layers of even and of odd numbers are groups; their blocks have the same hashes, sizes and positions."""
    real.put(tmp_path, stored, real_kv.kv, real_kv.steps)
    paged = real.part(TWO, Rank())
    with real.open_rank(tmp_path, TWO, Rank(), paged) as store:
        odd = get(store, real_kv, group=1)
        assert odd.verified.all()
        if way == "copied":
            spoil(monkeypatch, store, lambda: _from_odd_layers(paged))
        else:
            tensors = dict(paged.tensors)
            for layer in range(0, LAYERS, 2):
                tensors = exchanged(tensors, layer, layer + 1)
            misdirect(monkeypatch, store, real.described(tensors, TWO, Rank()))
        got = get(store, real_kv, group=0)
        check_refused(got, EVERY_BLOCK if way == "described" else {BLOCK})
        check_served(got, paged, real_kv, range(0, LAYERS, 2))


def _from_odd_layers(paged: PagedKVCache) -> None:
    for layer in range(0, LAYERS, 2):
        for one, two in zip(at(paged, layer), at(paged, layer + 1), strict=True):
            one.copy_(two)


@pytest.mark.parametrize("stored", [TWO, replace(SIX, groups=2)], ids=STORED)
def test_a_record_of_another_group_is_refused(real_kv: Prefilled, tmp_path: Path, stored: Split) -> None:
    real.put(tmp_path, stored, real_kv.kv, real_kv.steps)
    rank = stored.ranks[0]
    with real.open_rank(tmp_path, stored, rank, real.part(stored, rank)) as store:
        raw, hashes = Raw(store), stored.hashes(real_kv.steps)
        even, odd = (store._views[group].shape.keys(hashes)[BLOCK] for group in (0, 1))
        one, two = raw.entry(even), raw.entry(odd)
        raw.put_entry(even, two)
        raw.put_entry(odd, one)
    paged = real.part(TWO, Rank())
    with real.open_rank(tmp_path, TWO, Rank(), paged) as store:
        for group in (0, 1):
            got = get(store, real_kv, group)
            assert {i: (r.kind, r.condemned) for i, r in got.rejected.items()} == {BLOCK: ("key", True)}
            check_served(got, paged, real_kv, range(group, LAYERS, 2))


def test_the_model_goes_on_from_where_the_misplaced_block_was(
    real_kv: Prefilled, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a prefix after a refusal is good to go on from."""
    paged, kept = real.part(WHOLE, Rank()), OTHER * WHOLE.block_size
    with real.open_rank(stores["by six ranks"], WHOLE, Rank(), paged) as store:
        spoil(monkeypatch, store, lambda: exchange(at(paged, 9, OTHER)[0][0], at(paged, 9, OTHER)[0][1]))
        assert get(store, real_kv).num_leading == OTHER
    blank: Kv = [(torch.empty_like(keys), torch.empty_like(values)) for keys, values in real_kv.kv]
    real.read(paged, WHOLE, Rank(), blank)
    found, expected = ([(k[:, :kept], v[:, :kept]) for k, v in kv] for kv in (blank, real_kv.kv))
    assert go_on(real_kv.model, real_kv.ids, real.cache_of(found)) == go_on(
        real_kv.model, real_kv.ids, real.cache_of(expected)
    )
    assert STEP * len(real_kv.steps) == PREFIX
