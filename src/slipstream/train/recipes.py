"""Ready-made plans for three sizes of target, and the arithmetic behind what they say of memory and time.

Only the first is run here. The other two are sized by `cost`; a test holds their docstrings to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.core.options import DrafterOptions, SynthesisOptions, TargetOptions, TrainOptions
from slipstream.train.pipeline import Plan

#: Share of a GPU's stated bf16 rate that long training passes reach.
_UTILISATION = 0.4
#: Dense bf16 FLOP/s of an H100 SXM (NVIDIA data sheet, without sparsity).
_H100_FLOPS = 989e12


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of a target.

    Attributes:
        width: D.
        intermediate_size: of the drafter's MLP.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: C.
        parameters: of the target.
        active_parameters: used by one token.
    """

    width: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    active_parameters: float


@dataclass(frozen=True)
class Cost:
    """What a run takes.

    Attributes:
        drafter_parameters: trained.
        gigabytes: on each GPU: target in bf16; weights, average, gradients and what the optimiser keeps
            (AdamW two numbers a weight, Muon one) in fp32.
        days: of training with live features, by operations alone.
    """

    drafter_parameters: float
    gigabytes: float
    days: float


def cost(shape: Shape, plan: Plan, tokens_per_chat: int, gpus: int) -> Cost:
    """Memory and time of a plan with live features on H100 GPUs.

    A matrix of P weights costs 2P operations a token forward and 4P backward; context tokens pass `fc` and
    the key and value projections, block slots pass the layers. Attention and the reduced head are left out
    (under a tenth here).

    Args:
        shape: of the target.
        plan: its chats, epochs, anchors, layers and block size count.
        tokens_per_chat: mean length.
        gpus: data-parallel.
    """
    layers, taps = plan.drafter.num_layers, plan.drafter.taps
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = shape.width * (2 * inner + 2 * kv)
    layer = projections + 3 * shape.width * shape.intermediate_size
    fuse = taps * shape.width**2
    parameters = float(layers * layer + fuse)
    context = fuse + layers * 2 * shape.width * kv
    slots = plan.training.anchors * plan.drafter.block_size
    per_chat = 6.0 * (tokens_per_chat * context + slots * layers * layer)
    per_chat += 2 * tokens_per_chat * shape.active_parameters
    operations = per_chat * plan.chats * plan.training.epochs
    seconds = operations / (gpus * _H100_FLOPS * _UTILISATION)
    trained = (20 if plan.training.optimizer == "adamw" else 16) * parameters
    return Cost(parameters, (2 * shape.parameters + trained) / 1e9, seconds / 86_400)


QWEN3_8B = Shape(4096, 12288, 32, 8, 128, 8.2e9, 8.2e9)
QWEN3_30B_A3B = Shape(2048, 6144, 32, 4, 128, 30.5e9, 3.3e9)
TOKENS_PER_CHAT = 1500


def smollm2_on_a_cpu(out: Path, minutes: float = 120.0) -> Plan:
    """SmolLM2-135M-Instruct on two CPU cores: three layers, blocks of 8, self-written chats."""
    return Plan("smollm2", out, training=TrainOptions(minutes=minutes, anchors=32))


def dense_8b(out: Path, target: str, prompts: str, gpus: int = 1) -> Plan:
    """A dense 8B target of Qwen3's shape: five layers, blocks of 16, 400,000 chats, three epochs.

    Have a server write the answers first (`slipstream synthesize --prompts ... --endpoint ...`) and give its
    file as `prompts`. By `cost`, with chats of 1500 tokens and live features: 1.05 B trained weights, 37 GB
    per GPU before activations, 1.7 days on one H100, 0.2 on eight.
    """
    training = TrainOptions(
        epochs=3, features="live", documents=8 * gpus, anchors=256, max_length=4096, learning_rate=6e-4
    )
    return Plan(
        target,
        out,
        data=prompts,
        chats=400_000,
        drafter=DrafterOptions(num_layers=5, block_size=16),
        synthesis=SynthesisOptions(answer_tokens=2048),
        training=training,
        loading=TargetOptions(dtype="bfloat16", device="cuda"),
    )


def moe_30b(out: Path, target: str, prompts: str, gpus: int = 8) -> Plan:
    """A 30B mixture of experts with 3B active, of Qwen3-30B-A3B's shape: as `dense_8b`.

    By `cost`, with chats of 1500 tokens and live features: 0.30 B trained weights, 67 GB per GPU before
    activations (the target is held whole on each; 80 GB cards leave little for long chats), 0.6 days on one
    H100, 0.1 on eight.
    """
    return dense_8b(out, target, prompts, gpus)
