"""Finding the parts of a transformers model: layers, head, sizes, the name of the cache's argument."""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from slipstream.core.errors import TargetError


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    """The list of decoder layers.

    Raises:
        TargetError: there is no list of so many.
    """
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise TargetError(f"no list of {count} decoder layers found in {type(decoder).__name__}")


def output_embedding(model: PreTrainedModel) -> nn.Module:
    """The head.

    Raises:
        TargetError: the model has none.
    """
    module: nn.Module | None = model.get_output_embeddings()
    if module is None:
        raise TargetError(
            f"{type(model).__name__} has no output embedding, so it is not a causal language model"
        )
    return module


def row_count(embedding: nn.Module, attribute: str) -> int:
    """Rows of an embedding, from one of its attributes.

    Raises:
        TargetError: it does not say.
    """
    rows = getattr(embedding, attribute, None)
    if not isinstance(rows, int):
        raise TargetError(f"the vocabulary of a {type(embedding).__name__} cannot be read")
    return rows


def cache_argument(decoder: nn.Module, model_type: str) -> str:
    """Name of the decoder's cache argument: `cache` since transformers 5.2x, `past_key_values` before."""
    parameters = inspect.signature(decoder.forward).parameters
    if "position_ids" not in parameters:
        raise TargetError(
            f"the target ({model_type}) takes no explicit positions, so its rows cannot be verified in blocks"
        )
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise TargetError(f"the target ({model_type}) takes no cache of keys and values")
