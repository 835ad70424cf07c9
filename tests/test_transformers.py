"""A real model's KV: saved in one process, loaded in another, refused where it is damaged.

The oracle is always "prefill to k in the same chunks, then go on in place", compared bit for bit: KV recomputed in
other chunks differs in its last bits. One thread, so that the tests do not depend on how busy the machine is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    MistralConfig,
    StaticCache,
    T5Config,
)
from transformers.cache_utils import DynamicLayer

from kvstore import KVStore, StoreConfig, errors
from kvstore.engines.transformers import TransformersStore, chain_hashes, load_cache, open_store, save_cache
from kvstore.engines.transformers_model import model_identity
from kvstore.record import parse_header
from kvstore.tools.demo_model import forward
from kvstore.tools.model import load_smollm2, smollm2_folder
from tests.support import MIB, Raw, flip, index_key, io_mode, make_cache
from tests.support import open_store as open_plain_store

CONFIG = StoreConfig(capacity_bytes=128 * MIB, durability="process")
PROMPT = 200
PREFIX = 160


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


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model."""
    return load_smollm2(smollm2_folder(progress=False))[1]


@pytest.fixture(scope="session")
def prompt() -> torch.Tensor:
    return torch.randint(0, 40_000, (1, PROMPT), generator=torch.Generator().manual_seed(1))


def tiny(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """A random Llama of two layers."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(LlamaConfig(**(sizes | heads | settings))).to(dtype).eval()


def tiny_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def cache_of(model: Any, ids: torch.Tensor) -> Any:
    """The cache of all these tokens, computed in one forward pass."""
    return forward(model, ids, None, 1)["cache"]


def logits_after(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The logits of the tokens that are not in the cache, computed in one forward pass."""
    rest = ids[:, cache.get_seq_length() :]
    logits: torch.Tensor = forward(model, rest, cache, 0)["logits"]
    return logits


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one.view(torch.int16), two.view(torch.int16))


def damage(store: KVStore, block_hash: bytes) -> None:
    """Flip a bit in the middle of a block's first payload chunk."""
    raw, key = Raw(store), index_key(store, block_hash)
    header = parse_header(raw.entry(key) or b"", key)
    chunk_key = header.sequence.to_bytes(8, "big") + b"\0\1"
    value = raw.payload()[chunk_key]
    raw.put_chunk(chunk_key, flip(value, len(value) * 4))


SECOND = """
import json, sys, torch
from pathlib import Path
from kvstore.engines.transformers import load_cache, open_store
from kvstore.tools.demo_model import forward
from kvstore.tools.model import load_smollm2
torch.set_num_threads(1)
task = json.loads(sys.argv[1])
model = load_smollm2(Path(task["model"]))[1]
ids = torch.tensor([task["ids"]])
with open_store(task["store"], model, mode="r") as store:
    cache, tokens = load_cache(store, ids)
logits = forward(model, ids[:, tokens:], cache, 0)["logits"]
Path(task["out"]).write_bytes(logits.view(torch.int16).numpy().tobytes())
print(json.dumps(tokens))
"""


