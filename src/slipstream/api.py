"""Load a target and its drafter, and decode with them: the Python interface in one call.

No decoding happens here (that is `decode`); this file turns names into models and prompts into token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import cast

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, TargetOptions
from slipstream.core.records import Completion, Piece, Request
from slipstream.decode import DraftProposer, Engine, Report, RequestReport, check
from slipstream.decode.lossless import Difference, first_difference
from slipstream.decode.round_cost import kept_costs
from slipstream.formats import read_drafter
from slipstream.model import Drafter
from slipstream.target import Target, TargetInfo, load_target, packed

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
"""A text (one user turn, or as it is when raw), a conversation of role/content messages, or ids."""

Progress = Callable[[str], None]

BUNDLED_TARGET = "smollm2"
# What the bundled drafter was trained for. A fine-tuned model of the same shape may use it too, since a
# drafter changes only the speed.
_BUNDLED_FITS = {
    "model_type": "llama",
    "vocab_size": 49152,
    "width": 576,
    "num_layers": 30,
    "rope_theta": 100_000.0,
}


class Stream(Iterator[Piece]):
    """The pieces of one answer; when they have ended, `completion` holds the whole of it.

    A session decodes one stream at a time: read it to its end or close it before the next call.

    Args:
        engine: that decodes.
        request: to decode.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._pieces = iter(engine.stream([request]))
        self._completion: Completion | None = None

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration:
            if self._completion is None:
                self._completion = self._engine.completions[0]
            raise

    def close(self) -> None:
        """End the decoding early; the engine is ready for the next request."""
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()

    @property
    def completion(self) -> Completion:
        """The finished request.

        Raises:
            InputError: the stream has not been read to its end.
        """
        if self._completion is None:
            raise InputError("the stream has not ended, so there is no completion yet")
        return self._completion


