"""vLLM's paged caches as kvstore's: a worker's tensors, and what the scheduler needs to look blocks up."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch

from kvstore.cache import PagedKVCache
from kvstore.engines.vllm.specs import (
    VllmGroup,
    cell_bytes,
    first_head,
    groups_of,
    is_packed,
    layer_specs,
    packing_of,
    rank_heads,
    type_of,
)
from kvstore.engines.vllm.versions import installed_version
from kvstore.errors import InvalidShape, UnsupportedCache
from kvstore.identity import LayerSpec, Rank
from kvstore.layout import DTYPES

LAYOUT: Final = "BHNC"
"""The axes of a layer's tensor in vLLM, whatever their order in memory; C is K, then V."""
DTYPE_NAMED: Final = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Described:
    """vLLM's caches in kvstore's words.

    cache: a worker's own tensors, or (scheduler) one block of the unsharded model that nothing is copied to. layers: every
    layer of the unsharded model, with its group. rank: this worker; the whole model in the scheduler. block_sizes: tokens of
    a block, by group. layout, backend, device: what arranges the bytes; see `identity_of`.
    """

    cache: PagedKVCache
    layers: tuple[LayerSpec, ...]
    rank: Rank
    block_sizes: dict[int, int]
    layout: str
    backend: str
    device: str


