"""vLLM's KV cache groups in kvstore's words: which layers they have, and what a block of each is.

vLLM's classes are known by their names alone, so that nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstore.errors import UnsupportedCache
from kvstore.identity import LayerSpec, Rank, layer_number
from kvstore.layout import DTYPES

TYPES: Final = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding",
    "ChunkedLocalAttentionSpec": "chunked",
    "MLAAttentionSpec": "mla",
    "SlidingWindowMLASpec": "mla",
}
"""Class of vLLM's spec -> type of a LayerSpec."""
UNIFORM: Final = "UniformTypeKVCacheSpecs"
REFUSED: Final = {
    "MambaSpec": "recurrent states, which vLLM keeps in an arrangement of its own",
    "CrossAttentionSpec": "cross attention, whose KV does not follow from the tokens that a block hash covers",
    "EncoderOnlyAttentionSpec": "encoder attention, whose KV does not follow from the tokens before it",
    "RSWASpec": "reference sliding-window attention, whose blocks are dropped in the middle of a request",
    "CircularBufferSpec": "a ring buffer, whose blocks are no part of a prefix",
    "HiddenStateCacheSpec": "hidden states, not KV",
}
PACKED: Final = "packed:"
"""How `packing_of` begins."""
ADVICE: Final = "serve this model without kvstore's connector"


@dataclass(frozen=True)
class VllmGroup:
    """One KV cache group of vLLM: its layers that have memory of their own, and vLLM's spec of each.

    block_size: tokens. window: how many tokens a prefix looks back at, None where at all.
    """

    number: int
    specs: Mapping[str, Any]
    block_size: int
    window: int | None


def groups_of(kv_cache_config: Any) -> list[VllmGroup]:
    """The groups of a KVCacheConfig. Layers that share another layer's cache are not among its layers.

    Raises UnsupportedCache for groups whose blocks cannot be described.
    """
    own = {name for tensor in kv_cache_config.kv_cache_tensors for name in tensor.layers}
    made = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = {name: _spec_of(group.kv_cache_spec, name) for name in group.layer_names if name in own}
        _check_group(number, group, list(specs))
        for name, spec in specs.items():
            _check_spec(number, name, spec, list(specs))
        windows = {_window(spec) for spec in specs.values()} or {None}
        if len(windows) > 1:
            raise UnsupportedCache(f"KV cache group {number} has layers with windows of {windows} tokens: {ADVICE}")
        made.append(VllmGroup(number, specs, group.kv_cache_spec.block_size, windows.pop()))
    if not any(group.specs for group in made):
        raise UnsupportedCache(f"no layer of this model has a KV cache of its own: {ADVICE}")
    return made


def _spec_of(spec: Any, name: str) -> Any:
    return spec.kv_cache_specs[name] if class_of(spec) == UNIFORM else spec


def class_of(spec: Any) -> str:
    """The name of the class of vLLM's spec."""
    return type(spec).__name__


def type_of(spec: Any) -> str:
    """The type that a LayerSpec has for vLLM's spec, which is one of TYPES."""
    return TYPES[class_of(spec)]


def _check_group(number: int, group: Any, names: Sequence[str]) -> None:
    role = getattr(group, "role", None)
    moved = getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True)
    if moved or getattr(role, "value", role) not in (None, "default"):
        raise UnsupportedCache(
            f"KV cache group {number} ({_some(names)}) is part of what vLLM itself keeps in host memory (HiSparse): {ADVICE}"
        )


