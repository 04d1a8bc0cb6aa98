"""A Hugging Face causal language model seen as a few verbs: embed, unembed, head, prefill, verify.

Not a generation loop: sampling, acceptance and stopping live in `decode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slipstream.core.errors import TargetError
from slipstream.native import Kernels, can_read, native_product
from slipstream.target.cache import TargetCache
from slipstream.target.capture import why_not_captured
from slipstream.target.family import TargetInfo, check_config, check_modules, describe, layer_windows
from slipstream.target.lean import FEW, FEW_IN_ALL, lean_decoder
from slipstream.target.masks import pass_masks
from slipstream.target.modules import cache_argument, decoder_layers, output_embedding, row_count
from slipstream.target.taps import Taps


@dataclass(frozen=True)
class Prefill:
    """What a prefill yields.

    Attributes:
        logits_BV: fp32 logits of each row's last prompt token.
        features_BLE: tapped layer outputs of every prompt token; past a row's length they mean nothing.
    """

    logits_BV: Tensor
    features_BLE: Tensor


@dataclass(frozen=True)
class Verified:
    """What a verify pass yields.

    Attributes:
        logits_BTV: fp32 logits after each token of the pass.
        features_BTE: tapped layer outputs of each token of the pass.
    """

    logits_BTV: Tensor
    features_BTE: Tensor


class Target:
    """A causal language model that verifies blocks of tokens at per-row positions.

    Build it with `target_from_model` or `load_target`, which also run the self-test.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: of the model, if there is one.
        name: shown to users.
        kernels: compiled ones for small passes; None leaves all to PyTorch.

    Attributes:
        token_bytes: keys and values of one token, in bytes; seen in the self-test.

    Raises:
        TargetError: the family cannot be decoded speculatively.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        kernels: Kernels | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        check_config(config)
        self.model = model
        self.tokenizer = tokenizer
        self.decoder: nn.Module = model.get_decoder()
        check_modules(config, self.decoder)
        self._cache_argument = cache_argument(self.decoder, config.model_type)
        self.layers = decoder_layers(self.decoder, config.num_hidden_layers)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._unembedding: nn.Module = output_embedding(model)
        rows = row_count(self._embedding, "num_embeddings"), row_count(self._unembedding, "out_features")
        self.info: TargetInfo = describe(name, config, rows, _eos_token_ids(model, tokenizer))
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._windows = layer_windows(config)
        self._logit_multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        self._logit_divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._lean = lean_decoder(self.decoder, config, self.info.max_context, self._windows, kernels)
        # Of use to a drafter only beside a target that they serve as well.
        self.kernels = kernels if self._lean is not None and self._lean.native is not None else None
        self._native_head: Tensor | None = None
        plain = type(self._unembedding) is nn.Linear and getattr(self._unembedding, "bias", None) is None
        weight = getattr(self._unembedding, "weight", None)
        if self.kernels is not None and plain and weight is not None and can_read(self.kernels, [weight]):
            self._native_head = weight
        self._taps = Taps(self.layers, (), self.info.width)
        self.token_bytes = 0

    def set_taps(self, layer_ids: tuple[int, ...]) -> None:
        """Chooses the layers whose outputs are read as features.

        Args:
            layer_ids: 0-based ids of layers whose OUTPUT is read; features are concatenated in this order.

        Raises:
            InputError: an id is outside the model or given twice.
        """
        taps = Taps(self.layers, tuple(layer_ids), self.info.width)
        self._taps.remove()
        self._taps = taps

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The layers whose outputs are read."""
        return self._taps.layer_ids

    @property
    def uncapturable(self) -> str:
        """Why a pass cannot be captured as a CUDA graph; empty where it can."""
        return why_not_captured(self.model, lean=self._lean is not None, kernels=self.kernels)

    def new_cache(self, rows: int, slots: int) -> TargetCache:
        """A cache for `rows` sequences of at most `slots` positions, drafts that end up rejected included."""
        return TargetCache(rows, slots)

    @torch.no_grad()
    def embed(self, ids_BT: Tensor) -> Tensor:
        """Output x_BTD of the input embedding module (with a scale inside that module, as in Gemma)."""
        x_BTD: Tensor = self._embedding(ids_BT)
        return x_BTD

    def unembed(self, hidden_BTD: Tensor) -> Tensor:
        """Raw product with the output embedding.

        Args:
            hidden_BTD: states after a final norm; any leading axes.

        Returns:
            fp32 logits_BTV, vocabulary cut to `info.vocab_size`.
        """
        kernels = self._kernels_for(hidden_BTD)
        if kernels is not None and self._native_head is not None:
            return native_product(kernels, self._native_head, hidden_BTD)[..., : self.info.vocab_size]
        logits_BTV: Tensor = self._unembedding(hidden_BTD)
        return logits_BTV[..., : self.info.vocab_size].float()

    def _kernels_for(self, hidden_BTD: Tensor) -> Kernels | None:
        """The kernels where they can read the output embedding and are to multiply so many states by it."""
        few = hidden_BTD.numel() <= FEW_IN_ALL * hidden_BTD.shape[-1] and hidden_BTD.shape[-2] <= FEW
        able = self._native_head is not None and not hidden_BTD.requires_grad
        return self.kernels if able and few else None

    def output_rows(self, ids_V: Tensor) -> Tensor:
        """Rows of the output embedding, [V, D], a copy in one piece.

        Args:
            ids_V: int64 tokens.

        Raises:
            TargetError: the output embedding is no plain matrix.
        """
        weight = getattr(self._unembedding, "weight", None)
        if not isinstance(weight, Tensor) or getattr(self._unembedding, "bias", None) is not None:
            raise TargetError(f"the output embedding of {self.info.name} cannot be read row by row")
        return weight.detach()[ids_V].contiguous()

    def product(self, hidden_BTD: Tensor, rows_VD: Tensor) -> Tensor:
        """`unembed` over some rows of the output embedding.

        Args:
            hidden_BTD: states after a final norm; any leading axes.
            rows_VD: of `output_rows`.

        Returns:
            fp32 logits_BTV.
        """
        kernels = self._kernels_for(hidden_BTD)
        if kernels is not None:
            return native_product(kernels, rows_VD, hidden_BTD)
        return F.linear(hidden_BTD, rows_VD).float()

    def head(self, hidden_BTD: Tensor) -> Tensor:
        """The model's own logits: `unembed`, its scaling (Granite, Cohere) and its soft-cap (Gemma).

        Args:
            hidden_BTD: the decoder's output, after the final norm; any leading axes.

        Returns:
            fp32 logits_BTV.
        """
        logits_BTV = self.unembed(hidden_BTD)
        if self._logit_multiplier != 1.0:
            logits_BTV = logits_BTV * self._logit_multiplier
        if self._logit_divisor != 1.0:
            logits_BTV = logits_BTV / self._logit_divisor
        if self._soft_cap is not None:
            logits_BTV = torch.tanh(logits_BTV / self._soft_cap) * self._soft_cap
        return logits_BTV

    @torch.no_grad()
    def prefill(
        self,
        ids_BL: Tensor,
        length_B: Tensor,
        cache: TargetCache,
        chunk: int = 512,
        row_B: Tensor | None = None,
    ) -> Prefill:
        """Reads prompts of different lengths into a cache, from position 0.

        Args:
            ids_BL: int64 prompts, padded on the right with any valid id.
            length_B: int64 lengths, at least 1 and at most L.
            cache: with at least L slots.
            chunk: tokens per pass.
            row_B: int64 rows of the cache to read into; None is all of them, in order.

        Returns:
            Logits of each row's last token, features of all tokens. The head runs on one token per row only.
        """
        *_, filled = self.prefill_parts(ids_BL, length_B, cache, chunk, row_B)
        assert isinstance(filled, Prefill)
        return filled

    @torch.no_grad()
    def prefill_parts(
        self,
        ids_BL: Tensor,
        length_B: Tensor,
        cache: TargetCache,
        chunk: int,
        row_B: Tensor | None = None,
        start_B: Tensor | None = None,
        start: int = 0,
    ) -> Iterator[int | Prefill]:
        """`prefill` pass by pass, so that something else can be done in between.

        Between two passes the slots from the yielded position on may be written to; the next pass writes
        over them (from where a row's part begins, that is).

        Args:
            ids_BL: as for `prefill`, like all others.
            length_B: lengths.
            cache: written to.
            chunk: tokens per row and pass.
            row_B: rows of the cache.
            start_B: where each row's tokens begin; what lies before is in the cache. None: at 0.
            start: the largest of them.

        Yields:
            After every pass but the last how many tokens were read, after the last the result.
        """
        rows, longest = ids_BL.shape
        features_BLE = self._new_features(rows, longest)
        last_BD = torch.zeros(rows, self.info.width, dtype=self.dtype, device=self.device)
        for begin in range(0, longest, chunk):
            end = min(begin + chunk, longest)
            position_BT = torch.arange(begin, end, device=self.device).expand(rows, -1)
            if start_B is not None:
                position_BT = position_BT + start_B[:, None]
            part = ids_BL[:, begin:end], position_BT, cache, start + end, features_BLE[:, begin:end]
            hidden_BTD = self._pass(*part, row_B)
            offset_B = length_B - 1 - begin
            here_B = (offset_B >= 0) & (offset_B < end - begin)
            offset_B11 = offset_B.clamp(0, end - begin - 1)[:, None, None]
            found_BD = hidden_BTD.gather(1, offset_B11.expand(-1, 1, hidden_BTD.shape[-1]))[:, 0]
            last_BD = torch.where(here_B[:, None], found_BD, last_BD)
            if end < longest:
                yield end
        yield Prefill(self.head(last_BD[:, None])[:, 0], features_BLE)

    @torch.no_grad()
    def verify(
        self,
        ids_BT: Tensor,
        start_B: Tensor,
        cache: TargetCache,
        visible: int | None = None,
        row_B: Tensor | None = None,
    ) -> Verified:
        """Runs one block per row, each at its own position.

        Args:
            ids_BT: int64 tokens; token [b, t] sits at position start_B[b] + t.
            start_B: int64 positions; everything before them must already be in the cache.
            cache: start_B + T must not exceed its slots.
            visible: leading slots to read, at least max(start_B) + T; a caller that knows it on the host
                saves attention over empty slots. None reads them all.
            row_B: int64 rows of the cache, distinct; None is all of them, in order.

        Returns:
            Logits and features of every token.
        """
        position_BT = start_B[:, None] + torch.arange(ids_BT.shape[1], device=self.device)
        features_BTE = self._new_features(*ids_BT.shape)
        slots = cache.slots if visible is None else visible
        hidden_BTD = self._pass(ids_BT, position_BT, cache, slots, features_BTE, row_B)
        return Verified(self.head(hidden_BTD), features_BTE)

    @torch.no_grad()
    def recompute(self, ids_BL: Tensor) -> Tensor:
        """The model called plainly: no cache, no mask of ours, its own head; the yardstick of all else.

        Args:
            ids_BL: int64 sequences of equal length.

        Returns:
            fp32 logits_BLV, vocabulary cut to `info.vocab_size`.
        """
        logits_BLV: Tensor = self.model(input_ids=ids_BL, use_cache=False).logits
        return logits_BLV[..., : self.info.vocab_size].float()

    def _new_features(self, rows: int, tokens: int) -> Tensor:
        shape = rows, tokens, self._taps.feature_width
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _pass(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        cache: TargetCache,
        visible: int,
        features_BTE: Tensor,
        row_B: Tensor | None = None,
    ) -> Tensor:
        """One pass of the decoder; fills `features_BTE` and returns the states after the final norm."""
        cache.aim(position_BT, visible, row_B)
        # Drafts past the context limit are never kept, but a position table must not be read past its end.
        model_position_BT = position_BT.clamp(max=self.info.max_context - 1)
        if self._lean is not None:
            taps = self._taps.parts(features_BTE)
            return self._lean(ids_BT, position_BT, model_position_BT, visible, cache, taps)
        masks = pass_masks(position_BT, visible, self._windows, self.dtype)
        arguments: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        self._taps.aim(features_BTE)
        try:
            output = self.decoder(
                input_ids=ids_BT, position_ids=model_position_BT, attention_mask=masks, **arguments
            )
        finally:
            self._taps.aim(None)
        hidden_BTD: Tensor = output[0]
        return hidden_BTD


def target_from_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "",
    kernels: Kernels | None = None,
) -> Target:
    """Wraps a model that is already built.

    Args:
        model: any causal language model of transformers; it is put into evaluation mode.
        tokenizer: of the model, if there is one.
        name: shown to users; the model's own name or type otherwise.
        kernels: of `slipstream.native.load_kernels`; None leaves all to PyTorch.

    Returns:
        A target whose self-test has passed.

    Raises:
        TargetError: the family cannot be decoded speculatively, or the self-test failed.
    """
    from slipstream.target.selftest import run_selftest

    shown = name or model.config.name_or_path or model.config.model_type
    target = Target(model.eval(), tokenizer, shown, kernels)
    run_selftest(target)
    return target


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids: set[int] = set()
    for owner in (generation, model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            ids.update(found if isinstance(found, list | tuple) else [found])
    return tuple(sorted(ids))
