r"""An algorithm as a choice: family × expectation × curvature × step.

    S ← (1 − ρτ)S + ρ(E[H] + τS₀)
    m ← m − α S⁻¹ (E[∇ℓ] + τS₀(m − m₀))                with the new S

is the learning rule for a Gaussian q = N(m, S⁻¹) and the objective E_q[ℓ] + τ·KL(q‖p). The prior
p = N(m₀, S₀⁻¹) enters in closed form, never through draws. What deep learning does differently is a
setting of `Step`:

===================== ==========================================================================
``rate`` ρ            how fast curvature is forgotten: 1 − β₂ in Adam
``mean_rate`` α       the learning rate, where it is not ρ
``temperature`` τ     weight of the KL
``momentum`` γ        ν ← γν + (1 − γ)g and m ← m − αS⁻¹ν: heavy-ball momentum in the natural
                      parameter of the mean, λ⁺ = λ − ρ∇ + γ(λ − λ₋), where m − m₋ is measured by
                      the S it was made with. In the exact heavy ball (`rule.step`) that is the S
                      before it.
``damping`` ε         added to S or √S in the mean's step only
``root``              √S instead of S in the mean's step: no longer the rule, but RMSprop and Adam
``debias``            divide averages that started from zero by what they lack: "mean" divides ν
                      by 1 − γᵗ, "both" also S by 1 − (1 − ρτ)ᵗ, as Adam does
``prior_in_momentum`` whether ν averages the prior's pull too (VOGN) or not (IVON)
``keep_positive``     the improved step of `absorb_positive`
===================== ==========================================================================

    >>> import torch
    >>> from credo.rule.curvatures import ExactHessian
    >>> from credo.rule.expectations import AtMean
    >>> from credo.families import FullGaussian
    >>> newton = Learner(AtMean(), ExactHessian(), Step(rate=1.0))
    >>> state = newton.init(FullGaussian(torch.zeros(2), torch.eye(2)))
    >>> loss = Loss.of(lambda theta: (theta - torch.tensor([1.0, 2.0])).square().sum())
    >>> newton.update(state, loss).q.mean
    tensor([1., 2.])

Combinations that make no sense are refused with the reason when the algorithm meets its family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

from credo.autodiff.loss import Loss
from credo.checks import Decay, NotNegative, Positive, checked
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.families import DiagGaussian, FixedGaussian, Gaussian
from credo.noise import key_to_seed
from credo.rule.curvatures import Curvature, FromValues, SquaredGradient
from credo.rule.expectations import Expectation
from credo.rule.families import absorb, absorb_positive, natural_parameters
from credo.types import Vector


@checked
@dataclass(frozen=True)
class Step:
    """How far to go; the symbols are in the module's docstring.

    Args:
        rate: ρ.
        mean_rate: α; ρ if None.
        temperature: τ.
        momentum: γ.
        damping: ε.
        root: Whether √S stands for S in the mean's step.
        debias: Which averages are divided by what they lack.
        prior_in_momentum: Whether momentum averages the prior's pull too.
        keep_positive: Whether to take the improved step, which keeps S positive.
    """

    rate: Positive
    mean_rate: Positive | None = None
    temperature: NotNegative = 1.0
    momentum: Decay = 0.0
    damping: NotNegative = 0.0
    root: bool = False
    debias: Literal["none", "mean", "both"] = "none"
    prior_in_momentum: bool = True
    keep_positive: bool = False

    def __post_init__(self) -> None:
        if self.root and self.keep_positive:
            raise UnsupportedError(
                "root reads S as a mean of squared gradients, which is never negative: "
                "keep_positive has nothing to keep"
            )

    @property
    def alpha(self) -> float:
        """The mean's rate."""
        return self.rate if self.mean_rate is None else self.mean_rate

    @property
    def keep(self) -> float:
        """The share of S that stays."""
        return 1.0 - self.rate * self.temperature


