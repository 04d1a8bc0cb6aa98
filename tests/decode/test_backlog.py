"""What waits for the proposer: whenever drafts are wanted it knows each row's own context."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.decode import backlog as module
from slipstream.decode.backlog import Backlog, Prompts

ROWS, SLOTS = 4, 120


class Shelf:
    """A proposer that keeps features as they are: (number of the request, position)."""

    def __init__(self) -> None:
        self.context = torch.zeros(ROWS, SLOTS, 2)
        self.seen = 0

    def admit(self, features_BLE: Tensor, row_B: Tensor, start_B: Tensor, visible: int) -> None:
        self.context[row_B] = 0
        for features_LE, row, start in zip(features_BLE, row_B.tolist(), start_B.tolist(), strict=True):
            assert start + len(features_LE) <= visible
            self.context[row, start : start + len(features_LE)] = features_LE
            self.seen += len(features_LE)

    def extend(self, features_BLE: Tensor, position_BL: Tensor, visible: int, row_B: Tensor) -> None:
        assert int(position_BL.max()) < visible
        for place, row in enumerate(row_B.tolist()):
            for feature_E, position in zip(features_BLE[place], position_BL[place].tolist(), strict=True):
                self.context[row, position] = feature_E
                self.seen += 1

    def restore(self, row: int, saved: Any, length: int) -> None:
        self.context[row, :length] = saved[:length]


def features(number: int, begin: int, end: int) -> Tensor:
    return torch.tensor([[float(number), float(position)] for position in range(begin, end)]).reshape(-1, 2)


class Kept:
    def __init__(self, number: int) -> None:
        self.draft = features(number, 0, SLOTS)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_its_own_context_when_drafts_are_wanted(seed: int) -> None:
    draw, shelf = random.Random(seed), Shelf()
    backlog = Backlog(shelf, ROWS)  # type: ignore[arg-type]
    request: list[int | None] = [None] * ROWS
    length, numbers, flushes = [0] * ROWS, 0, 0
    for _ in range(300):
        free = [row for row in range(ROWS) if request[row] is None]
        if free and draw.random() < 0.3:
            rows = draw.sample(free, draw.randint(1, len(free)))
            lengths = [draw.randint(1, 30) for _ in rows]
            shared = [draw.choice([0, 0, n // 2]) for n in lengths]
            block = torch.full((len(rows), max(n - s for n, s in zip(lengths, shared, strict=True)), 2), -1.0)
            kept = []
            for place, (row, whole, begin) in enumerate(zip(rows, lengths, shared, strict=True)):
                numbers += 1
                request[row], length[row] = numbers, whole
                block[place, : whole - begin] = features(numbers, begin, whole)
                kept.append((Kept(numbers) if begin else None, begin))
            tensors = torch.tensor(rows), torch.tensor(shared)
            backlog.admit(Prompts(block, *tensors, tuple(rows), tuple(kept)))  # type: ignore[arg-type]
        # A round without drafts, of all rows or of those in use; rows that nobody uses give features as well.
        about = [row for row, n in enumerate(request) if n is not None or seed % 2]
        if about:
            one = [features(request[row] or -9, length[row], length[row] + 1) for row in about]
            backlog.park(torch.stack(one), torch.tensor([length[row] for row in about]), about)
        for row in range(ROWS):
            length[row] += request[row] is not None
            if request[row] is not None and (draw.random() < 0.05 or length[row] > 80):
                backlog.leave(row)
                request[row], length[row] = None, 0
        if draw.random() < 0.1:
            backlog.flush(max(length) + 6)
            flushes += 1
            for row, number in enumerate(request):
                if number is not None:
                    assert torch.equal(shelf.context[row, : length[row]], features(number, 0, length[row]))
    assert flushes > 10


def test_who_leaves_before_drafts_are_wanted_costs_nothing() -> None:
    shelf = Shelf()
    backlog = Backlog(shelf, ROWS)  # type: ignore[arg-type]
    for number in range(5):
        prompt = Prompts(
            features(number, 0, 9)[None], torch.tensor([2]), torch.tensor([0]), (2,), ((None, 0),)
        )
        backlog.admit(prompt)
        for position in range(9, 20):
            start_B = torch.full((ROWS,), position)
            backlog.park(features(number, position, position + 1).expand(ROWS, 1, 2), start_B, range(ROWS))
        backlog.leave(2)
    backlog.flush(30)
    assert shelf.seen == 0


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3000)
    backlog = Backlog(Shelf(), ROWS)  # type: ignore[arg-type]
    prompt = Prompts(features(1, 0, 9)[None], torch.tensor([0]), torch.tensor([0]), (0,), ((None, 0),))
    backlog.admit(prompt)
    rounds = 0
    while not backlog.full:
        backlog.park(torch.zeros(ROWS, 1, 2), torch.full((ROWS,), 9 + rounds), range(ROWS))
        rounds += 1
    assert rounds == (3000 - 9 * 2 * 4) // (ROWS * 2 * 4) + 1
    backlog.flush(118)
    assert not backlog.full
    nobody = Backlog(None, ROWS)
    nobody.admit(prompt)
    nobody.park(torch.zeros(ROWS, 1, 2), torch.zeros(ROWS), range(ROWS))
    nobody.flush(30)
    assert nobody.tokens == 0
