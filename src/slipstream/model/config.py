"""What a drafter is: its shape, its taps, its block. Layouts on disk are `formats`' business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.core.errors import CheckpointError


class TargetShape(Protocol):
    """What of a target a drafter's configuration depends on."""

    @property
    def name(self) -> str:
        """Shown to users."""

    @property
    def vocab_size(self) -> int:
        """Tokens that can be said."""

    @property
    def embedding_rows(self) -> int:
        """Rows of the input embedding, padding included."""

    @property
    def width(self) -> int:
        """Hidden width."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def intermediate_size(self) -> int:
        """Feed-forward width."""

    @property
    def rms_norm_eps(self) -> float:
        """Added inside norms."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotary positions."""

    @property
    def max_context(self) -> int:
        """Longest context in tokens."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def embedding_multiplier(self) -> float:
        """Factor that the model applies after its embedding module."""


@dataclass(frozen=True)
class DraftConfig:
    """Everything that a drafter's computation depends on.

    Attributes:
        width: hidden width D; equals the target's, whose embedding and head are borrowed.
        intermediate_size: feed-forward width.
        num_layers: draft layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        vocab_size: rows of the target's vocabulary.
        block_size: T, slots of a block, anchor included.
        mask_token_id: token whose embedding fills the slots to draft.
        target_layer_ids: 0-based ids of target layers whose OUTPUT is read, in feature order.
        num_target_layers: depth of the target it was made for.
        target_width: hidden width of the target.
        causal: per layer, block slots see only earlier slots of their block.
        windows: per layer, None for full attention or W: a key is seen while |query - key position| < W.
        rope_theta: base of the rotary positions.
        max_position_embeddings: longest position trained for.
        rms_norm_eps: added inside norms.
        rope_parameters: further rotary settings; only `rope_type` "default" can be computed.
        input_embedding_scale: multiplies the block's input embeddings.
        output_multiplier: multiplies logits.
        final_logit_softcapping: cap c of c * tanh(logits / c); None for none.
        from_anchor: the anchor's slot already gives the first draft, so K drafts take K slots (DeepSpec), not
            K + 1. T counts anchor and drafts either way.
    """

    width: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_width: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    from_anchor: bool = False

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be computed.

        Raises:
            CheckpointError: one sentence that names the field.
        """
        for name in ("width", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"drafter: {name} must be at least 1, not {getattr(self, name)}")
        for good, sentence in self._checks():
            if not good:
                raise CheckpointError(f"drafter: {sentence}")

    def _checks(self) -> tuple[tuple[bool, str], ...]:
        """Pairs of a condition and what to say when it fails."""
        ids, layers = self.target_layer_ids, self.num_target_layers
        rope_type = self.rope_parameters.get("rope_type", "default")
        return (
            (self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"),
            (self.head_dim % 2 == 0, f"head_dim must be even for rotary positions, not {self.head_dim}"),
            (self.block_size >= 2, f"block_size must be at least 2, not {self.block_size}"),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask token id {self.mask_token_id} lies outside the embedding of {self.vocab_size} rows",
            ),
            (len(ids) > 0, "target_layer_ids is empty"),
            (len(set(ids)) == len(ids), f"target_layer_ids {list(ids)} names a layer twice"),
            (
                all(0 <= number < layers for number in ids),
                f"target_layer_ids {list(ids)} reach beyond the target's {layers} layers",
            ),
            (
                len(self.causal) == len(self.windows) == self.num_layers,
                f"causal and windows must have one entry for each of {self.num_layers} layers",
            ),
            (all(w is None or w >= 1 for w in self.windows), "a sliding window must be at least 1"),
            (rope_type == "default", f"rotary type {rope_type!r} is not supported, only 'default' is"),
            (self.rope_theta > 0, "rope_theta must be above 0"),
            (
                self.final_logit_softcapping is None or self.final_logit_softcapping > 0,
                "final_logit_softcapping must be above 0",
            ),
        )

    @property
    def feature_width(self) -> int:
        """E: taps times target width."""
        return len(self.target_layer_ids) * self.target_width

    @property
    def first_draft_slot(self) -> int:
        """Slot of the pass that gives the first draft: 0 with `from_anchor`, else 1."""
        return 0 if self.from_anchor else 1

    @classmethod
    def for_target(
        cls,
        info: TargetShape,
        *,
        num_layers: int = 5,
        block_size: int = 16,
        num_taps: int = 5,
        mask_token_id: int | None = None,
        window: int | None = None,
        causal: bool = False,
    ) -> DraftConfig:
        """Derive everything from the target.

        Args:
            info: the target.
            num_layers: draft layers (paper: 5).
            block_size: slots of a block (paper: 16).
            num_taps: target layers to read (paper: 5), spread by `default_tap_ids`.
            mask_token_id: a token that is never said; None takes the last row of the embedding that does not
                end a text.
            window: sliding window of every layer; None for full attention.
            causal: block slots see only earlier ones.
        """
        if mask_token_id is None:
            endings = set(info.eos_token_ids)
            mask_token_id = next(i for i in reversed(range(info.embedding_rows)) if i not in endings)
        return cls(
            width=info.width,
            intermediate_size=info.intermediate_size,
            num_layers=num_layers,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            vocab_size=info.embedding_rows,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=default_tap_ids(info.num_layers, num_taps),
            num_target_layers=info.num_layers,
            target_width=info.width,
            causal=(causal,) * num_layers,
            windows=(window,) * num_layers,
            rope_theta=info.rope_theta,
            max_position_embeddings=info.max_context,
            rms_norm_eps=info.rms_norm_eps,
            input_embedding_scale=info.embedding_multiplier,
        )


def default_tap_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spread layers from the second to the third from last (DFlash, arXiv 2602.06036, section 4.1).

    Shallow targets have fewer layers to choose from; equal ids are then named once.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    start, end = 1, num_target_layers - 3
    if end <= start:
        return tuple(range(max(0, num_target_layers - num_taps), num_target_layers))
    spread = [round(start + i * (end - start) / (num_taps - 1)) for i in range(num_taps)]
    return tuple(dict.fromkeys(spread))
