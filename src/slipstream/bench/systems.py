"""The systems that a benchmark compares, each as something that answers a request and says what it took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from slipstream.bench.records import Measured, Side
from slipstream.bench.watch import Stopwatch, Trail, forget_peak, peak_memory
from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import Engine, Proposer
from slipstream.target import Target

_GENERATE_LACKS = ("presence_penalty", "frequency_penalty", "logit_bias", "stop")


class System(Protocol):
    """Whatever answers."""

    side: Side

    def answer(self, request: Request, origin: float) -> Measured:
        """Answer one request, alone.

        Args:
            request: prompt and settings.
            origin: start of the run on the clock of `time.perf_counter`.
        """


class OwnSystem:
    """Our engine: plain, or with any proposer.

    Args:
        side: what it is called.
        target: that speaks.
        proposer: that drafts; None decodes plainly.
        options: of the engine.
    """

    def __init__(self, side: Side, target: Target, proposer: Proposer | None, options: EngineOptions) -> None:
        self.side = side
        self._target, self._proposer, self._options = target, proposer, options
        self._engine = Engine(target, proposer, options)

    def answer(self, request: Request, origin: float) -> Measured:
        """Decode it."""
        device = self._target.device
        forget_peak(device)
        watch = Stopwatch(device)
        trail = Trail(time.perf_counter(), self._engine.block_size - 1)
        with watch.watching(self._target, self._proposer):
            for piece in self._engine.stream(request):
                trail.add(piece, time.perf_counter())
        return trail.measured(origin, watch.split(trail.last - trail.first), peak_memory(device))

    def engine(self, rows: int, longest: int) -> Engine:
        """Another engine of the same kind, for so many requests of so many tokens side by side."""
        options = replace(self._options, max_rows=rows, max_context=longest)
        return Engine(self._target, self._proposer, options)


class GenerateSystem:
    """`generate` of transformers on the same weights, as most people run a model today.

    Args:
        target: whose model it is.
    """

    def __init__(self, target: Target) -> None:
        dtype = str(target.dtype).removeprefix("torch.")
        self.side = Side("transformers", "transformers", False, f"generate, {dtype}, same weights")
        self._target = target

    def answer(self, request: Request, origin: float) -> Measured:
        """Generate.

        Raises:
            InputError: the request asks for what `generate` does not have, or does in another way.
        """
        target, ids = self._target, list(request.prompt_ids)
        target.set_taps(())  # of whoever drafted before
        settings = generation_settings(request.sampling, target.info.eos_token_ids)
        forget_peak(target.device)
        arrivals = _Arrivals()
        ids_BL = torch.tensor([ids], device=target.device)
        begun = time.perf_counter()
        torch.manual_seed(request.sampling.seed)
        model: Any = target.model
        whole_BL = model.generate(
            ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            generation_config=settings,
            streamer=arrivals,
        )
        ended = time.perf_counter()
        said = whole_BL[0, len(ids) :].tolist()
        stopped = bool(said) and said[-1] in request.sampling.end_ids(target.info.eos_token_ids)
        shown = said[:-1] if stopped else said
        return Measured(
            token_ids=tuple(said),
            text=str(target.tokenizer.decode(shown)) if target.tokenizer is not None else "",
            stop_reason="stop" if stopped else "length",
            started_s=begun - origin,
            ttft_s=arrivals.first - begun,
            decode_s=arrivals.last - arrivals.first,
            total_s=ended - begun,
            peak_memory_bytes=peak_memory(target.device),
        )


class _Arrivals:
    """A streamer that keeps times only."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self._prompt = True

    def put(self, value: object) -> None:
        """The prompt comes first."""
        if self._prompt:
            self._prompt = False
            return
        self.last = time.perf_counter()
        self.first = self.first or self.last

    def end(self) -> None:
        """Nothing more comes."""


def generation_settings(sampling: SamplingOptions, eos_token_ids: Sequence[int]) -> GenerationConfig:
    """Our options as those of `generate`, each stated, so that a model's own defaults have no say.

    Raises:
        InputError: an option that `generate` does not have, or has with another meaning.
    """
    lacking = [name for name in _GENERATE_LACKS if getattr(sampling, name)]
    if lacking:
        raise InputError(
            f"transformers' generate has no {lacking[0]} as we define it; leave transformers out of --systems"
        )
    ends = sorted(sampling.end_ids(eos_token_ids))
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        chosen = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
        **chosen,
    )
