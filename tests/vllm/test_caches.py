"""vLLM's caches in kvstore's words: real engines' tensors, splits over ranks, and what cannot be described."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore import KVStore, StoreConfig
from kvstore.engines.vllm.caches import Described, describe, rank_of, scheduler_side
from kvstore.engines.vllm.identity import identity_of
from kvstore.engines.vllm.options import Options
from kvstore.errors import InvalidShape, UnsupportedCache
from kvstore.identity import CacheIdentity, Rank
from tests.support import block_hashes
from tests.vllm import models
from tests.vllm.configs import BLOCKS, cache_config, config, full, kvi, names, one_group

HASHES = block_hashes(3)
SMALL = StoreConfig(capacity_bytes=8 << 20)
OPTIONS = Options.of({"path": "kv"})
ROOT = Path(__file__).parents[2]
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "fp8": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "blocks of 64": ("llama", {"dtype": "bfloat16", "block_size": 64}),
    "windowed": ("windowed", {}),
    "windowed, in one group": ("windowed", {"disable_hybrid_kv_cache_manager": True}),
    "mla": ("deepseek", {"dtype": "bfloat16"}),
}


def identity(described: Described, served: Any) -> CacheIdentity:
    return identity_of(served, OPTIONS, described.layers, described.device, described.layout, described.backend)


# Real engines.


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """What the rank and the scheduler of each of ENGINES know, as tests.vllm.capture wrote it."""
    folder, found = tmp_path_factory.mktemp("captured"), {}
    command = [sys.executable, "-m", "tests.vllm.engine"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for name, (model, options) in ENGINES.items():
            out = folder / name
            out.mkdir()
            transfer = {"kv_connector": "CapturingConnector", "kv_connector_module_path": "tests.vllm.capture"}
            transfer |= {"kv_role": "kv_both", "kv_connector_extra_config": {"path": str(out)}}
            weights = models.write(model, folder / f"weights-{model}")
            job = {"model": str(weights), "options": {**options, "kv_transfer_config": transfer}, "rounds": []}
            server.stdin.write(json.dumps([job, str(out / "log")]) + "\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
            assert answer["error"] is None, answer["error"] + (out / "log").read_text()[-3000:]
            found[name] = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
        server.stdin.close()
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_a_real_engine_is_described_alike_on_both_sides(captured: Mapping[str, Any], name: str) -> None:
    rank, scheduler = captured[name]["rank-tp0of1-pp0of1"], captured[name]["scheduler"]
    assert rank["same"], "stored blocks came back otherwise"
    assert rank["identity"] == scheduler["identity"]
    assert scheduler["matched"] == dict.fromkeys(rank["groups"], 2)
    for key in ("identity", "block_sizes", "groups", "windows", "layout", "backend", "device"):
        assert rank[key] == scheduler[key], key
    assert rank["unstable"] is None
    assert not rank["checksummed"], "this connector is another one's"


SEEN = {
    "llama": ({"0": 32}, {"0": None}, [2, 32, 64], "torch.float32", "vec"),
    "fp8": ({"0": 32}, {"0": None}, [2, 32, 64], "torch.uint8", ""),
    "blocks of 64": ({"0": 64}, {"0": None}, [2, 64, 64], "torch.bfloat16", ""),
    "windowed": ({"0": 32, "1": 32}, {"0": 64, "1": None}, [2, 32, 64], "torch.float32", "vec"),
    "windowed, in one group": ({"0": 32}, {"0": None}, [2, 32, 64], "torch.float32", "vec"),
    "mla": ({"0": 16}, {"0": None}, [1, 16, 576], "torch.bfloat16", "mla"),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_real_engine_has_the_caches_that_are_expected(captured: Mapping[str, Any], name: str) -> None:
    found = captured[name]["rank-tp0of1-pp0of1"]
    sizes, windows, shape, dtype, kernels = SEEN[name]
    assert (found["block_sizes"], found["windows"], found["device"]) == (sizes, windows, "cpu")
    assert all(given[0][1:] == shape and given[2] == dtype for given in found["tensors"].values())
    assert f"{kernels}/{shape[1]}/" in found["backend"] or not kernels
    assert "vllm=0.3" in found["backend"]


def test_real_engines_have_identities_of_their_own(captured: Mapping[str, Any]) -> None:
    found = {name: sides["scheduler"]["identity"] for name, sides in captured.items()}
    assert len(set(found.values())) == len(found)
    assert found["blocks of 64"].replace("/64/", "/32/") != found["blocks of 64"], (
        "a CPU's bytes depend on the block size"
    )


# Splits over ranks.


def whole_tensors(spec: Any, heads: int, members: list[str], seed: int = 1) -> dict[str, torch.Tensor]:
    """Noise as the unsharded model's cache: [blocks, heads, tokens, channels] by layer."""
    generator, channels = torch.Generator().manual_seed(seed), spec.state_content_size_bytes // spec.dtype.itemsize
    return {
        name: torch.randint(-9, 9, (BLOCKS, heads, spec.num_states, channels), generator=generator).to(spec.dtype)
        for name in members
    }