class LearnerState(ABC):
    """The Gaussian that is being learned, its momentum, and how many steps it has made."""

    steps: int = 0
    _velocity: Vector | None = None

    @property
    @abstractmethod
    def q(self) -> Gaussian:
        """The Gaussian as it stands."""

    @abstractmethod
    def absorb(self, step: Step, curvature: Tensor | None) -> None:
        """The new S from E[∇²ℓ], the prior's precision included."""

    @abstractmethod
    def advance(self, step: Step, gradient: Vector, warm: float) -> None:
        """The new m along ``gradient``, which is ``warm`` times what it stands for."""

    def direction(self, step: Step, gradient: Vector, pull: Vector | None) -> tuple[Vector, float]:
        """E[∇ℓ] and the prior's pull with momentum, and the factor by which it is too small."""
        if pull is not None and (step.prior_in_momentum or not step.momentum):
            gradient, pull = gradient + pull, None
        if not step.momentum:
            return gradient, 1.0
        if self._velocity is None:
            self._velocity = torch.zeros_like(gradient)
        velocity = self._velocity.lerp_(gradient, 1.0 - step.momentum)
        warm = 1.0 if step.debias == "none" else 1.0 - step.momentum**self.steps
        return velocity if pull is None else torch.add(velocity, pull, alpha=warm), warm


