"""What the library ships and what the engine composes are the same, step for step.

One table. A row has the shipped trajectory, the engine's from the same start on the same batches
(and, where the shipped method draws, at its own draws), and the tolerance with its reason.
Everything is float64 with smooth activations: with kinks, equal algorithms drift apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import credo
from credo.autodiff.loss import Loss
from credo.continual import OnlineEWC, Task, Training
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, Gaussian
from credo.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from credo.model import Model
from credo.noise import key_to_seed
from credo.optim import IVON, VOGN, VON, NaturalOptimizer, Vadam
from credo.rule import rule
from credo.rule.curvatures import (
    Curvature,
    ExactHessian,
    ExampleSquares,
    GaussNewton,
    Reparameterised,
)
from credo.rule.expectations import AtMean
from credo.rule.gallery import binary_network, elastic_weight_consolidation
from credo.rule.gallery.adam import adam
from credo.rule.gallery.gradient_descent import gradient_descent
from credo.rule.gallery.laplace import laplace
from credo.rule.learner import Learner, Step
from credo.types import Batch, Vector

F64 = torch.float64

Path: TypeAlias = list[tuple[Tensor, ...]]
"""After each step: the mean, and the precision where there is one."""
Draws: TypeAlias = list[list[Vector]]
"""The weights that each step looked at."""


@dataclass(frozen=True)
class Row:
    """A shipped algorithm and the composition that must follow it."""

    shipped: Callable[[], tuple[Path, Draws]]
    engine: Callable[[Draws], Path]
    tolerance: float
    """Relative and absolute."""
    why: str
    """Why it is that tolerance."""


ROWS: dict[str, Row] = {}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# --- point estimates: MAP -------------------------------------------------------------------------

MAP_STEPS, MAP_DATA = 50, 48


def map_model() -> Model:
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator).double())
    return Model(net, Categorical(), credo.priors.Normal(scale=0.7))


def map_batch(step: int) -> Batch:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(step % 3)).double()
    return x, (x[:, 0] > 0).long()


def shipped_map(method: credo.MAP) -> tuple[Path, Draws]:
    here = map_model()
    state, path = method.init(here, MAP_DATA, torch.Generator().manual_seed(0)), []
    for step in range(MAP_STEPS):
        state, _ = method.update(state, map_batch(step))
        path.append((here.bind().vector.clone(),))
    return path, []


def engine_map(method: Learner, start: Callable[[Tensor], Gaussian]) -> Path:
    """The engine on ℓ(θ) = mean NLL − log p(θ)/n, what MAP descends."""
    here = map_model()
    prior = here.prior_over_weights()
    state, path = method.init(start(here.bind().vector.clone())), []
    for step in range(MAP_STEPS):
        data = Loss.of_model(here, map_batch(step))
        loss = Loss.of(lambda w, data=data: data.value(w) - prior.log_prob(w) / MAP_DATA)
        method.update(state, loss)
        path.append((state.q.mean.clone(),))
    return path


FIFTY_STEPS = "the same sums in another order: 50 steps round by a few 1e-16"
ROWS["MAP with Adam"] = Row(
    lambda: shipped_map(credo.MAP(optimizer="adam", lr=1e-2)),
    lambda _: engine_map(
        adam(lr=1e-2),
        lambda mean: DiagGaussian(mean, torch.full((), math.inf, dtype=mean.dtype)),
    ),
    1e-12,
    FIFTY_STEPS,
)
ROWS["MAP with SGD"] = Row(
    lambda: shipped_map(credo.MAP(optimizer="sgd", lr=1e-2)),
    lambda _: engine_map(
        gradient_descent(1e-2, momentum=0.9),  # what the name "sgd" stands for
        lambda mean: FixedGaussian(mean, torch.ones((), dtype=mean.dtype)),
    ),
    1e-12,
    FIFTY_STEPS,
)


# --- natural-gradient optimizers, and the same as methods -----------------------------------------

N, P, LR, BETA2, H0 = 12, 3.0, 0.05, 0.9, 0.8
INPUTS, TARGETS = numbers(N, 3, seed=7), torch.tensor([0, 1, 1, 0] * 3)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batches(count: int = 25, size: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(count):
        chosen = torch.randperm(N, generator=torch.Generator().manual_seed(index))[:size]
        yield INPUTS[chosen], TARGETS[chosen]


def flat(net: nn.Module) -> Vector:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def curvature_of(opt: NaturalOptimizer, net: nn.Module) -> Vector:
    return torch.cat([opt.state[p]["curvature"].reshape(-1) for p in net.parameters()])


def shipped_optimizer(
    make: Callable[[nn.Module], NaturalOptimizer],
    samples: int,
    precision: Callable[[Vector], Vector],
) -> tuple[Path, Draws]:
    net = network()
    opt = make(net)
    path: Path = []
    draws: Draws = []
    for x, y in batches():
        draws.append([])
        for _ in range(samples):
            with opt.sampled():
                draws[-1].append(flat(net))
                loss = F.cross_entropy(net(x), y)
                if isinstance(opt, VON):
                    opt.backward(loss)
                else:
                    loss.backward()
        opt.step()
        path.append((flat(net), precision(curvature_of(opt, net))))
    return path, draws


def shipped_method(method: Any, precision: Callable[[Vector], Vector]) -> tuple[Path, Draws]:
    net = network()
    state = method.init(
        Model(net, Categorical(), credo.priors.Normal(P**-0.5)), N, torch.Generator().manual_seed(0)
    )
    path: Path = []
    draws: Draws = []
    seen: list[Vector] = []
    net.register_forward_pre_hook(lambda module, _: seen.append(flat(module)))
    for batch in batches():
        seen.clear()
        state, _ = method.update(state, batch)
        draws.append(seen[:1])  # VOGN passes a second time for its squares, at the same weights
        path.append((flat(net), precision(curvature_of(state.optimizer, net))))
    return path, draws


class Recorded:
    """The shipped algorithm's own draws, in place of the engine's."""

    at_mean_only = False
    values_only = False
    is_grid = False

    def __init__(self) -> None:
        self.now: list[Vector] = []

    def points(self, q: Any, generator: torch.Generator) -> Iterator[tuple[float, Vector]]:
        for point in self.now:
            yield 1 / len(self.now), point


@dataclass(frozen=True)
class MeanPulledSquare:
    """Vadam's: ∇ℓ(θ) + δm for the gradient, (∇ℓ)² without the prior for the curvature."""

    delta: float
    needs_spread = False
    diagonal_only = True
    is_derivative = False

    def at(
        self, loss: Loss, theta: Vector, q: Any, dense: bool, generator: torch.Generator
    ) -> tuple[Vector, Tensor]:
        gradient = loss.gradient(theta)
        return gradient + self.delta * q.mean, gradient.square()


