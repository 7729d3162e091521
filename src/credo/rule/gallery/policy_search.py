r"""Natural policy search: the rule where the loss is minus the return of an episode.

A policy's parameters have a Gaussian q = N(m, S⁻¹). Each draw θ ~ q plays a whole episode with
actions that need no noise of their own: the agent explores in parameter space. With ℓ = −R,

    maximise E_q[R(θ)] + τH(q):      S ← (1 − ρτ)S + ρE_q[∇²ℓ],      m ← m − αS⁻¹E_q[∇ℓ]

and the temperature τ is what exploration is worth: 0 lets q shrink around one policy (natural
evolution strategies), more keeps it wide. Returns can't be differentiated, so both expectations are
score estimates from the draws of a generation,

    E[∇ℓ] ≈ 1/(K−1) Σ_k (ℓ_k − ℓ̄)e_k,    E[∇²ℓ] ≈ 1/(K−1) Σ_k (ℓ_k − ℓ̄)(e_k e_kᵀ − S),

with e_k = S(θ_k − m).

The mean ℓ̄ of the K independent draws costs no episodes; K − 1 in place of K keeps the estimates
unbiased, as if each draw's baseline were the mean of the others. The curvature is noisy and of any
sign: `Step(keep_positive=True)` takes the improved step, which differs in second order of ρ.

``shaping="ranks"`` replaces ℓ_k by its rank among the K draws, mapped to mean 0 and variance 1: no
outlier or scale of rewards matters any more, but then E_q[R] is no longer what is maximised, and τ
is measured in standard deviations of the return within a generation.

    >>> import torch
    >>> from credo.families import DiagGaussian
    >>> search = PolicySearch(draws=64, step=Step(rate=0.1, temperature=0.1, keep_positive=True))
    >>> state = search.init(DiagGaussian(torch.zeros(2), torch.ones(2)))
    >>> for _ in range(200):
    ...     state = search.update(state, lambda theta, seed: -float((theta - 3).square().sum()))
    >>> bool((state.q.mean - 3).abs().max() < 0.2)
    True

References: Rückstieß et al., "Exploring parameter space in reinforcement learning", 2010; Wierstra
et al., "Natural evolution strategies", 2014; Khan, 2019, "Learning-algorithms from Bayesian
principles".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from credo.checks import Range, checked
from credo.errors import NonFiniteError
from credo.families import DiagGaussian, Gaussian
from credo.noise import key_to_seed
from credo.rule.expectations import MonteCarlo
from credo.rule.gallery.entry import Entry
from credo.rule.learner import Learner, LearnerState, Step, precision_of
from credo.types import Vector

ENTRY = Entry(
    algorithm="natural policy search, parameter-space exploration",
    family="diagonal or full Gaussian",
    expectation="Monte Carlo, scores",
    curvature="from values",
    step="ρ, improved; τ = worth of exploration",
    approximates="the return by its rank, if shaped",
    test="papers/tests/test_policy_search.py"
    "::test_the_search_converges_to_the_maximum_entropy_policy_of_a_quadratic_return",
)

EpisodeReturn = Callable[[Vector, int], float]
"""The return of an episode of policy θ (P,) that starts from this seed."""


@checked
@dataclass(frozen=True)
class PolicySearch:
    """``draws`` K policies a generation, one episode each, all from the same seed."""

    draws: Annotated[int, Range(2)]
    step: Step
    shaping: Literal["none", "ranks"] = "none"
    seed: int = 0

    @property
    def learner(self) -> Learner:
        """The rule for values of a loss alone."""
        return Learner(MonteCarlo(self.draws, estimator="score"), None, self.step, seed=self.seed)

    def init(self, q: Gaussian) -> LearnerState:
        """The state before the first generation."""
        return self.learner.init(q)

    def update(self, state: LearnerState, episode_return: EpisodeReturn) -> LearnerState:
        """Play one generation of K episodes and take one step; the state is returned."""
        policies = self.policies(state)
        episode = key_to_seed(self.seed, state.steps, 1)
        returns = [episode_return(theta, episode) for theta in policies]
        return self.learn(state, policies, returns)

    def policies(self, state: LearnerState) -> Tensor:
        """The θ that this generation tries, (K, P): a function of the seed and the generation."""
        generator = torch.Generator(state.q.mean.device)
        generator.manual_seed(key_to_seed(self.seed, state.steps))
        points = self.learner.expectation.points(state.q, generator)
        return torch.stack([theta for _, theta in points])

    def learn(self, state: LearnerState, policies: Tensor, returns: list[float]) -> LearnerState:
        """One step of the rule, given the returns of the policies."""
        if len(returns) != len(policies) or not all(map(math.isfinite, returns)):
            raise NonFiniteError(
                f"generation {state.steps} needs {len(policies)} finite returns, got {returns}"
            )
        losses = -torch.tensor(returns, dtype=policies.dtype, device=policies.device)
        if self.shaping == "ranks":
            losses = ranks(losses)
        return self.learner.move(state, *score_estimates(state.q, policies, losses))


def score_estimates(q: Gaussian, points: Tensor, losses: Tensor) -> tuple[Vector, Tensor]:
    """E_q[∇ℓ] (P,) and E_q[∇²ℓ], (P,) or (P, P), from losses (K,) at draws (K, P) of q."""
    excess = (losses - losses.mean()) / (len(losses) - 1)
    pulls = -q.grad_log_prob(points)
    if isinstance(q, DiagGaussian):
        return excess @ pulls, excess @ (pulls.square() - precision_of(q))
    # Σ(ℓ − ℓ̄) = 0, so S drops out.
    return excess @ pulls, (excess * pulls.mT) @ pulls


def ranks(losses: Tensor) -> Tensor:
    """Ranks of losses (K,) with mean 0 and variance 1; equal losses share theirs.

    >>> ranks(torch.tensor([5.0, -1.0, 5.0, 300.0]))
    tensor([ 0.0000, -1.4142,  0.0000,  1.4142])
    """
    below = (losses[:, None] > losses).sum(1)
    not_above = (losses[:, None] >= losses).sum(1)
    place = (below + not_above).to(losses)
    centred = place - place.mean()
    spread = centred.square().mean().sqrt()
    return centred / spread if spread > 0 else centred
