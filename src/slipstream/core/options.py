"""Every option and its default, defined once: flags, help and Python calls all read them from here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from slipstream.core.errors import InputError

Acceptor = Literal["match", "reject"]
DraftNoise = Literal["coupled", "argmax"]


@dataclass(frozen=True)
class SamplingOptions:
    """How one request is decoded; every field has its OpenAI / vLLM meaning.

    Attributes:
        temperature: 0 is greedy; above 0 logits are divided by it before the filters.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or output.
        presence_penalty: subtracted once from tokens already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: token id -> value added to its logit.
        seed: of the sampling noise; with it the text is a function of the request alone.
        max_tokens: most tokens to emit.
        min_tokens: no stop token can be chosen before so many tokens.
        stop_token_ids: extra ids that end the text (kept in token_ids, not in text).
        stop: strings that end the text (not part of it).
        ignore_eos: the model's own end tokens do not end the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field, its value and its range.
        """
        checks = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", -(2**63) <= self.seed < 2**63, "a signed 64-bit integer"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            ("stop", all(self.stop), "strings of at least one character"),
        )
        for name, good, range_ in checks:
            if not good:
                raise InputError(f"{name} must be {range_}, not {getattr(self, name)!r}")

    def at_most(self, tokens: int) -> SamplingOptions:
        """The same for a text of at most so many tokens, as warm-ups need it."""
        tokens = min(tokens, self.max_tokens)
        return replace(self, max_tokens=tokens, min_tokens=min(self.min_tokens, tokens))

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Ids that end this request's text, given the model's own end tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens said so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class EngineOptions:
    """What is bound when an engine is built.

    Attributes:
        block_size: most slots of a block, anchor included; 0 takes the drafter's own, 1 decodes plainly.
        drafts: per round: a number, `max` (as many as a block holds), or `auto`: as many as pay, by what
            rounds cost here and how far drafts are right; none where drafting does not pay
            (with the acceptor `reject` it is `max`, as the text would depend on the clock).
        acceptor: `match` keeps drafts that equal the target's choice; `reject` is p/q rejection sampling.
        draft_noise: `coupled` drafts with the target's noise, `argmax` drafts without noise.
        max_rows: requests decoded side by side.
        max_context: longest prompt plus output in tokens; 0 takes the target's own limit.
        prefill_chunk: prompt tokens per target pass.
        prefix_tokens: most tokens of finished requests whose keys and values are kept for prompts that begin
            alike (the turns of a chat); 0 keeps none, so that no text depends on earlier ones even at ties.
        graphs: `auto` captures whole rounds as CUDA graphs on CUDA, where target and proposer allow it;
            `off` never does.
    """

    block_size: int = 0
    drafts: int | Literal["auto", "max"] = "auto"
    acceptor: Acceptor = "match"
    draft_noise: DraftNoise = "coupled"
    max_rows: int = 8
    max_context: int = 0
    prefill_chunk: int = 512
    prefix_tokens: int = 0
    graphs: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field and its range.
        """
        for name, least in (("block_size", 0), ("max_rows", 1), ("max_context", 0), ("prefix_tokens", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if isinstance(self.drafts, int) and self.drafts < 0:
            raise InputError(f"drafts must be at least 0, not {self.drafts}")
        if self.prefill_chunk < 1:
            raise InputError(f"prefill_chunk must be at least 1, not {self.prefill_chunk}")


@dataclass(frozen=True)
class TargetOptions:
    """How a target is loaded.

    Attributes:
        dtype: `auto`, `float32`, `bfloat16` or `float16`; auto is bfloat16 where the hardware multiplies it
            natively and float32 elsewhere.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        trust_remote_code: let the hub repository run its own modelling code.
        kernels: on a CPU, `native` (compiled for Llama-like models, in bfloat16 on AVX-512 with bf16 and in
            float32 on AVX2), `torch`, or `auto`: native where this machine can run and compile them.
        pack: on a CPU in float32, where kernels do not serve, keep the weights in the order that makes
            decoding fast; the model is then for inference only.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    kernels: Literal["auto", "native", "torch"] = "auto"
    pack: bool = True


#: Peak learning rates: of a new drafter, and of one that is trained further, which a higher one throws back.
NEW_RATE, CONTINUED_RATE = 2e-3, 3e-4


@dataclass(frozen=True)
class TrainOptions:
    """How a drafter is trained from features.

    Attributes:
        max_steps: optimiser steps; the learning-rate schedule spans them.
        minutes: when above 0, wall-clock budget that the schedule spans instead of `max_steps`.
        epochs: when above 0, passes over the data that the schedule spans instead of `max_steps`.
        features: `disk` (computed once, gigabytes) or `live` (computed whenever a chat is read, no file).
        workers: processes that compute features on disk, each with a target of its own.
        documents: chats per optimiser step, over all processes and accumulated batches.
        anchors: blocks drawn per chat and step, on average: longer answers get more.
        max_length: longest chat in tokens; of a longer one a part is read, with its context.
        accumulate: batches that one optimiser step is split into, to save memory.
        precision: of the products: `bfloat16` (weights stay float32), `float32`, or `auto` (bfloat16 where
            the hardware multiplies it).
        attention: `sdpa` (dense masks), `flex` (FlexAttention, compiled, on CUDA), or `auto` (flex on CUDA).
        optimizer: `adamw`, or `muon` (for matrices; norms by AdamW).
        learning_rate: peak rate; by default 2e-3 for a new drafter, 3e-4 for one that exists.
        warmup: share of the run with rising rate.
        final_rate: rate at the end, as a share of the peak (cosine in between).
        weight_decay: decoupled, on matrices.
        clip: largest gradient norm.
        loss: `kl` (to the target's own distribution), `tv` (total variation), or `acceptance` (expected
            length).
        soft_share: share of that in the loss; the rest is cross-entropy with the target's words.
        weighting: of the slots, `dpace` (by the drafter's own acceptance) or `decay` (paper).
        gamma: of the `decay` weighting.
        vocabulary: most frequent tokens scored besides each step's labels; 0 scores the whole vocabulary.
        draft_vocabulary: most frequent tokens of the data, the only ones that are drafted; 0: all.
            The text stays the same, and a draft costs less.
        average: decay of the running average of weights that is evaluated and saved; 0 takes the last
            weights.
        feature_noise: standard deviation of noise on features, relative to their own size per tap.
        initialise: start from the target's own late layers where shapes allow.
        evaluate_every: steps between held-out evaluations.
        decode_prompts: held-out prompts that each evaluation really decodes; 0 decodes none.
        workload_prompts: prompts of each bundled workload that the finished drafter is tried on, for its
            card; 0 tries none.
        save_every: steps between checkpoints.
        tracker: also log to `tensorboard` (files in the run folder) or `wandb`, beside metrics.jsonl.
        seed: of anchors, order, noise and initial weights.
    """

    max_steps: int = 2000
    minutes: float = 0.0
    epochs: float = 0.0
    features: Literal["disk", "live"] = "disk"
    workers: int = 1
    documents: int = 16
    anchors: int = 24
    max_length: int = 1024
    accumulate: int = 1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    optimizer: Literal["muon", "adamw"] = "adamw"
    learning_rate: float | None = None
    warmup: float = 0.04
    final_rate: float = 0.02
    weight_decay: float = 0.05
    clip: float = 1.0
    loss: Literal["kl", "tv", "acceptance"] = "kl"
    soft_share: float = 0.7
    weighting: Literal["dpace", "decay"] = "dpace"
    gamma: float = 4.0
    vocabulary: int = 6144
    draft_vocabulary: int = 12288
    average: float = 0.995
    feature_noise: float = 0.0
    initialise: bool = True
    evaluate_every: int = 200
    decode_prompts: int = 4
    workload_prompts: int = 3
    save_every: int = 100
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field and its range.
        """
        least = {"max_length": 16}
        for name in (
            *("max_steps", "workers", "documents", "anchors", "max_length", "accumulate"),
            *("evaluate_every", "save_every"),
        ):
            if getattr(self, name) < least.get(name, 1):
                raise InputError(f"{name} must be at least {least.get(name, 1)}, not {getattr(self, name)}")
        for name in (
            "minutes",
            "epochs",
            "decode_prompts",
            "workload_prompts",
            "vocabulary",
            "draft_vocabulary",
            "feature_noise",
        ):
            if getattr(self, name) < 0:
                raise InputError(f"{name} must be at least 0, not {getattr(self, name)}")
        for name in ("warmup", "final_rate", "soft_share", "average"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if self.learning_rate is not None and self.learning_rate <= 0:
            raise InputError(f"learning_rate must be above 0, not {self.learning_rate}")
        if self.minutes and self.epochs:
            raise InputError("minutes and epochs both say when to stop; give one of them")

    @property
    def peak_rate(self) -> float:
        """Highest learning rate of the run."""
        return NEW_RATE if self.learning_rate is None else self.learning_rate


#: Chats decoded side by side: as many as one pass of the compiled kernels takes (64 tokens).
CHAT_ROWS: Final = 64


@dataclass(frozen=True)
class SynthesisOptions:
    """How the target writes chats.

    Attributes:
        prompt_temperature: of the user turns; high, for variety.
        prompt_top_k: of the user turns; keeps the unlikely tail out.
        prompt_tokens: longest user turn; longer ones are dropped.
        opened_share: share of the user turns that begin with given words ("Summarize the following text:",
            "Write a Python function that"), so that questions are of many kinds; sampled as answers are.
        opened_tokens: most that the target writes of such a turn; a longer one ends with a whole sentence.
        answer_temperature: of the answers that are sampled.
        answer_top_k: of the answers that are sampled; 0 keeps all tokens.
        greedy_share: share of chats whose answers are decoded greedily.
        answer_tokens: longest answer; longer ones are cut.
        turns: most questions of a chat.
        follow_share: how often a chat goes on after an answer, while it has turns left.
        thinking: passed to the chat template as `enable_thinking`; none leaves it to the template.
        seed: the same options and seed give the same chats.
    """

    prompt_temperature: float = 1.0
    prompt_top_k: int = 64
    prompt_tokens: int = 72
    opened_share: float = 0.4
    opened_tokens: int = 160
    answer_temperature: float = 0.8
    answer_top_k: int = 64
    greedy_share: float = 0.6
    answer_tokens: int = 256
    turns: int = 3
    follow_share: float = 0.3
    thinking: bool | None = None
    seed: int = 0


@dataclass(frozen=True)
class DrafterOptions:
    """The shape of a drafter; everything else about it follows from its target.

    Attributes:
        num_layers: draft layers.
        block_size: slots of a block, the anchor included; 0 takes 8, or those of the drafter that is begun
            from.
        taps: target layers whose outputs it reads.
        mask_token_id: a token that is never said, whose embedding fills the slots; -1 takes the last
            row of the embedding that ends no text.
    """

    num_layers: int = 3
    block_size: int = 0
    taps: int = 5
    mask_token_id: int = -1
