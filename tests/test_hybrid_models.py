"""Models of which not every layer keeps every token: what is loaded goes on bit for bit as if it had never left."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore import KVStore, StoreConfig, errors
from kvstore.engines.transformers import (
    SLID_OUT,
    TransformersStore,
    chain_hashes,
    load_cache,
    open_store,
    save_cache,
)
from kvstore.prefixes import PrefixResult
from kvstore.record import parse_header
from tests.real_models import BLOCK, MODELS, Continuation, elsewhere, fill, gemma3, go_on, mistral, request
from tests.support import MIB, Raw, flip, index_key, io_mode

CONFIG = StoreConfig(capacity_bytes=64 * MIB, durability="process", max_rejections_per_minute=None)
FULL, SLIDING = 0, 1
REST = 3
"""Tokens of a prompt behind those that were saved."""
LENGTHS = (3, 4, 5, 7, 8, 9, 12, 13, 16, 19, 31, 33)
"""How many tokens are saved: below, at and beyond windows of 8 and 9 tokens, whole blocks of 4 and not."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def any_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the adapter's stores opened with the io of the test."""
    monkeypatch.setitem(open_store.__kwdefaults__, "io", io_mode())


@pytest.fixture(scope="module")
def gemma() -> Any:
    """Windows of 8 tokens in layers 0 and 2."""
    return gemma3(8)


@pytest.fixture
def store(tmp_path: Path, gemma: Any) -> Iterator[KVStore]:
    with opened(tmp_path / "store", gemma) as made:
        yield made


def opened(path: Path, model: Any, **options: Any) -> KVStore:
    return open_store(path, model, block_size=BLOCK, config=CONFIG, **options)


def in_place(model: Any, ids: torch.Tensor, ends: Sequence[int]) -> Continuation:
    """What a model says that never heard of kvstore: prompt computed up to each end, and the rest at once."""
    return go_on(model, ids, fill(model, ids, DynamicCache(config=model.config), ends))


def saved(store: KVStore, model: Any, ids: torch.Tensor, ends: Sequence[int]) -> Any:
    """The cache of the tokens up to the last end, which were saved."""
    cache = fill(model, ids, load_cache(store, ids[:, :1])[0], ends)
    put = save_cache(store, ids, cache)
    assert put.stored.all()
    assert put.stored.size == ends[-1] // BLOCK
    return cache


def damage(store: KVStore, block_hash: bytes, group: int) -> None:
    """Flip a bit in the middle of a block's first payload chunk."""
    raw, key = Raw(store), index_key(store, block_hash, group)
    header = parse_header(raw.entry(key) or b"", key)
    chunk_key = header.sequence.to_bytes(8, "big") + b"\0\1"
    value = raw.chunk(chunk_key)
    raw.put_chunk(chunk_key, flip(value, len(value) * 4))


