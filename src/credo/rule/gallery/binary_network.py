r"""Networks of ±1 weights: the rule for signs, of which straight-through is a case.

Every weight w ∈ {−1, +1} has q(w) ∝ e^{λw}, with natural λ = ½ ln(p/(1−p)) and expectation
μ = E w = tanh λ. For n·E_q[ℓ̄] + τ·KL(q‖q₀), where ∇_μKL(q‖q₀) = λ − λ₀, the rule is

    λ ← λ − ρ( ∇_μE_q[nℓ̄] + τ(λ − λ₀) ),       ∇_μE_q[nℓ̄] ≈ n·s⊙∇ℓ̄(w)  at one draw of w

where μ is always that of the new λ. With ε = ½ ln(u/(1−u)), u uniform, sign(λ + ε) is a draw from
q, since P(ε > −λ) = σ(2λ). The two estimators are what stands for w and its slope s = ∂w/∂μ:

``relaxation=T``     BayesBiNN: w = tanh((λ+ε)/T), a draw made smooth, and s = (∂w/∂λ)/(∂μ/∂λ) =
                     sech²((λ+ε)/T)/(T·sech²λ). Unbiased only as T → 0, where s becomes rare and
                     huge: zero but for a share ~T of the draws, of variance ~1/T.
``relaxation=None``  straight-through: w = sign(λ+ε), whose gradient is copied to μ as if s = 1.
                     Exact if ℓ is linear in each weight by itself, as any function of signs can be
                     written, but a network's ℓ between the signs bends. No T → 0 limit of the
                     above; BayesBiNN's published code at T = 1e-10 is this one with s = 1/sech²λ,
                     because of the 1e-10 it adds to sech² twice.

``momentum`` is the rule's heavy ball in λ. Parameters other than the weights of Linear and Conv2d
layers (biases, batch-norm gains) have no distribution: they take gradient steps, which is the rule
for a Gaussian of fixed covariance looked at from its mean.

    >>> import torch
    >>> from credo.likelihoods import Gaussian
    >>> net = torch.nn.Linear(3, 1, bias=False)
    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> y = x @ torch.tensor([[1.0], [-1.0], [1.0]])
    >>> method = BinaryNetwork(rate=0.01)
    >>> state = method.init(Model(net, Gaussian(scale=1.0), random=sign_weights), num_data=64)
    >>> for _ in range(200):
    ...     state = method.update(state, (x, y))
    >>> mode(state.q)
    tensor([ 1., -1.,  1.])

References: Meng, Bachmann & Khan, "Training binary neural networks using the Bayesian learning
rule", 2020 (arXiv:2002.10778); Khan, 2019, "STE is derived using Bernoulli distribution".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from credo.checks import Decay, NotNegative, Positive, checked, positive
from credo.errors import NonFiniteError, UnsupportedError
from credo.families import Delta
from credo.model import Model
from credo.noise import key_to_seed
from credo.posterior.posterior import Posterior
from credo.rule import rule
from credo.rule.families import SignBernoulli
from credo.rule.gallery.entry import Entry
from credo.types import Batch, Segment, Vector

ENTRY = Entry(
    algorithm="BayesBiNN, straight-through estimator",
    family="signs ±1",
    expectation="one relaxed draw, or one draw",
    curvature="none",
    step="ρ, heavy ball",
    approximates="the loss between the signs: smoothed at T, or taken as linear in each weight",
    test="tests/theorems/test_gallery_binary.py"
    "::test_the_relaxed_gradient_loses_its_bias_as_its_temperature_falls",
)

At = Literal["samples", "mode"]


def sign_weights(segment: Segment) -> bool:
    """Whether a parameter is the weight of a Linear or Conv2d layer: ``Model(…, random=this)``."""
    return segment.layer_type in ("Linear", "Conv2d") and segment.name.endswith("weight")


@dataclass
class BinaryState:
    """The signs' distribution, the one before it, and the mean loss of the last batch."""

    model: Model
    num_data: int
    q: SignBernoulli
    previous: SignBernoulli
    prior: SignBernoulli
    steps: int = 0
    nll: float = math.nan


