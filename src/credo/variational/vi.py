r"""Mean-field variational inference by Bayes-by-backprop, on one flat vector.

    minimise  E_q[mean NLL(w)] + (η/n)·M·π_i·KL(q‖p),      q = N(mean, diag scale²), scale = link(ρ)

====== ================== ==============================================================
symbol argument           meaning
====== ================== ==============================================================
η      ``temperature``    weight of the KL: a number, a schedule, or `credo.Balanced`
n      ``num_data``       training examples; `credo.fit` reads it from the data
π_i    ``kl_weights``     share of minibatch i of M; ``"uniform"`` is 1/M
S      ``samples``        draws of the weights per step
ρ      ``link``           "exp" (scale = e^ρ, the default) or "softplus" (scale = ln(1 + e^ρ))
====== ================== ==============================================================

Gradients of mean and scale are closed forms of (g, ε): nothing is differentiated through the
sampling (see `credo.variational.estimators`). ``noise="local"`` and ``"flipout"`` perturb
activations instead of weights, for less variance at about twice the price.

References: Graves 2011; Blundell et al. 2015; Book 2020 (estimators, KL weights, separate rates);
Huix et al. 2022 (temperature). Correction: the prior of ReLU layers is Kaiming's with a = 0, not 1.

    >>> import torch, credo
    >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    >>> y = (x[:, 0] > 0).long()
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> posterior = credo.fit(model, credo.VI(lr=0.02), (x, y), epochs=30, progress=False)
    >>> posterior.predict(x, samples=8).probs.shape
    torch.Size([64, 2])
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo import noise as noise_sources
from credo.checks import Count, NotNegative, Positive, checked
from credo.collectives import Ranks
from credo.errors import UnsupportedError
from credo.families import DiagGaussian, links
from credo.kl import has_closed_form, kl_monte_carlo, kl_per_segment
from credo.method import (
    DROWNED,
    Info,
    TemperedMethod,
    TrainedState,
    average_over_ranks,
    drowned_layer,
    refuse_nonfinite,
    segment_norms,
    temperature_of,
)
from credo.model import Model
from credo.network import FlatParams, Selection
from credo.network.flat import Gathering
from credo.optim import by_name as optimizers
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.temperature import DEFAULT_TEMPERATURE, Temperature
from credo.types import Batch, FlatDistribution, Vector
from credo.variational.elbo import (
    KLWeights,
    PriorTerm,
    chain_to_rho_,
    elbo,
    kl_weights,
    prior_term,
)
from credo.variational.estimators import (
    Estimator,
    Flipout,
    GaussianStep,
    LocalReparameterisation,
    ScoreFunction,
    WeightNoise,
)
from credo.variational.estimators.score import Baseline
from credo.variational.scales import ScalePath, scale_rate


@final
@dataclass
class VIState(TrainedState):
    """q's parameters and everything a step reuses.

    ``grad_scale`` is where the estimator leaves ∂/∂scale, turned in place into ∂/∂ρ. ``scale``
    belongs to ``rho`` whenever an update begins or ends. ``work`` is the estimator's, of which each
    step changes what is its own.
    """

    flat: FlatParams
    fixed: Selection
    prior: FlatDistribution
    mean: Vector = field(metadata=STORED)
    rho: Vector = field(metadata=STORED)
    scale: Vector
    point: Vector = field(metadata=STORED)
    grad_mean: Vector
    grad_scale: Vector
    grad_point: Vector
    link: links.Link
    estimator: Estimator
    prior_term: PriorTerm | None
    optimizer: Optimizer = field(metadata=STORED)
    initial_kl: float = field(metadata=STORED)
    path: ScalePath = field(metadata=STORED)
    work: GaussianStep
    point_gathering: Gathering


@final
@checked
@dataclass(frozen=True)
class VI(TemperedMethod[VIState]):
    """Mean-field Gaussian variational inference.

    Args:
        samples: Draws of the weights per step.
        estimator: "reparam" (closed-form KL), "total", "path" (sticking the landing) or "score"
            (with ``baseline``).
        noise: "weight", "local" or "flipout".
        temperature: Weight of the KL; 1 is the ELBO proper.
        kl_weights: How the KL is shared out over the minibatches of an epoch.
        optimizer: A name, a callable, or one for each of "mean" and "scale".
        lr: The means' learning rate.
        scale_lr: The scales' (ρ's); 0 fixes them.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        link: "exp" or "softplus", from ρ to the scale.
        init_scale: Initial scale as a fraction of the prior's.
        warmup: Epochs over which the KL's weight rises linearly from nothing.
        baseline: What the score estimator subtracts: "loo", "optimal" or "none".
        scale_ratio: ``scale_lr`` as a multiple of ``lr``, in its place; ten unless said.
        shared_noise: Let all ranks draw the same weights: one sample for the batch of all of them.
        start: A Gaussian over the random weights to begin at, in place of the network's weights
            with small scales. A posterior that stays near it is then not warned of.
    """

    samples: Count = 1
    estimator: Literal["reparam", "total", "path", "score"] = "reparam"
    noise: Literal["weight", "local", "flipout"] = "weight"
    temperature: Temperature = DEFAULT_TEMPERATURE
    kl_weights: KLWeights = "uniform"
    optimizer: optimizers.OptimizerSpec = "adam"
    lr: Positive = 3e-3
    scale_lr: NotNegative | None = None
    draws: noise_sources.Draws = "table"
    link: links.LinkName = "exp"
    init_scale: Positive = 0.05
    warmup: NotNegative = 0.0
    baseline: Baseline = "loo"
    scale_ratio: NotNegative | None = None
    shared_noise: bool = False
    start: DiagGaussian | None = field(default=None, repr=False, compare=False)

    spreads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        scale_rate(self.lr, self.scale_lr, self.scale_ratio)
        if self.noise != "weight" and self.estimator != "reparam":
            raise UnsupportedError(
                f"noise={self.noise!r} never draws the weights, so a KL sampled at the drawn "
                f'weights (estimator={self.estimator!r}) does not exist: use estimator="reparam"'
            )
        if self.noise != "weight" and self.shared_noise:
            raise UnsupportedError(
                f"noise={self.noise!r} draws for every example, so that ranks with different "
                'examples have nothing to share: use noise="weight", or leave shared_noise=False'
            )

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> VIState:
        """q centred on the network's current weights, with small scales."""
        flat, random, fixed = model.bind(), model.random, model.deterministic
        flat.forget_gradients()
        prior = model.prior_over_weights()
        link = links.by_name(self.link)
        mean = random.read(flat.vector)
        prior_scale = _prior_scale(prior, mean)
        scale = (self.init_scale * prior_scale).expand_as(mean).contiguous()
        if self.start is not None:
            q = self.start.on(random.segments, mean)
            mean, scale = q.mean.clone(), q.scale.expand_as(mean).clone()
        rho = link.inverse(scale)
        point = fixed.read(flat.vector)
        grads = [torch.zeros_like(vector) for vector in (mean, rho, point)]
        mean.grad, rho.grad, point.grad = grads
        rate = scale_rate(self.lr, self.scale_lr, self.scale_ratio)
        points = [point] if fixed.size else []
        groups: optimizers.Groups = [
            {"params": [mean, *points, *model.noise_parameters()], "lr": self.lr, "name": "mean"},
            {"params": [rho], "lr": rate, "name": "scale"},
        ]
        seed = int(torch.randint(2**62, (), generator=generator))
        estimator = self._estimator(prior, DiagGaussian(mean, scale), seed)
        state = VIState(
            model=model,
            flat=flat,
            random=random,
            fixed=fixed,
            prior=prior,
            num_data=num_data,
            mean=mean,
            rho=rho,
            scale=scale,
            point=point,
            grad_mean=grads[0],
            grad_scale=grads[1],
            grad_point=grads[2],
            link=link,
            estimator=estimator,
            prior_term=None if estimator.integrates_kl else prior_term(prior),
            optimizer=optimizers.build(self.optimizer, groups),
            initial_kl=0.0,
            path=ScalePath.starting_at(scale, prior_scale),
            work=self._work(flat, random, DiagGaussian(mean, scale), grads),
            point_gathering=Gathering(flat, fixed, grads[2]),
        )
        state.initial_kl = sum(self._kl(state).values())
        return state

    def update(self, state: VIState, batch: Batch) -> tuple[VIState, Info]:
        """One optimizer step on one minibatch."""
        clock, step = state.clock, state.work
        clock.begin(state.num_data, len(batch[1]))
        if clock.batch == 0:
            # Once an epoch all is looked at; in between, what gradients and addresses tell.
            state.flat.check()
        weight = self._kl_weight(state)
        step.energy, step.kl_weight = partial(state.model.mean_nll, batch), weight
        step.key = (clock.step,)
        nll = state.estimator.gradients(step)
        if state.fixed.size:
            state.point_gathering.take()
        if state.ranks.several:
            gradients = [state.grad_mean, state.grad_scale, state.grad_point]
            nll = average_over_ranks(state, gradients, nll)
        refuse_nonfinite(nll, state.flat, clock)
        with torch.no_grad():
            if state.prior_term is not None:
                state.prior_term.add_gradients_(
                    state.mean, state.scale, weight, state.grad_mean, state.grad_scale
                )
            entropy_weight = 0.0 if state.estimator.integrates_kl else weight
            chain_to_rho_(state.grad_scale, state.scale, state.link, entropy_weight)
            state.optimizer.step()
            self._refresh_scale(state)
            if state.fixed.size:
                with state.flat.writing() as vector:
                    state.fixed.write(vector, state.point)
        for parameter in state.noise:
            parameter.grad = None
        clock.tick()
        state.path.step(state.optimizer)
        if clock.batch == 0:
            state.path.end_epoch(state.scale, _prior_scale(state.prior, state.mean))
        return state, Info(nll)

    def finish(self, state: VIState, data: Iterable[Batch]) -> VIState:
        """Leave the network at the mean, and say so if the posterior looks degenerate."""
        self._write_mean(state)
        if self.start is None:
            self._warn_if_degenerate(state)
            state.path.warn_if_stopped_early()
        return state

    def posterior(self, state: VIState) -> Posterior:
        """q, with its own copies of all tensors; the network is left at q's mean."""
        self._write_mean(state)
        q = DiagGaussian(state.mean.clone(), state.scale.clone())
        return Posterior.at_network(state.model, q, draws=self.draws)

    def summary(self, state: VIState, nll: float = math.nan) -> dict[str, Any]:
        """KL, ELBO, temperature, scales and their way; KL and gradient norm for each segment."""
        per_segment = self._kl(state)
        kl, temperature = sum(per_segment.values()), temperature_of(self.temperature, state)
        return {
            "kl": kl,
            "temperature": temperature,
            "elbo": elbo(nll, kl, temperature, state.num_data),
            "mean_scale": float(state.scale.mean()),
            **state.path.summary(),
            "kl_segments": per_segment,
            "gradient_norm": segment_norms(state.grad_mean, state.random),
        }

    @property
    def looks_at_start(self) -> bool:
        """Yes, unless it begins at a posterior, which need not fit the data."""
        return self.start is None

    def when_stuck(self, state: VIState) -> str:
        """Wide draws want narrower first scales or a lower temperature, else it is the rate."""
        name, ratio = drowned_layer(DiagGaussian(state.mean, state.scale), state.random)
        if ratio < DROWNED:
            return f"try another lr than {self.lr:g}, which credo.lr_range_test finds"
        return (
            f"the draws drown the weights, in {name} they are {ratio:.2g} times as large. Lower "
            f"init_scale (now {self.init_scale:g}) or the temperature (now "
            f"{temperature_of(self.temperature, state):.2g}), or take a narrower prior"
        )

    def optimizer_of(self, state: VIState) -> Optimizer:
        """The one over means and scales."""
        return state.optimizer

    def restored(self, state: VIState) -> None:
        """The network stands at the mean; the scales are those of ρ."""
        self._write_mean(state)
        self._refresh_scale(state)

    def _work(
        self, flat: FlatParams, random: Selection, q: DiagGaussian, grads: list[Vector]
    ) -> GaussianStep:
        """What an estimator needs, but for a step's batch, weight and key."""
        ranks = Ranks(alone=self.shared_noise)
        return GaussianStep(
            flat=flat,
            random=random,
            mean=q.mean,
            scale=q.scale,
            energy=_no_batch,
            kl_weight=0.0,
            samples=self.samples,
            key=(),
            grad_mean=grads[0],
            grad_scale=grads[1],
            rank=ranks.rank,
            ranks=ranks.size,
        )

    def _estimator(self, prior: FlatDistribution, q: DiagGaussian, seed: int) -> Estimator:
        source = noise_sources.source(self.draws, seed)
        if self.noise != "weight":
            if not has_closed_form(q, prior):
                raise UnsupportedError(
                    f"noise={self.noise!r} needs a prior whose KL has a closed form, which "
                    f'{type(prior).__name__} has not: use noise="weight"'
                )
            return {"local": LocalReparameterisation, "flipout": Flipout}[self.noise](source)
        if self.estimator == "score":
            return ScoreFunction(source, prior, self.baseline)
        if self.estimator == "path":
            return WeightNoise(source, prior, "path")
        if self.estimator == "total" or not has_closed_form(q, prior):
            return WeightNoise(source, prior, "total")
        return WeightNoise(source, prior)

    def _kl_weight(self, state: VIState) -> float:
        """(η/n)·M·π_i, times the warm-up."""
        clock = state.clock
        weight = temperature_of(self.temperature, state) / state.num_data
        if self.kl_weights != "uniform":
            share = kl_weights(self.kl_weights, clock.num_batches)[clock.batch]
            weight *= float(share) * clock.num_batches
        if self.warmup:
            weight *= min(1.0, clock.epoch / self.warmup)
        return weight

    def _refresh_scale(self, state: VIState) -> None:
        with torch.no_grad():
            if self.link == "exp":
                torch.exp(state.rho, out=state.scale)
            else:
                state.scale.copy_(state.link.forward(state.rho))

    def _kl(self, state: VIState) -> dict[str, float]:
        """KL of each segment; one entry for all where only Monte Carlo can tell."""
        q = DiagGaussian(state.mean, state.scale)
        if not has_closed_form(q, state.prior):
            generator = torch.Generator(state.mean.device).manual_seed(0)
            estimate, _ = kl_monte_carlo(q, state.prior, samples=8, generator=generator)
            return {"all": float(estimate)}
        sizes = [s.size for s in state.random.segments]
        values = kl_per_segment(q, state.prior, sizes).tolist()
        return dict(zip((s.name for s in state.random.segments), values, strict=True))

    def _write_mean(self, state: VIState) -> None:
        with state.flat.writing() as vector:
            state.random.write(vector, state.mean)
            state.fixed.write(vector, state.point)

    def _warn_if_degenerate(self, state: VIState) -> None:
        """Say so if the scales collapsed or the KL never moved."""
        relative = float((state.scale / _prior_scale(state.prior, state.mean)).median())
        if relative < 1e-3:
            warnings.warn(
                f"the posterior's scales collapsed: half of them are below {relative:.1e} of the "
                "prior's, so predictions are nearly those of a point estimate. Raise init_scale "
                f"(now {self.init_scale}), scale_lr, or the temperature.",
                stacklevel=5,
            )
        kl = sum(self._kl(state).values())
        same_kl = abs(kl - state.initial_kl) < 1e-3 * abs(state.initial_kl)
        # Means and scales may move and their KLs cancel, so the scales are asked as well.
        if same_kl and abs(relative / self.init_scale - 1) < 1e-3:
            warnings.warn(
                f"the KL never moved ({state.initial_kl:.4g} before training, {kl:.4g} after): the "
                "posterior is still its initial guess. Train longer, or raise lr and scale_lr.",
                stacklevel=5,
            )


def _no_batch() -> Tensor:
    raise AssertionError("a step's energy is that of its batch")


def _prior_scale(prior: FlatDistribution, like: Vector) -> Tensor:
    """The prior's standard deviation of each weight."""
    return torch.as_tensor(prior.scale, dtype=like.dtype, device=like.device)
