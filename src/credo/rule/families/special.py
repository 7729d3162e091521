r"""What the conjugate families share: gamma-type functions without cancellation, and inverses.

For large a, ψ(a) and ln a agree in their leading digits, and so do ln Γ(a) and Stirling's formula.
The differences are what entropies, divergences and inverses are made of, so they get functions:

===================== =================================== =======================
`digamma_minus_log`   δ(a) = ψ(a) − ln a                  −1/(2a) − Σ Bₙ/(n aⁿ)
`stirling_remainder`  R(a) = ln Γ(a) − Stirling's formula Σ Bₙ/(n(n−1) aⁿ⁻¹)
`trigamma_excess`     ε(a) = a ψ′(a) − 1                  1/(2a) + Σ Bₙ/aⁿ
===================== =================================== =======================

with Bernoulli numbers Bₙ, n = 2, 4, …, 12, for a ≥ 16. Below, ψ and ψ′ are taken from a + 16 by
their recurrence: torch's ψ′, which is also the derivative of its ψ, is right to nine digits only.

The inverses `gamma_shape` and `dirichlet_concentration` iterate in float64 without a graph. Their
last Newton step is differentiable; as it starts at the solution, its first derivative is exact.

Reference: Abramowitz & Stegun, 6.1.40, 6.3.18, 6.4.12; Minka, "Estimating a Dirichlet
distribution", 2000, and "Estimating a Gamma distribution", 2002.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from credo.errors import DataError
from credo.families.base import check_floating, refuse_unless

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730)
_LARGE = 16.0
_EULER = 0.5772156649015329
_LOG_SUM_BRACKET = 40.0


def digamma_minus_log(a: Tensor) -> Tensor:
    """δ(a) = ψ(a) − ln a for a > 0, elementwise.

    >>> digamma_minus_log(torch.tensor([1.0, 1e6]))
    tensor([-5.7722e-01, -5.0000e-07])
    """
    large, small = a.clamp(min=_LARGE), a.clamp(max=_LARGE)
    shift = torch.log1p(_LARGE / small) - _steps(small).sum(-1)
    return torch.where(a >= _LARGE, _delta(large), _delta(small + _LARGE) + shift)


def stirling_remainder(a: Tensor) -> Tensor:
    """R(a) = ln Γ(a) − (a − ½) ln a + a − ½ ln 2π for a > 0, elementwise.

    >>> stirling_remainder(torch.tensor([1.0, 1e6]))
    tensor([8.1061e-02, 8.3333e-08])
    """
    large, small = a.clamp(min=_LARGE), a.clamp(max=_LARGE)
    tail = _series(large, [b / (2 * i * (2 * i - 1)) for i, b in enumerate(_BERNOULLI, 1)])
    stirling = (small - 0.5) * small.log() - small + 0.5 * math.log(2 * math.pi)
    return torch.where(a >= _LARGE, tail / large, torch.lgamma(small) - stirling)


def trigamma_excess(a: Tensor) -> Tensor:
    """ε(a) = a ψ′(a) − 1 for a > 0, elementwise: positive, falling from 1/a to 1/(2a)."""
    large, small = a.clamp(min=_LARGE), a.clamp(max=_LARGE)
    shifted = small + _LARGE
    trigamma = (1 + _epsilon(shifted)) / shifted + _steps(small).square().sum(-1)
    return torch.where(a >= _LARGE, _epsilon(large), small * trigamma - 1)


def gamma_shape(log_gap: Tensor) -> Tensor:
    """The a > 0 with ln a − ψ(a) = ``log_gap`` > 0, which is ln E x − E ln x of a Gamma.

    >>> gamma_shape(-digamma_minus_log(torch.tensor([0.01, 3.0, 1e4], dtype=torch.float64)))
    tensor([1.0000e-02, 3.0000e+00, 1.0000e+04], dtype=torch.float64)
    """
    target = log_gap.double()

    def newton_step(a: Tensor) -> Tensor:
        # Newton in ln a, where the slope of ln a − ψ(a) is −ε(a).
        return a * torch.exp((-digamma_minus_log(a) - target) / trigamma_excess(a))

    with torch.no_grad():
        root = (9 + target * (18 + target)).sqrt()
        a = torch.where(target > 3, 2 / (root + target - 3), (3 - target + root) / (12 * target))
        for _ in range(6):
            a = newton_step(a)
    return newton_step(a).to(log_gap.dtype)


def dirichlet_concentration(expected_logs: Tensor) -> Tensor:
    """The α > 0 with ψ(α_k) − ψ(Σα) = μ_k, (..., K) → (..., K); needs Σ exp μ_k < 1 and K ≥ 2.

    One unknown is enough: with s = Σα, α_k(s) = ψ⁻¹(μ_k + ψ(s)) solves all equations but the sum.
    ln Σα_k(s) − ln s falls from ln K through its only root to ln Σ exp μ_k, so Newton within a
    bracket can't miss it. Last comes Newton in all α, whose Jacobian is diagonal minus rank one.

    >>> alpha = torch.tensor([0.01, 3.0, 1e4], dtype=torch.float64)
    >>> dirichlet_concentration(torch.digamma(alpha) - torch.digamma(alpha.sum()))
    tensor([1.0000e-02, 3.0000e+00, 1.0000e+04], dtype=torch.float64)
    """
    target = expected_logs.double()

    def newton_step(alpha: Tensor) -> Tensor:
        total = alpha.sum(-1, keepdim=True)
        share = alpha / total
        residual = target - share.log() - digamma_minus_log(alpha) + digamma_minus_log(total)
        excess, total_excess = trigamma_excess(alpha), trigamma_excess(total)
        # (D − z11ᵀ)⁻¹r by Sherman–Morrison in units of α, D = diag ψ′(α_k), z = ψ′(s). The
        # denominator 1 − zΣ1/ψ′(α_k) is written as a sum of positive terms: it tends to 0.
        direct = residual / (1 + excess)
        denominator = (share * (excess - total_excess) / (1 + excess)).sum(-1, keepdim=True)
        shared = (1 + total_excess) * (share * direct).sum(-1, keepdim=True) / denominator
        return alpha * torch.exp(direct + shared / (1 + excess))

    with torch.no_grad():
        alpha = _concentration_by_bracketing(target)
        alpha = newton_step(newton_step(alpha))
    return newton_step(alpha).to(expected_logs.dtype)


def sample_log_gamma(shape: Tensor, n: int, generator: Generator | None) -> Tensor:
    """n draws of ln x for x ~ Gamma(shape, 1): (n, ...), in float64 and differentiable.

    x = y·U^{1/a} with y ~ Gamma(a + 1, 1) has its logarithm where x itself underflows, which at
    a = 0.01 and float32 is four draws in ten.
    """
    many = shape.double().expand(n, *shape.shape)
    uniform = torch.rand(many.shape, generator=generator, dtype=many.dtype, device=many.device)
    boosted = torch._standard_gamma(many + 1, generator=generator)
    return boosted.log() + torch.log1p(-uniform) / many


def check_positive(family: str, **fields: Tensor) -> None:
    """Raise `DataError` unless all are floating, of one shape, positive and finite."""
    check_fields(family, **fields)
    for name, value in fields.items():
        value = value.detach()
        valid = (value > 0) & torch.isfinite(value)
        refuse_unless(valid, value, family, name, "positive and finite")


def check_fields(family: str, **fields: Tensor) -> None:
    """Raise `DataError` unless all are floating, of one dtype and of one shape."""
    check_floating(**fields)
    shapes = {name: tuple(value.shape) for name, value in fields.items()}
    if len(set(shapes.values())) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"{family}: {' and '.join(fields)} must have one shape, got {given}")


def check_events(theta: Tensor, event_shape: tuple[int, ...], family: str) -> None:
    """Raise `DataError` unless ``theta`` is (..., event): a silent broadcast would miscount."""
    start = theta.dim() - len(event_shape)
    if start < 0 or tuple(theta.shape[start:]) != event_shape:
        raise DataError(
            f"{family}: expected events of shape (..., {', '.join(map(str, event_shape))}), got "
            f"{tuple(theta.shape)}"
        )


def check_simplex(probs: Tensor, family: str, name: str) -> None:
    """Raise `DataError` unless all are positive and sum to 1 over the last dimension."""
    probs = probs.detach()
    valid = (probs > 0) & torch.isfinite(probs)
    refuse_unless(valid, probs, family, name, "positive and finite")
    total = probs.sum(-1)
    tolerance = max(1e-6, 8 * torch.finfo(probs.dtype).eps * probs.shape[-1])
    near_one = (total - 1).abs() <= tolerance
    refuse_unless(near_one, total, family, f"the sum of {name}", f"1 within {tolerance:.1g}")


def _delta(a: Tensor) -> Tensor:
    tail = _series(a, [-b / (2 * i) for i, b in enumerate(_BERNOULLI, 1)])
    return (tail / a - 0.5) / a


def _epsilon(a: Tensor) -> Tensor:
    return (_series(a, list(_BERNOULLI)) / a + 0.5) / a


def _steps(a: Tensor) -> Tensor:
    """1/a, 1/(a + 1), …, 1/(a + 15), in a last dimension: what ψ gains from a to a + 16."""
    return (a.unsqueeze(-1) + torch.arange(_LARGE, dtype=a.dtype, device=a.device)).reciprocal()


def _series(a: Tensor, coefficients: list[float]) -> Tensor:
    """c₁ + c₂/a² + c₃/a⁴ + …, by Horner."""
    inverse_square = a.square().reciprocal()
    total = torch.zeros_like(a)
    for coefficient in reversed(coefficients):
        total = total * inverse_square + coefficient
    return total


def _inverse_digamma(y: Tensor) -> Tensor:
    """The a > 0 with ψ(a) = y, from Minka's start, which five Newton steps take to float64."""
    a = torch.where(y >= -2.22, y.exp() + 0.5, -1 / (y.clamp(max=-2.22) + _EULER))
    for _ in range(5):
        a = a - (torch.digamma(a) - y) / torch.polygamma(1, a)
    return a


def _concentration_by_bracketing(target: Tensor) -> Tensor:
    """α to a relative accuracy that Newton's last steps double, for any legal μ (..., K)."""
    low = torch.full_like(target[..., :1], -_LOG_SUM_BRACKET)
    high = -low
    log_sum = torch.zeros_like(low)
    for _ in range(200):
        total = log_sum.exp()
        alpha = _inverse_digamma(target + torch.digamma(total))
        reached = alpha.sum(-1, keepdim=True)
        gap = reached.log() - log_sum
        low, high = torch.where(gap > 0, log_sum, low), torch.where(gap > 0, high, log_sum)
        rates = torch.polygamma(1, total) / torch.polygamma(1, alpha)
        slope = total * rates.sum(-1, keepdim=True) / reached - 1
        proposal = log_sum - gap / slope
        inside = (proposal > low) & (proposal < high)
        moved = torch.where(inside, proposal, (low + high) / 2)
        if bool(((moved - log_sum).abs() < 1e-9).all()):
            break
        log_sum = moved
    return alpha