def test_another_process_goes_on_bit_for_bit(smollm2: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    cache = cache_of(smollm2, prompt[:, :PREFIX])
    with open_store(tmp_path / "store", smollm2, config=CONFIG) as store:
        assert save_cache(store, prompt, cache).stored.tolist() == [True] * (PREFIX // 16)
    expected = logits_after(smollm2, prompt, cache)
    task = {"model": str(smollm2_folder()), "store": str(tmp_path / "store"), "ids": prompt[0].tolist()}
    task["out"] = str(tmp_path / "logits")
    result = subprocess.run([sys.executable, "-c", SECOND, json.dumps(task)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == PREFIX
    assert (tmp_path / "logits").read_bytes() == expected.view(torch.int16).numpy().tobytes()


@pytest.mark.both
def test_damage_in_the_middle_shortens_the_prefix(smollm2: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    cache = cache_of(smollm2, prompt[:, :PREFIX])
    hashes = chain_hashes(prompt, 16)
    with open_store(tmp_path / "store", smollm2, config=CONFIG) as store:
        save_cache(store, prompt, cache)
        damage(store, hashes[6])
        loaded, tokens = load_cache(store, prompt)
        assert tokens == 96
        assert store.stats()["get_rejected_storage_hash"] == 1
        assert {tuple(layer.keys.shape) for layer in loaded.layers} == {(1, 3, 96, 64)}
        again = save_cache(store, prompt, cache)
        assert again.stored.tolist() == [i == 6 for i in range(10)]
        assert load_cache(store, prompt)[1] == PREFIX
    cache.crop(96 - PREFIX)
    assert same_bits(logits_after(smollm2, prompt, loaded), logits_after(smollm2, prompt, cache))


def test_generate_goes_on_from_a_loaded_cache(smollm2: Any, prompt: torch.Tensor, tmp_path: Path) -> None:
    cache = cache_of(smollm2, prompt[:, :PREFIX])
    with open_store(tmp_path / "store", smollm2, config=CONFIG) as store:
        save_cache(store, prompt, cache)
        loaded, _ = load_cache(store, prompt)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = smollm2.generate(prompt, cache=cache, **options)
    assert torch.equal(smollm2.generate(prompt, cache=loaded, **options), expected)


@pytest.fixture
def model() -> Any:
    return tiny()


@pytest.fixture
def store(tmp_path: Path, model: Any) -> Iterator[KVStore]:
    """A store of the tiny model, with blocks of 4 tokens."""
    with open_store(tmp_path / "store", model, block_size=4, config=CONFIG) as opened:
        yield opened


@pytest.mark.both
def test_what_is_loaded_has_the_bytes_that_were_saved(store: KVStore, model: Any) -> None:
    ids = tiny_ids(23)
    cache = cache_of(model, ids)
    assert save_cache(store, ids, cache).stored.tolist() == [True] * 5
    loaded, tokens = load_cache(store, ids)
    assert tokens == 20
    for ours, theirs in zip(loaded.layers, cache.layers, strict=True):
        assert type(ours) is DynamicLayer
        assert same_bits(ours.keys, theirs.keys[:, :, :20])
        assert same_bits(ours.values, theirs.values[:, :, :20])


def test_nothing_is_copied_on_the_way(store: KVStore, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is summed is the cache's own memory: of the saved cache, and of the one that the model will read."""
    seen: list[Any] = []
    attach = KVStore.attach
    monkeypatch.setattr(TransformersStore, "attach", lambda self, cache: (seen.append(cache), attach(self, cache))[1])
    ids = tiny_ids(20)
    cache = cache_of(model, ids)
    save_cache(store, ids, cache)
    loaded, _ = load_cache(store, torch.cat([ids, ids], dim=1))
    for paged, given in zip(seen, (cache, loaded), strict=True):
        own = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in given.layers]
        assert [(layer.k.address, layer.v.address) for layer in paged.group(0).layers] == own


def test_prompts_that_share_a_prefix(store: KVStore, model: Any) -> None:
    ids = tiny_ids(40)
    save_cache(store, ids, cache_of(model, ids[:, :22]))
    longer = torch.cat([ids[:, :20], tiny_ids(9, seed=5)], dim=1)
    forked = torch.cat([ids[:, :10], tiny_ids(20, seed=6)], dim=1)
    assert load_cache(store, longer)[1] == 20
    assert load_cache(store, ids[:, :15])[1] == 12
    assert load_cache(store, forked)[1] == 8
    loaded, tokens = load_cache(store, forked)
    in_place = cache_of(model, ids[:, :22])
    in_place.crop(tokens - 22)
    assert same_bits(logits_after(model, forked, loaded), logits_after(model, forked, in_place))


@pytest.mark.parametrize(("count", "tokens"), [(1, 0), (4, 0), (5, 4), (16, 12), (17, 16), (20, 16)])
def test_at_least_one_token_is_left_to_compute(store: KVStore, model: Any, count: int, tokens: int) -> None:
    ids = tiny_ids(20)
    save_cache(store, ids, cache_of(model, ids))
    loaded, found = load_cache(store, ids[:, :count])
    assert (found, loaded.get_seq_length()) == (tokens, tokens)
    assert logits_after(model, ids[:, :count], loaded).shape[1] == count - tokens


def test_a_miss_is_an_empty_cache_that_works(store: KVStore, model: Any) -> None:
    ids = tiny_ids(12)
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 96
    save_cache(store, ids, cache_of(model, ids))
    loaded, tokens = load_cache(store, other)
    assert (tokens, loaded.get_seq_length()) == (0, 0)
    assert same_bits(logits_after(model, other, loaded), forward(model, other, None, 0)["logits"])


@pytest.mark.both
def test_a_damaged_first_block_leaves_an_empty_cache(store: KVStore, model: Any) -> None:
    ids = tiny_ids(12)
    save_cache(store, ids, cache_of(model, ids))
    damage(store, chain_hashes(ids, 4)[0])
    loaded, tokens = load_cache(store, ids)
    assert (tokens, loaded.get_seq_length()) == (0, 0)
    assert same_bits(logits_after(model, ids, loaded), forward(model, ids, None, 0)["logits"])


@pytest.mark.both
def test_exchanged_records_end_the_prefix(store: KVStore, model: Any) -> None:
    ids = tiny_ids(24)
    save_cache(store, ids, cache_of(model, ids))
    raw, hashes = Raw(store), chain_hashes(ids, 4)
    one, two = (index_key(store, hashes[i]) for i in (2, 4))
    first, second = raw.entry(one), raw.entry(two)
    raw.put_entry(one, second)
    raw.put_entry(two, first)
    assert load_cache(store, ids)[1] == 8
    assert store.stats()["get_rejected_key"] == 2


def test_less_than_a_block_stores_nothing(store: KVStore, model: Any) -> None:
    ids = tiny_ids(3)
    put = save_cache(store, ids, cache_of(model, ids))
    assert (put.stored.size, put.failed) == (0, {})
    assert save_cache(store, ids, DynamicCache(config=model.config)).stored.size == 0


def test_what_is_there_is_not_written_again(store: KVStore, model: Any) -> None:
    ids = tiny_ids(12)
    save_cache(store, ids, cache_of(model, ids[:, :8]))
    put = save_cache(store, ids, cache_of(model, ids))
    assert (put.present.tolist(), put.stored.tolist()) == ([True, True, False], [False, False, True])


def test_a_cache_that_generated_is_saved_with_what_it_said(store: KVStore, model: Any) -> None:
    ids = tiny_ids(6)
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True}
    said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert save_cache(store, said.sequences, said["cache"]).stored.tolist() == [True] * 3
    assert load_cache(store, said.sequences)[1] == 12


@pytest.mark.both
def test_a_store_opened_to_read(store: KVStore, model: Any, tmp_path: Path) -> None:
    ids = tiny_ids(12)
    cache = cache_of(model, ids)
    save_cache(store, ids, cache)
    store.close()
    with open_store(tmp_path / "store", model, block_size=4, mode="r") as reader:
        assert load_cache(reader, ids)[1] == 8
        with pytest.raises(errors.ReadOnlyStore):
            save_cache(reader, ids, cache)
    for call in (lambda: save_cache(store, ids, cache), lambda: load_cache(store, ids)):
        with pytest.raises(errors.StoreClosed):
            call()


@pytest.mark.both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model, ids = tiny(dtype=dtype), tiny_ids(20)
    cache = cache_of(model, ids)
    with open_store(tmp_path / "store", model, block_size=4, config=CONFIG) as store:
        save_cache(store, ids, cache)
        loaded, _ = load_cache(store, ids)
    assert torch.equal(loaded.layers[1].keys.view(torch.uint8), cache.layers[1].keys[:, :, :16].view(torch.uint8))


@pytest.mark.both
def test_keys_and_values_of_different_sizes(tmp_path: Path) -> None:
    """DeepSeek keeps latents as keys, and rotated positions as values."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "n_group": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 16, "topk_group": 1}
    widths = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2}
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **widths)).to(torch.bfloat16).eval()
    ids = tiny_ids(12)
    cache = cache_of(model, ids)
    assert cache.layers[0].keys.shape != cache.layers[0].values.shape
    with open_store(tmp_path / "store", model, block_size=4, config=CONFIG) as store:
        save_cache(store, ids, cache)
        loaded, tokens = load_cache(store, ids)
    assert tokens == 8
    assert same_bits(loaded.layers[1].values, cache.layers[1].values[:, :, :8])


def one_weight(model: Any) -> Any:
    """The same model with the last bit of one weight flipped."""
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data.view(torch.int16)[17, 3] ^= 1
    return model


class Adapter(torch.nn.Module):
    """What PEFT's layers keep beside their weights."""

    def __init__(self, scale: float, disabled: bool) -> None:
        super().__init__()
        self.active_adapters, self.disable_adapters, self.scaling = ["a"], disabled, {"a": scale}


def adapted(scale: float, disabled: bool = False) -> Any:
    model = tiny()
    model.model.layers[0].adapter = Adapter(scale, disabled)
    return model


OTHERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "weights": lambda: (tiny(seed=1), {}),
    "one bit of one weight": lambda: (one_weight(tiny()), {}),
    "dtype": lambda: (tiny(dtype=torch.float16), {}),
    "rope": lambda: (tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), {}),
    "norm": lambda: (tiny(rms_norm_eps=1e-4), {}),
    "revision": lambda: (tiny(), {"revision": "2"}),
    "extra": lambda: (tiny(), {"extra": {"salt": "tenant"}}),
    "block size": lambda: (tiny(), {"block_size": 8}),
    "adapter": lambda: (adapted(1.0), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_misses(store: KVStore, model: Any, tmp_path: Path, name: str) -> None:
    """Case 9 of what goes wrong elsewhere: other weights under the same name are served the old KV."""
    ids = tiny_ids(20)
    save_cache(store, ids, cache_of(model, ids))
    store.close()
    other, options = OTHERS[name]()
    with open_store(tmp_path / "store", other, **({"block_size": 4, "config": CONFIG} | options)) as opened:
        assert load_cache(opened, ids)[1] == 0
        assert save_cache(opened, ids, cache_of(other, ids)).stored.all()
    with open_store(tmp_path / "store", tiny(), block_size=4, config=CONFIG) as opened:
        assert load_cache(opened, ids)[1] == 16


def test_adapters_are_told_apart() -> None:
    models = [tiny(), adapted(1.0), adapted(2.0), adapted(1.0, disabled=True)]
    texts = {model_identity(model, "", {}).canonical_json() for model in models}
    assert len(texts) == 4


def test_a_copy_of_a_model_hits(store: KVStore, model: Any, tmp_path: Path) -> None:
    """How a model is run and by which version it was saved does not change its KV."""
    ids = tiny_ids(20)
    save_cache(store, ids, cache_of(model, ids))
    store.close()
    same = tiny(use_cache=False, output_hidden_states=True, architectures=["Other"], transformers_version="4.0")
    with open_store(tmp_path / "store", same, block_size=4, config=CONFIG) as opened:
        assert load_cache(opened, ids)[1] == 16


def nothing_stored(store: KVStore) -> bool:
    return store.stats()["records"] == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros((2, 8), dtype=torch.long), "batch"),
        (torch.zeros((1, 1, 8), dtype=torch.long), "shape"),
        (torch.zeros(8), "float32"),
        (torch.ones(8, dtype=torch.bool), "bool"),
        ([1, 2, -3, 4, 5, 6, 7, 8], "-3"),
        ([1, 2, 2**64, 4, 5, 6, 7, 8], "integers"),
        ([[1, 2], [3]], "integers"),
        (["a"] * 8, "integers"),
        (None, "integers"),
        ([], "empty"),
        ([1, 2, 3, 4, 5, 6, 7], "7 input_ids"),
    ],
)
def test_tokens_that_are_none(store: KVStore, model: Any, ids: Any, message: str) -> None:
    cache = cache_of(model, tiny_ids(8))
    with pytest.raises(errors.InvalidTokens, match=message):
        save_cache(store, ids, cache)
    assert nothing_stored(store)
    if "7" not in message:
        with pytest.raises(errors.InvalidTokens, match=message):
            load_cache(store, ids)


def batch_of_two() -> Any:
    return cache_of(tiny(), torch.cat([tiny_ids(8), tiny_ids(8, seed=1)]))


def uneven() -> Any:
    cache = cache_of(tiny(), tiny_ids(8))
    cache.layers[1].crop(-1)
    return cache


def half_filled() -> Any:
    cache = DynamicCache(config=tiny().config)
    cache.update(*(torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16) for _ in "kv"), 0)
    return cache