def shard(tensor: torch.Tensor, heads: int, tp: int, rank: int, tokens_first: bool) -> torch.Tensor:
    """A rank's part, as vLLM deals heads out; tokens_first: in memory tokens come before heads."""
    total = tensor.shape[1]
    first = rank * total // tp
    part = tensor[:, first : first + heads].clone()
    return part.transpose(1, 2).contiguous().transpose(1, 2) if tokens_first else part


SPLITS = [(2, 1), (2, 2), (2, 4), (4, 2), (1, 1), (1, 4)]


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(("heads", "tp"), SPLITS)
def test_what_ranks_store_the_scheduler_finds_and_one_rank_loads(
    tmp_path: Path, heads: int, tp: int, tokens_first: bool
) -> None:
    members = names(3)
    whole = whole_tensors(full(), heads, members)
    own = max(1, heads // tp)
    groups = one_group(full(num_kv_heads=own), members)
    for rank in range(tp):
        served = config(tp=tp, rank=rank, kv_heads=heads)
        parts = {name: shard(t, own, tp, rank, tokens_first) for name, t in whole.items()}
        described = describe(served, groups, parts)
        assert described.rank == Rank(rank, tp)
        with KVStore(tmp_path, described.cache, identity(described, served), SMALL, rank=described.rank) as store:
            store.put_blocks(HASHES, [1, 2, 3])
        for side in (
            scheduler_side(served, groups),
            describe(config(kv_heads=heads), one_group(full(num_kv_heads=heads)), whole),
        ):
            assert identity(side, served).canonical_json() == identity(described, served).canonical_json()
    look_up = scheduler_side(served, groups)
    with KVStore(tmp_path, look_up.cache, identity(look_up, served), SMALL, mode="r") as store:
        assert store.match_prefix(HASHES) == 3
    empty = {name: torch.zeros_like(t) for name, t in whole.items()}
    alone, served = describe(config(kv_heads=heads), one_group(full(num_kv_heads=heads)), empty), config(kv_heads=heads)
    with KVStore(tmp_path, alone.cache, identity(alone, served), SMALL) as store:
        assert store.get_blocks(HASHES, [4, 5, 6]).verified.all()
    assert all(torch.equal(empty[name][4:7], whole[name][1:4]) for name in members)


def test_a_scheduler_misses_what_one_rank_has_not_stored(tmp_path: Path) -> None:
    groups, whole = one_group(full(num_kv_heads=1)), whole_tensors(full(), 2, names(3))
    for rank, blocks in ((0, 3), (1, 2)):
        served = config(tp=2, rank=rank)
        described = describe(served, groups, {name: shard(t, 1, 2, rank, False) for name, t in whole.items()})
        with KVStore(tmp_path, described.cache, identity(described, served), SMALL, rank=described.rank) as store:
            store.put_blocks(HASHES[:blocks], range(1, blocks + 1))
    look_up = scheduler_side(served, groups)
    with KVStore(tmp_path, look_up.cache, identity(look_up, served), SMALL, mode="r") as store:
        assert store.match_prefix(HASHES) == 2


def test_copies_of_latents_are_stored_by_one_rank(tmp_path: Path) -> None:
    spec = kvi.MLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1, cache_dtype_str="auto"
    )
    whole, groups = whole_tensors(spec, 1, names(2)), one_group(spec, names(2))
    failed = []
    for rank in range(2):
        served = config(tp=2, rank=rank, kv_heads=16)
        described = describe(served, groups, whole)
        with KVStore(tmp_path, described.cache, identity(described, served), SMALL, rank=described.rank) as store:
            failed.append(store.put_blocks(HASHES, [1, 2, 3]).failed)
            assert store.get_blocks(HASHES, [4, 5, 6]).verified.all()
    assert failed == [{}, dict.fromkeys(range(3), "replica")]
    assert {(layer.type, layer.kv_heads, layer.v_bytes) for layer in described.layers} == {("mla", 1, 0)}


