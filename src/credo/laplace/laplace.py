r"""Laplace's approximation: the Gaussian with the posterior's curvature at the network's weights.

    q = N(m, S⁻¹)        S = H/temperature + δ        H = Σ_i J_iᵀΛ_iJ_i

symbols: m the weights the network has, J_i = ∂f(x_i)/∂m, Λ_i the likelihood's curvature at f(x_i)
(``curvature``), δ the prior's precision, ``structure`` what is kept of H. With temperature 1 it is
the second-order expansion of log p(m | D); another temperature is that of
E_q[n·mean NLL] + temperature·KL(q‖prior), as everywhere here.

It needs a network that is already trained, and one pass over the data:

    >>> import torch, credo
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> net = torch.nn.Linear(1, 1)
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> _ = credo.fit(model, credo.MAP(lr=0.1), (x, 3 * x), epochs=150, progress=False)
    >>> posterior = credo.fit(model, credo.Laplace(structure="full"), (x, 3 * x))
    >>> posterior.q.scale
    tensor([0.0213, 0.0125])
    >>> round(float(posterior.log_marginal_likelihood()))
    77

With ``epochs`` it trains first, by ``train``. With ``evidence_every=k`` that training learns the
prior's scales, and the noise of a Gaussian likelihood made with ``learned=True``: in every k-th
epoch each minibatch also gives its curvature, at the weights it finds, and at the end of the epoch
prior and noise go to the maximum of the evidence.

Λ is positive semi-definite, and the network's own second derivatives are left out (generalised
Gauss–Newton): that makes q the exact posterior of the network linearised at m, and predictions are
those of that model with ``posterior.predict(x, at="linearised")``. Draws of weights through the
network itself (``at="samples"``) are worse the more weights are random (Immer, Korzepa & Bauer,
2021, arXiv:2008.08400); with ``subset="last_layer"`` the two are the same.

References: MacKay, "A practical Bayesian framework for backpropagation networks", 1992; Ritter,
Botev & Barber, "A scalable Laplace approximation for neural networks", 2018; Daxberger,
Kristiadi, Immer, Eschenhagen, Bauer & Hennig, "Laplace Redux", 2021 (arXiv:2106.14806).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from torch import Generator, Tensor
from torch.optim import Optimizer

from credo import priors
from credo.checks import Count, Positive, checked, positive
from credo.errors import DataError, UnsupportedError
from credo.families import Gaussian
from credo.laplace.checks import refuse_beyond, warn_if_untrained
from credo.laplace.data_pass import CurvatureKind, DataPass
from credo.laplace.evidence import (
    Evidence,
    LaplacePosterior,
    Sharing,
    is_learned,
    noise_of,
    noise_scale,
    prior_with,
    set_noise_scale,
    with_fixed_noise,
    with_hyperparameters,
)
from credo.laplace.low_rank import LowRankCurvature
from credo.laplace.structures import DataCurvature, DiagonalCurvature, FullCurvature, KronCurvature
from credo.map import MAP, MAPState
from credo.method import Clock, Info, State, TemperedMethod
from credo.model import Model
from credo.network import Selector
from credo.noise import key_to_seed
from credo.packing import STORED
from credo.posterior.posterior import Posterior
from credo.priors import Normal
from credo.priors.normal import gaussian_around_zero, precision_of_segments
from credo.storage import under
from credo.temperature import Temperature, temperature_at
from credo.types import Batch, Json, Prior

Structure = Literal["diag", "kron", "full", "low_rank"]


@final
@dataclass
class LaplaceState(State):
    """The weights live in the network; ``training`` is that of `MAP`, whose clock this one shares.

    ``model`` has the prior in force, which the evidence may change; ``gathered`` is the curvature
    of the epoch in progress where training asks for it; ``evidence`` and ``q`` are what `finish`
    found.
    """

    model: Model
    training: MAPState = field(metadata=STORED)
    num_data: int
    seed: int = field(metadata=STORED)
    gathered: DataPass | None = None
    evidence: Evidence | None = None
    q: Gaussian | None = None


@final
@checked
@dataclass(frozen=True)
class Laplace(TemperedMethod[LaplaceState]):
    """The Gaussian with the posterior's curvature at the mode, post hoc or after training.

    Args:
        structure: "diag", "kron" (KFAC of every layer, plus the prior, exactly), "full" or
            "low_rank" (the leading ``rank`` eigenpairs).
        subset: "all" of the model's random weights, "last_layer", or any selector; the others stay
            point estimates.
        curvature: "ggn", "fisher" (``mc_samples`` labels drawn from the model for each example),
            "empirical" (the true labels) or "hessian" (exact; "full" and "diag" of small networks).
        temperature: That of the posterior; with 1 it is the expansion of log p(m | D).
        optimise_prior: Fit the prior's scales to the evidence at the end, one for all weights
            ("global") or one for each layer ("per_layer").
        evidence_every: Learn the prior's scales in every so many epochs of training.
        train: How to train where ``epochs`` are asked for; None is `credo.MAP` with this
            temperature.
        mc_samples: Drawn labels per example, with ``curvature="fisher"``.
        rank: Eigenpairs kept, with ``structure="low_rank"``.
        max_memory: What the structure may take, in bytes.
    """

    structure: Structure = "kron"
    subset: Selector = "all"
    curvature: CurvatureKind = "ggn"
    temperature: Temperature = 1.0
    optimise_prior: Sharing | None = None
    evidence_every: Count | None = None
    train: MAP | None = None
    mc_samples: Count = 1
    rank: Count = 20
    max_memory: Positive = 4e9

    default_epochs: ClassVar[int] = 0
    spreads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.curvature == "hessian" and self.structure in ("kron", "low_rank"):
            raise UnsupportedError(
                f'curvature="hessian" has no structure={self.structure!r}: it is not positive '
                'semi-definite. Take structure="full" or "diag", or curvature="ggn"'
            )
        if self.train is not None and self.train.penalty is not None:
            raise UnsupportedError(
                "train=credo.MAP(penalty=…) leaves the prior out that Laplace's method goes on to "
                "use: give the penalty's prior to the model (credo.priors) and train without it"
            )
        if (self.evidence_every or self.optimise_prior) and self.temperature != 1.0:
            raise UnsupportedError(
                "the evidence is that of a posterior at temperature 1: leave temperature=1.0, or "
                "don't ask for optimise_prior or evidence_every"
            )

    def init(self, model: Model, num_data: int, generator: Generator | None = None) -> LaplaceState:
        """At the network's current weights."""
        self._check(self._subject(model))
        trained = with_fixed_noise(model) if self.evidence_every else model
        training = self._map.init(trained, num_data, generator)
        if self.evidence_every and training.ranks.several:
            raise UnsupportedError(
                "evidence_every adds up the curvature of an epoch, of which every rank has a part: "
                "train in one process, or learn the prior at the end by optimise_prior"
            )
        return LaplaceState(
            model=model,
            training=training,
            num_data=num_data,
            seed=int(torch.randint(2**62, (), generator=generator)),
            clock=training.clock,
        )

    def update(self, state: LaplaceState, batch: Batch) -> tuple[LaplaceState, Info]:
        """One step of training; in an epoch that the evidence asks for, also its curvature."""
        state.clock.begin(state.num_data, len(batch[1]))
        if self._asks_for_evidence(state.clock):
            if state.gathered is None:
                state.gathered = self._pass(state)
            state.gathered.generator.manual_seed(key_to_seed(state.seed, state.clock.step))
            state.gathered.add(batch)
        state.training, info = self._map.update(state.training, batch)
        if state.gathered is not None and state.clock.batch == 0:
            self._learn_prior(state)
        return state, info

    def finish(self, state: LaplaceState, data: Iterable[Batch]) -> LaplaceState:
        """One pass over the data at the weights the network has now."""
        gathered = self._pass(state)
        gathered.take(data)
        gathered.add_up(state.training.ranks)
        evidence = self._evidence(state, gathered)
        if state.clock.step == 0:
            warn_if_untrained(gathered, evidence)
        if self.optimise_prior is not None:
            noise = is_learned(state.model)
            evidence = evidence.maximised(self.optimise_prior, noise)
        # The Gaussian first: what is refused in it leaves the state as it was.
        state.q, state.evidence = evidence.gaussian(), evidence
        return state

    def posterior(self, state: LaplaceState) -> Posterior:
        """q; before `finish` the point mass at the weights."""
        if state.q is None or state.evidence is None:
            return self._map.posterior(state.training)
        model = self._subject(state.model)
        if self.optimise_prior is not None:
            model = with_hyperparameters(model, state.evidence)
        posterior = LaplacePosterior.at_network(model, state.q)
        assert isinstance(posterior, LaplacePosterior)
        posterior.evidence = state.evidence
        return posterior

    def summary(self, state: LaplaceState, nll: float = math.nan) -> dict[str, Any]:
        """That of training."""
        return self._map.summary(state.training, nll)

    def optimizer_of(self, state: LaplaceState) -> Optimizer:
        """That of training."""
        return state.training.optimizer

    def pack(self, state: LaplaceState) -> tuple[dict[str, Tensor], Json]:
        """Training, the prior and noise it has come to, and the curvature of an epoch in progress.

        What `finish` finds is not stored: it is found again.
        """
        tensors, meta = super().pack(state)
        if self.evidence_every and isinstance(state.model.prior, Normal):
            meta["prior"] = state.model.prior.config()
            meta["noise"] = noise_scale(state.training.model)
        if state.gathered is not None:
            sums, meta["gathered"] = state.gathered.pack()
            tensors |= {f"gathered.{name}": tensor for name, tensor in sums.items()}
        return tensors, meta

    def unpack(
        self, state: LaplaceState, tensors: Mapping[str, Tensor], meta: Json
    ) -> LaplaceState:
        """The inverse of ``pack``."""
        state = super().unpack(state, tensors, meta)
        if "prior" in meta:
            self._set_hyperparameters(state, priors.from_config(meta["prior"]), meta["noise"])
        if "gathered" in meta:
            state.gathered = self._pass(state)
            state.gathered.unpack(under("gathered.", tensors), meta["gathered"])
        return state

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _map(self) -> MAP:
        return self.train or MAP(temperature=self.temperature)

    def _subject(self, model: Model) -> Model:
        """The model whose random weights get the Gaussian."""
        if self.subset is None or self.subset == "all":
            return model
        return model.replace(random=self.subset)

    def _check(self, model: Model) -> None:
        prior = gaussian_around_zero(model.prior_over_weights(), "Laplace")
        precision_of_segments(prior, model.random)
        refuse_beyond(self.max_memory, self.structure, model, self.rank)

    def _pass(self, state: LaplaceState) -> DataPass:
        model = self._subject(state.model)
        self._check(model)
        ranks = state.training.ranks
        # Labels that are drawn for the Fisher information are each rank's own.
        place = (ranks.rank,) if ranks.several else ()
        seed = key_to_seed(state.seed, state.clock.step, *place)
        return DataPass(
            model,
            self._gatherer(model),
            self.curvature,
            torch.Generator(model.like.device).manual_seed(seed),
            self.mc_samples,
            self.max_memory,
        )

    def _gatherer(self, model: Model) -> DataCurvature:
        segments, like = model.random.segments, model.like
        if self.structure == "low_rank":
            return LowRankCurvature(segments, like, self.rank)
        if self.structure == "kron":
            return KronCurvature(segments, like)
        return (FullCurvature if self.structure == "full" else DiagonalCurvature)(segments, like)

    def _evidence(self, state: LaplaceState, gathered: DataPass) -> Evidence:
        model = gathered.model
        if not gathered.examples:
            raise DataError("the training data yielded no batches: there is no curvature to take")
        prior = gaussian_around_zero(model.prior_over_weights(), "Laplace")
        clock = state.clock
        temperature = temperature_at(
            self.temperature, model.random.segments, state.num_data, clock.epoch
        )
        positive("temperature", temperature)
        # A loader may leave examples out; the posterior is that of all.
        share = state.num_data / gathered.examples
        log_likelihood = share * gathered.log_likelihood
        power = 4 if self.curvature == "empirical" else 2
        return Evidence(
            segments=model.random.segments,
            mean=model.weights(model.random),
            curvature=gathered.curvature,
            precision=torch.tensor(
                precision_of_segments(prior, model.random), dtype=torch.float64,
                device=model.like.device,
            ),
            log_likelihood=log_likelihood,
            num_data=state.num_data,
            weight=share / temperature,
            temperature=temperature,
            noise=noise_of(model, log_likelihood, share * gathered.targets, power),
        )  # fmt: skip

    # --- the evidence during training -------------------------------------------------------------

    def _asks_for_evidence(self, clock: Clock) -> bool:
        if not self.evidence_every:
            return False
        return (clock.step // clock.num_batches + 1) % self.evidence_every == 0

    def _learn_prior(self, state: LaplaceState) -> None:
        assert state.gathered is not None
        evidence = self._evidence(state, state.gathered).maximised(
            self.optimise_prior or "per_layer", is_learned(state.model)
        )
        state.gathered = None
        scales = evidence.precision.rsqrt().tolist()
        table = {s.name: scale for s, scale in zip(evidence.segments, scales, strict=True)}
        noise = evidence.noise.scale if evidence.noise is not None else None
        self._set_hyperparameters(state, prior_with(state.model, table), noise)

    def _set_hyperparameters(self, state: LaplaceState, prior: Prior, noise: float | None) -> None:
        """Training goes on under this prior and noise."""
        model = state.model
        if noise is not None:
            set_noise_scale(model, noise)
        state.model = model.replace(prior=prior)
        # Noise that the evidence chooses is not also trained by the likelihood, which fits it to
        # residuals that the weights have already made small.
        state.training.model = with_fixed_noise(state.model)
        state.training.prior = state.model.prior_over_weights()
