"""Models that keep recurrent states: what is loaded goes on bit for bit, and a state serves its own tokens alone."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore import KVStore, StoreConfig, errors, route
from kvstore.engines import transformers_layers
from kvstore.engines.transformers import (
    NO_STATE,
    TransformersStore,
    chain_hashes,
    load_cache,
    open_store,
    save_cache,
)
from kvstore.record import parse_header
from kvstore.tools.demo_model import forward
from tests.real_models import BLOCK, Continuation, elsewhere, fill, mistral, request
from tests.real_recurrent import (
    MODELS,
    ONE_BY_ONE,
    WITHOUT_ATTENTION,
    alike,
    bamba,
    falcon_h1,
    go_on,
    mamba,
    qwen3_next,
)
from tests.support import MIB, Raw, flip, index_key, io_mode

CONFIG = StoreConfig(capacity_bytes=64 * MIB, durability="process", max_rejections_per_minute=None)
FULL, STATES = 0, 1
RUNS = {"block": ([4], 3), "blocks": ([16], 1), "turns": ([8, 12, 20], 5), "between": ([8, 11], 6), "short": ([3], 2)}
"""Where forward passes ended and the cache was saved, each time; and how many tokens of the prompt were left."""


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
def hybrid() -> Any:
    """States in layers 0 and 2, attention in 1 and 3."""
    return bamba()


@pytest.fixture
def store(tmp_path: Path, hybrid: Any) -> Iterator[KVStore]:
    with opened(tmp_path / "store", hybrid) as made:
        yield made


def opened(path: Path, model: Any, **options: Any) -> KVStore:
    return open_store(path, model, block_size=BLOCK, config=CONFIG, **options)


def empty(model: Any) -> Any:
    return DynamicCache(config=model.config)


def in_place(model: Any, ids: torch.Tensor, ends: Sequence[int]) -> Continuation:
    """What a model says that never heard of kvstore: prompt computed up to each end, and the rest at once."""
    return go_on(model, ids, fill(model, ids, empty(model), ends, 0), max(ends, default=0))


def saved(store: KVStore, model: Any, ids: torch.Tensor, ends: Sequence[int]) -> Any:
    """The cache of the tokens up to the last end, which was saved at each."""
    cache, done = empty(model), 0
    for end in ends:
        fill(model, ids, cache, [end], done)
        save_cache(store, ids, cache, tokens=end)
        done = end
    return cache


def damage(store: KVStore, block_hash: bytes, group: int) -> None:
    """Flip a bit in the middle of a block's first payload chunk."""
    raw, key = Raw(store), index_key(store, block_hash, group)
    header = parse_header(raw.entry(key) or b"", key)
    chunk_key = header.sequence.to_bytes(8, "big") + b"\0\1"
    value = raw.chunk(chunk_key)
    raw.put_chunk(chunk_key, flip(value, len(value) * 4))


