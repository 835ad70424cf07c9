"""Tiny models with real weights, as folders that vLLM serves. Two folders of the same name and seed hold the same weights.

The weights are wide (standard deviation 0.25), since with those that models start from every prompt has the same answer:
here one wrong block changes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import DeepseekV2Config, LlamaConfig

VOCABULARY = 512
CONTEXT = 8192
WIDTH = 0.25
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": CONTEXT}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TICKS_S = 0.1
"""An engine that starts so long after a file was written knows that it is older."""
COMMON = {"initializer_range": WIDTH, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> Any:
    """Full attention in three layers, with two KV heads."""
    return transformers.LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **COMMON, num_hidden_layers=3))


def windowed() -> Any:
    """Full attention in every second layer, a window of 64 tokens in the others: two KV cache groups."""
    kinds = ["sliding_attention", "full_attention"] * 2
    settings = {"sliding_window": 64, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    return transformers.LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **COMMON, **settings))


def deepseek() -> Any:
    """Multi-head latent attention, with as wide latents as vLLM's CPU kernel was compiled for."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512}
    widths = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 2}
    experts = {"n_group": 1, "topk_group": 1, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1}
    config = DeepseekV2Config(**SIZES, **COMMON, **heads, **widths, **experts, num_hidden_layers=2)
    return transformers.DeepseekV2ForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "windowed": windowed, "deepseek": deepseek}


def write(name: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write one of MODELS as a folder, unless it is there; return it. Another seed makes other weights."""
    if not (folder / "config.json").exists():
        torch.manual_seed(seed)
        MODELS[name]().to(dtype).save_pretrained(folder)
        time.sleep(TICKS_S)
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the tiny Llama as a folder, over what is there; return it. Another seed makes other weights
    in files of the same sizes."""
    chance, rank, sizes = torch.Generator().manual_seed(seed), 8, {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors = {}
    for layer in range(3):
        for module, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = WIDTH * torch.randn(rank, SIZES["hidden_size"], generator=chance)
            tensors[f"{name}.lora_B.weight"] = WIDTH * torch.randn(size, rank, generator=chance)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    time.sleep(TICKS_S)
    return folder