@dataclass(frozen=True)
class Learner:
    """An algorithm: where the loss is looked at, what stands for its curvature, how far to go.

    ``curvature`` is None for a family of fixed covariance and for values alone. ``prior`` is a
    Gaussian, or None for a flat one. Draws are a function of ``seed`` and the step's number.

    Args:
        expectation: Where the loss is looked at.
        curvature: What stands for ∇²ℓ; None for a family of fixed covariance and for values
            alone.
        step: How far to go.
        prior: p, a Gaussian, or None for a flat one.
        seed: Draws are a function of it and of the step's number.
    """

    expectation: Expectation
    curvature: Curvature | None
    step: Step
    prior: Gaussian | None = None
    seed: int = 0

    def init(self, q: Gaussian) -> LearnerState:
        """The state before the first step, from q; refuses what does not fit together.

        A `DiagGaussian` of infinite scale is flat: S = 0, as Adam starts.

        Args:
            q: Where learning starts.
        """
        self._refuse_nonsense(q)
        return _DiagonalState(q) if isinstance(q, DiagGaussian) else _StructuredState(q)

    def update(self, state: LearnerState, loss: Loss) -> LearnerState:
        """One step of the rule on this loss; the state is changed and returned.

        Args:
            state: From `init` or the step before.
            loss: ℓ without the prior.
        """
        gradient, curvature = self.estimate(state, loss)
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError(f"the loss's gradient is not finite at step {state.steps}")
        return self.move(state, gradient, curvature)

    def estimate(self, state: LearnerState, loss: Loss) -> tuple[Vector, Tensor | None]:
        """E_q[∇ℓ], (P,), and E_q[∇²ℓ] where it is wanted: (P,) or (P, P).

        Args:
            state: From `init` or the step before.
            loss: ℓ without the prior.
        """
        q = state.q
        generator = torch.Generator(q.mean.device)
        generator.manual_seed(key_to_seed(self.seed, state.steps))
        points = list(self.expectation.points(q, generator))
        curvature = FromValues() if self.expectation.values_only else self.curvature
        if self.expectation.is_grid and (curvature is None or curvature.is_derivative):
            weights = q.mean.new_tensor([share for share, _ in points])
            loss = loss.smoothed(weights, torch.stack([theta for _, theta in points]) - q.mean)
            points = [(1.0, q.mean)]
        if curvature is None or (isinstance(curvature, SquaredGradient) and len(points) == 1):
            return _sum([share * loss.gradient(theta) for share, theta in points]), None
        estimates = [
            (share, curvature.at(loss, theta, q, _wants_matrix(q), generator))
            for share, theta in points
        ]
        gradient = _sum([share * gradient for share, (gradient, _) in estimates])
        if isinstance(q, FixedGaussian):
            return gradient, None
        return gradient, _sum([share * hessian for share, (_, hessian) in estimates])

    def move(self, state: LearnerState, gradient: Vector, curvature: Tensor | None) -> LearnerState:
        """One step, given E_q[∇ℓ] and E_q[∇²ℓ] of the loss without its prior.

        ``curvature`` may be left out where it is the square of the gradient. Where the settings
        are those of Adam, torch's fused kernel takes the step: the same arithmetic in one pass.

        Args:
            state: From `init` or the step before.
            gradient: E_q[∇ℓ], (P,).
            curvature: E_q[∇²ℓ], (P,) or (P, P), or None.
        """
        if curvature is None and isinstance(self.curvature, SquaredGradient):
            if self.prior is None and isinstance(state, _DiagonalState) and is_adam(self.step):
                state.steps += 1
                state.fused_adam(self.step, gradient)
                return state
            curvature = (
                torch.outer(gradient, gradient) if _wants_matrix(state.q) else gradient.square()
            )
        pull = None
        if self.prior is not None:
            pull = self.prior.grad_log_prob(state.q.mean) * -self.step.temperature
            if curvature is not None:
                curvature = _add(curvature, precision_of(self.prior), self.step.temperature)
        state.steps += 1
        state.absorb(self.step, curvature)
        state.advance(self.step, *state.direction(self.step, gradient, pull))
        return state

    def _refuse_nonsense(self, q: Gaussian) -> None:
        fixed, matrix = isinstance(q, FixedGaussian), _wants_matrix(q)
        name, curvature = type(q).__name__, type(self.curvature).__name__
        if self.prior is not None and self.prior.size != q.size:
            raise DataError(f"the prior is over {self.prior.size} weights, q over {q.size}")
        if self.expectation.values_only and self.curvature is not None:
            raise UnsupportedError(
                f'estimator="score" asks the loss for values only, and {curvature} would '
                "differentiate it: leave curvature=None, it comes from the scores too"
            )
        if fixed and self.curvature is not None:
            raise UnsupportedError(
                f"a {name} never changes its covariance, so {curvature} would be computed and "
                "thrown away: set curvature=None, or take a family whose covariance is learned"
            )
        if not fixed and self.curvature is None and not self.expectation.values_only:
            raise UnsupportedError(
                f"a {name} learns its precision from curvature, but curvature=None: choose one "
                "of credo.rule.curvatures, or hold the covariance fixed with a FixedGaussian"
            )
        if self.curvature is not None:
            if self.curvature.needs_spread and self.expectation.at_mean_only:
                raise UnsupportedError(
                    f"{curvature} reads curvature off θ − m, which is always zero at the mean: "
                    "draw θ with MonteCarlo, or use another curvature"
                )
            if self.curvature.diagonal_only and matrix:
                raise UnsupportedError(
                    f"{curvature} estimates the diagonal alone, but a {name} learns a matrix: "
                    "take a DiagGaussian, or ExactHessian or GaussNewton"
                )
        if not isinstance(q, DiagGaussian) and (self.step.root or self.step.debias == "both"):
            raise UnsupportedError(
                "root and the debiasing of S are what Adam does to each weight by itself; a "
                f"{name} does not learn them so: take a DiagGaussian"
            )


