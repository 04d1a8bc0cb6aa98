"""The noise: distribution, independence of shapes, and values that must never change."""

from __future__ import annotations

import torch

from slipstream.decode.noise import CHOICE, DRAFT, gumbel, uniform

MASK = (1 << 64) - 1


def splitmix(z: int) -> int:
    """The finaliser on plain integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_uniform(seed: int, position: int, token: int, stream: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix((splitmix((seed ^ (stream << 40)) & MASK) + position * golden) & MASK)
    bits = splitmix((key + (token + 1) * golden) & MASK)
    return ((bits >> 12) + 0.5) * 2.0**-52


def test_against_plain_integers() -> None:
    seeds = [0, 1, 7, 2**63 - 1, -5]
    drawn = uniform(torch.tensor(seeds), torch.tensor([[0, 3, 99999]] * 5), 4, DRAFT)
    for b, seed in enumerate(seeds):
        for t, position in enumerate((0, 3, 99999)):
            for v in range(4):
                assert drawn[b, t, v].item() == slow_uniform(seed, position, v, DRAFT)


def test_a_seed_keeps_its_noise_for_ever() -> None:
    """A change here changes what every seed says: it needs a line in the changelog."""
    drawn = gumbel(torch.tensor([42]), torch.tensor([[10]]), 3, CHOICE)[0, 0]
    expected = [
        -torch.tensor(slow_uniform(42, 10, v, CHOICE), dtype=torch.float64).log().neg().log()
        for v in range(3)
    ]
    torch.testing.assert_close(drawn.double(), torch.stack(expected), atol=1e-6, rtol=1e-6)


def test_bits_do_not_depend_on_batch_or_block() -> None:
    seeds, positions = torch.tensor([3, 4, 5]), torch.tensor([[1, 2, 3, 4]]).expand(3, -1)
    whole = gumbel(seeds, positions, 50)
    for b in range(3):
        for t in range(4):
            alone = gumbel(seeds[b : b + 1], positions[b : b + 1, t : t + 1], 50)
            assert torch.equal(alone[0, 0], whole[b, t])


def test_moments_and_range() -> None:
    drawn = uniform(torch.arange(50), torch.arange(20).expand(50, -1), 200)
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.002
    noise = -(-drawn.log()).log()
    assert abs(noise.mean() - 0.57722) < 0.01
    assert abs(noise.var() - 1.64493) < 0.03


def test_neighbours_are_uncorrelated() -> None:
    drawn = uniform(torch.arange(40), torch.arange(40).expand(40, -1), 40) - 0.5
    other = uniform(torch.arange(40), torch.arange(40).expand(40, -1), 40, DRAFT) - 0.5
    for a, b in (
        (drawn[1:], drawn[:-1]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[..., 1:], drawn[..., :-1]),
        (drawn, other),
    ):
        assert abs((a * b).mean() * 12) < 0.02


def test_named_tokens_have_the_noise_that_they_have_among_all() -> None:
    seeds, positions = torch.tensor([3, -9]), torch.tensor([[0, 5], [7, 7]])
    ids = torch.tensor([[[4, 0], [99, 4]], [[1, 1], [50, 2]]])
    every = gumbel(seeds, positions, 100)
    assert torch.equal(gumbel(seeds, positions, ids), every.gather(-1, ids))
