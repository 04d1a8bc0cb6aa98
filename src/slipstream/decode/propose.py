"""Proposers: what drafts a block. The trained drafter, and a stand-in whose drafts are never kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.decode.accept import Proposal
from slipstream.decode.drafting import TorchDrafter, at_work
from slipstream.decode.noise import DRAFT, gumbel
from slipstream.decode.sampling import RowSettings, choose, distribution, named
from slipstream.model import Drafter
from slipstream.target import Target
from slipstream.target.cache import Saved

#: Draft logits_BKV, the positions of the drafts, and what tokens the logits are of (None: all) to a proposal.
DraftChooser = Callable[[Tensor, Tensor, Tensor | None], Proposal]


class Proposer(Protocol):
    """What the engine needs of whatever drafts; its state belongs to one call of the engine."""

    @property
    def block_size(self) -> int:
        """Largest T it can draft for."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs it wants as features."""

    @property
    def token_bytes(self) -> int:
        """Bytes that it keeps per token of context."""

    @property
    def generation(self) -> int | None:
        """Number of the buffers that `propose` and `extend` work in, another one whenever they are made anew;
        None where a proposal takes the host, so that it cannot be part of a captured round.
        """

    def begin(self, rows: int, slots: int) -> None:
        """Forget everything; room for `rows` contexts of `slots` positions."""

    def admit(self, features_BLE: Tensor, row_B: Tensor, start_B: Tensor, visible: int) -> None:
        """A new context in each of the named rows: features from position start_B[b] on, all before slot
        `visible`; what was there is gone. What lies before that comes by `restore`.
        """

    def save(self, row: int, length: int) -> Saved:
        """Copies of what is known of a row's leading positions, for `restore`; empty where nothing is."""

    def restore(self, row: int, saved: Saved, length: int) -> None:
        """Put back the leading `length` positions of what `save` gave, into any row."""

    def extend(
        self, features_BLE: Tensor, position_BL: Tensor, visible: int, row_B: Tensor | None = None
    ) -> None:
        """Features of positions of all rows, or of the named ones, all before slot `visible`; what a later
        call writes again was not valid.
        """

    def propose(
        self,
        anchor_B: Tensor,
        length_B: Tensor,
        num_drafts: int,
        visible: int,
        chooser: DraftChooser,
        row_B: Tensor | None = None,
    ) -> Proposal:
        """Draft for positions after the anchor.

        Args:
            anchor_B: last committed token, at position length_B[b].
            length_B: context strictly before the anchor; 0 in rows that have finished.
            num_drafts: K.
            visible: leading context slots that can hold anything valid.
            chooser: turns draft logits into tokens.
            row_B: rows that anchors and lengths are of; None is all, in order.
        """


@runtime_checkable
class Reader(Protocol):
    """A proposer that drafts from the words themselves."""

    def read(self, row: int, prompt_ids: Sequence[int], said: Sequence[int]) -> None:
        """A new text in a row.

        Args:
            row: of the batch.
            prompt_ids: what was asked.
            said: what has been emitted; it grows with every round.
        """


class DraftProposer:
    """Drafts with a trained drafter; its context keys and values lie in fixed buffers."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        """Pair a drafter with the target whose embedding and head it borrows.

        Raises:
            CheckpointError: the widths differ.
        """
        if drafter.config.target_width != target.info.width or drafter.config.width != target.info.width:
            raise CheckpointError(
                f"the drafter has width {drafter.config.width} and reads a target of width "
                f"{drafter.config.target_width}, but {target.info.name} has width {target.info.width}"
            )
        self._target = target
        self._drafter = drafter
        self._work = at_work(drafter, target.kernels)
        self._ids_V: Tensor | None = None
        if drafter.draft_vocabulary is not None:
            self._ids_V = drafter.draft_vocabulary.to(target.device)
            self._head_VD = target.output_rows(self._ids_V)

    @property
    def block_size(self) -> int:
        """T as trained."""
        return self._drafter.config.block_size

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are read."""
        return self._drafter.config.target_layer_ids

    @property
    def token_bytes(self) -> int:
        """Keys and values of every layer."""
        config = self._drafter.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self._work.dtype.itemsize

    @property
    def generation(self) -> int | None:
        """That of the context's buffers; compiled kernels are not captured."""
        return self._work.context.generation if isinstance(self._work, TorchDrafter) else None

    def begin(self, rows: int, slots: int) -> None:
        """Buffers of this size; those of the last call serve again where they fit."""
        self._work.begin(rows, slots)

    def admit(self, features_BLE: Tensor, row_B: Tensor, start_B: Tensor, visible: int) -> None:
        """Clear the rows, then write their context."""
        self._work.clear(row_B)
        position_BL = start_B[:, None] + torch.arange(features_BLE.shape[1], device=start_B.device)
        self.extend(features_BLE, position_BL, visible, row_B)

    def save(self, row: int, length: int) -> Saved:
        """Keys and values of the context."""
        return self._work.context.save(row, length)

    def restore(self, row: int, saved: Saved, length: int) -> None:
        """Keys and values of the context."""
        self._work.context.restore(row, saved, length)

    def extend(
        self, features_BLE: Tensor, position_BL: Tensor, visible: int, row_B: Tensor | None = None
    ) -> None:
        """Write the keys and values of new positions."""
        self._work.context.aim(position_BL, visible, row_B)
        self._work.write(features_BLE.to(self._work.dtype), position_BL)

    @torch.no_grad()
    def propose(
        self,
        anchor_B: Tensor,
        length_B: Tensor,
        num_drafts: int,
        visible: int,
        chooser: DraftChooser,
        row_B: Tensor | None = None,
    ) -> Proposal:
        """One drafter pass over [anchor, MASK x K], one mask less where the anchor's slot gives a draft."""
        config = self._drafter.config
        first = config.first_draft_slot
        masked = anchor_B.new_full((len(anchor_B), num_drafts + first - 1), config.mask_token_id)
        ids_BT = torch.cat([anchor_B[:, None], masked], dim=1)
        position_BT = length_B[:, None] + torch.arange(ids_BT.shape[1], device=length_B.device)
        x_BTD = self._target.embed(ids_BT).to(self._work.dtype)
        hidden_BTD = self._work.hidden(x_BTD, position_BT, length_B, visible, row_B)
        hidden_BKD = hidden_BTD[:, first:].to(self._target.dtype)
        if self._ids_V is None:
            raw_BKV = self._target.unembed(hidden_BKD)
        else:
            raw_BKV = self._target.product(hidden_BKD, self._head_VD)
        position_BK = position_BT[:, first:] + (1 - first)  # of the drafts, whichever slot gives them
        return chooser(self._drafter.adjust_logits(raw_BKV), position_BK, self._ids_V)


