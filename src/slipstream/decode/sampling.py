"""From logits to a choice: temperature, filters and noise; pure functions, greedy and sampled rows together.

choice(t) = argmax(filter(logits / temperature) + gumbel(seed, t)) has the distribution
softmax(filter(logits / temperature)) (the Gumbel-max trick). The order is the one of vLLM and transformers:
temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.core.options import SamplingOptions
from slipstream.decode.noise import CHOICE, gumbel, key
from slipstream.native import Kernels, contenders

#: Tokens per row that top-p sorts before it falls back to all; sorting all can cost more than a model pass.
SURVIVORS = 1024
#: Tokens looked at beyond top_k, as ties with the last one stay: bf16 logits tie often.
_TIES = 32


@dataclass(frozen=True)
class RowSettings:
    """Sampling settings of every row, made once per batch.

    Attributes:
        temperature_B: float32; 1 for greedy rows.
        sampled_B: which rows draw.
        seed_B: int64.
        top_k_B: int64; vocabulary size where off.
        top_p_B: float32; 1 where off.
        min_p_B: float32; 0 where off.
        any_sampled: whether any row draws; the rest says what any row needs.
        most_top_k: largest top_k of the rows that use it, 0 when none does.
        any_top_p: whether any row filters by mass.
        survivors: how many tokens per row top-p has to sort at most.
        bounded: whether every row that draws has a top_k, so that only few tokens need noise.
        any_min_p: whether any row filters by relative probability.
        kernels: compiled kernels that find the tokens whose noise can matter; None takes the noise of all.
    """

    temperature_B: Tensor
    sampled_B: Tensor
    seed_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    any_sampled: bool
    most_top_k: int
    any_top_p: bool
    survivors: int
    bounded: bool
    any_min_p: bool
    kernels: Kernels | None = None

    @classmethod
    def of(
        cls,
        options: Sequence[SamplingOptions],
        vocab_size: int,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> RowSettings:
        """Gather the settings of a batch."""

        def row(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        drawn = [o for o in options if o.temperature > 0]
        top_ks = [min(o.top_k, vocab_size) for o in drawn if o.top_k]
        by_mass = [o for o in drawn if o.top_p < 1]
        bounded = all(o.top_k for o in by_mass)
        return cls(
            temperature_B=row([o.temperature or 1.0 for o in options], torch.float32),
            sampled_B=row([o.temperature > 0 for o in options], torch.bool),
            seed_B=row([o.seed for o in options], torch.int64),
            top_k_B=row([min(o.top_k, vocab_size) or vocab_size for o in options], torch.int64),
            top_p_B=row([o.top_p for o in options], torch.float32),
            min_p_B=row([o.min_p for o in options], torch.float32),
            any_sampled=bool(drawn),
            most_top_k=max(top_ks, default=0),
            any_top_p=bool(by_mass),
            survivors=min(vocab_size, max(top_ks, default=1) if bounded else SURVIVORS),
            bounded=all(o.top_k for o in drawn),
            any_min_p=any(o.min_p > 0 for o in drawn),
            kernels=kernels,
        )

    @property
    def kind(self) -> tuple[int, ...]:
        """All that decides which operations are run; equal kinds differ in numbers on the device alone."""
        return (
            *(self.any_sampled, self.most_top_k, self.any_top_p, self.survivors),
            *(self.bounded, self.any_min_p),
        )

    @property
    def may_fall_short(self) -> bool:
        """Whether a choice may have to be made again with more tokens."""
        return self.any_sampled and (self.bounded or self.any_top_p)

    def placed(self, keep: Callable[[str, Tensor], Tensor]) -> RowSettings:
        """The same settings in other tensors.

        Args:
            keep: from a name and a tensor to the one that takes its place.
        """
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = keep(name, value)
        return replace(self, **values)

    def of_rows(self, row_G: Tensor) -> RowSettings:
        """Those of some rows; what any row needs stays as it is."""
        return replace(
            self,
            temperature_B=self.temperature_B[row_G],
            sampled_B=self.sampled_B[row_G],
            seed_B=self.seed_B[row_G],
            top_k_B=self.top_k_B[row_G],
            top_p_B=self.top_p_B[row_G],
            min_p_B=self.min_p_B[row_G],
        )


@dataclass(frozen=True)
class Choice:
    """Chosen tokens.

    Attributes:
        ids_BT: the choices.
        short_B: rows whose filter needed more tokens than were looked at; choose again with all of them.
    """

    ids_BT: Tensor
    short_B: Tensor


def choose(
    logits_BTV: Tensor,
    position_BT: Tensor,
    settings: RowSettings,
    survivors: int | None = None,
    ids_V: Tensor | None = None,
) -> Choice:
    """The design's one expression, for greedy and sampled rows alike.

    Args:
        logits_BTV: float32, penalties and biases applied.
        position_BT: absolute position of the token to be chosen.
        settings: of the rows.
        survivors: tokens that the filters look at; None takes the settings' own.
        ids_V: the tokens that the logits are of; None where they are of all.
    """
    if not settings.any_sampled:
        return Choice(named(logits_BTV.argmax(-1), ids_V), torch.zeros_like(settings.sampled_B))
    if settings.bounded and survivors is None:
        return _choose_among_few(logits_BTV, position_BT, settings, ids_V)
    scores_BTV, short_B = filtered(logits_BTV, settings, survivors)
    drawn_BT = _draw(scores_BTV, position_BT, settings, ids_V)
    chosen_BT = torch.where(settings.sampled_B[:, None], drawn_BT, logits_BTV.argmax(-1))
    return Choice(named(chosen_BT, ids_V), short_B)


def _draw(scores_BTV: Tensor, position_BT: Tensor, settings: RowSettings, ids_V: Tensor | None) -> Tensor:
    """Places of the largest sums of score and noise, [B, T]; kernels spare the noise of most."""
    places = None
    if settings.kernels is not None:
        places = contenders(settings.kernels, scores_BTV, key(settings.seed_B, position_BT, CHOICE), ids_V)
    if places is None:
        tokens = scores_BTV.shape[-1] if ids_V is None else ids_V
        return (scores_BTV + gumbel(settings.seed_B, position_BT, tokens, CHOICE)).argmax(-1)
    noise = gumbel(settings.seed_B, position_BT, named(places, ids_V), CHOICE)
    return _first_best(places, scores_BTV.gather(-1, places) + noise)


def _first_best(places: Tensor, sums: Tensor) -> Tensor:
    """The place with the largest sum in each row."""
    return places.gather(-1, sums.argmax(-1, keepdim=True))[..., 0]


def named(place: Tensor, ids_V: Tensor | None) -> Tensor:
    """Token ids of places among some tokens."""
    return place if ids_V is None else ids_V[place]


def _choose_among_few(
    logits_BTV: Tensor, position_BT: Tensor, settings: RowSettings, ids_V: Tensor | None
) -> Choice:
    """The same choice where top_k bounds what can be chosen: filters and noise of those tokens alone.

    Noise is a function of the token's id, so a token has the same noise here as among all of them.
    """
    vocab_size = logits_BTV.shape[-1]
    top = logits_BTV.topk(min(settings.most_top_k + _TIES, vocab_size), dim=-1)
    scores_BTJ, short_B = filtered(top.values, settings)
    noise_BTJ = gumbel(settings.seed_B, position_BT, named(top.indices, ids_V), CHOICE)
    drawn_BT = _first_best(top.indices, scores_BTJ + noise_BTJ)
    if top.values.shape[-1] < vocab_size:
        # A last token that ties with the k-th may have further ties behind it.
        rank_B = settings.top_k_B.clamp(max=settings.most_top_k) - 1
        rank_BT1 = rank_B[:, None, None].expand(-1, top.values.shape[1], 1)
        tied_BT = top.values[..., -1] >= top.values.gather(-1, rank_BT1)[..., 0]
        short_B = settings.sampled_B & (short_B | tied_BT.any(-1))
    chosen_BT = torch.where(settings.sampled_B[:, None], drawn_BT, logits_BTV.argmax(-1))
    return Choice(named(chosen_BT, ids_V), short_B)


def filtered(
    logits_BTV: Tensor, settings: RowSettings, survivors: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits divided by temperature, dropped tokens at -inf; and short_B as in `Choice`.

    Rows that do not draw come out unfiltered where they ask for no filter; their result is not used.
    """
    scaled_BTV = logits_BTV / settings.temperature_B[:, None, None]
    highest_BT = scaled_BTV.amax(-1)
    short_B = torch.zeros_like(settings.sampled_B)
    if settings.most_top_k:
        scaled_BTV = _keep_top_k(scaled_BTV, settings)
    if settings.any_top_p:
        count = settings.survivors if survivors is None else survivors
        scaled_BTV, short_B = _keep_top_p(scaled_BTV, settings, count)
    if settings.any_min_p:
        least_BT1 = (highest_BT + settings.min_p_B.log()[:, None])[..., None]
        scaled_BTV = scaled_BTV.masked_fill(scaled_BTV < least_BT1, -torch.inf)
    return scaled_BTV, short_B


