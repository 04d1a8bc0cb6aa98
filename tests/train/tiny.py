"""A tiny drafter configuration and documents for training tests."""

from __future__ import annotations

import torch

from slipstream.data.features import Document, answer_numbers
from slipstream.model import DraftConfig


def tiny_config(**changes: object) -> DraftConfig:
    """Two layers of width 16 for a two-layer target with a vocabulary of 64."""
    fields: dict[str, object] = {
        "width": 16,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 64,
        "block_size": 4,
        "mask_token_id": 63,
        "target_layer_ids": (0, 1),
        "num_target_layers": 2,
        "target_width": 16,
        "causal": (False, False),
        "windows": (None, None),
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
    }
    return DraftConfig(**(fields | changes))  # type: ignore[arg-type]


def random_document(length: int, prompt: int, seed: int, features: int = 32, candidates: int = 3) -> Document:
    """Random tokens and features; the first candidate of each position is the next token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 63, (length,), generator=generator)
    top = torch.randint(0, 63, (length, candidates), generator=generator)
    top[:-1, 0] = tokens[1:]
    scores = torch.randn(length, candidates, generator=generator).sort(dim=-1, descending=True).values
    return Document(
        tokens,
        answer_numbers(length, [(prompt, length)]),
        torch.randn(length, features, generator=generator),
        top,
        scores.log_softmax(-1),
    )