class QuantisedLayer(DynamicLayer):
    """Stands for transformers' quantised layers, whose back ends are not installed."""


def with_layer(layer: Any) -> Any:
    cache = cache_of(tiny(), tiny_ids(8))
    cache.layers[1] = layer
    return cache


def mistral(**settings: Any) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MistralForCausalLM(MistralConfig(**sizes, **heads, **settings)).to(torch.bfloat16).eval()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (batch_of_two, errors.InvalidShape, "batch"),
        (uneven, errors.InvalidShape, "layer 1"),
        (half_filled, errors.InvalidShape, "layer 1"),
        (lambda: cache_of(tiny(num_hidden_layers=3), tiny_ids(8)), errors.InvalidCache, "3 layers"),
        (lambda: cache_of(tiny(num_key_value_heads=1), tiny_ids(8)), errors.InvalidShape, "K of layer 0"),
        (lambda: cache_of(tiny(head_dim=16), tiny_ids(8)), errors.InvalidShape, "K of layer 0"),
        (lambda: cache_of(tiny(dtype=torch.float16), tiny_ids(8)), errors.UnsupportedDtype, "float16"),
        (lambda: cache_of(mistral(sliding_window=4), tiny_ids(8)), errors.InvalidCache, "Sliding"),
        (lambda: with_layer(QuantisedLayer()), errors.UnsupportedCache, "QuantisedLayer"),
        (lambda: StaticCache(config=tiny().config, max_cache_len=8), errors.UnsupportedCache, "StaticCache"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), errors.UnsupportedCache, "EncoderDecoder"),
        (lambda: None, errors.UnsupportedCache, "NoneType"),
    ],
)
def test_caches_that_cannot_be_saved(store: KVStore, make: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        save_cache(store, tiny_ids(8), make())
    assert nothing_stored(store)


def indexed() -> Any:
    model = tiny()
    model.config.layer_types = ["indexed_attention"] * model.config.num_hidden_layers
    return model


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1))


