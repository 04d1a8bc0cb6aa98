"""Whether a target's passes can be captured as CUDA graphs: nothing on the host may decide what they compute.

Not the capture itself, which is `decode.graphs`.
"""

from __future__ import annotations

from torch import nn

from slipstream.native import Kernels


def why_not_captured(model: nn.Module, *, lean: bool, kernels: Kernels | None) -> str:
    """A reason in words, empty where there is none.

    Args:
        model: of transformers.
        lean: whether our own pass runs it; code that we do not know may look at values on the host.
        kernels: compiled ones that run it.
    """
    if kernels is not None:
        return "compiled kernels run the target"
    if not lean:
        return "transformers' own code runs the target"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the target lies on several devices"
    # transformers hangs hooks of its own on layers and attentions, and so do taps; a lean pass calls neither.
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    if any(module._forward_hooks or module._forward_pre_hooks for module in leaves):
        return "somebody's hooks hang on the target"
    return ""
