"""What must be equal for vLLM's KV to be reusable, from vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import torch

from kvstore.engines.vllm.options import Options
from kvstore.engines.vllm.specs import PACKED
from kvstore.engines.vllm.weights import weights_digest
from kvstore.identity import CacheIdentity, LayerSpec, Scalar

RUN_SETTINGS: Final = frozenset(
    (
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "id2label", "label2id"),
        *("problem_type", "return_dict", "use_cache", "output_attentions", "output_hidden_states"),
        *("_attn_implementation", "_attn_implementation_internal", "chunk_size_feed_forward"),
        *("dtype", "torch_dtype", "tie_word_embeddings", "draft_vocab_size", "target_layer_count", "num_labels"),
    )
)
"""What a model's configuration says, at any depth, about saving and running it, not about what it computes; and what vLLM
sets in a rank while it loads the model, so that the scheduler's configuration has another value."""
LENGTH_DEPENDENT_ROPE: Final = ("longrope", "su")
"""Rope types for which vLLM chooses the frequencies by max_model_len."""
NO_DRAFT_CACHE: Final = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Ways to draft tokens without attention layers of their own."""
FIELDS: Final = ("model", "revision", "dtype", "quantization")
UNSTABLE: Final = ("xxhash", "xxhash_cbor")


def identity_of(
    vllm_config: Any, options: Options, layers: Sequence[LayerSpec], device: str, layout: str, backend: str
) -> CacheIdentity:
    """The identity of an engine's KV; equal in all its processes, and in any other that computes the same KV.

    layers: every layer of the unsharded model. device, layout, backend: of the caches, as `caches.Described` has them.
    options: its `weights` names the weights by hand, and its `identity` goes before what is found here.

    model: the architecture, not the name or path: weights moved or served under another name are the same weights.
    revision: `weights_digest`. dtype, quantization: as vLLM resolved them. extra: digests of the whole model configuration
    with its overrides (rope, windows, scaling), the cache dtype, the draft model where it has layers in the cache, and what
    arranges the bytes. The scales of an fp8 cache come from the checkpoint, and are told apart with the weights. LoRA
    adapters are told apart by keys (`adapters.Adapters`); multimodal inputs and cache salts are in vLLM's block hashes. The
    block size, and the split over ranks, are in `backend` where the bytes depend on them. The algorithm and the seed of
    block hashes are not part: other ones make other keys.

    Raises EngineError where the weights cannot be told apart, IdentityError.
    """
    model = vllm_config.model_config
    found: dict[str, Scalar] = {
        "model": _architecture(model),
        "revision": options.weights or weights_digest(model, vllm_config.load_config),
        "dtype": _dtype(model.dtype),
        "quantization": str(model.quantization or ""),
        "device": device,
        "backend": backend,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "config": digest(_model_settings(vllm_config)),
    }
    if getattr(torch.version, "hip", None):
        found["platform"] = "rocm"  # its fp8 is another format under the same names
        # Some of its backends permute a block's cells, as these say.
        found["switches"] = digest({k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_ROCM")})
    if device == "cpu" or PACKED in backend or "platform" in found:
        found["layout"] = layout  # elsewhere blocks are described cell by cell, wherever these lie
    if draft := _draft(vllm_config, options.weights):
        found["draft"] = digest(draft)
    made = found | dict(options.identity)
    texts = {name: str(made.pop(name)) for name in FIELDS}
    return CacheIdentity(**texts, extra=made, layers=tuple(layers))


def _architecture(model: Any) -> str:
    names = list(getattr(model.hf_config, "architectures", None) or ())
    return ",".join(map(str, names)) or str(getattr(model.hf_config, "model_type", "")) or "model"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _model_settings(vllm_config: Any) -> dict[str, Any]:
    """What the model computes, beside its weights."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    settings = {
        "config": settings_of(model.hf_config),
        "text": settings_of(model.hf_text_config),
        "quantization": getattr(model, "quantization_config", None),
        "implementation": [str(model.model_impl), getattr(model, "model_class_overrides", None)],
        "disable_sliding_window": getattr(model, "disable_sliding_window", False),
        "skipped": list(getattr(cache, "kv_cache_dtype_skip_layers", None) or ()),
        "calculated_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "multimodal": _multimodal(model),
    }
    if _mentions(settings["text"], LENGTH_DEPENDENT_ROPE):
        settings["max_model_len"] = model.max_model_len
    return settings


def _multimodal(model: Any) -> dict[str, Any] | None:
    """What changes the embeddings of an image or video, and with them the KV."""
    config = getattr(model, "multimodal_config", None)
    names = (
        "mm_processor_kwargs",
        "media_io_kwargs",
        "video_pruning_rate",
        "video_pruning_method",
        "mm_encoder_attn_dtype",
    )
    return None if config is None else {name: getattr(config, name, None) for name in names}


def settings_of(hf_config: Any) -> dict[str, Any]:
    """A transformers configuration without what is about saving and running the model."""
    return dict(_without(hf_config.to_dict()))


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(key): inner for key, inner in value.items() if key not in RUN_SETTINGS}
        return {key: inner if key == "quantization_config" else _without(inner) for key, inner in kept.items()}
    if isinstance(value, list | tuple):
        return [_without(inner) for inner in value]
    return value


def _mentions(settings: object, rope_types: Sequence[str]) -> bool:
    """Whether a configuration has one of these rope types, at any depth."""
    if not isinstance(settings, Mapping):
        return False
    own = any(key in ("rope_type", "type") and value in rope_types for key, value in settings.items())
    return own or any(_mentions(value, rope_types) for value in settings.values())


def _draft(vllm_config: Any, weights: str) -> dict[str, Any] | None:
    """The draft model, where its layers are in the cache. weights: named by hand, or ""."""
    speculative = getattr(vllm_config, "speculative_config", None)
    model = getattr(speculative, "draft_model_config", None)
    if speculative is None or model is None or speculative.method in NO_DRAFT_CACHE:
        return None
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    return {
        "method": str(speculative.method),
        "architecture": _architecture(model),
        "weights": weights or weights_digest(model, load),
        "config": settings_of(model.hf_config),
        "dtype": _dtype(model.dtype),
        "quantization": str(model.quantization or ""),
        "cache_dtype": str(getattr(speculative, "kv_cache_dtype", None)),
    }


def digest(value: object) -> str:
    """32 hexadecimal digits of the value's JSON with sorted keys; what JSON lacks (a dtype) as its text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> object:
    """Never a text with an address in memory, which would differ in every process."""
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if hasattr(value, "__dict__"):
        fields = {key: inner for key, inner in vars(value).items() if not key.startswith("_")}
        return [type(value).__qualname__, fields]
    return str(value)


def unstable_hashes(vllm_config: Any) -> str | None:
    """A warning where vLLM's block hashes differ from one process to the next, so that nothing stored is found after a
    restart; None where they are stable.

    vLLM seeds the cryptographic hashes with a constant, the others at random, and both with PYTHONHASHSEED where that is set.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in UNSTABLE or "PYTHONHASHSEED" in os.environ:
        return None
    return (
        f"prefix_caching_hash_algo is {algorithm!r} and PYTHONHASHSEED is not set: block hashes differ after every restart, "
        "and what is stored is not found again; use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to a number"
    )
