"""Muon: momentum, then the update of each matrix replaced by its nearest orthogonal one.

Source: Jordan et al., "Muon" (2024), with the scale of Liu et al., arXiv 2502.16982 (0.2 * sqrt(larger)),
so that learning rates are those of AdamW. Where bfloat16 is no faster, the Newton-Schulz polynomials run on
the small Gram matrix, which for a wide matrix costs a fraction of running them on the matrix itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

# Quintic coefficients of the Muon write-up: singular values from about 0.01 up end near 1 after five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrix: Tensor, steps: int = 5, low_precision: bool = False) -> Tensor:
    """Push all singular values of a 2-D matrix towards one: X <- (aI + bXX' + c(XX')^2) X, `steps` times.

    Args:
        matrix: float32.
        steps: of the iteration.
        low_precision: products in bfloat16, as the write-up does it: faster where the hardware multiplies
            that, and the directions of small singular values become noisy.

    Returns:
        float32, of the same shape.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if tall else matrix).float()
    wide = wide / (wide.norm() + 1e-7)
    result = _step_by_step(wide.bfloat16(), steps).float() if low_precision else _through_gram(wide, steps)
    return result.T if tall else result


def _step_by_step(wide: Tensor, steps: int) -> Tensor:
    """The iteration as it is written: rounding errors of one step are worked on by the next."""
    for _ in range(steps):
        gram = wide @ wide.T
        wide = _A * wide + (_B * gram + _C * (gram @ gram)) @ wide
    return wide


def _through_gram(wide: Tensor, steps: int) -> Tensor:
    """All steps as one polynomial in the Gram matrix, applied once: fewer operations, but no second
    chance.
    """
    gram = wide @ wide.T
    total = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    eye = total
    for step in range(steps):
        factor = _A * eye + _B * gram + _C * (gram @ gram)
        total = factor @ total
        if step + 1 < steps:
            gram = factor @ gram @ factor
    return total @ wide


class Exchange(Protocol):
    """Whole matrices for work that parts cannot do, where parameters are split over processes."""

    @property
    def processes(self) -> int:
        """Matrices that are worked on at once."""

    def __call__(self, parts: list[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Results of `work` on the whole matrices, split as the parts are."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for 2-D parameters only.

    Attributes:
        exchange: set where parameters are split over processes, each of which then orthogonalises every
            so-manieth matrix.
    """

    exchange: Exchange | None = None

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 2e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        low_precision: bool = False,
    ) -> None:
        """Args are those of any optimiser; `params` must all be matrices; `low_precision` is
        `orthogonalise`'s.
        """
        self._low_precision = low_precision
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        work = partial(orthogonalise, low_precision=self._low_precision)
        for group in self.param_groups:
            due = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.exchange is None:
                for parameter in due:
                    self._apply(parameter, work(self._update(parameter, group)), group)
                continue
            # Matrices of about one size together, so that no process waits for another.
            due.sort(key=Tensor.numel)
            for start in range(0, len(due), self.exchange.processes):
                together = due[start : start + self.exchange.processes]
                updates = [self._update(parameter, group) for parameter in together]
                for parameter, direction in zip(together, self.exchange(updates, work), strict=True):
                    self._apply(parameter, direction, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient with Nesterov momentum."""
        assert parameter.grad is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        buffer.lerp_(parameter.grad, 1 - group["momentum"])
        update: Tensor = parameter.grad.lerp(buffer, group["momentum"])
        return update

    def _apply(self, parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """Decay, then move against a direction."""
        scale = 0.2 * max(parameter.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * scale)
