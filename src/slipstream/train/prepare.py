"""What a run starts from: the target's frozen ends and a fresh drafter, near the target if shapes allow."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.core.options import TrainOptions
from slipstream.data.features import Features
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.train.initial import initialise_from_target, plain_gains, target_layers_for
from slipstream.train.step import FrozenEnds

# Usual spread of initial weights in decoder-only models; norms keep their ones.
_INITIAL_SPREAD = 0.02


def frozen_ends(target: Target) -> FrozenEnds:
    """The target's input embedding and the rows of its output embedding, in float32.

    Raises:
        InputError: the target has no output embedding module.
    """
    head = target.model.get_output_embeddings()
    if head is None:
        raise InputError(f"{target.info.name} has no output embedding that a drafter could borrow")
    return FrozenEnds(target.embed, head.weight.detach().float()[: target.info.vocab_size])


def fresh_drafter(
    config: DraftConfig,
    target: Target,
    store: Features,
    options: TrainOptions,
    layer_ids: tuple[int, ...] | None = None,
) -> tuple[Drafter, bool]:
    """A drafter to train: random, or begun from the target's late layers.

    Args:
        config: shape of the drafter.
        target: whose layers may be copied.
        store: features on which attention's sharpness is measured.
        options: seed and whether to copy.
        layer_ids: target layers to copy, one per draft layer; None takes the last ones.

    Returns:
        The drafter in float32, and whether target layers were copied.
    """
    torch.manual_seed(options.seed)
    drafter = Drafter(config).float()
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=_INITIAL_SPREAD)
    if not options.initialise:
        return drafter, False
    layer_ids = layer_ids or target_layers_for(config.num_layers, target.info.num_layers)
    sample_LE = torch.cat([store[number].features_LE for number in range(min(8, len(store)))]).float()
    return drafter, initialise_from_target(drafter, plain_gains(target.model), layer_ids, sample_LE)