def engine_at_draws(
    draws: Draws,
    curvature: Curvature,
    step: Step,
    start_precision: float,
    prior_precision: float | None,
    num_data: int | None,
) -> Path:
    twin = Model(network(), Categorical())
    one = torch.ones_like(twin.bind().vector)
    prior = None if prior_precision is None else DiagGaussian(0 * one, one * prior_precision**-0.5)
    expectation = Recorded()
    learner = Learner(expectation, curvature, step, prior)
    state: Any = learner.init(
        DiagGaussian(twin.bind().vector.clone(), one * float(start_precision) ** -0.5)
    )
    path: Path = []
    for (x, y), now in zip(batches(), draws, strict=True):
        expectation.now = now
        learner.update(state, Loss.of_model(twin, (x, y), num_data))
        path.append((state.q.mean.clone(), state.precision.clone()))
    return path


TWENTY_FIVE_STEPS = "the same sums in another order: 25 steps round by a few 1e-15"


def newton_like(kind: type[NaturalOptimizer], momentum: float, damping: float, temperature: float,
                debias: bool) -> tuple[Step, float]:  # fmt: skip
    """The step and the first S of the engine, where S = Nh + p.

    The rule at temperature τ with rates ρ/τ and α/τ is the optimizer with ρ and α, whose rates
    don't depend on τ.
    """
    effective = N / temperature
    rate = LR * (H0 + P / effective) if kind is IVON else LR
    step = Step(
        rate=(1 - BETA2) / temperature,
        mean_rate=rate / temperature,
        momentum=momentum,
        damping=damping * effective,
        temperature=temperature,
        debias="mean" if debias else "none",
        prior_in_momentum=kind is not IVON,
        keep_positive=kind is not VOGN,
    )
    return step, effective * H0 + P