@checked
@dataclass(frozen=True)
class BinaryNetwork:
    """λ ← λ − ρ(n·s⊙∇ℓ̄(w) + τ(λ − λ₀)) + γ(λ − λ₋), one backward pass a step.

    ``rate`` ρ, ``relaxation`` T or None, ``temperature`` τ, ``momentum`` γ; ``point_rate`` is the
    step of the parameters that are no signs, along the mean loss. Draws are a function of ``seed``
    and the step's number.
    """

    rate: Positive
    relaxation: Positive | None = None
    temperature: NotNegative = 1.0
    momentum: Decay = 0.0
    point_rate: NotNegative = 0.01
    seed: int = 0

    @checked
    def init(
        self, model: Model, num_data: int, spread: Positive = 1, prior: SignBernoulli | None = None
    ) -> BinaryState:
        """λ uniform in ±``spread``; ``prior`` q₀ defaults to fair coins, λ₀ = 0."""
        if others := [s.name for s in model.random.segments if not sign_weights(s)]:
            raise UnsupportedError(
                f"only weights of Linear and Conv2d layers become signs, but {others} are random "
                "too: build Model(net, likelihood, random=sign_weights)"
            )
        flat = model.bind()
        flat.forget_gradients()
        generator = torch.Generator(flat.vector.device).manual_seed(key_to_seed(self.seed))
        uniform = flat.vector.new_empty(model.random.size).uniform_(-1, 1, generator=generator)
        q = SignBernoulli(spread * uniform)
        prior = SignBernoulli(torch.zeros_like(uniform)) if prior is None else prior
        q.check_same_family(prior)
        return BinaryState(model, int(positive("num_data", num_data)), q, q, prior)

    def update(self, state: BinaryState, batch: Batch) -> BinaryState:
        """One step on a minibatch; the state is changed and returned. The net keeps the draw."""
        flat, signs, points = state.model.bind(), state.model.random, state.model.deterministic
        generator = torch.Generator(flat.vector.device)
        generator.manual_seed(key_to_seed(self.seed, state.steps, 1))
        weights, slope = draw(state.q, self.relaxation, generator)
        with flat.writing() as vector:
            signs.write(vector, weights)
        loss = state.model.mean_nll(batch)
        loss.backward()
        state.nll = loss.item()
        gradient = flat.gradient(signs, out=weights).mul_(slope).mul_(state.num_data)
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(
                f"the gradient is not finite at step {state.steps}, where the loss is {state.nll} "
                f"and |λ| at most {float(state.q.half_logit.abs().max()):.3g}: lower the rate. A "
                "relaxed slope grows as e^{2|λ|}; relaxation=None takes none"
            )
        gradient.sub_(state.prior.half_logit, alpha=self.temperature)
        moved = rule.step(
            state.q, (gradient,), self.rate, temperature=self.temperature,
            momentum=self.momentum, previous=state.previous,
        )  # fmt: skip
        state.q, state.previous, state.steps = moved, state.q, state.steps + 1
        if points.size:
            down = flat.gradient(points, out=flat.vector.new_empty(points.size))
            with flat.writing() as vector:
                points.write(vector, points.read(vector).sub_(down, alpha=self.point_rate))
        return state

    @checked
    def posterior(self, state: BinaryState, at: At = "samples") -> Posterior:
        """Networks of signs drawn from q; ``at="mode"`` the single one of the likeliest signs."""
        family = Delta(mode(state.q)) if at == "mode" else state.q
        return Posterior.at_network(state.model, family)


def draw(
    q: SignBernoulli, relaxation: Positive | None, generator: Generator | None = None
) -> tuple[Vector, Tensor]:
    """w, (P,), and s = ∂w/∂μ, with w relaxed at T or, where ``relaxation`` is None, a sign.

    >>> draw(SignBernoulli(torch.full((3,), 9.0)), None)
    (tensor([1., 1., 1.]), tensor(1.))
    """
    if relaxation is None:
        return q.sample(1, generator)[0], q.half_logit.new_ones(())
    u = torch.empty_like(q.half_logit).uniform_(generator=generator)
    noise = u.clamp_(min=torch.finfo(u.dtype).tiny).logit_()
    relaxed = SignBernoulli((noise.div_(2) + q.half_logit) / positive("relaxation", relaxation))
    return relaxed.mean, relaxed.variance / (relaxation * q.variance)


def mode(q: SignBernoulli) -> Vector:
    """The likeliest signs, (P,)."""
    return torch.where(q.half_logit < 0, -1.0, 1.0).to(q.half_logit)
