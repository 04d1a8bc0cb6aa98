"""Scripted proposers and tiny targets, for our tests and for yours. Nothing here is meant to be fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from slipstream.decode.accept import Proposal
from slipstream.decode.propose import DraftChooser, FeaturelessProposer
from slipstream.target import Target, target_from_model

#: Row, position of a draft and the right token there, to the token that is drafted.
Script = Callable[[int, int, int], int]


class ScriptedProposer(FeaturelessProposer):
    """Drafts by a script that knows the right continuation of every row.

    Args:
        texts: per row its prompt and the whole right answer.
        script: decides each draft; `right`, `wrong`, `right_for` and `random_draft` make some.
        block_size: largest block.
    """

    def __init__(self, texts: Sequence[Sequence[int]], script: Script, block_size: int) -> None:
        self.block_size = block_size
        self._texts = [list(text) for text in texts]
        self._script = script

    def propose(
        self,
        anchor_B: Tensor,
        length_B: Tensor,
        num_drafts: int,
        visible: int,
        chooser: DraftChooser,
        row_B: Tensor | None = None,
    ) -> Proposal:
        """Follow the script."""
        places = range(len(length_B)) if row_B is None else row_B.tolist()
        rows = [
            [self._draft(row, length + 1 + k, k) for k in range(num_drafts)]
            for row, length in zip(places, length_B.tolist(), strict=True)
        ]
        return Proposal(torch.tensor(rows, device=length_B.device).reshape(len(rows), num_drafts))

    def _draft(self, row: int, position: int, slot: int) -> int:
        """Past the known text any token will do."""
        text = self._texts[row]
        return self._script(slot, position, text[position] if position < len(text) else 0)


def right(slot: int, position: int, token: int) -> int:
    """Always the right token."""
    return token


def wrong(slot: int, position: int, token: int) -> int:
    """Never the right token."""
    return 1 if token != 1 else 2


def right_for(count: int) -> Script:
    """Right for the first `count` drafts of every block, then wrong."""
    return lambda slot, position, token: token if slot < count else wrong(slot, position, token)


def random_draft(seed: int, share: float = 0.5) -> Script:
    """Right with a given probability, drawn anew for every position."""

    def script(slot: int, position: int, token: int) -> int:
        generator = torch.Generator().manual_seed(seed * 100_003 + position)
        drawn = float(torch.rand(1, generator=generator))
        return token if drawn < share else wrong(slot, position, token)

    return script


def tiny_config(vocab_size: int = 64, **changes: Any) -> LlamaConfig:
    """A Llama of two layers and width 32."""
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**(fields | changes))


def tiny_target(
    config: PretrainedConfig | None = None,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    spread: float = 0.3,
) -> Target:
    """A random target in float32.

    Args:
        config: of any causal LM; None takes `tiny_config()`.
        seed: of the weights.
        tokenizer: optional.
        spread: standard deviation of the matrices; larger ones make sharper distributions.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config if config is not None else tiny_config())
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=spread)
    return target_from_model(model.float().eval(), tokenizer, "tiny")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 1 to 256), id 0 ends a text; with a chat template of the ChatML kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0} | {symbol: number for number, symbol in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return fast
