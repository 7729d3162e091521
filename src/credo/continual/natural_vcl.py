r"""Variational continual learning by natural gradient: IVON with yesterday's posterior as prior.

    σ² = 1/(N(h + δ)),    δ = s/N          q_{t−1} = N(m₀, diag 1/s) in place of N(0, 1/p)
    m ← m − ξ(h₀ + 1/N)·(g + δ∘(m − m₀))/(h + δ)

is `credo.optim.IVON` with a precision s and a centre m₀ of its own for every weight: h is the
curvature of the new task alone, and Nh + s the posterior's precision, to which the old tasks' adds
without a trace of approximation. What it buys over `VCL`: means and scales have one step size, and
a weight moves by less the more precisely the old tasks know it.

====== ===================== ===================================================================
symbol argument              meaning
====== ===================== ===================================================================
ξ      ``training.lr``       IVON's step size
h₀     ``hess_init``         curvature of an example at the start of each task
β₁, β₂ ``betas``             shares that the averages of gradient and curvature keep
s, m₀  the prior             yesterday's posterior; for a new head the model's own
====== ===================== ===================================================================

Coresets, heads and the start at a maximum-likelihood fit (by Adam, ``start_lr``) are those of
`VCL`; the initial scales are 1/√(Nh₀ + s).

    >>> import credo
    >>> from credo.continual import Training, permuted
    >>> stream = permuted("digits", tasks=2, num_data=100)
    >>> model = credo.Model(
    ...     torch.nn.Linear(64, 10), credo.likelihoods.Categorical(), credo.priors.Normal(scale=1.0)
    ... )
    >>> learner = NaturalVCL(model, Training(epochs=2, lr=0.5))
    >>> learner.learn(stream[0], progress=False)
    >>> bool((learner.q.scale < 1).all())
    True

References: IVON, Shen et al., 2024 (arXiv:2402.17641); the recursion, Nguyen et al., 2018
(arXiv:1710.10628); Tseran, Khan, Harada & Bui, "Natural variational continual learning", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Generator

from credo import optim
from credo.checks import Count, Decay, Index, Positive, checked
from credo.continual.coreset import Choice
from credo.continual.learner import Training
from credo.continual.vcl import VCL
from credo.errors import UnsupportedError
from credo.families import DiagGaussian
from credo.map import MLE
from credo.method import Method
from credo.model import Model
from credo.optim.groups import Group
from credo.types import Vector
from credo.variational.natural import NaturalMethod, NaturalState


class AnchoredIVON(optim.IVON):
    """IVON whose prior is a Gaussian with a mean and a precision for every random weight.

    ``prior_precision`` is 1 in all groups: δ is then 1/N, by which the prior's own multiplies.
    """

    def anchor(self, prior: DiagGaussian) -> None:
        """Take this prior.

        Args:
            prior: A Gaussian whose weights are in the order of the optimizer's random ones.
        """
        self._prior_mean, self._prior_precision = prior.mean, prior.precision

    def _precision(self, where: slice, delta: float) -> Vector:
        if where.start >= self._num_random:
            return super()._precision(where, delta)
        h, precision = self._memory["curvature"][where], self._shifted[where]
        state = (h._version, delta)
        if self._shifted_from.get(where.start) != state:
            torch.add(h, self._prior_precision[where], alpha=delta, out=precision)
            self._shifted_from[where.start] = state
        return precision

    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        if group["deterministic"]:
            super()._update(group, mean, where, delta)
            return
        # IVON's own step pulls by δm; what this prior pulls beyond that is added.
        more = (mean - self._prior_mean[where]).mul_(self._prior_precision[where]).sub_(mean)
        super()._update(group, mean, where, delta)
        rate = group["lr"] * ((group["hess_init"] + delta) if group["rescale_lr"] else 1.0)
        mean.addcdiv_(more, self._denominator(group, where, delta), value=-rate * delta)


@final
@checked
@dataclass(frozen=True)
class SequentialIVON(NaturalMethod):
    """`credo.IVON` that takes any Gaussian prior with independent weights.

    Args:
        lr: IVON's step size.
        betas: Shares that the averages of gradient and curvature keep.
        hess_init: Curvature of an example at the start.
        samples: Draws of the weights in each step.
        temperature: Weight of the KL.
        draws: The noise source.
        start: A Gaussian whose mean to begin at, in place of the network's weights.
    """

    lr: Positive = 0.1
    betas: tuple[Decay, Decay] = (0.9, 0.99999)
    hess_init: Positive = 1.0
    start: DiagGaussian | None = field(default=None, repr=False, compare=False)

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> NaturalState:
        """q centred on ``start``, or on the network's current weights."""
        prior = model.prior_over_weights()
        if not isinstance(prior, DiagGaussian):
            raise UnsupportedError(
                f"natural variational continual learning takes a Gaussian prior with independent "
                f"weights, not a {type(prior).__name__}"
            )
        flat = model.bind()
        if self.start is not None:
            with flat.writing() as vector:
                model.random.write(vector, self.start.mean)
        named = [(s.name, flat.parameter_at[s.start]) for s in model.random.segments]
        points = [(s.name, flat.parameter_at[s.start]) for s in model.deterministic.segments]
        groups: list[Group] = [{"params": named, "prior_precision": 1.0}]
        if points:
            groups.append({"params": points, "deterministic": True})
        state = self._start(model, num_data, prior, groups, generator)
        assert isinstance(state.optimizer, AnchoredIVON)
        state.optimizer.anchor(prior)
        return state

    @property
    def looks_at_start(self) -> bool:
        """Yes, unless it begins at a posterior, which need not fit the data."""
        return self.start is None

    def _optimizer(self, groups: list[Group], shared: dict[str, Any]) -> AnchoredIVON:
        return AnchoredIVON(groups, **shared)


@checked
class NaturalVCL(VCL):
    """`VCL` by IVON.

    Args:
        model: What learns.
        training: How each task is trained.
        coreset_size: Examples of each task that are held out of its training, 0 for none.
        coreset: How they are chosen: "random", "balanced", "relevance" or "k-centre".
        likelihood_start: Whether the first means are those of a maximum-likelihood fit of the same
            length.
        start_lr: Adam's rate in the maximum-likelihood fit.
        hess_init: h₀: curvature of an example at the start of each task.
        betas: Shares that the averages of gradient and curvature keep.
        temperature: Weight of the KL.
        samples: Draws of the weights in a step.
        predict_samples: Draws of the weights in a prediction.
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        coreset_size: Index = 0,
        coreset: Choice = "random",
        likelihood_start: bool = True,
        start_lr: Positive = 1e-3,
        hess_init: Positive = 0.1,
        betas: tuple[Decay, Decay] = (0.9, 0.9995),
        temperature: Positive = 1.0,
        samples: Count = 1,
        predict_samples: Count = 100,
    ) -> None:
        super().__init__(
            model,
            training or Training(lr=0.5),
            coreset_size=coreset_size,
            coreset=coreset,
            likelihood_start=likelihood_start,
            temperature=temperature,
            samples=samples,
            predict_samples=predict_samples,
        )
        self.start_lr, self.hess_init, self.betas = float(start_lr), float(hess_init), betas

    @property
    def name(self) -> str:
        """With its coreset, if it has one."""
        return f"Natural {super().name}"

    def _likelihood_method(self) -> Method[Any]:
        return MLE(lr=self.start_lr)

    def _method(self, start: DiagGaussian) -> Method[Any]:
        return SequentialIVON(
            lr=self.training.lr,
            betas=self.betas,
            hess_init=self.hess_init,
            samples=self.samples,
            temperature=self.temperature,
            start=start,
        )