Found = dict[tuple[str, int], tuple[dict[str, Any], Continuation]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What another process loaded and said, and what was said in place, by model and tokens saved."""
    folder = tmp_path_factory.mktemp("elsewhere")
    tasks, expected = [], {}
    for name, make in MODELS.items():
        model = make()
        for count in LENGTHS:
            ids, path = request(count + REST, seed=count), folder / f"{name} {count}"
            ends = [6, count // BLOCK * BLOCK] if count > 20 else [count // BLOCK * BLOCK]
            expected[name, count] = in_place(model, ids, ends)
            with opened(path, model) as store:
                saved(store, model, ids, [*ends, count])
            tasks.append({"model": name, "store": str(path), "ids": ids[0].tolist()})
    return {key: (got, expected[key]) for key, got in zip(expected, elsewhere(tasks, folder), strict=True)}


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_another_process_goes_on_bit_for_bit(found: Found, name: str, count: int) -> None:
    got, expected = found[name, count]
    assert got == {"tokens": count // BLOCK * BLOCK, "logits": expected.logits, "answer": expected.answer}


def test_what_is_said_depends_on_what_the_windows_hold(store: KVStore, gemma: Any) -> None:
    """Of every sliding layer, and of the oldest and the newest token in its window: else no test here could fail."""
    ids = request(32)
    saved(store, gemma, ids, [28])
    expected = in_place(gemma, ids, [28])
    for layer in (0, 2):
        for token in (-7, -1):
            cache, _ = load_cache(store, ids)
            cache.layers[layer].values[0, :, token].neg_()
            assert go_on(gemma, ids, cache).logits != expected.logits
    cache, _ = load_cache(store, ids)
    cache.layers[0].values[0, :, -8].neg_()
    assert go_on(gemma, ids, cache) == expected


@pytest.mark.both
def test_a_window_is_all_that_is_loaded_and_it_is_loaded_where_it_is_read(
    store: KVStore, gemma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, seen = request(32), list[Any]()
    cache = saved(store, gemma, ids, [28])
    attach = KVStore.attach
    monkeypatch.setattr(TransformersStore, "attach", lambda self, cache: (seen.append(cache), attach(self, cache))[1])
    loaded, tokens = load_cache(store, ids)
    assert tokens == 28
    for index, (ours, theirs) in enumerate(zip(loaded.layers, cache.layers, strict=True)):
        first = 20 if index % 2 == 0 else 0
        assert (type(ours), ours.get_seq_length()) == (type(theirs), 28)
        assert torch.equal(ours.keys.view(torch.int16), theirs.keys[:, :, first:].view(torch.int16))
        assert torch.equal(ours.values.view(torch.int16), theirs.values[:, :, first:].view(torch.int16))
    assert store.stats()["get_verified"] == 7 + 2
    places = {layer.number: layer.k.address for group in seen[0].groups.values() for layer in group.layers}
    assert places == {index: layer.keys.data_ptr() for index, layer in enumerate(loaded.layers)}


def test_prompts_that_fork_inside_what_was_saved(store: KVStore, gemma: Any) -> None:
    ids = request(33)
    saved(store, gemma, ids, [4, 12, 20, 33])
    for shared in (6, 12, 22):
        forked = torch.cat([ids[:, :shared], request(9, seed=7)], dim=1)
        ends = [end for end in (4, 12, 20) if end <= shared]
        cache, tokens = load_cache(store, forked)
        assert tokens == ends[-1]
        assert go_on(gemma, forked, cache) == in_place(gemma, forked, ends)


def test_a_conversation_is_saved_turn_by_turn(store: KVStore, gemma: Any) -> None:
    """`crop(0)` frees what windows have passed; what is new of the next turn is saved all the same."""
    ids = request(61)
    cache, _ = load_cache(store, ids)
    for turn, end in enumerate((10, 25, 41)):
        put = save_cache(store, ids, fill(gemma, ids, cache, [end]))
        assert not put.failed
        assert put.stored.sum() == (2, 4, 4)[turn]
        cache.crop(0)
        assert [layer.keys.shape[2] for layer in cache.layers] == [7, end, 7, end]
    again, tokens = load_cache(store, ids)
    assert tokens == 40
    never_left = DynamicCache(config=gemma.config)
    never_left.activate_past_recording()
    fill(gemma, ids, never_left, [10, 25, 41]).crop(-1)
    assert go_on(gemma, ids, load_cache(store, ids)[0]) == go_on(gemma, ids, never_left)
    save_cache(store, ids, fill(gemma, ids, again, [60]))
    assert load_cache(store, ids)[1] == 60
    assert in_place(gemma, ids, [10, 25, 41]) == go_on(gemma, ids, cache)


@pytest.mark.parametrize("make", [lambda: gemma3(8), lambda: mistral(8)])
def test_generate_goes_on_from_a_loaded_cache(tmp_path: Path, make: Callable[[], Any]) -> None:
    model, ids = make(), request(30)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, cache=fill(model, ids, DynamicCache(config=model.config), [24]), **options)
    with opened(tmp_path, model) as store:
        saved(store, model, ids, [24])
        cache, tokens = load_cache(store, ids)
        assert tokens == 24
        said = model.generate(ids, cache=cache, **options)
        assert torch.equal(said, expected)
        assert save_cache(store, said, cache).stored.tolist() == [False] * 6 + [True] * 4


@pytest.mark.both(cases=3)
@pytest.mark.parametrize(
    ("group", "block", "tokens"),
    [(SLIDING, 7, 28), (SLIDING, 6, 24), (SLIDING, 5, 32), (FULL, 7, 28), (FULL, 2, 8), (SLIDING, 0, 32)],
)
def test_a_damaged_block_ends_the_prefix_earlier(
    store: KVStore, gemma: Any, group: int, block: int, tokens: int
) -> None:
    """Of the windows only what the prefix needs is read: blocks 6 and 7 of a prefix of 8."""
    ids, ends = request(35), [8, 16, 24, 28, 32]
    cache = saved(store, gemma, ids, ends)
    damage(store, chain_hashes(ids, BLOCK)[block], group)
    loaded, found = load_cache(store, ids)
    assert found == tokens
    assert store.stats().get("get_rejected_storage_hash", 0) == (tokens < 32)
    assert {layer.get_seq_length() for layer in loaded.layers} == {tokens}
    expected = in_place(gemma, ids, [end for end in ends if end <= tokens])
    assert go_on(gemma, ids, loaded) == expected
    assert load_cache(store, ids)[1] == tokens
    again = save_cache(store, ids, cache)
    assert again.stored.tolist() == [index == block and tokens < 32 for index in range(8)]
    whole, found = load_cache(store, ids)
    assert found == 32
    assert go_on(gemma, ids, whole) == in_place(gemma, ids, ends)


@pytest.mark.parametrize("seed", range(12))
def test_any_blocks_damaged(store: KVStore, gemma: Any, seed: int) -> None:
    """What is loaded is the longest prefix of which everything that it needs is intact."""
    rng, ids, ends = random.Random(seed), request(35), list(range(4, 33, 4))
    saved(store, gemma, ids, ends)
    every = [(FULL, block) for block in range(8)] + [(SLIDING, block) for block in range(8)]
    bad = set(rng.sample(every, rng.randrange(1, 6)))
    for group, block in bad:
        damage(store, chain_hashes(ids, BLOCK)[block], group)
    needed = {
        end: {(FULL, token // 4) for token in range(end)} | {(SLIDING, max(0, end - k) // 4) for k in range(1, 8)}
        for end in ends
    }
    loaded, tokens = load_cache(store, ids)
    assert tokens == max((end for end in ends if not needed[end] & bad), default=0)
    assert go_on(gemma, ids, loaded) == in_place(gemma, ids, [end for end in ends if end <= tokens])


@pytest.mark.parametrize("group", [FULL, SLIDING])
def test_what_was_refused_does_not_stay_in_a_window_that_is_not_full(store: KVStore, gemma: Any, group: int) -> None:
    ids = request(11)
    saved(store, gemma, ids, [4, 8])
    damage(store, chain_hashes(ids, BLOCK)[1], group)
    loaded, tokens = load_cache(store, ids)
    assert tokens == 4
    assert {(layer.keys.shape[2], layer.get_seq_length()) for layer in loaded.layers} == {(4, 4)}
    assert go_on(gemma, ids, loaded) == in_place(gemma, ids, [4])


@pytest.mark.both
def test_damage_everywhere_leaves_an_empty_cache(store: KVStore, gemma: Any) -> None:
    ids = request(35)
    saved(store, gemma, ids, [32])
    for block_hash in chain_hashes(ids, BLOCK)[:8]:
        damage(store, block_hash, SLIDING)
    loaded, tokens = load_cache(store, ids)
    assert (tokens, loaded.get_seq_length()) == (0, 0)
    assert go_on(gemma, ids, loaded) == in_place(gemma, ids, [])
    assert load_cache(store, ids)[1] == 0


def test_a_store_that_promises_and_does_not_give_is_asked_once(
    store: KVStore, gemma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, calls = request(35), list[int]()
    saved(store, gemma, ids, [32])
    monkeypatch.setattr(KVStore, "get_prefix", lambda self, blocks: (calls.append(1), PrefixResult(0, {}))[1])
    loaded, tokens = load_cache(store, ids)
    assert (tokens, loaded.get_seq_length(), len(calls)) == (0, 0, 1)


def test_what_a_window_dropped_before_it_was_saved_is_said_to_be_lost(
    store: KVStore, gemma: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ids = request(30)
    cache = fill(gemma, ids, DynamicCache(config=gemma.config), [26])
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert save_cache(store, ids, cache).stored.tolist() == [True] * 6
    assert "first 0 of 24 saved tokens" in caplog.text
    loaded, tokens = load_cache(store, ids)
    assert tokens == 0
    assert go_on(gemma, ids, loaded) == in_place(gemma, ids, [])
    assert store.match_prefix(chain_hashes(ids, BLOCK)[:6], group=FULL) == 6


@pytest.mark.parametrize("count", [5, 8, 16])
def test_a_cache_that_still_has_the_window_needs_not_record(
    tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A window of 9 looks back at two whole blocks."""
    model, ids = gemma3(9), request(20)
    with opened(tmp_path, model) as store, caplog.at_level(logging.WARNING, "kvstore"):
        save_cache(store, ids, fill(model, ids, DynamicCache(config=model.config), [count]))
        loaded, tokens = load_cache(store, ids)
    assert tokens == count // BLOCK * BLOCK
    assert not caplog.text
    loaded.crop(0)
    if tokens == count:
        assert go_on(model, ids, loaded) == in_place(model, ids, [count])


def test_blocks_that_no_layer_has_any_longer(tmp_path: Path) -> None:
    model, ids = mistral(8), request(30)
    with opened(tmp_path, model) as store:
        put = save_cache(store, ids, fill(model, ids, DynamicCache(config=model.config), [26]))
        assert put.failed == dict.fromkeys(range(5), SLID_OUT)
        assert (put.stored.tolist(), put.present.any()) == ([False] * 5 + [True], False)
        assert load_cache(store, ids)[1] == 0
        saved(store, model, ids[:, :21], [20])
        assert load_cache(store, ids)[1] == 24
    other = mistral(3)
    with opened(tmp_path / "other", other) as store:
        cache = fill(other, ids, DynamicCache(config=other.config), [26])
        assert save_cache(store, ids, cache).failed == dict.fromkeys(range(6), SLID_OUT)


def test_a_block_is_stored_where_every_layer_of_its_kind_has_it(store: KVStore, gemma: Any) -> None:
    ids = request(29)
    cache = fill(gemma, ids, load_cache(store, ids)[0], [26])
    cache.layers[2].crop(0)
    assert save_cache(store, ids, cache).stored.all()
    there = [
        store.get_blocks([own], [0], start, group=SLIDING) for start, own in enumerate(chain_hashes(ids, BLOCK)[:6])
    ]
    assert [bool(got.verified[0]) for got in there] == [False] * 5 + [True]


def test_kinds_of_layers_are_groups(store: KVStore) -> None:
    groups = store.cache.groups
    assert {n: [layer.number for layer in g.layers] for n, g in groups.items()} == {FULL: [1, 3], SLIDING: [0, 2]}
    assert [(groups[n].layers[0].type, groups[n].window) for n in (FULL, SLIDING)] == [("full", None), ("sliding", 8)]


def cropped(model: Any, ids: torch.Tensor) -> Any:
    """A cache whose windows lost tokens at their ends: it was made small before."""
    cache = fill(model, ids, DynamicCache(config=model.config), [20])
    cache.activate_past_recording()
    cache.crop(-2)
    return cache


def forgotten(model: Any, ids: torch.Tensor) -> Any:
    cache = fill(model, ids, DynamicCache(config=model.config), [20])
    cache.layers[2].cumulative_length = 7
    return cache


def uneven(model: Any, ids: torch.Tensor) -> Any:
    cache = fill(model, ids, DynamicCache(config=model.config), [20])
    cache.layers[2].values = cache.layers[2].values[:, :, 1:]
    return cache


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda model, ids: fill(model, ids, DynamicCache(), [20]), errors.InvalidCache, "layer 0 .* window None"),
        (lambda model, ids: fill(o := gemma3(9), ids, DynamicCache(config=o.config), [20]), errors.InvalidCache, "9"),
        (cropped, errors.InvalidShape, "K of layer 0 .*7 to 18"),
        (forgotten, errors.InvalidShape, "layer 2 has seen 7 tokens"),
        (uneven, errors.InvalidShape, "V of layer 2"),
    ],
)
def test_caches_that_cannot_be_saved(
    store: KVStore, gemma: Any, make: Callable[..., Any], error: type, message: str
) -> None:
    ids = request(24)
    with pytest.raises(error, match=message):
        save_cache(store, ids, make(gemma, ids))
    assert store.stats()["records"] == 0