CURVATURES: dict[type[NaturalOptimizer], Curvature] = {
    VON: ExactHessian(),
    VOGN: ExampleSquares(),
    IVON: Reparameterised(),
}


def newton_like_row(
    kind: type[NaturalOptimizer],
    momentum: float,
    damping: float,
    temperature: float,
    samples: int,
    debias: bool,
) -> Row:
    def make(net: nn.Module) -> NaturalOptimizer:
        return kind(net, lr=LR, num_data=N, prior_precision=P, hess_init=H0, damping=damping,
                    betas=(momentum, BETA2), debias=debias, temperature=temperature)  # fmt: skip

    step, start = newton_like(kind, momentum, damping, temperature, debias)
    return Row(
        lambda: shipped_optimizer(make, samples, lambda h: N / temperature * h + P),
        lambda draws: engine_at_draws(draws, CURVATURES[kind], step, start, P, N),
        1e-12,
        TWENTY_FIVE_STEPS,
    )


for kind, (momentum, damping), temperature, samples, debias in itertools.product(
    (VON, VOGN, IVON), ((0.0, 0.1), (0.8, 0.0)), (1.0, 0.4), (1, 2), (False, True)
):
    settings = f"γ={momentum}, ε={damping}, τ={temperature}, {samples} draws, debias={debias}"
    ROWS[f"optim.{kind.__name__}, {settings}"] = newton_like_row(
        kind, momentum, damping, temperature, samples, debias
    )
for method, kind in (
    (credo.VOGN(lr=LR, betas=(0.8, BETA2), hess_init=H0, damping=0.0, temperature=0.4), VOGN),
    (credo.IVON(lr=LR, betas=(0.8, BETA2), hess_init=H0, temperature=0.4), IVON),
):
    step, start = newton_like(kind, 0.8, 0.0, 0.4, debias=True)
    ROWS[f"method {kind.__name__}"] = Row(
        lambda method=method: shipped_method(method, lambda h: N / 0.4 * h + P),
        lambda draws, kind=kind, step=step, start=start: engine_at_draws(
            draws, CURVATURES[kind], step, start, P, N
        ),
        1e-12,
        TWENTY_FIVE_STEPS,
    )


def vadam_step(damping: float, debias: bool) -> Step:
    """The prior's precision acts as the damping of √S, its pull as part of the gradient."""
    return Step(rate=1 - BETA2, mean_rate=LR, momentum=0.8, damping=P / N + damping, root=True,
                debias="both" if debias else "none")  # fmt: skip


def vadam_row(samples: int, debias: bool) -> Row:
    def make(net: nn.Module) -> NaturalOptimizer:
        return Vadam(net, lr=LR, num_data=N, prior_precision=P, hess_init=H0, betas=(0.8, BETA2),
                     damping=0.01, debias=debias)  # fmt: skip

    return Row(
        lambda: shipped_optimizer(make, samples, lambda h: h),
        lambda draws: engine_at_draws(
            draws, MeanPulledSquare(P / N), vadam_step(0.01, debias), H0, None, None
        ),
        1e-12,
        TWENTY_FIVE_STEPS,
    )


for debias in (False, True):
    ROWS[f"optim.Vadam, debias={debias}"] = vadam_row(1, debias)
ROWS["method Vadam"] = Row(
    lambda: shipped_method(
        credo.Vadam(lr=LR, betas=(0.8, BETA2), hess_init=H0, temperature=1.0), lambda h: h
    ),
    lambda draws: engine_at_draws(
        draws, MeanPulledSquare(P / N), vadam_step(1e-8, True), H0, None, None
    ),
    1e-12,
    TWENTY_FIVE_STEPS,
)

# --- Laplace --------------------------------------------------------------------------------------

RULE = {"ggn": GaussNewton(), "hessian": ExactHessian(), "empirical": ExampleSquares()}
CASES = {
    "categorical": (Categorical(), torch.arange(20) % 3, 3),
    "gaussian": (credo.likelihoods.Gaussian(0.3), numbers(20, 2, seed=3), 2),
    "bernoulli": (Bernoulli(), (numbers(20, 2, seed=4) > 0).to(F64), 2),
    "heteroscedastic": (HeteroscedasticGaussian(), numbers(20, 1, seed=6), 2),
}


