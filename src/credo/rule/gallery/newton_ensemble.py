r"""An ensemble of Newton methods: the rule for a mixture of Gaussians q = Σ_k π_k N(m_k, S_k⁻¹).

A mixture is no exponential family, but the pair (θ, z) of a draw and its component is one for each
z. The Fisher matrix of the pair is block-diagonal, and the block of component k is π_k times its
own, so the factor π_k of ∂_{m_k}L = π_k E_{N_k}[∇f] and ∂_{V_k}L = ½π_k E_{N_k}[∇²f] cancels. With
L = E_q[f] and f = ℓ + log q the rule is

    S_k ← S_k + ρE_{N_k}[∇²f],      m_k ← m_k − ρS_k⁻¹E_{N_k}[∇f]  with the new S_k
    ln(π_k/π_K) ← ln(π_k/π_K) − ρ(E_{N_k} − E_{N_K})[f]

The entropy sits in log q: a lone component has ∇² log q = −S, and its step is (1 − ρ)S + ρE[∇²ℓ];
neighbours push each other apart. Nothing is given up but the exact E_{N_k}. At the means, far-apart
components are Newton methods that know nothing of each other, and π_k ∝ exp(−ℓ(m_k))|S_k|^{−½},
Laplace's evidence of each mode.

    >>> import torch
    >>> from credo.families import FullGaussian, GaussianMixture
    >>> start = [FullGaussian(torch.tensor([m]), torch.tensor([[20.0]])) for m in (-1.5, 1.5)]
    >>> method = NewtonEnsemble(rate=0.5)
    >>> state = method.init(GaussianMixture(torch.zeros(1), tuple(start)))
    >>> wells = Loss.of(lambda x: 5 * (x.square() - 1).square().sum())    # minima at −1 and 1
    >>> for _ in range(30):
    ...     state = method.update(state, wells)
    >>> [round(float(component.mean), 3) for component in state.q.components]
    [-1.0, 1.0]

Reference: Lin, Khan & Schmidt, 2019 (arXiv:1906.02914).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from credo.autodiff.loss import Loss
from credo.checks import positive
from credo.errors import UnsupportedError
from credo.families import FullGaussian, Gaussian, GaussianMixture
from credo.noise import key_to_seed
from credo.rule.curvatures import ExactHessian
from credo.rule.expectations import AtMean, Expectation
from credo.rule.families import Categorical
from credo.rule.families.gaussian_mixture import hessian_log_prob
from credo.rule.gallery.entry import Entry
from credo.rule.rule import gaussian_step, step
from credo.types import Vector

ENTRY = Entry(
    algorithm="ensemble of Newton methods",
    family="mixture of Gaussians",
    expectation="each component's own: at its mean, Monte Carlo or Gauss–Hermite",
    curvature="exact Hessian of ℓ + log q",
    step="ρ in every block",
    approximates="E of each component",
    test="tests/theorems/test_gallery_search.py"
    "::test_far_apart_components_at_their_means_are_independent_newton_methods",
)


@dataclass(frozen=True)
class EnsembleState:
    """The mixture and the number of steps it has made."""

    q: GaussianMixture
    steps: int = 0


@dataclass(frozen=True)
class NewtonEnsemble:
    """The rule for a mixture; ``keep_positive`` takes the improved step of `gaussian_step`.

    With draws that are not antithetic, E_{N_k}[∇ log N_k] = 0 holds in the mean only: near the
    optimum that is less noise, because the draws of ∇ log q cancel those of ∇ℓ.
    """

    rate: float
    expectation: Expectation = field(default_factory=AtMean)
    keep_positive: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        positive("rate", self.rate)
        if self.expectation.values_only:
            raise UnsupportedError(
                "the mixture's rule differentiates the loss: take AtMean, GaussHermite or "
                'MonteCarlo with estimator="reparam"'
            )

    def init(self, q: GaussianMixture) -> EnsembleState:
        """The state before the first step."""
        return EnsembleState(q)

    def update(self, state: EnsembleState, loss: Loss) -> EnsembleState:
        """One step of all components and weights, every gradient taken at the old mixture."""
        q = state.q
        generator = torch.Generator(q.mean.device)
        generator.manual_seed(key_to_seed(self.seed, state.steps))
        of_components = [
            self.derivatives(q, component, loss, generator) for component in q.components
        ]
        # temperature=0: the entropy is in f already.
        components = tuple(
            gaussian_step(
                component,
                gradient,
                hessian,
                self.rate,
                temperature=0.0,
                keep_positive=self.keep_positive,
            )
            for component, (_, gradient, hessian) in zip(q.components, of_components, strict=True)
        )
        values = torch.stack([value for value, _, _ in of_components])
        odds = (values[:-1] - values[-1],)
        weights = step(Categorical(q.log_odds), odds, self.rate, temperature=0.0)
        return EnsembleState(GaussianMixture(weights.logits, components), state.steps + 1)

    def derivatives(
        self, q: GaussianMixture, component: Gaussian, loss: Loss, generator: Generator
    ) -> tuple[Tensor, Vector, Tensor]:
        """E_{N_k} of f = ℓ + log q, of ∇f (P,), and of ∇²f: (P, P), or (P,) if N_k is diagonal."""
        points = list(self.expectation.points(component, generator))
        shares = q.mean.new_tensor([share for share, _ in points])
        thetas = torch.stack([theta for _, theta in points])
        average = loss.smoothed(shares, thetas - component.mean)
        slope, bend = ExactHessian().at(
            average, component.mean, component, isinstance(component, FullGaussian), generator
        )
        return (
            average.value(component.mean) + shares @ q.log_prob(thetas),
            slope + shares @ q.grad_log_prob(thetas),
            bend + torch.tensordot(shares, hessian_log_prob(q, thetas), dims=1),
        )
