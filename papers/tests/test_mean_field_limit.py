"""At η = 1 a wide network's posterior is its prior; at η = τp/N it has a limit (Huix 2022)."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch.distributions import Normal, kl_divergence

from credo.errors import ConvergenceError, DataError, UnsupportedError
from credo_papers.mean_field_limit import (
    CrossEntropy,
    MeanFieldProblem,
    Neurons,
    SquaredLoss,
    maximise,
    relu_moments,
)

WIDTHS = (10, 100, 1000, 10_000, 100_000)
TAU = 0.01


def double(values):
    return torch.as_tensor(values, dtype=torch.float64)


def regression() -> MeanFieldProblem:
    """Data: 20 points of sin(2x) + ½ on [0.2, 2], no bias."""
    x = torch.linspace(0.2, 2, 20, dtype=torch.float64)
    return MeanFieldProblem(x[:, None], torch.sin(2 * x) + 0.5)


def classification() -> MeanFieldProblem:
    """Three classes along the same line, with a bias."""
    x = torch.linspace(0.2, 2, 20, dtype=torch.float64)
    labels = (x > 0.8).long() + (x > 1.5).long()
    return MeanFieldProblem(torch.stack([x, torch.ones_like(x)], 1), labels, CrossEntropy())


PROBLEMS = {"squared loss": regression(), "cross-entropy": classification()}
BOTH = pytest.mark.parametrize("name", PROBLEMS)


@cache
def best_limit(name: str) -> Neurons:
    return PROBLEMS[name].best_limit(TAU)


def some_neurons(rows: int, inputs: int, outputs: int, seed: int = 0, copies: int = 1) -> Neurons:
    generator = torch.Generator().manual_seed(seed)
    mean, log_scale = torch.randn(
        2, rows, outputs + inputs, generator=generator, dtype=torch.float64
    )
    return Neurons(mean, (0.5 * log_scale).exp(), outputs, copies)


def slope(widths, values) -> float:
    return float(np.polyfit(np.log(widths), np.log(values), 1)[0])


# --- moments --------------------------------------------------------------------------------------


@given(st.floats(-6, 6), st.floats(0.05, 4))
@settings(deadline=None, max_examples=50)
def test_relu_moments_are_those_of_quadrature(mean: float, scale: float) -> None:
    density = stats.norm(mean, scale).pdf
    top = max(mean, 0) + 12 * scale
    points = [mean] if 0 < mean < top else None
    for power, found in zip((1, 2), relu_moments(double(mean), double(scale)), strict=True):
        want, _ = integrate.quad(
            lambda u, k=power: u**k * density(u), 0, top, points=points, epsabs=1e-13
        )
        # quad's own precision; below 1e-13 the closed form is a difference of rounded numbers.
        assert float(found) == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_moments_stay_possible_where_a_neuron_is_off_or_certain() -> None:
    first, second = relu_moments(double([-40.0, -9.0, 3.0, 0.0]), double([1.0, 1.0, 0.0, 0.0]))
    assert (first >= 0).all()
    assert (second >= first.square()).all()
    torch.testing.assert_close(first[2:], double([3.0, 0.0]))
    torch.testing.assert_close(second[2:], double([9.0, 0.0]))


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, torch.nn.functional.softplus])
def test_output_moments_are_those_of_drawn_networks(activation) -> None:
    """Two outputs, three inputs, five rows of two neurons; within 5 standard errors."""
    q = some_neurons(5, inputs=3, outputs=2, copies=2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, covariance = q.output_moments(x, activation)
    samples = 40_000
    f = q.sample_outputs(x, samples, torch.Generator().manual_seed(2), activation)
    error = f.std(0) / math.sqrt(samples)
    assert ((f.mean(0) - mean).abs() < 5 * error).all()
    products = torch.einsum("sbk,sbl->sbkl", f - mean, f - mean)
    error = products.std(0) / math.sqrt(samples)
    assert ((products.mean(0) - covariance).abs() < 5 * error).all()


def test_tanh_moments_are_those_of_scipy() -> None:
    q = some_neurons(1, inputs=2, outputs=1)
    x = double([[0.7, -0.4]])
    mean, covariance = q.moments(x, torch.tanh)
    (a, *b), (sa, *sb) = q.mean[0].tolist(), q.scale[0].tolist()
    u = stats.norm(b @ x[0].numpy(), math.hypot(sb[0] * 0.7, sb[1] * 0.4))
    first, second = (u.expect(lambda t, k=k: np.tanh(t) ** k) for k in (1, 2))
    # 64 nodes for a tanh of a normal of standard deviation one
    assert float(mean) == pytest.approx(a * first, rel=1e-6)
    want = (a**2 + sa**2) * second - (a * first) ** 2
    assert float(covariance) == pytest.approx(want, rel=1e-6)


def test_a_neurons_kl_is_that_of_torch() -> None:
    q = some_neurons(6, inputs=2, outputs=3)
    prior = Normal(double(0.0), double(math.sqrt(0.2)))
    torch.testing.assert_close(q.kl(), kl_divergence(Normal(q.mean, q.scale), prior).sum(1))
    torch.testing.assert_close(
        PROBLEMS["squared loss"].total_kl(replace(q, copies=7)), 7 * q.kl().sum()
    )


# --- the objectives -------------------------------------------------------------------------------


def test_the_elbo_of_the_squared_loss_is_exact() -> None:
    problem, q = PROBLEMS["squared loss"], some_neurons(4, inputs=1, outputs=1)
    sampled, error = problem.sampled_loss(q, 50_000, torch.Generator().manual_seed(0))
    assert abs(float(sampled - problem.expected_loss(q).sum())) < 5 * float(error)
    elbo = -0.3 * q.kl().sum() - problem.expected_loss(q).sum()
    torch.testing.assert_close(problem.elbo(q, 0.3), elbo)


def test_normal_outputs_cost_the_cross_entropy_one_over_n_squared() -> None:
    """Cubature against every neuron drawn: 5 standard errors, plus that third cumulant."""
    problem, ten = PROBLEMS["cross-entropy"], best_limit("cross-entropy")
    for width, samples in ((20, 20_000), (200, 4000)):
        q = replace(ten, copies=width)
        sampled, error = problem.sampled_loss(q, samples, torch.Generator().manual_seed(0))
        bias = 20 / width**2
        assert abs(float(sampled - problem.expected_loss(q).sum())) < 5 * float(error) + bias


def test_cubature_is_that_of_scipy() -> None:
    """Two classes: log(1 + e^(f₁ − f₀)) of one normal."""
    mean, root = double([[0.3, -0.8]]), double([[[0.9, 0.0], [0.4, 0.7]]])
    covariance = root @ root.mT
    found = CrossEntropy().expected(mean, covariance, torch.tensor([0]))
    c = covariance[0]
    margin = stats.norm(-1.1, math.sqrt(c[0, 0] + c[1, 1] - 2 * c[0, 1]))
    assert float(found) == pytest.approx(margin.expect(lambda t: np.logaddexp(0, t)), rel=1e-6)


@BOTH
def test_the_limit_functional_is_the_tempered_limit_at_the_balanced_temperature(name: str) -> None:
    problem = PROBLEMS[name]
    for copies in (1, 30):
        q = replace(best_limit(name), copies=copies)
        eta = problem.balanced(TAU, q.width)
        torch.testing.assert_close(
            problem.tempered_limit(q, eta), problem.num_data * problem.limit(q, TAU)
        )
        torch.testing.assert_close(
            problem.gap(q), problem.tempered_limit(q, eta) - problem.elbo(q, eta)
        )


def test_the_gap_of_the_squared_loss_is_half_the_variance() -> None:
    problem, q = PROBLEMS["squared loss"], some_neurons(8, inputs=1, outputs=1)
    _, per_neuron = q.moments(problem.x)
    want = 0.5 * per_neuron.mean(0).sum() / 8
    torch.testing.assert_close(problem.gap(q), want, rtol=1e-12, atol=0)


@BOTH
def test_the_gap_is_of_order_p_over_n_and_not_negative(name: str) -> None:
    """gap·N/p is one constant for the squared loss, and tends to one for the cross-entropy."""
    problem = PROBLEMS[name]
    q = some_neurons(3, problem.x.shape[1], problem.start().outputs)
    constants = []
    for width in WIDTHS:
        copies = replace(q, copies=width)
        constants.append(float(problem.gap(copies)) * copies.width / problem.num_data)
    assert min(constants) > 0
    if name == "squared loss":
        assert constants == pytest.approx([constants[0]] * len(WIDTHS), rel=1e-9)
    else:
        # The next term is O(1/N): already a thousandth at N = 3000, and rounding of E ℓ − ℓ later.
        assert constants[2:] == pytest.approx([constants[-1]] * 3, rel=2e-3)


def test_more_data_widens_the_gap_in_proportion() -> None:
    problem, q = PROBLEMS["cross-entropy"], best_limit("cross-entropy")
    twice = MeanFieldProblem(problem.x.repeat(2, 1), problem.y.repeat(2), CrossEntropy())
    torch.testing.assert_close(twice.gap(q), 2 * problem.gap(q))
    torch.testing.assert_close(twice.limit(q, TAU), problem.limit(q, TAU))


@BOTH
def test_the_gradient_of_the_limit_is_that_of_finite_differences(name: str) -> None:
    problem = PROBLEMS[name]
    q = some_neurons(2, problem.x.shape[1], problem.start().outputs)
    for objective in (
        lambda m, s: problem.limit(replace(q, mean=m, scale=s), TAU),
        lambda m, s: problem.elbo(replace(q, mean=m, scale=s, copies=5), 0.5),
    ):
        leaves = q.mean.clone().requires_grad_(), q.scale.clone().requires_grad_()
        assert torch.autograd.gradcheck(objective, leaves)


# --- η = 1: collapse ------------------------------------------------------------------------------


def test_known_numbers_of_the_collapse() -> None:
    problem = PROBLEMS["squared loss"]
    found = [float(problem.total_kl(problem.best(1.0, width))) for width in WIDTHS]
    assert found == pytest.approx([0.0731, 0.00723, 7.25e-4, 7.25e-5, 7.25e-6], rel=1e-3)


@BOTH
def test_total_kl_and_mean_output_fall_as_one_over_n(name: str) -> None:
    """Ours: the paper says KL → 0. The constant of the rate is a formula."""
    problem = PROBLEMS[name]
    kls, outputs = [], []
    for width in WIDTHS:
        q = problem.best(1.0, width)
        kls.append(float(problem.total_kl(q)))
        outputs.append(float(q.output_moments(problem.x)[0].abs().mean()))
    assert slope(WIDTHS, kls) == pytest.approx(-1, abs=0.05)
    assert slope(WIDTHS, outputs) == pytest.approx(-1, abs=0.05)
    # The next term is O(1/N); the optimum's own gradient is 1e-8 at worst.
    assert kls[-2] * WIDTHS[-2] == pytest.approx(problem.collapse_constant(), rel=1e-3)
    # The paper's bound: the KL is at most what the prior loses by not fitting.
    prior = Neurons.at_prior(problem.x.shape[1], problem.start().outputs, 10, dtype=torch.float64)
    best = problem.best(1.0, 10)
    loss_of_prior, loss = problem.expected_loss(prior).sum(), problem.expected_loss(best).sum()
    assert float(problem.total_kl(best)) < float(loss_of_prior - loss)


def test_a_posterior_that_fits_is_given_up_at_temperature_one() -> None:
    """Also where neurons are free to differ and start from a good fit."""
    problem = PROBLEMS["squared loss"]
    fit = problem.best_limit(0.003, some_neurons(2, 1, 1, seed=3))
    assert float(fit.kl().max()) > 1
    forgetful = problem.best(1.0, 1000, start=fit)
    assert float(problem.total_kl(forgetful)) == pytest.approx(7.25e-4, rel=1e-2)


# --- η = τp/N: balance ----------------------------------------------------------------------------


def test_known_numbers_of_the_balance() -> None:
    problem, limit = PROBLEMS["squared loss"], best_limit("squared loss")
    found = [problem.best(problem.balanced(TAU, width), width) for width in WIDTHS]
    kls = [float(q.kl()) for q in found]
    assert kls == pytest.approx([2.618, 2.273, 2.267, 2.268, 2.268], abs=6e-4)
    elbos = [float(problem.elbo(q, problem.balanced(TAU, q.width))) for q in found]
    missing = [
        (float(problem.limit(limit, TAU)) - elbo / problem.num_data) * width
        for elbo, width in zip(elbos, WIDTHS, strict=True)
    ]
    assert missing[-2:] == pytest.approx([0.182, 0.182], abs=6e-4)
    # Its limit is gap·N/p at the limit's own optimum, for F has no slope there.
    gap = float(problem.gap(limit)) * limit.width / problem.num_data
    assert missing[-1] == pytest.approx(gap, rel=1e-3)


@BOTH
def test_optima_converge_to_that_of_the_limit(name: str) -> None:
    problem, limit = PROBLEMS[name], best_limit(name)
    target, _ = limit.output_moments(problem.x)
    kls, distances = [], []
    for width in WIDTHS:
        q = problem.best(problem.balanced(TAU, width), width)
        kls.append(float(q.kl()))
        distances.append(float((q.output_moments(problem.x)[0] - target).abs().max()))
    assert kls[-1] == pytest.approx(float(limit.kl()), rel=1e-4)
    assert slope(WIDTHS[1:], distances[1:]) == pytest.approx(-1, abs=0.05)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Neurons(torch.zeros(2, 3), torch.ones(2, 2)), "must both be"),
        (lambda: Neurons(torch.zeros(2, 3), torch.ones(2, 3), outputs=3), "at least one output"),
        (lambda: Neurons(torch.zeros(2, 3), torch.zeros(2, 3)), "must be positive"),
        (lambda: MeanFieldProblem(torch.ones(3), torch.ones(3)), r"x\[:, None\]"),
        (lambda: replace(regression(), prior_variance=0.0), "prior_variance must be"),
        (lambda: regression().best(1.0, 7, some_neurons(2, 1, 1)), "can't share 2 rows"),
    ],
)
def test_what_cannot_be_meant_is_refused(build, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


def test_ten_classes_are_sampled_not_integrated() -> None:
    problem = MeanFieldProblem(torch.ones(3, 2), torch.tensor([0, 4, 9]), CrossEntropy())
    q = Neurons.at_prior(inputs=2, outputs=10, copies=50)
    with pytest.raises(UnsupportedError, match="sampled_loss"):
        problem.elbo(q, 1.0)
    estimate, error = problem.sampled_loss(q, 500, torch.Generator().manual_seed(0))
    # Three examples near log 10; the prior's logits have a variance of 0.2·0.2/50 each.
    assert float(estimate) == pytest.approx(3 * math.log(10), abs=5 * float(error) + 0.01)


def test_an_objective_without_a_maximum_is_refused() -> None:
    start = Neurons.at_prior(inputs=1, dtype=torch.float64)
    with pytest.raises(ConvergenceError, match="gradient is still"):
        maximise(lambda q: q.mean.sum(), start)


def test_losses_at_an_output_are_torchs() -> None:
    f = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 2])
    want = torch.stack(
        [torch.nn.functional.cross_entropy(row, labels, reduction="none") for row in f]
    )
    torch.testing.assert_close(CrossEntropy().at(f, labels), want)
    y = double([[1.0, 2.0, 3.0]] * 4)
    torch.testing.assert_close(SquaredLoss().at(f, y), 0.5 * ((f - y) ** 2).sum(-1))
