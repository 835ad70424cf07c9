"""vLLM's configuration as far as it is read, around vLLM's own classes of KV cache groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

kvi: Any = pytest.importorskip("vllm.v1.kv_cache_interface")
BLOCKS = 7


class HfConfig(SimpleNamespace):
    """A transformers configuration."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def names(count: int, first: int = 0) -> list[str]:
    """The names of so many layers."""
    return [f"model.layers.{i}.self_attn.attn" for i in range(first, first + count)]


def full(**changed: Any) -> Any:
    """Full attention: 2 KV heads of 32 bf16 elements, blocks of 32 tokens."""
    plain = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return kvi.FullAttentionSpec(**plain | changed)


def cache_config(groups: Mapping[int, tuple[Sequence[str], Any]], *, own: Sequence[str] | None = None) -> Any:
    """A KVCacheConfig of groups, {number: (layer names, spec)}; own: the layers that have memory (default: all)."""
    tensors, made = [], []
    for _, (members, spec) in sorted(groups.items()):
        laid_out: dict[Any, list[str]] = {}
        for name in members:
            if own is None or name in own:
                laid_out.setdefault(_spec(spec, name), []).append(name)
        tensors += [
            kvi.KVCacheTensor(size=0, layers=alike, layer_stride=0, block_stride=0) for alike in laid_out.values()
        ]
        made.append(kvi.KVCacheGroupSpec(list(members), spec))
    return kvi.KVCacheConfig(BLOCKS, tensors, made, kv_cache_layout="LBNHC")


def _spec(spec: Any, name: str) -> Any:
    return spec.kv_cache_specs[name] if isinstance(spec, kvi.UniformTypeKVCacheSpecs) else spec


def one_group(spec: Any, members: Sequence[str] | None = None) -> Any:
    """A KVCacheConfig of one group."""
    return cache_config({0: (names(3) if members is None else members, spec)})


def model(*, kv_heads: int = 2, layers: int = 3, folder: str = "tests", **changed: Any) -> Any:
    """A ModelConfig."""
    hf = HfConfig(architectures=["LlamaForCausalLM"], rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    plain = {
        "model": folder,
        "model_weights": "",
        "revision": None,
        "seed": 0,
        "dtype": torch.bfloat16,
        "quantization": None,
        "quantization_config": None,
        "hf_config": hf,
        "hf_text_config": hf,
        "model_impl": "auto",
        "max_model_len": 512,
        "is_encoder_decoder": False,
        "get_total_num_kv_heads": lambda: kv_heads,
        "get_total_num_hidden_layers": lambda: layers,
    }
    return SimpleNamespace(**plain | changed)


def config(
    *,
    tp: int = 1,
    pp: int = 1,
    rank: int = 0,
    device: str = "cuda",
    load_format: str = "dummy",
    cache_dtype: str = "auto",
    hashing: str = "sha256",
    backend: str | None = None,
    speculative_config: Any = None,
    kv_transfer_config: Any = None,
    **of_model: Any,
) -> Any:
    """A VllmConfig."""
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "rank": rank}
    context = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=model(**of_model),
        parallel_config=SimpleNamespace(**parallel, **context),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype,
            kv_cache_layout=None,
            prefix_caching_hash_algo=hashing,
            kv_cache_dtype_skip_layers=[],
        ),
        device_config=SimpleNamespace(device_type=device),
        load_config=SimpleNamespace(load_format=load_format),
        attention_config=SimpleNamespace(backend=backend, backend_per_kind={}),
        speculative_config=speculative_config,
        kv_transfer_config=kv_transfer_config,
        lora_config=None,
    )