def describe(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> Described:
    """A worker's caches. kv_caches: by layer name, as registered: [blocks, heads, tokens, channels] of any strides, K's
    channels before V's; blocks may be cut into kernel blocks. The tensors are viewed, not copied.

    Raises UnsupportedCache for caches that kvstore cannot describe, InvalidShape for tensors that are not as vLLM's
    configuration says, or another kind of InvalidCache.
    """
    groups = groups_of(kv_cache_config)
    layers = layer_specs(vllm_config, groups)
    rank = rank_of(vllm_config)
    heads = {layer.name: layer.kv_heads for layer in layers}
    specs = {name: spec for group in groups for name, spec in group.specs.items()}
    if missing := sorted(specs.keys() - kv_caches.keys()):
        raise UnsupportedCache(
            f"vLLM registered no cache for layer {missing[0]} ({len(missing)} such layers): expected a tensor for each layer"
        )
    blocks = int(kv_cache_config.num_blocks)
    cache = PagedKVCache.from_tensors(
        {name: _blocks_of(name, spec, kv_caches[name], blocks) for name, spec in specs.items()},
        LAYOUT,
        {group.number: list(group.specs) for group in groups if group.specs},
        {name: first_head(spec, heads[name], rank) for name, spec in specs.items()},
        value_channels={name: cell_bytes(spec)[1] // spec.dtype.itemsize for name, spec in specs.items()},
        layer_types={layer.name: layer.type for layer in layers if layer.name in specs},
        kv_heads={name: heads[name] for name in specs},
        windows={group.number: group.window for group in groups if group.specs and group.window is not None},
    )
    return _described(vllm_config, kv_cache_config, groups, layers, cache, rank)


def scheduler_side(vllm_config: Any, kv_cache_config: Any, layers: Sequence[LayerSpec] | None = None) -> Described:
    """The caches of all ranks as one, for a store that looks blocks up: its cache is one block of the unsharded model.

    layers: those that a worker described, where the scheduler's configuration does not tell them: vLLM gives it one spec a
    group even where the layers' sizes differ. Raises UnsupportedCache, also where they differ and `layers` is None.
    """
    groups = groups_of(kv_cache_config)
    if layers is None:
        check_alike(kv_cache_config, groups)
        layers = layer_specs(vllm_config, groups)
    cache = _template(layers, groups)
    return _described(vllm_config, kv_cache_config, groups, tuple(layers), cache, Rank())


def _described(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[VllmGroup],
    layers: tuple[LayerSpec, ...],
    cache: PagedKVCache,
    rank: Rank,
) -> Described:
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or vllm_config.cache_config.kv_cache_layout or ""
    return Described(
        cache,
        layers,
        rank,
        {group.number: group.block_size for group in groups},
        str(layout),
        backend_of(vllm_config, groups),
        str(vllm_config.device_config.device_type),
    )


def rank_of(vllm_config: Any) -> Rank:
    """A worker's rank: vLLM numbers the ranks of one engine stage by stage, and in a stage by tensor-parallel rank."""
    parallel = vllm_config.parallel_config
    tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
    return Rank(parallel.rank % tp, tp, parallel.rank // tp % pp, pp)


def _blocks_of(name: str, spec: Any, tensor: Any, blocks: int) -> torch.Tensor:
    """A layer's tensor with vLLM's blocks along its first axis; checked against its spec."""
    k_bytes, v_bytes = cell_bytes(spec)
    channels = (k_bytes + v_bytes) // spec.dtype.itemsize
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4 or tensor.shape[0] % blocks:
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidShape(
            f"layer {name}: vLLM registered {shape}: expected a tensor [blocks, heads, tokens, channels] with a multiple of "
            f"{blocks} blocks"
        )
    whole = _without_kernel_blocks(name, tensor, blocks)
    expected = (blocks, rank_heads(spec), spec.block_size, channels)
    if tuple(whole.shape) != expected or whole.dtype != spec.dtype:
        raise InvalidShape(
            f"layer {name}: vLLM registered {tuple(tensor.shape)} {tensor.dtype}: expected {expected} {spec.dtype}, as its "
            "KV cache configuration says"
        )
    return whole


def _without_kernel_blocks(name: str, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """The tensor by vLLM's blocks where its kernel's are smaller. A block's tokens then need one stride."""
    ratio = tensor.shape[0] // blocks
    if ratio == 1:
        return tensor
    _, heads, tokens, channels = tensor.shape
    try:
        cut = tensor.view(blocks, ratio, heads, tokens, channels).transpose(1, 2)
        return cut.view(blocks, heads, ratio * tokens, channels)
    except RuntimeError:
        raise UnsupportedCache(
            f"layer {name}: each block is cut into {ratio} of the attention kernel's, and its heads lie apart in these: "
            f"start vLLM with --block-size {tensor.shape[2]}, or VLLM_KV_CACHE_LAYOUT=LBNHC where the backend has it"
        ) from None


def check_alike(kv_cache_config: Any, groups: Sequence[VllmGroup]) -> None:
    """Raise UnsupportedCache where a group's layers have several specs in the ranks: vLLM lays out those of one spec
    together, and gives the scheduler the first of a group's specs for all its layers."""
    laid_out = {name: i for i, tensor in enumerate(kv_cache_config.kv_cache_tensors) for name in tensor.layers}
    for group in groups:
        if len({laid_out[name] for name in group.specs}) > 1:
            raise UnsupportedCache(
                f"KV cache group {group.number} has layers of several shapes, and the scheduler's configuration has that of "
                "one of them alone: pass the layers that a worker described"
            )


def _template(layers: Sequence[LayerSpec], groups: Sequence[VllmGroup]) -> PagedKVCache:
    """One block of every layer of the unsharded model."""
    sizes = {group.number: group.block_size for group in groups}
    members = {number: [layer.name for layer in layers if layer.group == number] for number in sizes}
    return PagedKVCache.from_tensors(
        {layer.name: _one_block(layer, sizes[layer.group]) for layer in layers},
        LAYOUT,
        {number: names for number, names in members.items() if names},
        value_channels={layer.name: layer.v_bytes // DTYPE_NAMED[layer.dtype].itemsize for layer in layers},
        layer_types={layer.name: layer.type for layer in layers},
        windows={group.number: group.window for group in groups if members[group.number] and group.window is not None},
    )


def _one_block(layer: LayerSpec, tokens: int) -> torch.Tensor:
    dtype = DTYPE_NAMED[layer.dtype]
    return torch.zeros((1, layer.kv_heads, tokens, (layer.k_bytes + layer.v_bytes) // dtype.itemsize), dtype=dtype)


def backend_of(vllm_config: Any, groups: Sequence[VllmGroup]) -> str:
    """What arranges the bytes of a block, as far as the configuration of any of the engine's processes tells: the attention
    backend that was asked for ("auto" where none was), and of packed cells their packing.

    On a CPU the kernels arrange K and V of a whole block by the instruction set, and by its size; then that is part of it.
    What a backend packs, and a CPU's arrangement, may change from one version of vLLM to the next: so is the version.
    """
    parts = [_asked_backend(vllm_config)]
    specs = [spec for group in groups for spec in group.specs.values()]
    packings = sorted({packing_of(spec) for spec in specs if is_packed(spec)})
    if packings:
        parts += [*packings, f"tp={vllm_config.parallel_config.tensor_parallel_size}"]
    if on_cpu := vllm_config.device_config.device_type == "cpu":
        parts += sorted({_cpu_arrangement(vllm_config, spec) for spec in specs})
        parts += [platform.machine(), *_instruction_sets()]
    if packings or on_cpu:
        parts.append(f"vllm={installed_version()}")
    return " ".join(parts)


def _asked_backend(vllm_config: Any) -> str:
    config = getattr(vllm_config, "attention_config", None)
    backend = getattr(config, "backend", None)
    by_kind = {str(k): getattr(b, "name", str(b)) for k, b in (getattr(config, "backend_per_kind", None) or {}).items()}
    asked = "auto" if backend is None else str(getattr(backend, "name", backend))
    return ",".join((asked, *(f"{kind}={name}" for kind, name in sorted(by_kind.items()))))


def _cpu_arrangement(vllm_config: Any, spec: Any) -> str:
    """Of a spec, the set of kernels that vLLM chooses on this CPU, which arranges the bytes of a block."""
    size = (spec.block_size, spec.head_size)
    if type_of(spec) == "mla":
        return f"mla/{size[0]}/{size[1]}"
    choose = import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa
    isa = choose(vllm_config.model_config.dtype, *size, vllm_config.cache_config.cache_dtype)
    return f"{isa}/{size[0]}/{size[1]}"


def _instruction_sets() -> list[str]:
    """torch names them by private functions."""
    asked = {name: getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx2", "avx512", "amx_tile")}
    return [name for name, supported in asked.items() if supported is not None and supported()]
