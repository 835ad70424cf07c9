"""Tiny random models that keep recurrent states, and the process that goes on from what another one saved; as
tests/real_models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from tests import real_models
from tests.real_models import VOCABULARY, Continuation, fill, made, main

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
SCAN = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}


def mamba(state_size: int = 8) -> Any:
    """States alone: no layer counts tokens."""
    config = transformers.MambaConfig(**SIZES, state_size=state_size, num_hidden_layers=2, time_step_rank=4)
    return made(transformers.MambaForCausalLM, config)


def alike() -> Any:
    """States alone, whose conv and recurrent state have one shape and one dtype."""
    return mamba(state_size=4).to(torch.float32)


def mamba2() -> Any:
    """States alone, with heads."""
    sizes = {"state_size": 8, "num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 2, "chunk_size": 8}
    config = transformers.Mamba2Config(**SIZES, **sizes, num_hidden_layers=2)
    return made(transformers.Mamba2ForCausalLM, config)


def jamba() -> Any:
    """Mamba in layers 0 and 2, attention in 1 and 3."""
    turns = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    config = transformers.JambaConfig(
        **SIZES, **HEADS, **EXPERTS, **turns, num_hidden_layers=4, mamba_d_state=8, mamba_dt_rank=4
    )
    return made(transformers.JambaForCausalLM, config)


def bamba() -> Any:
    """Mamba 2 in layers 0 and 2, attention in 1 and 3."""
    config = transformers.BambaConfig(
        **SIZES, **HEADS, **SCAN, mamba_expand=2, num_hidden_layers=4, attn_layer_indices=[1, 3]
    )
    model = made(transformers.BambaForCausalLM, config)
    model.model.register_forward_pre_hook(_with_positions, with_kwargs=True)
    return model


def _with_positions(model: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Where the tokens are in the request: Bamba must be told, as `generate` does, and elsewhere takes each pass's first one
    for token 0."""
    if options.get("position_ids") is None and options.get("cache") is not None:
        first = options["cache"].get_seq_length()
        options["position_ids"] = torch.arange(first, first + options["input_ids"].shape[1])[None]
    return args, options


def qwen3_next() -> Any:
    """Gated delta nets in layers 0 and 2, attention in 1 and 3."""
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8, "moe_intermediate_size": 16}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 16}
    config = transformers.Qwen3NextConfig(
        **SIZES, **HEADS, **EXPERTS, **widths, **heads, layer_types=["linear_attention", "full_attention"] * 2,
        num_hidden_layers=4,
    )  # fmt: skip
    return made(transformers.Qwen3NextForCausalLM, config)


def falcon_h1() -> Any:
    """Mamba 2 and attention side by side in every layer."""
    config = transformers.FalconH1Config(**SIZES, **HEADS, **SCAN, head_dim=8, num_hidden_layers=2, mamba_d_ssm=64)
    return made(transformers.FalconH1ForCausalLM, config)


def lfm2() -> Any:
    """Short convolutions without a recurrent state in layers 0 and 2, attention in 1 and 3."""
    config = transformers.Lfm2Config(
        **SIZES, **HEADS, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, block_multiple_of=8
    )
    return made(transformers.Lfm2ForCausalLM, config)


MODELS: dict[str, Callable[[], Any]] = {
    "mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": bamba,
    "qwen3 next": qwen3_next,
    "falcon h1": falcon_h1,
    "lfm2": lfm2,
}
WITHOUT_ATTENTION = ("mamba", "mamba2")
ONE_BY_ONE = ("mamba", "jamba")
"""Models that read their recurrent states only where they compute a single token."""


def go_on(model: Any, ids: torch.Tensor, cache: Any, done: int) -> Continuation:
    """As tests.real_models, in forward passes that read the states."""
    if model.config.model_type in ONE_BY_ONE:
        fill(model, ids, cache, range(done + 1, ids.shape[1]), done)
        done = max(done, ids.shape[1] - 1)
    return real_models.go_on(model, ids, cache, done)


if __name__ == "__main__":
    main(MODELS, go_on)
