r"""Variational Laplace: the ELBO of a mean-field Gaussian without drawing weights.

    minimise  mean NLL(μ) + (S/2) Σ_λ σ_λ² ḡ_λ² + (η/n)·½ Σ_λ [(σ² + μ²)/s² − 1 + ln(s²/σ²)]

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
S                         examples in this minibatch (the last one may have fewer)
ḡ      ``curvature``      gradient of mean NLL on labels drawn from the network itself
                          ("fisher"), on the true ones ("empirical"); or the Hessian's
                          diagonal in the place of S·ḡ² ("hessian")
η      ``temperature``    weight of the KL: a number, a schedule, or `credo.Balanced`
n      ``num_data``       training examples; `credo.fit` reads it from the data
σ      ``init_scale``     e^(log σ), log σ starts at log s − 3
s                         the prior's scale; its mean may also be other than 0
====== ================== ==============================================================

At rest σ² = η/(F + η/s²), F the summed Fisher information: ``scales="fixed_point"`` puts a running
average of it there instead of following the gradient of log σ. With the Hessian the objective is
unbounded in σ² wherever the log-likelihood's H_λλ exceeds η/s² (Unlu & Aitchison 2021, eq. 24).
``guard=True`` then keeps σ ≤ s, which is where clamping such curvatures at zero would lead;
``guard=False`` lets the scales run away.

The penalty's gradient needs second derivatives, so networks with ReLUs are refused: `credo.smooth`
makes them smooth. ``route="difference"`` (two ordinary passes) agrees with ``route="exact"`` (torch
differentiates the gradient) to about 1e-3. ``penalty_share=0.5`` estimates the penalty on a random
half of each batch: unbiased, and cheaper. With batch norm both parts are then normalised by
themselves, as in batches of their own size.

Reference: Unlu & Aitchison 2021, with corrections: s² in both slots of eq. 30; a starting point of
log s − 3 means σ = 0.0498·s.

    >>> import torch, credo
    >>> from credo.variational.variational_laplace import VariationalLaplace
    >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 2))
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> method = VariationalLaplace(lr=0.02)
    >>> posterior = credo.fit(model, method, (x, y), epochs=30, progress=False)
    >>> posterior.predict(x, samples=8).probs.shape
    torch.Size([64, 2])
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, final

import torch
from torch import Generator
from torch.optim import Optimizer

from credo.checks import Decay, NotNegative, Positive, Range, checked
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, links
from credo.kl import has_closed_form, kl_per_segment
from credo.method import (
    Info,
    TemperedMethod,
    TrainedState,
    refuse_nonfinite,
    segment_norms,
    temperature_of,
)
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.noise import Draws, key_to_seed
from credo.optim import by_name as optimizers
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.temperature import DEFAULT_TEMPERATURE, Temperature, temperature_at
from credo.types import Batch, FlatDistribution, Vector
from credo.variational.elbo import PriorTerm, chain_to_rho_, elbo, prior_term
from credo.variational.expansion import (
    Curvature,
    ExpansionStep,
    HessianPenalty,
    Route,
    SquaredGradientPenalty,
)
from credo.variational.scales import ScalePath, scale_rate


@final
@dataclass
class VariationalLaplaceState(TrainedState):
    """q's parameters and gradient buffers; between updates the network stands at the mean.

    ``mean`` and ``point`` are the network's own memory where that is in one piece. ``spread`` is
    log σ, or the running Fisher information of one example.
    """

    flat: FlatParams
    fixed: Selection
    prior: FlatDistribution
    prior_scale: Vector
    seed: int
    mean: Vector = field(metadata=STORED)
    spread: Vector = field(metadata=STORED)
    scale: Vector
    point: Vector = field(metadata=STORED)
    grad_mean: Vector
    grad_scale: Vector
    grad_point: Vector
    penalty: SquaredGradientPenalty | HessianPenalty
    prior_term: PriorTerm
    optimizer: Optimizer = field(metadata=STORED)
    path: ScalePath | None = field(metadata=STORED)


@final
@checked
@dataclass(frozen=True)
class VariationalLaplace(TemperedMethod[VariationalLaplaceState]):
    """Mean-field Gaussian by a second-order expansion at the mean.

    Args:
        curvature: "fisher" (labels drawn from the network), "empirical" (the true ones) or
            "hessian".
        temperature: Weight of the KL: a number, a schedule, or `credo.Balanced`.
        optimizer: As for `VI`.
        lr: The means' learning rate.
        scale_lr: Rate of log σ; 0 fixes the scales.
        scales: "gradient" follows the gradient of log σ, "fixed_point" puts σ where it would rest.
        route: "difference" (two ordinary passes) or "exact" (torch differentiates the gradient).
        penalty_share: The share of each batch that the penalty is estimated on.
        guard: With the Hessian, keep σ at or below the prior's.
        init_scale: Initial σ as a fraction of the prior's.
        fisher_decay: What the running Fisher information keeps per step, with
            ``scales="fixed_point"``.
        draws: The noise source of predictions.
        scale_ratio: ``scale_lr`` as a multiple of ``lr``, in its place; ten unless said.
    """

    curvature: Curvature = "fisher"
    temperature: Temperature = DEFAULT_TEMPERATURE
    optimizer: optimizers.OptimizerSpec = "adam"
    lr: Positive = 3e-3
    scale_lr: NotNegative | None = None
    scales: Literal["gradient", "fixed_point"] = "gradient"
    route: Route = "difference"
    penalty_share: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    guard: bool = True
    init_scale: Positive = field(default=math.exp(-3))
    fisher_decay: Decay = 0.99
    draws: Draws = "table"
    scale_ratio: NotNegative | None = None

    def __post_init__(self) -> None:
        scale_rate(self.lr, self.scale_lr, self.scale_ratio)
        if self.curvature == "hessian" and self.scales == "fixed_point":
            raise UnsupportedError(
                "the fixed point σ² = η/(F + η/s²) needs a curvature that is never negative, which "
                'the Hessian is not: use curvature="fisher", or scales="gradient"'
            )

    def init(
        self, model: Model, num_data: int, generator: Generator | None = None
    ) -> VariationalLaplaceState:
        """q centred on the network's current weights, with small scales."""
        flat, random, fixed = model.bind(), model.random, model.deterministic
        flat.forget_gradients()
        prior = model.prior_over_weights()
        self._refuse_misfits(model, prior)
        mean, point = (
            part.view(flat.vector) if part.is_one_run else part.read(flat.vector)
            for part in (random, fixed)
        )
        prior_scale = torch.as_tensor(prior.scale, dtype=mean.dtype, device=mean.device)
        scale = (self.init_scale * prior_scale).expand_as(mean).contiguous()
        grad_mean, grad_scale, grad_point = (torch.zeros_like(v) for v in (mean, scale, point))
        mean.grad, point.grad = grad_mean, grad_point
        trained = [mean, *([point] if fixed.size else []), *model.noise_parameters()]
        groups: optimizers.Groups = [{"params": trained, "lr": self.lr, "name": "mean"}]
        spread = scale.log()
        if self.scales == "fixed_point":
            temperature = temperature_at(self.temperature, random.segments, num_data, 0.0)
            spread = temperature / num_data * (scale.pow(-2) - prior_scale.pow(-2))
        else:
            spread.grad = grad_scale
            rate = scale_rate(self.lr, self.scale_lr, self.scale_ratio)
            groups.append({"params": [spread], "lr": rate, "name": "scale"})
        return VariationalLaplaceState(
            model=model,
            flat=flat,
            random=random,
            fixed=fixed,
            prior=prior,
            prior_scale=prior_scale,
            num_data=num_data,
            seed=int(torch.randint(2**62, (), generator=generator)),
            mean=mean,
            spread=spread,
            scale=scale,
            point=point,
            grad_mean=grad_mean,
            grad_scale=grad_scale,
            grad_point=grad_point,
            penalty=HessianPenalty()
            if self.curvature == "hessian"
            else SquaredGradientPenalty(self.curvature, self.route),
            prior_term=prior_term(prior),
            optimizer=optimizers.build(self.optimizer, groups),
            path=ScalePath.starting_at(scale, prior_scale) if self.scales == "gradient" else None,
        )

    def update(
        self, state: VariationalLaplaceState, batch: Batch
    ) -> tuple[VariationalLaplaceState, Info]:
        """One optimizer step on one minibatch; ``nll`` is that expected under q, as for `VI`."""
        state.clock.begin(state.num_data, len(batch[1]))
        weight = self._temperature(state) / state.num_data
        self._refresh_scale(state)
        expanded = state.penalty.gradients(self._step(state, batch))
        expected = expanded.nll + expanded.penalty
        refuse_nonfinite(expected, state.flat, state.clock)
        with torch.no_grad():
            self._add_kl(state, weight)
            with state.flat.writing() as vector:
                state.optimizer.step()
                self._write_mean(state, vector)
            if self.guard and self.curvature == "hessian":
                torch.minimum(state.spread, state.prior_scale.log(), out=state.spread)
        for parameter in state.model.noise_parameters():
            parameter.grad = None
        state.clock.tick()
        if state.path is not None:
            state.path.step(state.optimizer)
            if state.clock.batch == 0:
                self._refresh_scale(state)
                state.path.end_epoch(state.scale, state.prior_scale)
        return state, Info(expected, {"nll_at_mean": expanded.nll, "penalty": expanded.penalty})

    def finish(
        self, state: VariationalLaplaceState, data: Iterable[Batch]
    ) -> VariationalLaplaceState:
        """The network is at the mean already; say so if the scales could not settle."""
        if state.path is not None:
            state.path.warn_if_stopped_early()
        return state

    def posterior(self, state: VariationalLaplaceState) -> Posterior:
        """q, with its own copies of all tensors."""
        return Posterior.at_network(state.model, self._q(state), draws=self.draws)

    def summary(self, state: VariationalLaplaceState, nll: float = math.nan) -> dict[str, Any]:
        """KL, ELBO, temperature, scales and their way; KL and gradient norm for each segment."""
        q, segments = self._q(state), state.random.segments
        values = kl_per_segment(q, state.prior, [s.size for s in segments]).tolist()
        kl, temperature = sum(values), self._temperature(state)
        return {
            "kl": kl,
            "temperature": temperature,
            "elbo": elbo(nll, kl, temperature, state.num_data),
            "mean_scale": float(q.scale.mean()),
            **(state.path.summary() if state.path is not None else {}),
            "kl_segments": dict(zip((s.name for s in segments), values, strict=True)),
            "gradient_norm": segment_norms(state.grad_mean, state.random),
        }

    def optimizer_of(self, state: VariationalLaplaceState) -> Optimizer:
        """The one over means and scales."""
        return state.optimizer

    def restored(self, state: VariationalLaplaceState) -> None:
        """The network stands at the mean."""
        with state.flat.writing() as vector:
            self._write_mean(state, vector)

    def _refuse_misfits(self, model: Model, prior: FlatDistribution) -> None:
        one = torch.ones(1)
        if not has_closed_form(DiagGaussian(one, one), prior):
            raise UnsupportedError(
                "Variational Laplace never draws weights, so it needs a prior whose KL has a "
                f"closed form, which {type(prior).__name__} has not: use credo.priors.Normal or "
                "credo.priors.Laplace"
            )
        if self.scales == "fixed_point" and not isinstance(prior, DiagGaussian):
            raise UnsupportedError(
                f"the fixed point σ² = η/(F + η/s²) is that of a normal prior, not of "
                f'{type(prior).__name__}: use scales="gradient"'
            )
        if self.curvature == "fisher" and model.likelihood.kind == "loss":
            raise UnsupportedError(
                "the Fisher information is an expectation over labels drawn from the model, and a "
                'loss has none to draw: use curvature="empirical", or a likelihood such as '
                "Categorical, Bernoulli or Gaussian"
            )

    def _step(self, state: VariationalLaplaceState, batch: Batch) -> ExpansionStep:
        device = state.scale.device
        generator = Generator(device).manual_seed(key_to_seed(state.seed, state.clock.step))
        size, rows = len(batch[1]), None
        # Two at least in each part: batch norm can't normalise one example.
        chosen = max(2, round(self.penalty_share * size))
        if chosen <= size - 2:
            rows = torch.randperm(size, generator=generator, device=device)[:chosen]
        return ExpansionStep(
            model=state.model,
            flat=state.flat,
            random=state.random,
            fixed=state.fixed,
            mean=state.mean,
            scale=state.scale,
            batch=batch,
            generator=generator,
            grad_mean=state.grad_mean,
            grad_scale=state.grad_scale,
            grad_point=state.grad_point,
            rows=rows,
        )

    def _add_kl(self, state: VariationalLaplaceState, weight: float) -> None:
        """The KL's share of both gradients; the Fisher information's turn, if it is kept."""
        if self.scales == "fixed_point":
            # ∂penalty/∂σ = σ·f with f = S·ḡ², the Fisher information of one example.
            state.spread.mul_(self.fisher_decay)
            state.spread.addcdiv_(state.grad_scale, state.scale, value=1 - self.fisher_decay)
        state.prior_term.add_gradients_(
            state.mean, state.scale, weight, state.grad_mean, state.grad_scale
        )
        chain_to_rho_(state.grad_scale, state.scale, links.EXP, entropy_weight=weight)

    def _write_mean(self, state: VariationalLaplaceState, vector: Vector) -> None:
        """Costs nothing where mean and point are parts of the vector itself."""
        state.random.write(vector, state.mean)
        state.fixed.write(vector, state.point)

    def _temperature(self, state: VariationalLaplaceState) -> float:
        value = temperature_of(self.temperature, state)
        if self.scales == "fixed_point" and not value:
            raise DataError('temperature 0 has no spread: with scales="fixed_point" it must be > 0')
        return value

    def _refresh_scale(self, state: VariationalLaplaceState) -> None:
        """σ from log σ; or σ² = (η/n)/(f + (η/n)/s²)."""
        with torch.no_grad():
            if self.scales == "gradient":
                torch.exp(state.spread, out=state.scale)
                return
            weight = self._temperature(state) / state.num_data
            precision = state.spread / weight + state.prior_scale.pow(-2)
            torch.rsqrt(precision, out=state.scale)

    def _q(self, state: VariationalLaplaceState) -> DiagGaussian:
        self._refresh_scale(state)
        return DiagGaussian(state.mean.clone(), state.scale.clone())