def laplace_row(case: str, curvature: str, structure: str) -> Row:
    """One step with rate 1 puts S = H + δ, H at the mean the step starts from."""
    likelihood, y, outputs = CASES[case]
    x = numbers(20, 4)

    def model() -> Model:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
        return Model(net, likelihood, credo.priors.Normal(500.0**-0.5))  # enough for the Hessian

    def shipped() -> tuple[Path, Draws]:
        method = credo.Laplace(structure=structure, curvature=curvature)
        return [(credo.fit(model(), method, (x, y), progress=False).q.precision,)], []

    def engine(_: Draws) -> Path:
        here = model()
        mean = here.random.read(here.bind().vector)
        one = torch.ones_like(mean)
        diagonal = structure == "diag"
        start = DiagGaussian(mean, one) if diagonal else FullGaussian(mean, torch.diag(one))
        learner = Learner(AtMean(), RULE[curvature], Step(rate=1.0), here.prior_over_weights())
        loss = Loss.of_model(here, (x, y), num_data=20)
        return [(learner.update(learner.init(start), loss).q.precision,)]

    return Row(shipped, engine, 1e-12, "a few hundred additions of numbers of one size")


for case, curvature, structure in itertools.product(CASES, RULE, ("full", "diag")):
    ROWS[f"Laplace, {case}, {curvature}, {structure}"] = laplace_row(case, curvature, structure)


def rested_laplace() -> Row:
    """The rule run to rest, and Laplace at the mean where it rests."""
    x = numbers(40, 3)
    y = (x[:, 0] + 0.5 * numbers(40, seed=1) > 0).to(F64)[:, None]
    prior = credo.priors.Normal(2.5**-0.5)

    def rest() -> FullGaussian:
        model = Model(nn.Linear(3, 1, bias=False).double(), Bernoulli(), prior)
        start = FullGaussian(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))
        loss = Loss.of_model(model, (x, y), num_data=40)
        q = laplace(loss, start, model.prior_over_weights(), tolerance=1e-13)
        assert isinstance(q, FullGaussian)
        return q

    def shipped() -> tuple[Path, Draws]:
        net, mean = nn.Linear(3, 1, bias=False).double(), rest().mean
        with torch.no_grad():
            net.weight.copy_(mean)
        q = credo.fit(
            Model(net, Bernoulli(), prior), credo.Laplace("full"), (x, y), progress=False
        ).q
        assert isinstance(q, FullGaussian)
        return [(q.mean, q.precision)], []

    def engine(_: Draws) -> Path:
        q = rest()
        return [(q.mean, q.precision)]

    return Row(
        shipped,
        engine,
        1e-9,
        "the rule rests to 1e-13 of a standard deviation, and S has numbers of 1e1",
    )


ROWS["Laplace where the rule rests"] = rested_laplace()


# --- elastic weight consolidation -----------------------------------------------------------------

NOISE, PRIOR_SCALE = 0.7, 0.9


def ewc_tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for index in range(3):
        x = torch.randn(30 + 10 * index, 4, generator=generator, dtype=F64)
        y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]).double()
        y = y + torch.randn(len(x), 1, generator=generator, dtype=F64)
        tasks.append(Task(f"task {index}", (x, y), (x, y)))
    return tasks


def ewc_model() -> Model:
    likelihood = credo.likelihoods.Gaussian(scale=NOISE)
    return Model(nn.Linear(4, 1).double(), likelihood, credo.priors.Normal(scale=PRIOR_SCALE))


def shipped_ewc() -> tuple[Path, Draws]:
    model = ewc_model()
    # Full batches and plain gradient descent on forms whose eigenvalues lie between 1 and 12: each
    # step takes at least a tenth of what is left, and 250 leave nothing but rounding.
    training = Training(
        epochs=250, batch_size=10_000, lr=0.12, optimizer="sgd-plain", temperature=1.0
    )
    learner = OnlineEWC(model, training, structure="full")
    path: Path = []
    for task in ewc_tasks():
        learner.learn(task, progress=False)
        (form,) = learner.forms
        eye = torch.eye(len(form.anchor), dtype=F64)
        path.append((model.bind().vector.clone(), torch.stack([form.times(row) for row in eye])))
    return path, []