def on_meta() -> Any:
    model = tiny()
    model.model.layers[0].mlp.act_spare = torch.nn.Linear(2, 2, device="meta")
    return model


def stretched(kind: str) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
    rope |= {"long_factor": [2.0] * 4, "short_factor": [1.0] * 4} if kind == "longrope" else {}
    return tiny(rope_parameters=rope)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (indexed, {}, errors.UnsupportedCache, "kinds DynamicIndexedLayer: expected DynamicLayer"),
        (t5, {}, errors.UnsupportedCache, "encoder-decoder"),
        (lambda: stretched("dynamic"), {}, errors.UnsupportedCache, "dynamic"),
        (lambda: stretched("longrope"), {}, errors.UnsupportedCache, "longrope"),
        (on_meta, {}, errors.EngineError, "act_spare"),
        (lambda: torch.nn.Linear(2, 2), {}, errors.EngineError, "Linear"),
        (lambda: "HuggingFaceTB/SmolLM2-135M", {}, errors.EngineError, "str"),
        (tiny, {"block_size": 0}, errors.ConfigError, "block_size"),
        (tiny, {"block_size": True}, errors.ConfigError, "block_size"),
        (tiny, {"extra": {"weights": "mine"}}, errors.IdentityError, "weights"),
        (tiny, {"extra": {"salt": [1]}}, errors.IdentityError, "salt"),
        (tiny, {"mode": "w"}, errors.ConfigError, "mode"),
    ],
)
def test_models_that_cannot_be_served(
    tmp_path: Path, make: Callable[[], Any], options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        open_store(tmp_path / "store", make(), **options)
    assert not (tmp_path / "store").exists()


def test_a_store_that_knows_no_model(tmp_path: Path, store: KVStore, model: Any) -> None:
    ids = tiny_ids(8)
    cache = cache_of(model, ids)
    with open_plain_store(tmp_path / "plain", make_cache()) as plain:
        for other in (plain, store.attach(store.cache), None):
            with pytest.raises(errors.EngineError, match="open_store"):
                save_cache(other, ids, cache)  # type: ignore[arg-type]
            with pytest.raises(errors.EngineError, match="open_store"):
                load_cache(other, ids)  # type: ignore[arg-type]


def test_without_transformers(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(errors.EngineError, match="the extra `engines`"):
        open_store(tmp_path / "store", model)


def test_the_adapter_is_imported_without_transformers() -> None:
    code = "import sys, kvstore.engines.transformers; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


HASH_IDS = [*range(40), 2**40]
HASHES = "import sys; from kvstore.engines.transformers import chain_hashes as c; print([h.hex() for h in c({}, 16)])"


def test_hashes_are_equal_in_every_process() -> None:
    """Case 10: hashes that depend on Python's seed differ between processes."""
    own = str([h.hex() for h in chain_hashes(HASH_IDS, 16)])
    command = [sys.executable, "-c", HASHES.format(HASH_IDS)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONHASHSEED": seed}) for seed in "17"
    ]
    assert [process.communicate()[0].strip() for process in running] == [own, own]


def test_hashes_are_those_of_the_definition() -> None:
    assert [h.hex() for h in chain_hashes([1, 2, 3, 4, 5], 2)] == [
        "919c0b7695b1deeb44baa11b7d91c1d65e3a8a7acf4043c8ea44a1ab9c3e5f33",
        "65dbd00a050f8a95d8bfa66cbc4779e1ddfb902e54e0bcd00fe1631d75de99c4",
    ]


def test_hashes_do_not_depend_on_how_the_ids_are_given() -> None:
    ids = tiny_ids(40)
    expected = chain_hashes(ids, 16)
    for given in (ids[0], ids[0].tolist(), ids.numpy(), ids.to(torch.int32), ids[0, :35], tuple(ids[0].tolist())):
        assert chain_hashes(given, 16) == expected
    assert chain_hashes([], 16) == []


def test_hashes_depend_on_every_token_before() -> None:
    ids = list(range(64))
    before = chain_hashes(ids, 16)
    for at in (0, 15, 16, 47):
        after = chain_hashes([*ids[:at], 99, *ids[at + 1 :]], 16)
        assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // 16 for i in range(4)]
    assert not set(before) & set(chain_hashes(ids, 16, salt=b"tenant"))
    assert not set(before) & set(chain_hashes(ids, 32))