def distribution(
    logits_BTV: Tensor, settings: RowSettings, survivors: int | None = None
) -> tuple[Tensor, Tensor]:
    """Probabilities p_BTV that `choose` draws from, one-hot in greedy rows; and short_B as in `Choice`."""
    scores_BTV, short_B = filtered(logits_BTV, settings, survivors)
    greedy_BTV = torch.zeros_like(logits_BTV).scatter_(-1, logits_BTV.argmax(-1, keepdim=True), 1.0)
    return torch.where(settings.sampled_B[:, None, None], scores_BTV.softmax(-1), greedy_BTV), short_B


def _keep_top_k(scaled_BTV: Tensor, settings: RowSettings) -> Tensor:
    """Drop what lies below the k-th largest; ties with it stay."""
    count = min(settings.most_top_k, scaled_BTV.shape[-1])
    top = scaled_BTV.topk(count, dim=-1).values
    used_B = settings.top_k_B <= settings.most_top_k
    rank_B = settings.top_k_B.masked_fill(~used_B, 1) - 1
    least_BT1 = top.gather(-1, rank_B[:, None, None].expand(-1, top.shape[1], 1))
    return scaled_BTV.masked_fill((scaled_BTV < least_BT1) & used_B[:, None, None], -torch.inf)


def _keep_top_p(scaled_BTV: Tensor, settings: RowSettings, count: int) -> tuple[Tensor, Tensor]:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p; ties with the last one stay."""
    top = scaled_BTV.topk(min(count, scaled_BTV.shape[-1]), dim=-1).values
    probability = (top - scaled_BTV.logsumexp(-1, keepdim=True)).exp()
    mass = probability.cumsum(-1)
    top_p_B11 = settings.top_p_B[:, None, None]
    kept = mass - probability < top_p_B11
    least_BT1 = top.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
    used_B = (settings.top_p_B < 1) & settings.sampled_B
    dropped_BTV = (scaled_BTV < least_BT1) & used_B[:, None, None]
    # Rounding may leave the mass of ALL tokens below top_p; only missing tokens make a row short.
    whole = top.shape[-1] == scaled_BTV.shape[-1]
    reached_BT = (mass[..., -1] >= settings.top_p_B[:, None]) | torch.isinf(top[..., -1])
    short_B = used_B & ~reached_BT.all(-1) & (not whole)
    return scaled_BTV.masked_fill(dropped_BTV, -torch.inf), short_B