Found = dict[tuple[str, str], tuple[dict[str, Any], Continuation]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What another process loaded and said, and what was said in place, by model and run."""
    folder = tmp_path_factory.mktemp("elsewhere")
    tasks, expected = [], {}
    for name, make in MODELS.items():
        model = make()
        for run, (ends, rest) in RUNS.items():
            ids, path = request(ends[-1] + rest, seed=ends[-1]), folder / f"{name} {run}"
            with opened(path, model) as store:
                saved(store, model, ids, ends)
            expected[name, run] = in_place(model, ids, whole_blocks(ends))
            tasks.append({"model": name, "store": str(path), "ids": ids[0].tolist()})
    got = elsewhere(tasks, folder, "tests.real_recurrent")
    return {key: (own, expected[key]) for key, own in zip(expected, got, strict=True)}


def whole_blocks(ends: Sequence[int]) -> list[int]:
    return [end for end in ends if end % BLOCK == 0]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_another_process_goes_on_bit_for_bit(found: Found, name: str, run: str) -> None:
    got, expected = found[name, run]
    tokens = max(whole_blocks(RUNS[run][0]), default=0)
    assert got == {"tokens": tokens, "logits": expected.logits, "answer": expected.answer}


def states_of(cache: Any) -> list[torch.Tensor]:
    """Every state: conv states, then recurrent ones, layer by layer."""
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    every = [
        state for layer in layers for kept in (layer.conv_states, layer.recurrent_states) for state in kept.values()
    ]
    return [state for state in every if state is not None]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_depends_on_every_state(tmp_path: Path, name: str) -> None:
    """Else no test here could fail. The loaded states are those that were saved, in tensors laid out as theirs."""
    model, ids = MODELS[name](), request(15)
    with opened(tmp_path, model) as store:
        cache = saved(store, model, ids, [12])
        loaded, tokens = load_cache(store, ids)
        assert tokens == 12
        for ours, theirs in zip(states_of(loaded), states_of(cache), strict=True):
            assert torch.equal(ours, theirs)
            assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        expected, heard = in_place(model, ids, [12]), set[str]()
        for number in range(len(states_of(cache))):
            again, _ = load_cache(store, ids)
            states_of(again)[number].neg_()
            heard.add(go_on(model, ids, again, 12).logits)
        assert len(heard) == len(states_of(cache))
        assert expected.logits not in heard
        assert expected == go_on(model, ids, load_cache(store, ids)[0], 12)


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_cache_is_like_one_that_never_left(tmp_path: Path, name: str) -> None:
    """Everything that its layers have besides tensors, too."""
    model, ids = MODELS[name](), request(15)
    with opened(tmp_path, model) as store:
        cache, (loaded, _) = saved(store, model, ids, [8]), load_cache(store, ids)
    assert described(loaded) == described(cache)


def described(cache: Any) -> list[dict[str, Any]]:
    return [{"kind": type(layer)} | {key: plain(value) for key, value in vars(layer).items()} for layer in cache.layers]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(own) for key, own in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.both
def test_states_are_loaded_where_they_are_read(store: KVStore, hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, seen = request(15), list[Any]()
    saved(store, hybrid, ids, [12])
    attach = KVStore.attach
    monkeypatch.setattr(TransformersStore, "attach", lambda self, cache: (seen.append(cache), attach(self, cache))[1])
    loaded, tokens = load_cache(store, ids)
    assert tokens == 12
    assert store.stats()["get_verified"] == 3 + 1
    places = [state.address for layer in seen[0].state_groups[STATES].layers for state in layer.states]
    assert places == [state.data_ptr() for state in states_of(loaded)]


@pytest.mark.parametrize("name", MODELS)
def test_models_that_forget_their_states_are_told_of(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By what they say: as long a prompt in one pass, and in two of several tokens each, of which the second starts anew."""
    model, ids = MODELS[name]().to(torch.float32), request(15)
    with caplog.at_level(logging.WARNING, "kvstore"), opened(tmp_path, model) as store:
        assert isinstance(store, TransformersStore)
        assert store.goes_on_at_once == (name not in ONE_BY_ONE)
    assert ("one token a pass" in caplog.text) == (name in ONE_BY_ONE)
    whole, parts = (forward(model, ids, empty(model), 1)["logits"][0, -1], in_two(model, ids))
    assert torch.allclose(whole, parts, rtol=1e-3, atol=1e-3) == (name not in ONE_BY_ONE)


def in_two(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What is said after a prompt of which 12 tokens were computed before the others."""
    found: torch.Tensor = forward(model, ids[:, 12:], fill(model, ids, empty(model), [12], 0), 1)["logits"][0, -1]
    return found


def test_a_layer_that_keeps_both_is_in_two_groups(tmp_path: Path) -> None:
    with opened(tmp_path, falcon_h1()) as store:
        groups = store.cache.all_groups
        assert {n: ([layer.number for layer in g.layers], g.block_size) for n, g in groups.items()} == {
            FULL: ([0, 1], BLOCK),
            STATES: ([0, 1], BLOCK),
        }
        assert {layer.type for layer in groups[STATES].layers} == {"mamba"}


@pytest.mark.parametrize("name", ["mamba2", "qwen3 next", "falcon h1"])
def test_a_conversation_is_saved_turn_by_turn(tmp_path: Path, name: str) -> None:
    """Each turn goes on from what was loaded, and is saved where its whole blocks end."""
    model, ids, done = MODELS[name](), request(31), 0
    for end in (8, 20, 28):
        with opened(tmp_path, model) as store:
            cache, tokens = load_cache(store, ids)
            assert tokens == done
            put = save_cache(store, ids, fill(model, ids, cache, [end], done), tokens=end)
            assert put.stored[-1]
            done = end
    with opened(tmp_path, model) as store:
        assert go_on(model, ids, load_cache(store, ids)[0], 28) == in_place(model, ids, [8, 20, 28])


# --- a state serves its own tokens alone -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [7, 9, 10, 11])
def test_a_state_between_block_ends_is_not_stored(
    store: KVStore, hybrid: Any, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    ids = request(16)
    with caplog.at_level(logging.WARNING, "kvstore"):
        for _ in range(2):
            saved(store, hybrid, ids, [count])
    blocks = count // BLOCK
    assert [record.getMessage() for record in caplog.records] == [
        message for message in caplog.messages if f"a multiple of 4 tokens, {4 * blocks} for this prompt" in message
    ]
    assert len(caplog.records) == 1
    assert store.match_prefix(chain_hashes(ids, BLOCK), group=FULL) == blocks
    loaded, tokens = load_cache(store, ids)
    assert (tokens, store.stats().get("get_verified", 0)) == (0, 0)
    assert go_on(hybrid, ids, loaded, 0) == in_place(hybrid, ids, [])


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_prompts_that_fork_around_a_state(tmp_path: Path, name: str) -> None:
    """One token before its end, and at it."""
    model, ids = MODELS[name](), request(20)
    with opened(tmp_path, model) as store:
        saved(store, model, ids, [8, 16])
        for shared, tokens in ((7, 0), (8, 8), (15, 8), (16, 16)):
            other = (request(9, seed=7) + 1) % 96
            other[0, 0] = (ids[0, shared] + 1) % 96
            forked = torch.cat([ids[:, :shared], other], dim=1)
            loaded, found = load_cache(store, forked)
            assert found == tokens
            assert go_on(model, forked, loaded, found) == in_place(model, forked, [e for e in (8, 16) if e <= found])
        assert load_cache(store, ids[:, :16])[1] == 8


def test_a_record_of_another_number_of_tokens_is_refused(store: KVStore, hybrid: Any) -> None:
    """A state of 8 tokens under the key of 12: the tag in its checksum is that of 8."""
    ids, hashes = request(15), chain_hashes(request(15), BLOCK)
    saved(store, hybrid, ids, [8, 12])
    raw, short, long = Raw(store), *(index_key(store, hashes[block], STATES) for block in (1, 2))
    raw.put_entry(long, raw.entry(short))
    loaded, tokens = load_cache(store, ids)
    assert tokens == 8
    assert go_on(hybrid, ids, loaded, loaded.get_seq_length()) == in_place(hybrid, ids, [8])
    assert sum(count for name, count in store.stats().items() if name.startswith("get_rejected_")) == 1


def test_attention_without_a_state_is_not_used(store: KVStore, hybrid: Any) -> None:
    ids = request(23)
    saved(store, hybrid, ids, [8, 19])
    hashes = chain_hashes(ids, BLOCK)
    assert store.match_prefix(hashes, group=FULL) == 4
    loaded, tokens = load_cache(store, ids)
    assert (tokens, loaded.get_seq_length()) == (8, 8)
    Raw(store).put_entry(index_key(store, hashes[1], STATES), None)
    loaded, tokens = load_cache(store, ids)
    assert (tokens, loaded.get_seq_length(), loaded.has_previous_state()) == (0, 0, False)
    assert go_on(hybrid, ids, loaded, loaded.get_seq_length()) == in_place(hybrid, ids, [])


def test_a_state_without_its_attention_is_not_used(store: KVStore, hybrid: Any) -> None:
    ids = request(15)
    saved(store, hybrid, ids, [4, 12])
    Raw(store).put_entry(index_key(store, chain_hashes(ids, BLOCK)[1], FULL), None)
    loaded, tokens = load_cache(store, ids)
    assert tokens == 4
    assert go_on(hybrid, ids, loaded, loaded.get_seq_length()) == in_place(hybrid, ids, [4])


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_without_attention_only_blocks_with_a_state_are_stored(tmp_path: Path, name: str) -> None:
    model, ids = MODELS[name](), request(15)
    with opened(tmp_path, model) as store:
        cache = fill(model, ids, empty(model), [12], 0)
        put = save_cache(store, ids, cache, tokens=12)
        assert (put.stored.tolist(), put.failed) == ([False, False, True], {0: NO_STATE, 1: NO_STATE})
        assert save_cache(store, ids, cache, tokens=12).present.tolist() == [False, False, True]
        fill(model, ids, cache, [13], 12)
        assert save_cache(store, ids, cache, tokens=13).failed == dict.fromkeys(range(3), NO_STATE)
        assert save_cache(store, ids, empty(model)).stored.size == 0
        assert store.stats()["records"] == 1


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.both(cases=2)
@pytest.mark.parametrize(
    ("group", "bad", "tokens"),
    [(STATES, [3], 12), (STATES, [3, 2], 4), (STATES, [3, 2, 0], 0), (FULL, [3], 12), (FULL, [2], 4), (FULL, [0], 0)],
)
def test_a_damaged_block_leaves_an_earlier_state(
    store: KVStore, hybrid: Any, group: int, bad: list[int], tokens: int
) -> None:
    """States are of 4, 12 and 16 tokens."""
    ids, ends = request(19), [4, 12, 16]
    cache, hashes = saved(store, hybrid, ids, ends), chain_hashes(request(19), BLOCK)
    for block in bad:
        damage(store, hashes[block], group)
    loaded, found = load_cache(store, ids)
    assert found == tokens
    assert store.stats()["get_rejected_storage_hash"] == len(bad)
    assert go_on(hybrid, ids, loaded, loaded.get_seq_length()) == in_place(
        hybrid, ids, [end for end in ends if end <= tokens]
    )
    assert load_cache(store, ids)[1] == tokens
    save_cache(store, ids, cache)
    whole, found = load_cache(store, ids)
    assert found == 16
    assert go_on(hybrid, ids, whole, whole.get_seq_length()) == in_place(hybrid, ids, ends)


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_a_damaged_state_of_a_model_without_attention(tmp_path: Path, name: str) -> None:
    model, ids, hashes = MODELS[name](), request(15), chain_hashes(request(15), BLOCK)
    with opened(tmp_path, model) as store:
        saved(store, model, ids, [8, 12])
        for block, tokens in ((2, 8), (1, 0)):
            damage(store, hashes[block], 0)
            loaded, found = load_cache(store, ids)
            assert found == tokens
            assert loaded.has_previous_state() == (tokens > 0)
            assert go_on(model, ids, loaded, found) == in_place(model, ids, [8] if tokens else [])


@pytest.mark.parametrize("seed", range(8))
def test_any_blocks_damaged(store: KVStore, hybrid: Any, seed: int) -> None:
    """What is loaded is the longest prefix of which everything that it needs is intact."""
    rng, ids, hashes = random.Random(seed), request(27), chain_hashes(request(27), BLOCK)
    ends = sorted(rng.sample(range(4, 25, 4), 4))
    saved(store, hybrid, ids, ends)
    every = [(FULL, block) for block in range(ends[-1] // BLOCK)] + [(STATES, end // BLOCK - 1) for end in ends]
    bad = set(rng.sample(every, rng.randrange(1, 4)))
    for group, block in bad:
        damage(store, hashes[block], group)
    needed = {end: {(FULL, own) for own in range(end // BLOCK)} | {(STATES, end // BLOCK - 1)} for end in ends}
    loaded, tokens = load_cache(store, ids)
    assert tokens == max((end for end in ends if not needed[end] & bad), default=0)
    assert go_on(hybrid, ids, loaded, loaded.get_seq_length()) == in_place(
        hybrid, ids, [end for end in ends if end <= tokens]
    )


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


ASTRAY: dict[str, Callable[[list[torch.Tensor]], None]] = {
    "conv and recurrent state": lambda s: exchange(s[0], s[1]),
    "conv states of two layers": lambda s: exchange(s[0], s[2]),
    "recurrent states of two layers": lambda s: exchange(s[1], s[3]),
    "all states of two layers": lambda s: (exchange(s[0], s[2]), exchange(s[1], s[3]))[0],
    "channels": lambda s: exchange(s[1][0, 3], s[1][0, 4]),
    "a bit": lambda s: s[2].view(torch.int32)[0, 5, 1:2].bitwise_xor_(1 << 30) and None,
}


@pytest.mark.both(cases=2)
@pytest.mark.parametrize("fault", ASTRAY)
def test_states_that_landed_in_the_wrong_place_are_refused(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model whose conv and recurrent states have one shape and one dtype. The record is intact and stays."""
    model, ids, loaded = alike(), request(15), list[Any]()
    scatter, make = route.HostTransfer.scatter, transformers_layers.cache_utils().DynamicCache

    def astray(transfer: Any, span: Any, staged: Any) -> None:
        scatter(transfer, span, staged)
        ASTRAY[fault](states_of(loaded[-1]))

    def seen(**options: Any) -> Any:
        loaded.append(make(**options))
        return loaded[-1]

    with opened(tmp_path, model) as store:
        cache = saved(store, model, ids, [8, 12])
        with monkeypatch.context() as patch:
            patch.setattr(transformers_layers.cache_utils(), "DynamicCache", seen)
            patch.setattr(route.HostTransfer, "scatter", astray)
            assert load_cache(store, ids)[1] == 0
        assert store.stats()["get_rejected_content"] == 2
        assert save_cache(store, ids, cache, tokens=12).stored[-1]
        again, tokens = load_cache(store, ids)
        assert tokens == 12
        assert go_on(model, ids, again, 12) == in_place(model, ids, [8, 12])


# --- what cannot be saved ----------------------------------------------------------------------------------------


def cropped(model: Any, ids: torch.Tensor) -> Any:
    """Attention of 8 tokens, recurrent states of 9."""
    cache = empty(model)
    cache.activate_past_recording()
    fill(model, ids, cache, [9]).crop(-1)
    assert cache.get_seq_length() == 8
    return cache


def batch(model: Any, ids: torch.Tensor) -> Any:
    return fill(model, torch.cat([ids, ids]), empty(model), [8])


def forgotten(model: Any, ids: torch.Tensor) -> Any:
    cache = fill(model, ids, empty(model), [8])
    cache.layers[2].has_previous_state[0] = False
    return cache


def widened(model: Any, ids: torch.Tensor) -> Any:
    cache = fill(model, ids, empty(model), [8])
    cache.layers[2].conv_states[0] = cache.layers[2].conv_states[0].float()
    return cache


def without_recurrent_state(model: Any, ids: torch.Tensor) -> Any:
    cache = fill(model, ids, empty(model), [8])
    cache.layers[0].recurrent_states[0] = None
    return cache


def of_another(make: Callable[[], Any]) -> Callable[[Any, torch.Tensor], Any]:
    def filled(model: Any, ids: torch.Tensor) -> Any:
        other = make()
        return fill(other, ids, empty(other), [8], 0)

    return filled


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (cropped, errors.InvalidCache, "layer 0 records its past.*load_cache"),
        (batch, errors.InvalidShape, "one sequence"),
        (forgotten, errors.InvalidCache, "layer 2 has 2 states, or no tokens"),
        (widened, errors.UnsupportedDtype, r"conv_states\[0\] of layer 2 is torch.float32"),
        (without_recurrent_state, errors.InvalidCache, "layer 0 has 1 states"),
        (of_another(mamba), errors.InvalidCache, "2 layers, the model of the store 4"),
        (of_another(lambda: mistral(8)), errors.InvalidCache, "2 layers, the model of the store 4"),
        (of_another(qwen3_next), errors.InvalidShape, r"conv_states\[0\] of layer 0.*\(1, 80, 4\)"),
    ],
)
def test_caches_that_cannot_be_saved(
    store: KVStore, hybrid: Any, make: Callable[..., Any], error: type, message: str
) -> None:
    ids = request(24)
    with pytest.raises(error, match=message):
        save_cache(store, ids, make(hybrid, ids))
    assert store.stats()["records"] == 0