class FeaturelessProposer:
    """What proposers that draft without features have in common: nothing to write, keep or put back."""

    tap_ids: tuple[int, ...] = ()
    token_bytes = 0
    generation: int | None = None

    def begin(self, rows: int, slots: int) -> None:
        """Nothing to remember."""

    def admit(self, features_BLE: Tensor, row_B: Tensor, start_B: Tensor, visible: int) -> None:
        """Nothing to remember."""

    def save(self, row: int, length: int) -> Saved:
        """Nothing to remember."""
        return ()

    def restore(self, row: int, saved: Saved, length: int) -> None:
        """Nothing to remember."""

    def extend(
        self, features_BLE: Tensor, position_BL: Tensor, visible: int, row_B: Tensor | None = None
    ) -> None:
        """Nothing to remember."""


class NullProposer(FeaturelessProposer):
    """Drafts that the target verifies and the engine never keeps: plain decoding in drafted shapes."""

    def __init__(self, block_size: int, tap_ids: tuple[int, ...] = ()) -> None:
        """Blocks of `block_size` slots; taps as of the drafter to compare with."""
        self.block_size = block_size
        self.tap_ids = tap_ids
        self.generation = 0

    def propose(
        self,
        anchor_B: Tensor,
        length_B: Tensor,
        num_drafts: int,
        visible: int,
        chooser: DraftChooser,
        row_B: Tensor | None = None,
    ) -> Proposal:
        """The anchor again and again, not offered."""
        return Proposal(anchor_B[:, None].expand(-1, num_drafts), offered=False)


def make_chooser(settings: RowSettings, acceptor: str, noise: str, vocab_size: int) -> DraftChooser:
    """How draft logits become tokens, bound once per batch.

    `reject` draws from q with noise of its own; `match` takes the target's noise (coupled: arXiv 2408.07978)
    or none (argmax).
    """
    if acceptor == "reject":
        return lambda logits_BKV, position_BK, ids_V: _draw(
            logits_BKV, position_BK, ids_V, settings, vocab_size
        )
    coupled = noise == "coupled" and settings.any_sampled
    return partial(_choose_drafts, settings=settings if coupled else None)


def _choose_drafts(
    logits_BKV: Tensor, position_BK: Tensor, ids_V: Tensor | None, settings: RowSettings | None
) -> Proposal:
    """The likeliest tokens, or the choices of some settings; and how to choose again among fewer."""

    def chosen(logits_BKV: Tensor, position_BK: Tensor, settings: RowSettings | None) -> Tensor:
        if settings is None:
            return named(logits_BKV.argmax(-1), ids_V)
        return choose(logits_BKV, position_BK, settings, None, ids_V).ids_BT

    def again(rows: Sequence[int], slot: int, allowed_GV: Tensor) -> list[int]:
        row_G = torch.tensor(rows, device=logits_BKV.device)
        allowed_GV = allowed_GV.to(logits_BKV.device)
        allowed_GV = allowed_GV if ids_V is None else allowed_GV[:, ids_V]
        permitted_G1V = logits_BKV[row_G, slot].masked_fill(~allowed_GV, -torch.inf)[:, None]
        own = None if settings is None else settings.of_rows(row_G)
        ids_G1 = chosen(permitted_G1V, position_BK[row_G, slot, None], own)
        ids: list[int] = ids_G1[:, 0].tolist()  # host: for grammars only
        return ids

    return Proposal(chosen(logits_BKV, position_BK, settings), again=again)


def _draw(
    logits_BKV: Tensor, position_BK: Tensor, ids_V: Tensor | None, settings: RowSettings, vocab_size: int
) -> Proposal:
    """Sample drafts and keep the distribution they came from, which is over all tokens."""
    if ids_V is not None:
        whole_BKV = logits_BKV.new_full((*logits_BKV.shape[:-1], vocab_size), -torch.inf)
        logits_BKV = whole_BKV.index_copy(-1, ids_V, logits_BKV)
    q_BKV, _ = distribution(logits_BKV, settings)
    noise_BKV = gumbel(settings.seed_B, position_BK, vocab_size, DRAFT)
    return Proposal((q_BKV.log() + noise_BKV).argmax(-1), q_BKV)
