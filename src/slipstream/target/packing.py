"""Linear layers with the weight in the order that oneDNN reads: about twice as fast on a few rows of fp32.

Decoding multiplies few rows by large weights, so it is bound by how fast a weight streams from memory, and
the usual order streams badly on many CPUs. Not a quantization: the numbers are the same, and the result
differs from `nn.Linear` by rounding. For inference on a CPU in float32; everything else stays as it is.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 8
"""Rows the layout is chosen for: a block of drafts; one row and sixteen run as fast with it."""
_LEAST_WEIGHTS = 1 << 14
"""Below so many weights the call costs more than the product."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class PackedLinear(nn.Module):
    """The product of an `nn.Linear`, from a packed copy of its weight.

    Only the copy is kept; the layer's own weight is freed unless someone holds it, as a tied embedding does.

    Args:
        linear: an fp32 layer on the CPU.
    """

    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed_weight = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().contiguous(), _ROWS
        )
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in the usual order: a fresh copy on every call, and not a parameter."""
        dense: Tensor = self._packed_weight.to_dense()
        return dense

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """As an `nn.Linear` does, so that whoever copies or writes the module's weights finds all of them."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies.

        Args:
            x: [..., in], fp32.

        Returns:
            [..., out], fp32.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            # The packed product has no derivative.
            return F.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed_weight, self.bias, "none", [], ""
        )
        return product


def is_packed(module: nn.Module) -> bool:
    """Whether any layer inside was replaced by a packed one."""
    return any(isinstance(child, PackedLinear) for child in module.modules())


def can_pack() -> bool:
    """Whether this torch has oneDNN's packed products (private operators, so they are looked for)."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def packed(module: AnyModule, least_weights: int = _LEAST_WEIGHTS) -> AnyModule:
    """Replaces the linear layers inside a module by packed ones, where that is possible.

    A layer qualifies if it is exactly an `nn.Linear`, float32, on the CPU, without hooks, and large enough.
    Nothing happens where torch lacks the operators. The module is for inference afterwards: packed weights
    are no longer among its parameters, though still in its `state_dict()`.

    Args:
        module: changed in place; must not itself be an `nn.Linear`.
        least_weights: smallest weight worth packing, in numbers.

    Returns:
        The same module.
    """
    if not can_pack():
        return module
    made: dict[int, PackedLinear] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # with names that share a module
            if isinstance(child, nn.Linear) and _qualifies(child, least_weights):
                if id(child) not in made:
                    made[id(child)] = PackedLinear(child)
                setattr(parent, name, made[id(child)])
    return module


def _qualifies(module: nn.Linear, least_weights: int) -> bool:
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= least_weights
