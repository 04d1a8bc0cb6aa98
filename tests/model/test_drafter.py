"""The drafter against slow loops, and what its context may and may not do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from slipstream.core.errors import CheckpointError
from slipstream.model import DraftConfig, Drafter, decode_masks, default_tap_ids
from slipstream.model.rope import rope_angles, rotate
from slipstream.testing import tiny_config, tiny_target


def make(**changes: object) -> Drafter:
    info = tiny_target(tiny_config(num_hidden_layers=6)).info
    config = replace(DraftConfig.for_target(info, num_layers=2, block_size=4, num_taps=2), **changes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    drafter = Drafter(config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return drafter.double()


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / math.sqrt(float((x * x).mean()) + eps)


def turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary position of one head vector, pair by pair."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def slow_forward(drafter: Drafter, features: torch.Tensor, x: torch.Tensor, start: int) -> torch.Tensor:
    """One row, in loops over slots and heads: the paper's section 4.1 in words.

    features [start, E] are the context; x [T, D] the block at positions start, start + 1, ...
    """
    config, eps = drafter.config, drafter.config.rms_norm_eps
    context = [norm(drafter.fc.weight @ f, drafter.hidden_norm.weight, eps) for f in features]
    states = list(x)
    for index, layer in enumerate(drafter.layers):
        attention, causal, window = layer.self_attn, config.causal[index], config.windows[index]
        normed = [norm(s, layer.input_layernorm.weight, eps) for s in states]
        out = []
        for t, query_state in enumerate(normed):
            keys = [(p, context[p]) for p in range(start)]
            keys += [(start + s, normed[s]) for s in range(len(normed)) if s <= t or not causal]
            if window is not None:
                keys = [(p, k) for p, k in keys if abs(start + t - p) < window]
            heads = []
            for head in range(config.num_heads):
                group = head * config.num_kv_heads // config.num_heads
                part = slice(head * config.head_dim, (head + 1) * config.head_dim)
                kv = slice(group * config.head_dim, (group + 1) * config.head_dim)
                q = norm((attention.q_proj.weight @ query_state)[part], attention.q_norm.weight, eps)
                q = turn(q, start + t, config.rope_theta)
                scores, values = [], []
                for p, state in keys:
                    k = norm((attention.k_proj.weight @ state)[kv], attention.k_norm.weight, eps)
                    scores.append(float(q @ turn(k, p, config.rope_theta)) / math.sqrt(config.head_dim))
                    values.append((attention.v_proj.weight @ state)[kv])
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                heads.append(sum(w * v for w, v in zip(weights, values, strict=True)))
            out.append(attention.o_proj.weight @ torch.cat(heads))
        states = [s + o for s, o in zip(states, out, strict=True)]
        for t, s in enumerate(states):
            h = norm(s, layer.post_attention_layernorm.weight, eps)
            gate = layer.mlp.gate_proj.weight @ h
            states[t] = s + layer.mlp.down_proj.weight @ (
                gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ h)
            )
    return torch.stack([norm(s, drafter.norm.weight, eps) for s in states])


def fast_forward(drafter: Drafter, features: torch.Tensor, x: torch.Tensor, slots: int) -> torch.Tensor:
    """The same through fixed buffers whose unused slots hold garbage."""
    start = len(features)
    padded = torch.full((1, slots, features.shape[1]), 7.7, dtype=torch.float64)
    padded[0, :start] = features
    context = drafter.context_kv(padded, torch.arange(slots)[None])
    masks = decode_masks(drafter.config, torch.tensor([start]), slots, len(x))
    return drafter(x[None], torch.arange(start, start + len(x))[None], context, masks)[0]


@pytest.mark.parametrize(
    ("causal", "windows"),
    [
        ((False, False), (None, None)),
        ((True, True), (None, None)),
        ((True, False), (3, None)),
        ((False, False), (3, 2)),
    ],
)
@torch.no_grad()
def test_forward_against_loops(causal: tuple[bool, ...], windows: tuple[int | None, ...]) -> None:
    drafter = make(causal=causal, windows=windows)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(5, drafter.config.feature_width, generator=generator, dtype=torch.float64)
    x = torch.randn(4, 32, generator=generator, dtype=torch.float64)
    expected = slow_forward(drafter, features, x, 5)
    # The norms and angles of the fast path are computed in float32.
    torch.testing.assert_close(fast_forward(drafter, features, x, 11), expected, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_context_may_come_in_pieces() -> None:
    drafter = make()
    features = torch.randn(2, 9, drafter.config.feature_width, dtype=torch.float64)
    position = torch.arange(9).expand(2, -1)
    whole = drafter.context_kv(features, position)
    parts = [drafter.context_kv(features[:, a:b], position[:, a:b]) for a, b in ((0, 4), (4, 5), (5, 9))]
    for layer, (k, v) in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[layer][0] for part in parts], dim=2), k)
        torch.testing.assert_close(torch.cat([part[layer][1] for part in parts], dim=2), v)


@torch.no_grad()
def test_unused_slots_and_later_context_change_nothing() -> None:
    drafter = make()
    features = torch.randn(1, 8, drafter.config.feature_width, dtype=torch.float64)
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    masks = decode_masks(drafter.config, torch.tensor([5]), 8, 4)
    position = torch.arange(5, 9)[None]
    results = []
    for fill in (0.0, 1e4, -1e4):
        changed = features.clone()
        changed[:, 5:] = fill
        context = drafter.context_kv(changed, torch.arange(8)[None])
        results.append(drafter(x, position, context, masks))
    assert torch.isfinite(results[0]).all()
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


@torch.no_grad()
def test_no_context_at_all_gives_finite_states() -> None:
    drafter = make()
    context = drafter.context_kv(
        torch.zeros(1, 3, drafter.config.feature_width).double(), torch.arange(3)[None]
    )
    masks = decode_masks(drafter.config, torch.tensor([0]), 3, 4)
    hidden = drafter(torch.randn(1, 4, 32).double(), torch.arange(4)[None], context, masks)
    assert torch.isfinite(hidden).all()


def test_every_parameter_gets_a_gradient() -> None:
    drafter = make()
    features = torch.randn(1, 6, drafter.config.feature_width, dtype=torch.float64)
    context = drafter.context_kv(features, torch.arange(6)[None])
    masks = decode_masks(drafter.config, torch.tensor([6]), 6, 4)
    drafter(
        torch.randn(1, 4, 32).double(), torch.arange(6, 10)[None], context, masks
    ).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_by_enumeration(window: int | None, causal: bool) -> None:
    config = replace(make().config, causal=(causal, causal), windows=(window, window))
    lengths = [0, 2, 6]
    masks = decode_masks(config, torch.tensor(lengths), 6, 4)
    assert masks[0] is masks[1]
    for row, length in enumerate(lengths):
        for t in range(4):
            for key in range(10):
                position = key if key < 6 else length + key - 6
                seen = key < length if key < 6 else (not causal or key - 6 <= t)
                seen = seen and (window is None or abs(length + t - position) < window)
                assert bool(masks[0][row, 0, t, key]) == seen


def test_rotation_against_pairs() -> None:
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([[0, 7, 1000]])
    result = rotate(x, *rope_angles(position, 8, 10000.0))
    for head in range(2):
        for t in range(3):
            expected = turn(x[0, head, t], int(position[0, t]), 10000.0)
            torch.testing.assert_close(result[0, head, t], expected, atol=1e-4, rtol=1e-4)


def test_logits_are_multiplied_then_capped() -> None:
    logits = torch.tensor([[[-100.0, 0.5, 80.0]]])
    adjusted = make(output_multiplier=0.5, final_logit_softcapping=20.0).adjust_logits(logits)
    torch.testing.assert_close(adjusted, 20 * torch.tanh(logits * 0.5 / 20))
    assert make().adjust_logits(logits) is logits


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (30, 1, (15,)),
    ],
)
def test_taps_are_the_papers(layers: int, taps: int, expected: tuple[int, ...]) -> None:
    assert default_tap_ids(layers, taps) == expected


@pytest.mark.parametrize("layers", range(1, 9))
def test_shallow_targets_get_valid_taps(layers: int) -> None:
    ids = default_tap_ids(layers, 5)
    assert ids
    assert list(ids) == sorted(set(ids))
    assert all(0 <= number < layers for number in ids)


def test_a_configuration_follows_its_target() -> None:
    info = tiny_target(
        tiny_config(num_hidden_layers=6, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    ).info
    config = DraftConfig.for_target(info)
    assert (config.width, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 4, 2, 8)
    assert (config.intermediate_size, config.num_target_layers, config.target_width) == (64, 6, 32)
    assert config.rope_theta == 5e5
    assert config.max_position_embeddings == info.max_context
    assert config.mask_token_id == 63
    assert config.mask_token_id not in info.eos_token_ids
    assert DraftConfig.for_target(replace(info, eos_token_ids=(63, 62))).mask_token_id == 61


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_kv_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"width": 0}, "width must be at least 1"),
        ({"causal": (True,)}, "one entry for each of 2 layers"),
        ({"windows": (0, None)}, "sliding window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"target_layer_ids": ()}, "empty"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        replace(make().config, **changes)  # type: ignore[arg-type]
