"""Small made-up problems on which a posterior can be looked at."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from credo.checks import Count, NotNegative, checked


@checked
def two_moons(n: Count = 200, noise: NotNegative = 0.1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two interleaved half circles: inputs x (n, 2) float32, labels y (n,) int64 in {0, 1}.

    With t uniform on [0, π], class 0 is (cos t, sin t) and class 1 is (1 − cos t, ½ − sin t), each
    plus normal noise. The first ⌈n/2⌉ rows are class 0.

    Args:
        n: How many points.
        noise: Standard deviation of the noise.
        seed: Same seed, same points.

    >>> x, y = two_moons(5, seed=1)
    >>> x.shape, y
    (torch.Size([5, 2]), tensor([0, 0, 0, 1, 1]))
    """
    generator = Generator().manual_seed(seed)
    y = (torch.arange(n) >= (n + 1) // 2).to(torch.int64)
    t = torch.rand(n, generator=generator) * math.pi
    outer = torch.stack([t.cos(), t.sin()], 1)
    inner = torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)
    x = torch.where(y[:, None] == 0, outer, inner)
    return x + noise * torch.randn(n, 2, generator=generator), y


@checked
def sinus_with_gap(
    n: Count = 100, seed: int = 0, noise: NotNegative = 0.1
) -> tuple[Tensor, Tensor]:
    """A sine seen only on both sides of a gap: x (n, 1) and y (n, 1), float32.

    y = sin x + ε with ε ~ N(0, noise²), and x uniform on [−4, −1.5] ∪ [1.5, 4]. In the gap between
    and beyond the ends a good posterior is less certain than near the data.

    Args:
        n: How many points.
        seed: Same seed, same points.
        noise: Standard deviation of the observations.

    >>> x, y = sinus_with_gap(6)
    >>> x.shape, y.shape, bool((x.abs() >= 1.5).all())
    (torch.Size([6, 1]), torch.Size([6, 1]), True)
    """
    generator = Generator().manual_seed(seed)
    u = torch.rand(n, 1, generator=generator) * 2 - 1
    x = torch.where(u < 0, -1.0, 1.0) * (1.5 + 2.5 * u.abs())
    return x, x.sin() + noise * torch.randn(n, 1, generator=generator)


def and_gate() -> tuple[Tensor, Tensor]:
    """Logical AND: the four inputs (4, 2) and their outcomes (4, 1), float32 zeros and ones.

    >>> and_gate()[1].flatten()
    tensor([0., 0., 0., 1.])

    Reference: J. W. Book, "Training Bayesian neural networks", 2020, §2.4: a single Bayesian node.
    """
    x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    return x, x.prod(1, keepdim=True)