def _check_spec(number: int, name: str, spec: Any, names: Sequence[str]) -> None:
    where, kind = f"KV cache group {number} ({_some(names)})", class_of(spec)
    if kind in REFUSED:
        raise UnsupportedCache(f"{where} has {REFUSED[kind]} ({kind}): {ADVICE}")
    if kind not in TYPES:
        raise UnsupportedCache(f"{where} is a {kind}: expected one of {', '.join(TYPES)}; {ADVICE}")
    if getattr(spec, "non_causal", False):
        raise UnsupportedCache(
            f"{where} attends to later tokens (non_causal), so that its KV does not follow from a block's hash: {ADVICE}"
        )
    if not getattr(spec, "prefix_cacheable", True):
        raise UnsupportedCache(
            f"{where} is left out of vLLM's prefix caching: start vLLM with --no-swa-bounded-replay, or {ADVICE}"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedCache(
            f"{where} keeps {spec.tokens_per_state} tokens in one state: kvstore describes one a token; {ADVICE}"
        )
    if spec.dtype not in DTYPES:
        raise UnsupportedCache(f"{where} is {spec.dtype}: expected one of {', '.join(DTYPES.values())}; {ADVICE}")
    layer_number(name)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "no layers"


def _window(spec: Any) -> int | None:
    """A prefix of a chunked layer looks back to the beginning of its chunk, which is never further than a chunk."""
    if class_of(spec) in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return int(spec.attention_chunk_size) if class_of(spec) == "ChunkedLocalAttentionSpec" else None


def is_packed(spec: Any) -> bool:
    """Whether the backend packs K, V and scales into cells of its own making."""
    return getattr(spec, "state_content_bytes", None) is not None or getattr(spec, "num_head_slots", None) is not None


def packing_of(spec: Any) -> str:
    """What tells one packing from another."""
    fields = ("kv_quant_mode", "cache_dtype_str", "state_content_bytes", "num_head_slots", "num_kv_heads", "head_size")
    values = {name: getattr(spec, name, None) for name in (*fields, "head_size_v", "model_version")}
    return f"{PACKED}{class_of(spec)}({', '.join(f'{name}={value}' for name, value in values.items() if value is not None)})"


def cell_bytes(spec: Any) -> tuple[int, int]:
    """Bytes of K and of V of one head and token; of a packed cell all are K's."""
    packed = getattr(spec, "state_content_bytes", None)
    if packed is not None:
        return int(packed), 0
    return int(spec.head_size) * spec.dtype.itemsize, int(spec.head_size_v) * spec.dtype.itemsize


def rank_heads(spec: Any) -> int:
    """The heads of one rank's tensor: slots where the backend packs heads."""
    slots = getattr(spec, "num_head_slots", None)
    return int(spec.num_kv_heads if slots is None else slots)


def model_heads(vllm_config: Any, name: str, spec: Any) -> int:
    """The KV heads of a layer in the unsharded model, of which each rank has `rank_heads`.

    Slots of packed heads count as so many of each rank: which heads a slot has depends on the split. Raises
    UnsupportedCache where the ranks may have copies and nothing says of how many heads.
    """
    held, tp = rank_heads(spec), int(vllm_config.parallel_config.tensor_parallel_size)
    if tp == 1 or getattr(spec, "num_head_slots", None) is not None:
        return held * tp
    shards = getattr(spec, "max_tp_shards", None)
    if shards is not None or type_of(spec) == "mla":
        return held * min(tp, shards or 1)
    total = int(_owner(vllm_config, name, spec).get_total_num_kv_heads())
    if max(1, total // tp) == held:
        return total
    if held > 1:
        return held * tp
    raise UnsupportedCache(
        f"layer {name} has one KV head on each of {tp} ranks, and its model says {total} in all: which ranks have copies of "
        f"one is not known; use a tensor_parallel_size of at most the layer's KV heads, or {ADVICE}"
    )


def _owner(vllm_config: Any, name: str, spec: Any) -> Any:
    """The configuration of the model that a layer is of: the draft model's layers are numbered behind the target's."""
    target = vllm_config.model_config
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    behind = layer_number(name) >= int(target.get_total_num_hidden_layers())
    return draft if draft is not None and (getattr(spec, "is_draft", False) or behind) else target


def first_head(spec: Any, kv_heads: int, rank: Rank) -> int:
    """The first of a rank's heads in the unsharded model. kv_heads: as `model_heads`. Where there are fewer heads than
    ranks, ranks in a row have copies of one."""
    held = rank_heads(spec)
    copies = max(1, held * rank.tp_size // kv_heads)
    return rank.tp_rank // copies * held


def layer_specs(vllm_config: Any, groups: Sequence[VllmGroup]) -> tuple[LayerSpec, ...]:
    """Every layer of the unsharded model, as an identity has them.

    Each pipeline stage knows its own layers alone: those of the others follow from the number of layers where all are alike.
    Raises UnsupportedCache where they are not.
    """
    made = [
        LayerSpec(
            *(name, type_of(spec), DTYPES[spec.dtype]),
            model_heads(vllm_config, name, spec),
            *cell_bytes(spec),
            group.number,
        )
        for group in groups
        for name, spec in group.specs.items()
    ]
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return _of_all_stages(vllm_config, made)
    return tuple(made)


def _of_all_stages(vllm_config: Any, own: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    count = int(vllm_config.model_config.get_total_num_hidden_layers())
    alike = {_numbered(layer, 0) for layer in own}
    if len(alike) != 1 or max(layer_number(layer.name) for layer in own) >= count:
        raise UnsupportedCache(
            f"pipeline parallelism with layers of several kinds ({_some([layer.name for layer in own])}) or a draft model: "
            "a stage cannot tell which layers the others have; use pipeline_parallel_size 1"
        )
    return tuple(_numbered(own[0], number) for number in range(count))


def _numbered(layer: LayerSpec, number: int) -> LayerSpec:
    """The same layer under another number."""
    parts = (str(number) if part.isascii() and part.isdigit() else part for part in layer.name.split("."))
    return replace(layer, name=".".join(parts))
