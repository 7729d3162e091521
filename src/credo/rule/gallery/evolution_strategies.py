r"""Evolution strategies: the rule without entropy, from values of the loss alone.

With τ = 0 the rule λ ← λ − ρ∇_μE_q[ℓ] descends E_q[ℓ], so that q contracts onto a minimum rather
than settle on a posterior. Stein's identity trades derivatives of ℓ for polynomials in θ − m:

    E[∇ℓ] = E[ℓ(θ)·S(θ − m)],       E[∇²ℓ] = E[ℓ(θ)·(S(θ − m)(θ − m)ᵀS − S)]
    S ← S + ρE[∇²ℓ],                m ← m − αS⁻¹E[∇ℓ]  with the new S

These are natural evolution strategies: ∇_μ is the natural gradient, and the right sides are means
over a population θ_1, …, θ_n ~ q of fitness −ℓ(θ_i). ℓ is never differentiated, so it may have
jumps. A baseline ℓ(m), whose terms have mean zero, is subtracted. The estimate of ∇²ℓ is noisy and
of either sign, so the step is the one that keeps S positive definite. Given up: the exact
expectation. With a `FixedGaussian` only the mean evolves.

    >>> import torch
    >>> from credo.families import DiagGaussian
    >>> from credo.autodiff.loss import Loss
    >>> method = evolution_strategy(rate=0.05, samples=100)
    >>> state = method.init(DiagGaussian(torch.tensor([3.0]), torch.tensor([1.0])))
    >>> stairs = Loss.of(lambda x: x.abs().floor().sum())                # ∇ℓ = 0 almost everywhere
    >>> for _ in range(60):
    ...     state = method.update(state, stairs)
    >>> bool(state.q.mean.abs() < 1)
    True

Reference: Wierstra et al., "Natural evolution strategies", 2014 (arXiv:1106.4487).
"""

from __future__ import annotations

from credo.rule.expectations import MonteCarlo
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, Step

ENTRY = Entry(
    algorithm="natural evolution strategies",
    family="any Gaussian",
    expectation="Monte Carlo, values of ℓ only",
    curvature="from the same values",
    step="τ = 0, positive definite",
    approximates="E_q by a population; ρ² terms keep S positive definite",
    test="tests/theorems/test_gallery_search.py"
    "::test_evolution_strategies_estimate_the_gradients_of_bonnet_and_price",
)


def evolution_strategy(
    rate: float,
    samples: int,
    *,
    mean_rate: float | None = None,
    antithetic: bool = True,
    seed: int = 0,
) -> Learner:
    """Evolve q with ``samples`` draws a step; ``antithetic`` ones come in pairs m ± δ.

    ``rate`` ρ is for the precision, ``mean_rate`` α for the mean, by default ρ too.
    """
    return Learner(
        MonteCarlo(samples, estimator="score", antithetic=antithetic),
        None,
        Step(rate=rate, mean_rate=mean_rate, temperature=0.0, keep_positive=True),
        seed=seed,
    )
