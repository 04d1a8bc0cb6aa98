"""For users of transformers: `model.generate(..., custom_generate=speculate())` decodes with a drafter.

Settings come from transformers' own generation config; what has no counterpart here is refused, not ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process, stopping_criteria

from slipstream.api import drafter_path, load_drafter
from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Request
from slipstream.decode import DraftProposer, Engine
from slipstream.target import target_from_model

_KNOWN_ENDS = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)


@dataclass(frozen=True)
class Speculation:
    """A decoding method for `custom_generate`.

    Attributes:
        draft: the drafter: auto (the bundled one), a folder, a GGUF file or a hub id.
        options: of the engine.
        streamer: of transformers, for one prompt; None takes the one given to `generate`.
    """

    draft: str
    options: EngineOptions
    streamer: Any = None

    def __post_init__(self) -> None:
        """The engine is built at the first call and kept for the model that it was built for."""
        object.__setattr__(self, "_built", None)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: GenerationConfig | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """What `generate` calls.

        Returns:
            int64 ids of prompts and answers, padded on the right, as plain decoding returns them.

        Raises:
            InputError: a setting has no counterpart here.
        """
        config = generation_config or GenerationConfig()
        sampling = sampling_options(
            config, logits_processor or (), stopping_criteria or (), input_ids.shape[1]
        )
        mask = model_kwargs.get("attention_mask")
        rows = [row if mask is None else row[mask[number].bool()] for number, row in enumerate(input_ids)]
        seed = int(torch.randint(2**31, ())) if sampling.temperature else 0
        requests = [
            Request(row.tolist(), replace(sampling, seed=seed + number)) for number, row in enumerate(rows)
        ]
        done = self._decode(self._engine(model), requests, input_ids)
        answers = [torch.tensor(one.token_ids, dtype=torch.long) for one in done]
        padding = config.pad_token_id if config.pad_token_id is not None else sampling.stop_token_ids[0]
        new = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=padding)
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)

    def _decode(self, engine: Engine, requests: list[Request], prompt: Tensor) -> Sequence[Completion]:
        streamer = self.streamer
        if streamer is None:
            streamer = _streamer_of_generate()  # it has the prompt already
        elif len(requests) == 1:
            streamer.put(prompt.cpu())
        if streamer is None:
            return engine.generate(requests)
        if len(requests) > 1:
            raise InputError("a streamer takes one prompt at a time")
        for piece in engine.stream(requests):
            if piece.token_ids:
                streamer.put(torch.tensor(piece.token_ids))
        streamer.end()
        return engine.completions

    def _engine(self, model: PreTrainedModel) -> Engine:
        built: tuple[Any, Engine] | None = self._built  # type: ignore[attr-defined]
        if built is not None and built[0]() is model:
            return built[1]
        target = target_from_model(model)
        drafter = load_drafter(target, drafter_path(self.draft))
        engine = Engine(target, DraftProposer(target, drafter), self.options)
        object.__setattr__(self, "_built", (ref(model), engine))
        return engine


def speculate(
    draft: str = "auto", options: EngineOptions = EngineOptions(), streamer: Any = None
) -> Speculation:
    """A decoding method for `model.generate(..., custom_generate=...)`; keep it for further calls.

    Args:
        draft: the drafter: auto (the bundled one), a folder, a GGUF file or a hub id.
        options: of the engine.
        streamer: of transformers, for one prompt, for those who do not give it to `generate`.
    """
    return Speculation(draft, options, streamer)


def _streamer_of_generate() -> Any:
    """The streamer of the `generate` that called us.

    It tells its streamer the prompt and then hands it to its own methods alone, so that one read in another
    thread would wait for ever. Its frame is the only place where a custom method finds it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_name == "generate" and home.startswith("transformers."):
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None


def sampling_options(
    config: GenerationConfig, processors: Sequence[Any], criteria: Sequence[Any], prompt: int
) -> SamplingOptions:
    """Transformers' settings in our words.

    Args:
        config: of the call; its lengths count the prompt.
        processors: that `generate` made of it and was given.
        criteria: likewise.
        prompt: tokens of the (padded) prompt.

    Raises:
        InputError: names the first setting that has no counterpart.
    """
    if (config.num_beams or 1) > 1:
        raise InputError("beam search is not decoded speculatively; set num_beams to 1")
    if config.return_dict_in_generate:
        raise InputError("return_dict_in_generate has no counterpart here; leave it off")
    odd = [type(one).__name__ for one in criteria if not isinstance(one, _KNOWN_ENDS)]
    ends = config.eos_token_id
    found: dict[str, Any] = {
        "temperature": 1.0 if config.do_sample else 0.0,
        "max_tokens": config.max_length - prompt,
        "ignore_eos": True,
        "stop_token_ids": tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (ends,),
    }
    for one in processors:
        value = _setting(one, prompt)
        if value is None:
            odd.append(type(one).__name__)
        else:
            found |= value
    if odd:
        raise InputError(f"{odd[0]} has no counterpart in Slipstream; leave its setting out")
    return SamplingOptions(**found)


def _setting(one: Any, prompt: int) -> dict[str, Any] | None:
    """A logits processor's setting, or None for one that is not known."""
    if isinstance(one, logits_process.TemperatureLogitsWarper):
        return {"temperature": one.temperature}
    if isinstance(one, logits_process.TopKLogitsWarper):
        return {"top_k": one.top_k}
    if isinstance(one, logits_process.TopPLogitsWarper):
        return {"top_p": one.top_p}
    if isinstance(one, logits_process.MinPLogitsWarper):
        return {"min_p": one.min_p}
    if isinstance(one, logits_process.RepetitionPenaltyLogitsProcessor):
        return {"repetition_penalty": one.penalty}
    if isinstance(one, logits_process.MinNewTokensLengthLogitsProcessor):
        return {"min_tokens": one.min_new_tokens}
    if isinstance(one, logits_process.MinLengthLogitsProcessor):
        return {"min_tokens": max(0, one.min_length - prompt)}
    return None
