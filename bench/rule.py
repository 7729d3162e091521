"""The learning rule's own steps: Adam on a flat vector, and a dense Gaussian."""

from __future__ import annotations

import torch
from torch import nn

from bench.timing import Contestants, Row, interleave
from credo.families import DiagGaussian, FullGaussian
from credo.rule.gallery.adam import adam
from credo.rule.gallery.newton import newton


def adam_step(parameters: int = 10**6) -> list[Row]:
    """One step given its gradient: the engine's Adam against torch's on the same vector."""
    gradient = torch.randn(parameters)

    def by_torch(**settings: bool) -> object:
        parameter = nn.Parameter(torch.randn(parameters))
        parameter.grad = gradient
        return torch.optim.Adam([parameter], lr=1e-3, **settings).step

    method = adam(lr=1e-3)
    flat = DiagGaussian(torch.randn(parameters), torch.tensor(torch.inf))
    fused, composed = method.init(flat), method.init(flat)
    contestants: Contestants = {
        "adam": by_torch(),
        "adam fused": by_torch(fused=True),
        "adam fused again (control)": by_torch(fused=True),
        "the rule's Adam": lambda: method.move(fused, gradient, None),
        "the rule's Adam, composed": lambda: method.move(composed, gradient, gradient.square()),
    }
    baselines = {"adam fused": "adam fused", "adam": "adam"}
    return interleave("optimizer step", "10⁶ weights", contestants, baselines, rounds=61, steps=10)


def dense_step(weights: int = 2000) -> list[Row]:
    """One Newton step of a dense Gaussian against the factorisation and the solves it must do."""
    root = torch.randn(weights, weights, dtype=torch.float64)
    hessian = root @ root.mT / weights + torch.eye(weights, dtype=torch.float64)
    gradient = torch.randn(weights, dtype=torch.float64)
    method = newton(rate=0.5)
    start = FullGaussian(torch.zeros(weights, dtype=torch.float64), hessian)

    def necessary() -> torch.Tensor:
        factor = torch.linalg.cholesky(hessian)
        half = torch.linalg.solve_triangular(factor, gradient.unsqueeze(-1), upper=False)
        return torch.linalg.solve_triangular(factor.mT, half, upper=True)

    contestants: Contestants = {
        "Cholesky and two solves": necessary,
        "Cholesky and two solves again (control)": necessary,
        "the rule's step": lambda: method.move(method.init(start), gradient, hessian),
    }
    baselines = {"Cholesky and two solves": "Cholesky and two solves"}
    return interleave("dense step", f"{weights} weights", contestants, baselines, 11, 1)