def engine_ewc(_: Draws) -> Path:
    model, path = ewc_model(), []
    eye = torch.eye(5, dtype=F64)
    yesterday: Any = FullGaussian(0 * eye[0], eye / PRIOR_SCALE**2)
    for task in ewc_tasks():
        loss = Loss.of_model(model, task.train_data, num_data=task.num_data)
        yesterday = elastic_weight_consolidation.consolidate(loss, yesterday, rate=1.0)
        path.append((yesterday.mean, yesterday.precision))
    return path


ROWS["OnlineEWC"] = Row(
    shipped_ewc, engine_ewc, 1e-11, "gradient descent rests to rounding, and S has numbers of 1e2"
)


# --- signs: BayesBiNN -----------------------------------------------------------------------------

BINARY = binary_network.BinaryNetwork(rate=1e-3, relaxation=0.7, temperature=0.3, momentum=0.5)
BINARY_DATA = numbers(40, 5), torch.arange(40) % 3


def binary_model() -> Model:
    net = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    return Model(net.double(), Categorical(), random=binary_network.sign_weights)


def shipped_binary() -> tuple[Path, Draws]:
    state, path = BINARY.init(binary_model(), num_data=400), []
    for _ in range(20):
        state = BINARY.update(state, BINARY_DATA)
        path.append((state.q.half_logit,))
    return path, []


def engine_binary(_: Draws) -> Path:
    """λ ← λ − ρ(n·s⊙∇ℓ̄ + τλ) by `rule.step`, with ∇ℓ̄ by `torch.func` and s by its formula."""
    model, (x, y) = binary_model(), BINARY_DATA
    q = previous = BINARY.init(model, num_data=400).q
    path: Path = []
    for step in range(20):
        generator = torch.Generator().manual_seed(key_to_seed(BINARY.seed, step, 1))
        u = torch.empty_like(q.half_logit).uniform_(generator=generator)
        w = torch.tanh((q.half_logit + 0.5 * torch.log(u / (1 - u))) / 0.7)
        slope = (1 - w**2) / (0.7 * (1 - q.mean**2))

        def mean_loss(w: Vector) -> Tensor:
            weights = {"0.weight": w[:30].view(6, 5), "2.weight": w[30:].view(3, 6)}
            return F.cross_entropy(functional_call(model.net, weights, (x,)), y)

        gradient = 400 * slope * torch.func.grad(mean_loss)(w)
        q, previous = (
            rule.step(q, (gradient,), 1e-3, temperature=0.3, momentum=0.5, previous=previous),
            q,
        )
        path.append((q.half_logit,))
    return path


ROWS["BayesBiNN"] = Row(
    shipped_binary, engine_binary, 1e-11, "1 − tanh², as published, cancels where a draw is near ±1"
)


# --- the table ------------------------------------------------------------------------------------


def gaps(ours: Path, engines: Path) -> Iterator[float]:
    """The largest difference of each step, next to the larger of 1 and the engine's number."""
    for step, expected in zip(ours, engines, strict=True):
        for a, b in zip(step, expected, strict=True):
            yield float(((a - b).abs() / b.abs().clamp(min=1)).max())


@pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning")
@pytest.mark.parametrize("name", ROWS)
def test_the_shipped_algorithm_follows_the_engine(name: str) -> None:
    row = ROWS[name]
    ours, draws = row.shipped()
    assert max(gaps(ours, row.engine(draws))) <= row.tolerance, row.why


def test_vadam_with_several_draws_is_not_the_rule() -> None:
    """The engine would average the draws' squares; Vadam squares the average, as the square of a
    minibatch's gradient is meant. For one draw both are the same."""
    row = vadam_row(samples=2, debias=True)
    ours, draws = row.shipped()
    assert max(gaps(ours, row.engine(draws))) > 1e-3


def test_penalties_of_ewc_and_of_the_engine_are_the_same_numbers() -> None:
    model = ewc_model()
    learner = OnlineEWC(model, Training(epochs=1, batch_size=10_000), structure="full")
    learner.learn(ewc_tasks()[0], progress=False)
    (form,) = learner.forms
    eye = torch.eye(5, dtype=F64)
    q = FullGaussian(form.anchor, torch.stack([form.times(row) for row in eye]))
    theta = numbers(5, seed=4)
    expected = float(elastic_weight_consolidation.penalty(q, theta))
    assert form.value(theta) == pytest.approx(expected, rel=1e-12)
