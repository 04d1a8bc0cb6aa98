"""What depends on the tokens said so far: penalties, bias, the ban on stopping early, per slot of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.records import Request


class History:
    """Token counts of every row and the logit changes that follow from them.

    Rows that ask for nothing cost nothing when no row of the batch asks.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        said: Sequence[Sequence[int]] = (),
    ) -> None:
        """Count the prompts and what was said so far; a request's own end tokens are those that min_tokens
        bans.
        """
        options = [request.sampling for request in requests]
        self._counting = any(o.has_penalties for o in options)
        self._biased = any(o.logit_bias for o in options)
        self._banning = any(o.min_tokens for o in options)
        self._prompt_B = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        shape = (len(requests), vocab_size)
        if self._counting:
            self._output_BV = torch.zeros(shape, dtype=torch.int32, device=device)
            self._prompt_BV = torch.zeros(shape, dtype=torch.bool, device=device)
            for row, request in enumerate(requests):
                self._prompt_BV[row, torch.tensor(list(request.prompt_ids), device=device)] = True
            for row, tokens in enumerate(said):
                said_T = torch.tensor(list(tokens), dtype=torch.int64, device=device)
                self._output_BV[row] = torch.bincount(said_T, minlength=vocab_size)
            self._repetition_B = torch.tensor([o.repetition_penalty for o in options], device=device)
            self._presence_B = torch.tensor([o.presence_penalty for o in options], device=device)
            self._frequency_B = torch.tensor([o.frequency_penalty for o in options], device=device)
        if self._biased:
            self._bias_BV = torch.zeros(shape, device=device)
            for row, option in enumerate(options):
                for token, value in option.logit_bias.items():
                    self._bias_BV[row, token] = value
        if self._banning:
            self._least_B = torch.tensor([o.min_tokens for o in options], device=device)
            self._ends_BV = torch.zeros(shape, dtype=torch.bool, device=device)
            for row, option in enumerate(options):
                self._ends_BV[row, list(option.end_ids(eos_token_ids))] = True

    @property
    def kind(self) -> tuple[bool, ...]:
        """All that decides which operations are run."""
        return self._counting, self._biased, self._banning

    def place(self, keep: Callable[[str, Tensor], Tensor]) -> None:
        """Go on in other tensors; `keep` is from a name and a tensor to the one that takes its place."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, keep(name, value))

    def adjust(self, logits_BTV: Tensor, drafts_BK: Tensor, position_BT: Tensor) -> Tensor:
        """Logits as each slot's own history makes them.

        Args:
            logits_BTV: of the target, T = K + 1.
            drafts_BK: slot t has seen the first t drafts.
            position_BT: absolute position of the token to be chosen.
        """
        if self._biased:
            logits_BTV = logits_BTV + self._bias_BV[:, None]
        if self._counting:
            logits_BTV = self._penalise(logits_BTV, drafts_BK)
        if self._banning:
            early_BT = position_BT - self._prompt_B[:, None] < self._least_B[:, None]
            logits_BTV = logits_BTV.masked_fill(early_BT[..., None] & self._ends_BV[:, None], -torch.inf)
        return logits_BTV

    def add(self, tokens_BT: Tensor, emitted_B: Tensor) -> None:
        """Count the first emitted_B[b] tokens of each row as said."""
        if self._counting:
            said_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) < emitted_B[:, None]
            self._output_BV.scatter_add_(1, tokens_BT, said_BT.int())

    def _penalise(self, logits_BTV: Tensor, drafts_BK: Tensor) -> Tensor:
        """Repetition (CTRL, arXiv 1909.05858, section 4.1), then frequency and presence (OpenAI)."""
        count_BTV = self._output_BV[:, None]
        if drafts_BK.shape[1]:
            # Not one_hot, which on some devices reads the drafts on the host to check them.
            none_BKV = self._output_BV.new_zeros((*drafts_BK.shape, logits_BTV.shape[-1]))
            said_BKV = none_BKV.scatter_(-1, drafts_BK[..., None], 1).cumsum(1)
            count_BTV = count_BTV + F.pad(said_BKV, (0, 0, 1, 0))
        seen_BTV = (count_BTV > 0) | self._prompt_BV[:, None]
        factor_B11 = self._repetition_B[:, None, None]
        repeated = torch.where(logits_BTV > 0, logits_BTV / factor_B11, logits_BTV * factor_B11)
        logits_BTV = torch.where(seen_BTV, repeated, logits_BTV)
        logits_BTV = logits_BTV - self._frequency_B[:, None, None] * count_BTV
        return logits_BTV - self._presence_B[:, None, None] * (count_BTV > 0)