def test_layers_of_other_kinds_are_refused(tmp_path: Path) -> None:
    ids = request(12)
    model, other = falcon_h1(), mamba()
    for mine, theirs in ((model, other), (other, model)):
        with opened(tmp_path / type(mine).__name__, mine) as store:
            cache = fill(theirs, ids, empty(theirs), [8], 0)
            with pytest.raises(errors.InvalidCache, match="layer 0 of the cache is a LinearAttention"):
                save_cache(store, ids, cache, tokens=8)


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("jamba", 7, "tokens is 7, the cache holds 8"),
        ("jamba", -1, "tokens is -1"),
        ("mamba", None, "pass tokens="),
        ("mamba", True, "tokens is True"),
        ("mamba", 13, "12 input_ids, the cache holds 13"),
    ],
)
def test_the_number_of_tokens(tmp_path: Path, name: str, tokens: Any, message: str) -> None:
    model, ids = MODELS[name](), request(12)
    with opened(tmp_path, model) as store:
        with pytest.raises(errors.InvalidTokens, match=message):
            save_cache(store, ids, fill(model, ids, empty(model), [8], 0), tokens=tokens)
        assert store.stats()["records"] == 0


def test_generate_goes_on_from_a_loaded_cache(store: KVStore, hybrid: Any) -> None:
    ids = request(15)
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = hybrid.generate(ids, cache=fill(hybrid, ids, empty(hybrid), [12]), **options)
    saved(store, hybrid, ids, [12])
    cache, tokens = load_cache(store, ids)
    assert tokens == 12
    said = hybrid.generate(ids, cache=cache, **options)
    assert torch.equal(said, expected)
    assert save_cache(store, said, cache).stored.tolist() == [False] * 3 + [True] * 2