class Session:
    """A target, perhaps a drafter, and the engines that decode with and without it.

    Args:
        target: to decode with.
        drafter: that proposes tokens, or None to decode plainly.
        options: of both engines.
        note: why there is no drafter, for people.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        options: EngineOptions = EngineOptions(),
        note: str = "",
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.options = options
        self.note = note

    @cached_property
    def plain(self) -> Engine:
        """The engine with drafting off: the baseline of every speed-up."""
        return Engine(self.target, None, self.options)

    @cached_property
    def engine(self) -> Engine:
        """The engine that drafts; the plain one where there is no drafter."""
        if self.drafter is None:
            return self.plain
        costs = kept_costs(self.target, self.drafter)
        return Engine(self.target, self.proposer, self.options, costs=costs)

    def exact(self, draft: bool = True) -> bool:
        """Whether every token is the target's own choice after the tokens before it.

        True without drafting and with the acceptor `match`. With `reject` tokens follow the target's
        distribution, but the text may differ from plain decoding with the same seed.
        """
        return not draft or self.drafter is None or self.options.acceptor == "match"

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: text, messages or token ids (which are returned as they are).
            raw: a text is continued as it is, without the target's chat template.

        Raises:
            InputError: the target has no tokenizer or no chat template, or the prompt is empty.
        """
        ids = self._encode(prompt, raw)
        if not ids:
            raise InputError("the prompt is empty")
        return ids

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingOptions = SamplingOptions(),
        *,
        raw: bool = False,
        draft: bool = True,
    ) -> Completion:
        """Answer one prompt.

        Args:
            prompt: text, messages or token ids.
            sampling: how to decode.
            raw: continue a text as it is, without the chat template.
            draft: False decodes plainly on the same target.

        Raises:
            InputError: the prompt cannot be used, or does not fit the context.
        """
        return self.generate_batch([prompt], sampling, raw=raw, draft=draft)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions | Sequence[SamplingOptions] = SamplingOptions(),
        *,
        raw: bool = False,
        draft: bool = True,
    ) -> list[Completion]:
        """Answer several prompts side by side.

        Args:
            prompts: texts, conversations or token ids.
            sampling: one for all, or one per prompt.
            raw: continue texts as they are, without the chat template.
            draft: False decodes plainly on the same target.

        Returns:
            Completions in the order of the prompts.

        Raises:
            InputError: a prompt cannot be used, or the counts of prompts and sampling options differ.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingOptions) else list(sampling)
        if len(each) != len(prompts):
            raise InputError(f"there are {len(prompts)} prompts, but {len(each)} sampling options")
        requests = [Request(self.encode(p, raw), s) for p, s in zip(prompts, each, strict=True)]
        return self._engine(draft).generate(requests)

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingOptions = SamplingOptions(),
        *,
        raw: bool = False,
        draft: bool = True,
    ) -> Stream:
        """Answer one prompt piece by piece; arguments as for `generate`.

        Raises:
            InputError: the prompt cannot be used, or does not fit the context.
        """
        return Stream(self._engine(draft), Request(self.encode(prompt, raw), sampling))

    def check(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions = SamplingOptions(),
        *,
        raw: bool = False,
        report: Callable[[int, RequestReport], None] | None = None,
    ) -> Report:
        """Compare drafted decoding with plain decoding, in the same shapes and in one-row shapes.

        Args:
            prompts: texts, conversations or token ids, decoded one by one.
            sampling: the same for all.
            raw: continue texts as they are, without the chat template.
            report: called with each prompt's number and comparison when it is done.

        Raises:
            InputError: there is no drafter, or the acceptor does not promise the same text.
        """
        if self.drafter is None:
            raise InputError(f"nothing to check: {self.note or 'there is no drafter'}")
        if not self.exact():
            raise InputError(
                f"the acceptor {self.options.acceptor} does not promise the same text; use match"
            )
        requests = [Request(self.encode(prompt, raw), sampling) for prompt in prompts]
        return check(self.target, self.proposer, requests, self.options, report)

    def difference(
        self,
        prompt: Prompt,
        sampling: SamplingOptions,
        drafted: Completion,
        plain: Completion,
        *,
        raw: bool = False,
    ) -> Difference | None:
        """Where two completions of a prompt part, and whether rounding explains it; None for equal texts."""
        request = Request(self.encode(prompt, raw), sampling)
        return first_difference(self.target, request, drafted.token_ids, plain.token_ids)

    def redraft(self, draft: str, progress: Progress | None = None) -> Session:
        """The same target with another drafter, named as for `load`.

        Raises:
            InputError: there is no such drafter.
            CheckpointError: the drafter does not fit the target.
        """
        drafter, note = _load_drafter(self.target, draft, packing=True, progress=progress)
        return Session(self.target, drafter, self.options, note)

    @cached_property
    def proposer(self) -> DraftProposer:
        """The drafter beside its target.

        Raises:
            InputError: there is no drafter.
        """
        if self.drafter is None:
            raise InputError(f"there is no drafter: {self.note}")
        return DraftProposer(self.target, self.drafter)

    def _engine(self, draft: bool) -> Engine:
        return self.engine if draft else self.plain

    def _encode(self, prompt: Prompt, raw: bool) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return list(cast(Sequence[int], prompt))
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise InputError(f"{self.target.info.name} has no tokenizer, so a prompt must be token ids")
        if raw:
            if not isinstance(prompt, str):
                raise InputError("a raw prompt must be a text, not messages")
            return list(tokenizer(prompt)["input_ids"])
        if not tokenizer.chat_template:
            raise InputError(
                f"{self.target.info.name} has no chat template; decode the text as it is with raw"
            )
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [dict(turn) for turn in cast(Sequence[Mapping[str, str]], turns)]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)


def load(
    target: str = BUNDLED_TARGET,
    draft: str | None = "auto",
    *,
    target_options: TargetOptions = TargetOptions(),
    engine_options: EngineOptions = EngineOptions(),
    progress: Progress | None = None,
) -> Session:
    """Load a target and its drafter.

    Args:
        target: `smollm2` (bundled), a hub id, a folder or a GGUF file.
        draft: `auto` takes the bundled drafter where the target has one and decodes plainly elsewhere (`note`
            says so); a folder, GGUF file or hub id of a checkpoint in any layout; None decodes plainly.
        target_options: dtype and device.
        engine_options: block size, acceptor and limits.
        progress: called with a line for people whenever something takes long.

    Raises:
        TargetError: the target cannot be loaded or decoded speculatively.
        CheckpointError: the drafter does not fit the target.
    """
    loaded = load_target(target, target_options, progress)
    drafter, note = _load_drafter(loaded, draft, packing=target_options.pack, progress=progress)
    return Session(loaded, drafter, engine_options, note)


def load_drafter(target: Target, path: Path) -> Drafter:
    """A drafter in any layout, in its target's dtype and on its device.

    Args:
        target: to draft for.
        path: of the checkpoint.

    Raises:
        CheckpointError: it cannot be read, or does not fit the target.
    """
    return read_drafter(path, target.info, target, device=target.device, dtype=target.dtype)


def bundled_drafter(info: TargetInfo) -> Path | None:
    """Folder of the drafter that comes with the package for this target, or None."""
    if any(getattr(info, name) != value for name, value in _BUNDLED_FITS.items()):
        return None
    folder = _bundled_folder()
    return folder if (folder / "config.json").is_file() else None


def drafter_path(name: str, progress: Progress | None = None) -> Path:
    """Where a drafter lies, whatever its target: for looking at it, not for decoding.

    Args:
        name: `auto` or `smollm2` (the bundled one), a folder, a GGUF file, or a hub id, which is fetched.
        progress: called with a line for people when something takes long.

    Raises:
        InputError: there is none of this name.
    """
    if name in ("auto", BUNDLED_TARGET):
        return _bundled_folder()
    return Path(name) if Path(name).exists() else _download(name, progress)


def _bundled_folder() -> Path:
    return Path(str(files("slipstream"))) / "drafters" / BUNDLED_TARGET


def _load_drafter(
    target: Target, draft: str | None, *, packing: bool, progress: Progress | None
) -> tuple[Drafter | None, str]:
    folder, note = _find_drafter(target.info, draft, progress)
    if folder is None:
        return None, note
    drafter = load_drafter(target, folder)
    if packing and target.kernels is None:  # which read weights where they lie
        packed(drafter)
    return drafter, note


def _find_drafter(info: TargetInfo, draft: str | None, progress: Progress | None) -> tuple[Path | None, str]:
    if draft is None:
        return None, "drafting is off"
    if draft == "auto":
        folder = bundled_drafter(info)
        return folder, "" if folder else f"no drafter is bundled for {info.name}, so it is decoded plainly"
    if Path(draft).exists():
        return Path(draft), ""
    return _download(draft, progress), ""


def _download(hub_id: str, progress: Progress | None) -> Path:
    if hub_id.startswith((".", "/", "~")) or hub_id.count("/") > 1 or hub_id.endswith(".gguf"):
        raise InputError(f"no drafter at {hub_id}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if progress is not None:
        progress(f"fetching drafter {hub_id}")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.gguf"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"drafter {hub_id} is neither a folder nor a hub repository that can be read: {reason}"
        ) from error