def test_ranks_are_numbered_stage_by_stage() -> None:
    ranks = [rank_of(config(tp=2, pp=3, rank=rank)) for rank in range(6)]
    assert ranks == [Rank(tp, 2, stage, 3) for stage in range(3) for tp in range(2)]
    assert rank_of(config(tp=2, pp=3, rank=7)) == ranks[1], "of a second data-parallel engine"


def test_pipeline_stages_know_the_layers_of_all() -> None:
    found = set()
    for stage in range(2):
        members, served = names(2, 2 * stage), config(pp=2, rank=stage, layers=4)
        groups = one_group(full(), members)
        described = describe(served, groups, whole_tensors(full(), 2, members))
        assert [layer.name for layer in described.cache.groups[0].layers] == members
        found |= {identity(side, served).canonical_json() for side in (described, scheduler_side(served, groups))}
    alone = config(layers=4)
    found.add(identity(scheduler_side(alone, one_group(full(), names(4))), alone).canonical_json())
    assert len(found) == 1


def test_pipeline_stages_with_layers_of_several_kinds_are_refused() -> None:
    window = kvi.SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64)
    several = cache_config({0: (names(1), full()), 1: (names(1, 1), window)})
    for groups, layers in ((several, 4), (one_group(full(), names(2)), 1)):
        with pytest.raises(UnsupportedCache, match=r"pipeline_parallel_size 1"):
            scheduler_side(config(pp=2, layers=layers), groups)


def test_heads_that_may_be_copies_of_an_unknown_number_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="one KV head on each of 4 ranks, and its model says 8"):
        scheduler_side(config(tp=4, kv_heads=8), one_group(full(num_kv_heads=1)))


def test_a_draft_model_has_heads_of_its_own() -> None:
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: 2)
    served = config(tp=4, kv_heads=8, layers=2, speculative_config=SimpleNamespace(draft_model_config=draft))
    groups = cache_config({0: (names(2), full()), 1: (names(1, 2), full(num_kv_heads=1))})
    heads = [(layer.name, layer.kv_heads) for layer in scheduler_side(served, groups).layers]
    assert heads == [*((name, 8) for name in names(2)), (names(3)[2], 2)]


# Groups and tensors.


def test_layers_of_several_sizes_in_a_group_are_told_to_the_scheduler_by_a_rank() -> None:
    core = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    specs = {names(2)[0]: full(), names(2)[1]: full(head_size=64)}
    groups = one_group(kvi.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs), list(specs))
    tensors = {name: t for name, spec in specs.items() for name, t in whole_tensors(spec, 2, [name]).items()}
    served, schedulers = config(), core.generate_scheduler_kv_cache_config([groups])
    described = describe(served, groups, tensors)
    assert [layer.k_bytes for layer in described.layers] == [64, 128]
    with pytest.raises(UnsupportedCache, match="group 0 has layers of several shapes"):
        scheduler_side(served, schedulers)
    told = scheduler_side(served, schedulers, described.layers)
    assert identity(told, served) == identity(described, served)
    assert told.cache.groups[0].layers[1].k.channels == 64


def test_layers_that_share_a_cache_are_left_out() -> None:
    members, served = names(3), config()
    groups = cache_config({0: (members, full())}, own=members[:2])
    tensors = whole_tensors(full(), 2, members[:2])
    described = describe(served, groups, {**tensors, members[2]: tensors[members[0]]})
    schedulers = cache_config({0: (members[:2], full())})
    assert [layer.name for layer in described.layers] == members[:2]
    assert identity(described, served) == identity(scheduler_side(served, schedulers), served)


def test_windows_reach_as_far_back_as_vllm_keeps_tokens() -> None:
    heads: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    groups = cache_config(
        {
            0: (names(1), full(sliding_window=64)),
            1: (names(1, 1), kvi.SlidingWindowSpec(**heads, sliding_window=64, extra_retained_tokens=3)),
            2: (names(1, 2), kvi.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=96)),
        }
    )
    found = scheduler_side(config(), groups)
    tensors = whole_tensors(full(), 2, names(3))
    for side in (found, describe(config(), groups, tensors)):
        assert {number: group.window for number, group in side.cache.groups.items()} == {0: None, 1: 67, 2: 96}
    assert [layer.type for layer in found.layers] == ["full", "sliding", "chunked"]