class _DiagonalState(LearnerState):
    """Mean and precision of every weight, changed in place: what training of networks needs."""

    def __init__(self, q: DiagGaussian) -> None:
        self.mean = q.mean.detach().clone()
        self.precision = q.scale.detach().square().reciprocal().contiguous()
        self._scratch = torch.empty_like(self.mean)

    @property
    def q(self) -> DiagGaussian:
        """The Gaussian as it stands; it moves with the state."""
        return DiagGaussian(self.mean, self.precision.rsqrt())

    def fused_adam(self, step: Step, gradient: Vector) -> None:
        """Both averages and the mean in one pass over memory, by torch's kernel for Adam."""
        if self._velocity is None:
            self._velocity = torch.zeros_like(gradient)
        adam(
            [self.mean],
            [gradient],
            [self._velocity],
            [self.precision],
            [],
            [torch.tensor(float(self.steps - 1))],
            fused=True,
            beta1=step.momentum,
            beta2=step.keep,
            lr=step.alpha,
            weight_decay=0.0,
            eps=step.damping,
            amsgrad=False,
            maximize=False,
        )

    def absorb(self, step: Step, curvature: Tensor | None) -> None:
        """S, in place."""
        if curvature is None or curvature.shape != self.mean.shape:
            given = None if curvature is None else tuple(curvature.shape)
            raise DataError(
                f"a DiagGaussian over {len(self.mean)} weights takes curvature "
                f"({len(self.mean)},), got {given}"
            )
        if step.keep_positive:
            rate = step.rate
            change = torch.sub(curvature, self.precision, alpha=step.temperature)
            second_order = change.square().div_(self.precision)
            self.precision.add_(change, alpha=rate).add_(second_order, alpha=0.5 * rate**2)
            return
        if step.temperature == 1.0:
            self.precision.lerp_(curvature, step.rate)
        else:
            self.precision.mul_(step.keep).add_(curvature, alpha=step.rate)
        if not step.root and bool((self.precision <= 0).any()):
            where = int(torch.argmax((self.precision <= 0).to(torch.uint8)))
            raise DataError(
                f"the precision of weight {where} became {float(self.precision[where]):.3g}, "
                "because the curvature there is negative: take keep_positive=True, a lower rate, "
                "or a curvature that is never negative (GaussNewton, ExampleSquares)"
            )

    def advance(self, step: Step, gradient: Vector, warm: float) -> None:
        """m, in as few passes over memory as the settings allow."""
        precision, warm_precision = self.precision, 1.0
        if step.debias == "both":
            warm_precision = 1.0 - step.keep**self.steps
        if step.root:
            precision = torch.sqrt(precision, out=self._scratch)
            warm_precision = warm_precision**0.5
        if step.damping:
            # ε belongs to the debiased S, so it is scaled with it.
            precision = torch.add(precision, step.damping * warm_precision, out=self._scratch)
        self.mean.addcdiv_(gradient, precision, value=-step.alpha * warm_precision / warm)


class _StructuredState(LearnerState):
    """Any other Gaussian, replaced as a whole."""

    def __init__(self, q: Gaussian) -> None:
        self._q = q

    @property
    def q(self) -> Gaussian:
        """The Gaussian as it stands."""
        return self._q

    def absorb(self, step: Step, curvature: Tensor | None) -> None:
        """S, by the family's own arithmetic."""
        if curvature is not None and step.keep_positive:
            self._q = absorb_positive(self._q, curvature, step.rate, step.temperature)
        elif curvature is not None:
            self._q = absorb(self._q, curvature, step.keep, step.rate)

    def advance(self, step: Step, gradient: Vector, warm: float) -> None:
        """m, by a solve with S."""
        metric = self._q
        if step.damping:
            metric = absorb(metric, torch.ones_like(gradient), 1.0, step.damping)
        moved = torch.sub(self._q.mean, metric.solve(gradient), alpha=step.alpha / warm)
        self._q = self._q.with_mean(moved)


def is_adam(step: Step) -> bool:
    """Whether a step on squared gradients is Adam's to the letter."""
    return step.root and step.debias == "both" and step.temperature == 1.0


def precision_of(q: Gaussian) -> Tensor:
    """S, as its diagonal (P,) where it is diagonal and else (P, P)."""
    if isinstance(q, DiagGaussian):
        return q.scale.square().reciprocal()
    if isinstance(q, FixedGaussian):
        return q.precision.expand(q.size) if q.precision.dim() == 0 else q.precision
    precision: Tensor = -2 * natural_parameters(q)[1]
    return precision


def _wants_matrix(q: Gaussian) -> bool:
    return not isinstance(q, DiagGaussian | FixedGaussian)


def _add(curvature: Tensor, precision: Tensor, weight: float) -> Tensor:
    """curvature + weight·precision, where either may be a diagonal."""
    if curvature.dim() == precision.dim():
        return torch.add(curvature, precision, alpha=weight)
    if curvature.dim() == 1:
        return torch.add(curvature, precision.diagonal(), alpha=weight)
    return curvature + weight * torch.diag(precision)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
