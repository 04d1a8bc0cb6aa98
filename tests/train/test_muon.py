"""Muon's polynomial against the singular value decomposition and against steps on the matrix itself."""

from __future__ import annotations

import pytest
import torch

from slipstream.train.muon import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(8, 8), (8, 20), (20, 8)])
def test_gram_form_equals_steps_on_the_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = (matrix if shape[0] <= shape[1] else matrix.T) / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    expected = x if shape[0] <= shape[1] else x.T
    torch.testing.assert_close(orthogonalise(matrix), expected, atol=1e-4, rtol=1e-4)


def test_singular_values_end_near_one_and_directions_stay() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(3))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalise(matrix)
    rotated = u.T @ result @ v.T
    assert rotated.diagonal().min() > 0.6
    assert rotated.diagonal().max() < 1.3
    assert (rotated - rotated.diagonal().diag()).abs().max() < 1e-3


def test_muon_lowers_a_quadratic() -> None:
    torch.manual_seed(0)
    goal = torch.randn(6, 10)
    weight = torch.nn.Parameter(torch.zeros(6, 10))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        (weight - goal).square().mean().backward()
        optimizer.step()
    assert (weight - goal).square().mean() < 0.1 * goal.square().mean()
