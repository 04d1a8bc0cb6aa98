"""The self-test of a target at load: cached passes must agree with a plain pass, taps with its hidden states.

Not a proof of losslessness (that is `slipstream check`): a handful of ids that catches a family whose code
does something that Slipstream does not know of, before a user sees wrong text.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream.core.errors import SlipstreamError, TargetError
from slipstream.target.model import Target
from slipstream.target.taps import Taps

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference by dtype; a wrong mask, position or scale is far above, rounding well below."""
_LENGTH = 12
_SPLIT = (8, 5)


@torch.no_grad()
def run_selftest(target: Target) -> None:
    """Compares taps, head and cached passes of a target with the model called plainly.

    Args:
        target: the target; its taps are left as they were, and what its cache takes per token is noted.

    Raises:
        TargetError: something differs, or the model cannot run this way.
    """
    taps = target.tap_ids
    try:
        ids_BL = _sample_ids(target)
        _check_taps_and_head(target, ids_BL)
        _check_cached(target, ids_BL)
    except SlipstreamError:
        raise
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        IndexError,
        NotImplementedError,
    ) as error:
        raise TargetError(
            f"the code of {target.info.model_type} does not run with Slipstream's cache and masks: {error}"
        ) from error
    finally:
        target.set_taps(taps)


def _sample_ids(target: Target) -> Tensor:
    length = min(_LENGTH, target.info.max_context)
    count = torch.arange(2 * length, device=target.device)
    return (count * 7919 + 11).remainder(target.info.vocab_size).view(2, length)


def _check_taps_and_head(target: Target, ids_BL: Tensor) -> None:
    ids = tuple(range(target.info.num_layers))
    taps = Taps(target.layers, ids, target.info.width)
    shape = *ids_BL.shape, taps.feature_width
    features_BLE = torch.empty(shape, dtype=target.dtype, device=target.device)
    taps.aim(features_BLE)
    try:
        plain = target.model(input_ids=ids_BL, use_cache=False, output_hidden_states=True)
    finally:
        taps.remove()
    for layer_id, feature_BLD in zip(ids, features_BLE.split(target.info.width, -1), strict=True):
        last = layer_id == ids[-1]
        normed_BLD = _final_norm(target.decoder)(feature_BLD) if last else feature_BLD
        _compare(target, f"the tap on layer {layer_id}", normed_BLD, plain.hidden_states[layer_id + 1])
    logits_BLV = plain.logits[..., : target.info.vocab_size]
    _compare(target, "the head", target.head(plain.hidden_states[-1]), logits_BLV)


def _check_cached(target: Target, ids_BL: Tensor) -> None:
    """Ragged prefill, a wrong block, then the right block over it: every token must have its plain logits."""
    rows, length = ids_BL.shape
    target.set_taps((0, target.info.num_layers - 1) if target.info.num_layers > 1 else (0,))
    plain_BLV = target.recompute(ids_BL)
    length_B = torch.tensor([min(n, length - 1) for n in _SPLIT], device=target.device)
    block = min(4, length - max(_SPLIT[0], 1)) if length > _SPLIT[0] else 1
    cache = target.new_cache(rows, length + block)
    first = target.prefill(ids_BL[:, : _SPLIT[0]], length_B, cache, 3)
    slot_BT = length_B[:, None] + torch.arange(block, device=target.device)
    ids_BT = ids_BL.gather(1, slot_BT)
    target.verify((ids_BT + 1).remainder(target.info.vocab_size), length_B, cache)
    second = target.verify(ids_BT, length_B, cache)
    target.token_bytes = cache.token_bytes
    row_B = torch.arange(rows, device=target.device)
    _compare(target, "prefill", first.logits_BV, plain_BLV[row_B, length_B - 1])
    _compare(target, "verify", second.logits_BTV, plain_BLV[row_B[:, None], slot_BT])


def _final_norm(decoder: nn.Module) -> nn.Module:
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f"):
        module = getattr(decoder, name, None)
        if isinstance(module, nn.Module):
            return module
    raise TargetError(f"no final norm found in {type(decoder).__name__}, so its last layer cannot be tapped")


def _compare(target: Target, what: str, found: Tensor, expected: Tensor) -> None:
    difference = (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
    size = difference.item()  # host: once per check, at load
    if not size <= _TOLERANCE.get(target.dtype, 1e-1):
        raise TargetError(
            f"self-test of {target.info.name} failed: {what} differs from a plain pass by {size:.1e} "
            "(relative), so this model is not supported"
        )