@pytest.mark.parametrize("latents", [False, True])
def test_kernel_blocks_are_put_together(tmp_path: Path, latents: bool) -> None:
    """Blocks of 64 tokens, of which the kernel sees four of 16, with tokens before heads in memory, or one head."""
    heads = 1 if latents else 2
    spec, members, served = full(block_size=64, num_kv_heads=heads), names(2), config(kv_heads=heads)
    memory = {name: torch.zeros(4 * BLOCKS, 16, heads, 64, dtype=torch.bfloat16) for name in members}
    views = {name: t.transpose(1, 2) for name, t in memory.items()}
    described = describe(served, one_group(spec, members), views)
    for name, t in whole_tensors(spec, heads, members).items():
        memory[name].copy_(t.transpose(1, 2).reshape(4 * BLOCKS, 16, heads, 64))
    plain = describe(served, one_group(spec, members), whole_tensors(spec, heads, members))
    with KVStore(tmp_path, described.cache, identity(described, served), SMALL) as store:
        store.put_blocks(HASHES, [1, 2, 3])
    into = {name: torch.zeros_like(t) for name, t in plain.cache.tensors.items() if isinstance(t, torch.Tensor)}
    with KVStore(
        tmp_path, describe(served, one_group(spec, members), into).cache, identity(plain, served), SMALL
    ) as store:
        assert store.get_blocks(HASHES, [1, 2, 3]).verified.all()
    assert all(torch.equal(t[1:4], plain.cache.tensors[name][1:4]) for name, t in into.items())


def test_kernel_blocks_with_heads_before_tokens_are_refused() -> None:
    tensors = {name: torch.zeros(4 * BLOCKS, 2, 16, 64, dtype=torch.bfloat16) for name in names(3)}
    with pytest.raises(UnsupportedCache, match=r"cut into 4 of the attention kernel's.* --block-size 16"):
        describe(config(), one_group(full(block_size=64)), tensors)


def test_packed_cells_are_opaque_and_belong_to_their_packing() -> None:
    cells = [
        full(state_content_bytes=136),
        full(state_content_bytes=144),
        full(num_head_slots=4, state_content_bytes=64),
    ]
    found = [scheduler_side(config(tp=2, kv_heads=4), one_group(spec)) for spec in cells]
    assert [(d.layers[0].k_bytes, d.layers[0].v_bytes, d.layers[0].kv_heads) for d in found] == [
        (136, 0, 4),
        (144, 0, 4),
        (64, 0, 8),
    ]
    assert len({d.backend for d in found}) == 3
    assert all(d.backend.startswith("auto packed:FullAttentionSpec(") and "tp=2 vllm=" in d.backend for d in found)
    plain = scheduler_side(config(tp=2, kv_heads=4, backend="FLASH_ATTN"), one_group(full()))
    assert plain.backend == "FLASH_ATTN"


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (None, UnsupportedCache, "registered no cache for layer model.layers.1.*1 such layers"),
    "a list": ([torch.zeros(1)], InvalidShape, r"registered list: expected a tensor \[blocks"),
    "an axis more": (torch.zeros(2, BLOCKS, 32, 2, 32), InvalidShape, r"\(2, 7, 32, 2, 32\): expected a tensor"),
    "other blocks": (torch.zeros(BLOCKS + 1, 2, 32, 64), InvalidShape, "multiple of 7 blocks"),
    "other heads": (torch.zeros(BLOCKS, 3, 32, 64, dtype=torch.bfloat16), InvalidShape, r"expected \(7, 2, 32, 64\)"),
    "other channels": (
        torch.zeros(BLOCKS, 2, 32, 32, dtype=torch.bfloat16),
        InvalidShape,
        r"expected \(7, 2, 32, 64\)",
    ),
    "another dtype": (torch.zeros(BLOCKS, 2, 32, 64), InvalidShape, "float32: expected .* torch.bfloat16"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_tensors_than_the_configuration_says_are_refused(case: str) -> None:
    given, error, text = WRONG[case]
    tensors: dict[str, Any] = dict(whole_tensors(full(), 2, names(3)))
    tensors[names(3)[1]] = given
    if given is None:
        del tensors[names(3)[1]]
    with pytest.raises(error, match=text):
        describe(config(), one_group(full()), tensors)
