"""Combinations that make no sense are refused with the reason; the others run."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.autodiff.loss import Loss
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, Gaussian, LowRankGaussian
from credo.rule.curvatures import (
    Curvature,
    ExactHessian,
    ExampleSquares,
    GaussNewton,
    Hutchinson,
    Reparameterised,
    SquaredGradient,
)
from credo.rule.expectations import AtMean, Expectation, GaussHermite, MonteCarlo
from credo.rule.families import KroneckerGaussian
from credo.rule.learner import Learner, Step

P = 3


def eye(size: int = P) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def mean() -> Tensor:
    return torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)


FAMILIES: dict[str, Gaussian] = {
    "fixed": FixedGaussian(mean(), torch.tensor(2.0).double()),
    "diagonal": DiagGaussian(mean(), torch.full((P,), 0.5).double()),
    "full": FullGaussian(mean(), 4 * eye()),
    "low rank": LowRankGaussian(
        mean(), 0.1 * torch.ones(P, 1).double(), 4 * torch.ones(P).double()
    ),
    "kronecker": KroneckerGaussian(mean(), ((4 * eye(P), eye(1)),)),
}
EXPECTATIONS: dict[str, Expectation] = {
    "at mean": AtMean(),
    "draws": MonteCarlo(4, antithetic=True),
    "values": MonteCarlo(4, estimator="score"),
    "quadrature": GaussHermite(3),
}
CURVATURES: dict[str, Curvature | None] = {
    "none": None,
    "exact": ExactHessian(),
    "gauss-newton": GaussNewton(),
    "examples": ExampleSquares(),
    "squared": SquaredGradient(),
    "reparameterised": Reparameterised(),
    "hutchinson": Hutchinson(2),
}


def network_loss() -> Loss:
    """Logistic regression with two weights and a bias, as a network."""
    net = nn.Linear(2, 1).double()
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0)).double()
    model = credo.Model(net, credo.likelihoods.Bernoulli())
    return Loss.of_model(model, (x, (x[:, :1] > 0).double()), num_data=10)


def is_nonsense(family: str, expectation: str, curvature: str) -> bool:
    """The rules, stated a second time and in another way than the library does."""
    if expectation == "values":
        return curvature != "none"
    if family == "fixed":
        return curvature != "none"
    if curvature == "none":
        return True
    if curvature == "reparameterised" and expectation == "at mean":
        return True
    return curvature == "hutchinson" and family != "diagonal"


@pytest.mark.parametrize(
    ("family", "expectation", "curvature"),
    list(itertools.product(FAMILIES, EXPECTATIONS, CURVATURES)),
)
def test_every_combination_runs_or_is_refused(
    family: str, expectation: str, curvature: str
) -> None:
    q = FAMILIES[family]
    prior = FixedGaussian(torch.zeros(P).double(), torch.tensor(1.0).double())
    learner = Learner(
        EXPECTATIONS[expectation], CURVATURES[curvature], Step(0.1, keep_positive=True), prior
    )
    if is_nonsense(family, expectation, curvature):
        with pytest.raises(UnsupportedError):
            learner.init(q)
        return
    state, loss = learner.init(q), network_loss()
    for _ in range(2):
        learner.update(state, loss)
    assert type(state.q) is type(q)
    assert state.q.mean.isfinite().all()
    assert (state.q.variance > 0).all()
    assert not torch.equal(state.q.mean, q.mean)
    if family != "fixed":
        assert not torch.equal(state.q.variance, q.variance)


def test_the_same_seed_gives_the_same_draws() -> None:
    learner = Learner(MonteCarlo(2), ExactHessian(), Step(0.1, keep_positive=True), seed=3)
    runs = []
    for _ in range(2):
        state = learner.init(FAMILIES["full"])
        for _ in range(3):
            learner.update(state, network_loss_fixed())
        runs.append(state.q.mean)
    assert torch.equal(*runs)


def network_loss_fixed() -> Loss:
    return Loss.of(lambda theta: (theta - 1).cosh().sum())


@pytest.mark.parametrize(
    ("learner", "family", "message"),
    [
        (Learner(AtMean(), Reparameterised(), Step(0.1)), "diagonal", "always zero at the mean"),
        (Learner(AtMean(), Hutchinson(), Step(0.1)), "full", "estimates the diagonal alone"),
        (Learner(AtMean(), ExactHessian(), Step(0.1)), "fixed", "thrown away"),
        (Learner(AtMean(), None, Step(0.1)), "diagonal", "learns its precision from curvature"),
        (
            Learner(MonteCarlo(estimator="score"), ExactHessian(), Step(0.1)),
            "diagonal",
            "values only",
        ),
        (Learner(AtMean(), SquaredGradient(), Step(0.1, root=True)), "full", "by itself"),
    ],
)
def test_refusals_say_why(learner: Learner, family: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        learner.init(FAMILIES[family])


def test_a_prior_of_another_size_is_refused() -> None:
    prior = FixedGaussian(torch.zeros(2), torch.tensor(1.0))
    with pytest.raises(DataError, match="over 2 weights, q over 3"):
        Learner(AtMean(), ExactHessian(), Step(0.1), prior).init(FAMILIES["full"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "rate must be a positive"),
        ({"rate": 0.1, "momentum": 1.0}, "momentum must be .*less than 1"),
        ({"rate": 0.1, "temperature": -1.0}, "temperature must be 0 or a positive"),
        ({"rate": 0.1, "root": True, "keep_positive": True}, "nothing to keep"),
        ({"rate": 0.1, "debias": True}, "debias must be one of .none."),
    ],
)
def test_steps_out_of_range_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises((DataError, UnsupportedError), match=message):
        Step(**settings)  # type: ignore[arg-type]


def test_quadrature_over_many_weights_is_refused() -> None:
    q = DiagGaussian(torch.zeros(30), torch.ones(30))
    learner = Learner(GaussHermite(8), ExactHessian(), Step(0.1))
    with pytest.raises(UnsupportedError, match=r"8\^30 points; use MonteCarlo"):
        learner.update(learner.init(q), Loss.of(lambda theta: theta.square().sum()))


def test_negative_curvature_names_the_weight_and_the_remedy() -> None:
    learner = Learner(AtMean(), ExactHessian(), Step(0.9))
    state = learner.init(DiagGaussian(mean(), torch.ones(P).double()))
    curvatures = torch.tensor([1.0, -50.0, 1.0]).double()
    with pytest.raises(DataError, match=r"weight 1 became .*keep_positive=True"):
        learner.update(state, Loss.of(lambda theta: 0.5 * curvatures @ theta.square()))


def test_a_gradient_that_is_not_finite_stops_before_the_step() -> None:
    learner = Learner(AtMean(), SquaredGradient(), Step(0.1))
    state = learner.init(DiagGaussian(mean(), torch.ones(P).double()))
    with pytest.raises(NonFiniteError, match="not finite at step 0"):
        learner.update(state, Loss.of(lambda theta: theta.sum() / 0.0))
    assert torch.equal(state.q.mean, mean())


def test_a_loss_of_one_number_has_no_examples_and_no_outputs() -> None:
    loss = Loss.of(lambda theta: theta.square().sum())
    with pytest.raises(DataError, match=r"Loss\.over_examples or Loss\.of_model"):
        loss.example_squares(mean())
    with pytest.raises(UnsupportedError, match=r"Loss\.of_model"):
        loss.gauss_newton(mean())
