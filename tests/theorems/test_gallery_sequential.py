"""Learning in sequence: regression, Kalman, hidden Markov models and EWC are the rule, exactly.

Tolerances: all is float64 with condition numbers below 1e3 and numbers of order one, so that two
exact routes to one result differ by some 1e-12. Looser ones say why.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct
from sklearn.linear_model import BayesianRidge, Ridge
from torch import Tensor

from credo.autodiff.loss import Loss
from credo.errors import DataError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, Gaussian
from credo.rule import rule
from credo.rule.curvatures import ExactHessian, ExampleSquares
from credo.rule.expectations import AtMean
from credo.rule.families import Categorical, expectation_parameters, natural_parameters
from credo.rule.gallery import (
    baum_welch,
    hidden_markov,
    kalman_filter,
    linear_regression,
    rts_smoother,
    state_space,
)
from credo.rule.gallery import elastic_weight_consolidation as consolidation
from credo.rule.learner import Learner, Step

NOISE = 0.5


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def spread(seed: int, size: int) -> Tensor:
    """A covariance matrix with eigenvalues above ½."""
    root = randn(seed, size, size)
    return root @ root.mT / size + 0.5 * torch.eye(size, dtype=torch.float64)


def close(found: object, expected: object, tolerance: float = 1e-10) -> None:
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def regression_data() -> tuple[Tensor, Tensor]:
    x = randn(1, 30, 4)
    return x, x @ randn(2, 4) + NOISE * randn(3, 30)


def broad_prior(precision: float = 0.7) -> FixedGaussian:
    return FixedGaussian(torch.zeros(4).double(), torch.tensor(precision, dtype=torch.float64))


# --- linear regression ----------------------------------------------------------------------------


def test_one_step_from_anywhere_is_the_posterior_of_linear_regression() -> None:
    x, y = regression_data()
    prior = FullGaussian(randn(4, 4), spread(5, 4))
    precision = x.mT @ x / NOISE**2 + prior.precision
    mean = torch.linalg.solve(precision, x.mT @ y / NOISE**2 + prior.precision @ prior.mean)
    for seed in range(6, 10):
        start = FullGaussian(100 * randn(seed, 4), 10.0 ** (seed - 8) * spread(seed, 4))
        q = linear_regression.update(start, prior, x, y, NOISE)
        close(q.mean, mean)
        close(q.precision, precision)
        again = linear_regression.update(q, prior, x, y, NOISE)
        close(again.mean, mean)


def test_the_naturals_of_prior_and_data_add() -> None:
    x, y = regression_data()
    prior = FullGaussian(randn(4, 4), spread(5, 4))
    q = linear_regression.fit(prior, x, y, NOISE)
    data = x.mT @ y / NOISE**2, -0.5 * x.mT @ x / NOISE**2
    for found, own, added in zip(
        natural_parameters(q), natural_parameters(prior), data, strict=True
    ):
        close(found, own + added)
    gradient = tuple(
        -(own + added) for own, added in zip(natural_parameters(prior), data, strict=True)
    )
    stepped = rule.step(FullGaussian(randn(6, 4), spread(7, 4)), gradient, rate=1.0)
    close(stepped.mean, q.mean)


def test_linear_regression_is_ridge_regression() -> None:
    x, y = regression_data()
    q = linear_regression.fit(broad_prior(), x, y, NOISE)
    ridge = Ridge(alpha=0.7 * NOISE**2, fit_intercept=False, solver="cholesky").fit(x, y)
    close(q.mean, ridge.coef_)


def test_linear_regression_is_bayesian_ridge_at_its_precisions() -> None:
    x, y = regression_data()
    ridge = BayesianRidge(fit_intercept=False, compute_score=False).fit(x.numpy(), y.numpy())
    q = linear_regression.fit(broad_prior(float(ridge.lambda_)), x, y, float(ridge.alpha_) ** -0.5)
    close(q.mean, ridge.coef_)
    close(q.covariance, ridge.sigma_)


def test_linear_regression_predicts_as_a_gaussian_process_with_linear_kernel() -> None:
    x, y = regression_data()
    q = linear_regression.fit(broad_prior(), x, y, NOISE)
    kernel = ConstantKernel(1 / 0.7, "fixed") * DotProduct(0.0, "fixed")
    process = GaussianProcessRegressor(kernel, alpha=NOISE**2, optimizer=None).fit(x, y)
    new = randn(8, 7, 4)
    mean, covariance = process.predict(new, return_cov=True)
    close(new @ q.mean, mean)
    close(new @ q.covariance @ new.mT, covariance)


@pytest.mark.parametrize("size", [1, 7, 30])
def test_sequential_bayes_is_batch_bayes_in_any_order(size: int) -> None:
    x, y = regression_data()
    prior = DiagGaussian(randn(4, 4), randn(5, 4).exp())
    whole = linear_regression.fit(prior, x, y, NOISE)
    for order in (torch.arange(30), torch.randperm(30, generator=torch.Generator().manual_seed(0))):
        batches = zip(x[order].split(size), y[order].split(size), strict=True)
        q = linear_regression.sequential(prior, batches, NOISE)
        close(q.mean, whole.mean)
        close(q.precision, whole.precision)


X, Y = regression_data()
SMALL = FullGaussian(torch.zeros(2).double(), torch.eye(2).double())


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("x must be", {"x": X[:, :3]}),
        ("y must be", {"y": Y[:, None]}),
        ("noise_scale", {"noise_scale": 0.0}),
        ("x has values that are not finite", {"x": X / 0}),
        ("y is torch", {"y": Y.float()}),
        ("prior is over 2", {"prior": SMALL}),
    ],
)
def test_linear_regression_refuses_what_does_not_fit(reason: str, changed: Any) -> None:
    fine = {"prior": broad_prior(), "x": X, "y": Y, "noise_scale": NOISE}
    with pytest.raises(DataError, match=reason):
        linear_regression.update(linear_regression.as_full(broad_prior()), **(fine | changed))


# --- Kalman filter and RTS smoother ---------------------------------------------------------------

STATES, MEASURED, TIMES = 3, 2, 6


def tracking(singular: bool = False) -> state_space.LinearGaussianModel:
    turn = torch.linalg.qr(randn(20, STATES, STATES)).Q
    noise = spread(21, STATES)
    if singular:
        kick = randn(21, STATES, 1)
        noise = kick @ kick.mT
    return state_space.LinearGaussianModel(
        0.9 * turn, noise, randn(22, MEASURED, STATES), spread(23, MEASURED)
    )


def tracked(missing: bool = False) -> Tensor:
    observations = 2 * randn(24, TIMES, MEASURED)
    if missing:
        observations[0] = torch.nan
        observations[2, 1] = torch.nan
        observations[TIMES - 1] = torch.nan
    return observations


def first_state() -> FullGaussian:
    return FullGaussian(randn(25, STATES), spread(26, STATES))


def test_the_kalman_filter_is_josephs_form() -> None:
    model, observations = tracking(), tracked()
    a, q, c, r = (np.asarray(matrix) for matrix in vars(model).values())
    result = kalman_filter.filter(model, first_state(), observations)
    mean, covariance = first_state().mean.numpy(), first_state().covariance.numpy()
    for t, y in enumerate(observations.numpy()):
        if t:
            mean, covariance = a @ mean, a @ covariance @ a.T + q
            close(result.predicted[t].covariance, covariance)
        gain = covariance @ c.T @ np.linalg.inv(c @ covariance @ c.T + r)
        keep = np.eye(STATES) - gain @ c
        mean = mean + gain @ (y - c @ mean)
        covariance = keep @ covariance @ keep.T + gain @ r @ gain.T
        close(result.filtered[t].mean, mean)
        close(result.filtered[t].covariance, covariance)


def joint(
    model: state_space.LinearGaussianModel, prior: FullGaussian, times: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and covariance of all states, the stacked C, and the stacked R."""
    eye = torch.eye(times, dtype=torch.float64)
    means, blocks = [prior.mean], [[prior.covariance]]
    for t in range(1, times):
        means.append(model.transition @ means[-1])
        row = [model.transition @ block for block in blocks[-1]]
        own = model.transition @ row[-1].mT + model.transition_noise
        for s in range(t):
            blocks[s].append(row[s].mT)
        blocks.append([*row, own])
    covariance = torch.cat([torch.cat(row, dim=1) for row in blocks])
    return (
        torch.cat(means),
        covariance,
        torch.kron(eye, model.observation),
        torch.kron(eye, model.observation_noise),
    )


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("singular", [False, True])
def test_filter_and_smoother_are_the_marginals_of_the_joint_gaussian(
    missing: bool, singular: bool
) -> None:
    model, prior, observations = tracking(singular), first_state(), tracked(missing)
    result = kalman_filter.filter(model, prior, observations)
    smoothed = rts_smoother.smooth(model, result)
    mean, covariance, rows, noise = joint(model, prior, TIMES)

    def given(until: int) -> tuple[Tensor, Tensor]:
        y = observations[:until].reshape(-1)
        seen = torch.nonzero(~y.isnan()).squeeze(-1)
        c, r = rows[seen], noise[seen][:, seen]
        gain = torch.linalg.solve(c @ covariance @ c.mT + r, c @ covariance).mT
        return mean + gain @ (y[seen] - c @ mean), covariance - gain @ c @ covariance

    for t in range(TIMES):
        block = slice(t * STATES, (t + 1) * STATES)
        for q, until in (
            (result.predicted[t], t),
            (result.filtered[t], t + 1),
            (smoothed[t], TIMES),
        ):
            expected_mean, expected_covariance = given(until)
            close(q.mean, expected_mean[block])
            close(q.covariance, expected_covariance[block, block])
    y = observations.reshape(-1)
    seen = torch.nonzero(~y.isnan()).squeeze(-1)
    c = rows[seen]
    evidence = torch.distributions.MultivariateNormal(
        c @ mean, c @ covariance @ c.mT + noise[seen][:, seen]
    )
    close(result.log_evidence, evidence.log_prob(y[seen]))


def test_a_filter_without_observations_only_predicts() -> None:
    model = tracking()
    result = kalman_filter.filter(model, first_state(), tracked() * torch.nan)
    assert float(result.log_evidence) == 0
    for predicted, filtered, smoothed in zip(
        result.predicted, result.filtered, rts_smoother.smooth(model, result), strict=True
    ):
        assert filtered is predicted
        close(smoothed.mean, filtered.mean)
        close(smoothed.covariance, filtered.covariance)


def test_a_far_origin_costs_the_filter_and_smoother_no_digits() -> None:
    """A random walk seen from 1e6 away is the same walk, but for rounding of the numbers given."""
    one = torch.eye(2, dtype=torch.float64)
    model = state_space.LinearGaussianModel(one, 0.1 * one, one, spread(27, 2))
    observations, far = randn(28, 50, 2), 2.0**20
    here, there = (
        rts_smoother.smooth(
            model, kalman_filter.filter(model, FullGaussian(at, one), observations + at)
        )
        for at in (torch.zeros(2).double(), torch.full((2,), far).double())
    )
    for near, distant in zip(here, there, strict=True):
        # The observations themselves are rounded to 1e6·1e-16.
        close(distant.mean - far, near.mean, 1e-8)


TWO = torch.eye(2).double()
OUTER = torch.outer(randn(30, 2), randn(30, 2))


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("observation_noise must be positive definite", {"observation_noise": OUTER}),
        ("transition_noise must be positive semidefinite", {"transition_noise": -TWO}),
        ("transition_noise must be symmetric", {"transition_noise": TWO + OUTER.triu()}),
        (r"transition must be \(2, 2\)", {"transition": TWO[:1]}),
        (r"observation_noise must be \(2, 2\)", {"observation_noise": TWO[:1]}),
        (r"transition must be .* finite", {"transition": TWO * torch.nan}),
        (r"observation must be \(M, D\)", {"observation": TWO[0]}),
        ("transition_noise", {"transition_noise": TWO.float()}),
        ("transition_noise, must be positive definite", {"transition": 0 * TWO}),
        ("observations must be", {"observations": TWO[:, :1]}),
        ("observations must be", {"observations": TWO[:0]}),
        ("observations has infinite", {"observations": TWO / 0}),
        ("prior must be over", {"prior": FullGaussian(TWO[0, :1], TWO[:1, :1])}),
        ("prior", {"prior": FullGaussian(torch.zeros(2), torch.eye(2))}),
    ],
)
def test_the_kalman_filter_refuses_what_does_not_fit(reason: str, changed: Any) -> None:
    given = {"transition": TWO, "transition_noise": 0 * TWO, "observation": TWO}
    given |= {"observation_noise": TWO, "prior": SMALL, "observations": TWO} | changed
    with pytest.raises(DataError, match=reason):
        kalman_filter.filter(
            prior=given.pop("prior"),
            observations=given.pop("observations"),
            model=state_space.LinearGaussianModel(**given),
        )


def test_a_singular_prediction_is_never_passed_on_as_a_gaussian() -> None:
    still = state_space.LinearGaussianModel(OUTER, 0 * TWO, TWO, TWO)
    with pytest.raises(DataError, match="transition_noise, must be positive definite"):
        kalman_filter.predict(still, SMALL)
    with pytest.raises(DataError, match="model has 2 states"):
        rts_smoother.step_back(still, SMALL, SMALL, first_state())


def test_badly_scaled_units_are_not_taken_for_singular_noise() -> None:
    units = torch.diag(torch.tensor([1e-12, 1e12], dtype=torch.float64))
    model = state_space.LinearGaussianModel(TWO, units, TWO, units)
    result = kalman_filter.filter(model, FullGaussian(torch.zeros(2).double(), units), TWO)
    assert bool(result.filtered[-1].variance.isfinite().all())


# --- hidden Markov models -------------------------------------------------------------------------


def weather(states: int, times: int, seed: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    initial = randn(seed, states).softmax(-1)
    transition = randn(seed + 1, states, states).softmax(-1)
    return initial, transition, 2 * randn(seed + 2, times, states)


def path_losses(initial: Tensor, transition: Tensor, log_likelihood: Tensor) -> tuple[Tensor, ...]:
    """All K^T paths, (K^T, T), and −log p(y, path) of each."""
    times, states = log_likelihood.shape
    paths = torch.tensor(list(itertools.product(range(states), repeat=times)))
    joint = initial.log()[paths[:, 0]] + log_likelihood[torch.arange(times), paths].sum(-1)
    if times > 1:
        joint = joint + transition.log()[paths[:, :-1], paths[:, 1:]].sum(-1)
    return paths, -joint


@pytest.mark.parametrize(("states", "times"), [(1, 3), (2, 8), (3, 6), (4, 1), (4, 2)])
def test_forward_backward_is_the_sum_over_all_paths(states: int, times: int) -> None:
    initial, transition, log_likelihood = weather(states, times)
    chain = hidden_markov.forward_backward(initial, transition, log_likelihood)
    paths, losses = path_losses(initial, transition, log_likelihood)
    close(chain.log_evidence, (-losses).logsumexp(0))
    posterior = (-losses).softmax(0)
    here = torch.nn.functional.one_hot(paths, states).double()
    close(chain.marginals.probs, torch.einsum("p,ptk->tk", posterior, here))
    close(
        chain.log_pairs.exp(), torch.einsum("p,pti,ptj->tij", posterior, here[:, :-1], here[:, 1:])
    )


def test_one_step_of_the_rule_over_all_paths_is_forward_backward() -> None:
    model = weather(3, 5)
    paths, losses = path_losses(*model)
    start = Categorical(randn(43, len(losses) - 1))
    gradient = (losses[:-1] - losses[-1],)
    posterior = rule.step(start, gradient, rate=1.0).probs
    marginals = hidden_markov.forward_backward(*model).marginals.probs
    for t in range(5):
        close(torch.zeros(3).double().index_add(0, paths[:, t], posterior), marginals[t])


def test_marginals_are_the_gradient_of_the_log_partition_function() -> None:
    initial, transition, log_likelihood = weather(3, 40)
    log_likelihood.requires_grad_()
    transition.requires_grad_()
    chain = hidden_markov.forward_backward(initial, transition, log_likelihood)
    by_node, by_edge = torch.autograd.grad(chain.log_evidence, (log_likelihood, transition))
    close(chain.log_marginals.exp(), by_node)
    close(chain.log_pairs.exp().sum(0), by_edge * transition)


def test_long_chains_do_not_underflow() -> None:
    initial, transition, log_likelihood = weather(3, 2000)
    log_likelihood = 50 * log_likelihood - 1000
    chain = hidden_markov.forward_backward(initial, transition, log_likelihood)
    # Shifting every log-likelihood by a constant shifts the evidence alone.
    shifted = hidden_markov.forward_backward(initial, transition, log_likelihood + 1000)
    assert float(chain.log_evidence) < -1e6
    # log-likelihoods of 1e3 carry a rounding of 1e-13, evidence of 1e6 one of 1e-10.
    close(chain.log_evidence + 2000 * 1000.0, shifted.log_evidence, 1e-8)
    close(chain.log_marginals.exp(), shifted.log_marginals.exp(), 1e-9)
    close(chain.log_pairs.exp().sum(-1), chain.log_marginals[:-1].exp(), 1e-9)
    close(chain.log_pairs.exp().sum(-2), chain.log_marginals[1:].exp(), 1e-9)


def test_impossible_jumps_stay_impossible() -> None:
    initial = torch.tensor([1.0, 0.0]).double()
    transition = torch.tensor([[0.5, 0.5], [0.0, 1.0]]).double()
    log_likelihood = randn(44, 7, 2)
    chain = hidden_markov.forward_backward(initial, transition, log_likelihood)
    paths, losses = path_losses(initial, transition, log_likelihood)
    close(chain.log_evidence, (-losses).logsumexp(0))
    probs = chain.log_marginals.exp()
    close(probs[:, 1], ((-losses).softmax(0).unsqueeze(-1) * (paths == 1)).sum(0))
    assert bool((probs[:, 1].diff() >= 0).all())
    with pytest.raises(DataError, match="logits"):
        _ = chain.marginals


HALF = torch.full((2, 2), 0.5).double()


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("each row of transition must be 1", {"transition": HALF * torch.tensor([[0.9], [1.1]])}),
        ("the sum of each row of initial must be 1", {"initial": 0.9 * HALF[0]}),
        ("initial must be from 0 to 1", {"initial": torch.tensor([1.5, -0.5]).double()}),
        (r"initial must be \(K,\)", {"initial": HALF}),
        (r"transition must be \(2, 2\)", {"transition": HALF[:1]}),
        (r"log_likelihood must be \(T, 2\)", {"log_likelihood": HALF[:, :1]}),
        (r"log_likelihood must be \(T, 2\)", {"log_likelihood": HALF[:0]}),
        ("log_likelihood must be less than ∞", {"log_likelihood": HALF * torch.nan}),
        (
            "log_likelihood at time 1",
            {"log_likelihood": torch.tensor([[1.0], [0.0]]).double().log() + HALF},
        ),
        ("one dtype", {"log_likelihood": HALF.float()}),
    ],
)
def test_forward_backward_refuses_what_is_no_markov_chain(reason: str, changed: Any) -> None:
    fine = {"initial": HALF[0], "transition": HALF, "log_likelihood": HALF}
    with pytest.raises(DataError, match=reason):
        hidden_markov.forward_backward(**(fine | changed))


def gaussian_model(states: int = 2) -> baum_welch.HiddenMarkovModel:
    initial, transition, _ = weather(states, 1, seed=50)
    emissions = tuple(FullGaussian(3 * randn(53 + k, 2), spread(56 + k, 2)) for k in range(states))
    return baum_welch.HiddenMarkovModel(initial, transition, emissions)


def symbol_model(states: int = 2) -> baum_welch.HiddenMarkovModel:
    initial, transition, _ = weather(states, 1, seed=50)
    emissions = tuple(Categorical(randn(53 + k, 3)) for k in range(states))
    return baum_welch.HiddenMarkovModel(initial, transition, emissions)


CASES = [
    (gaussian_model(), 2 * randn(60, 60, 2)),
    (symbol_model(), (4 * randn(61, 60).sigmoid()).long()),
]


@pytest.mark.parametrize(("model", "observations"), CASES, ids=["gaussian", "categorical"])
def test_baum_welch_never_lowers_the_evidence(
    model: baum_welch.HiddenMarkovModel, observations: Tensor
) -> None:
    evidence = []
    for _ in range(25):
        model, log_evidence = baum_welch.em_step(model, observations)
        evidence.append(float(log_evidence))
    # At rest, rounding may take back some 1e-13 of an evidence of 1e2.
    assert np.diff(evidence).min() > -1e-10
    assert evidence[-1] > evidence[0] + 1


@pytest.mark.parametrize(("model", "observations"), CASES, ids=["gaussian", "categorical"])
def test_baum_welch_is_a_step_of_hmmlearn(
    model: baum_welch.HiddenMarkovModel, observations: Tensor
) -> None:
    hmm = pytest.importorskip("hmmlearn.hmm")
    emissions = model.emissions
    if isinstance(emissions[0], FullGaussian):
        # hmmlearn's own prior on covariances is switched off.
        other = hmm.GaussianHMM(
            2, "full", min_covar=0, covars_prior=0, covars_weight=0, n_iter=1, init_params=""
        )
        other.means_ = np.stack([e.mean for e in emissions])
        other.covars_ = np.stack([e.covariance for e in emissions])
        data = observations.numpy()
    else:
        other = hmm.CategoricalHMM(2, n_iter=1, init_params="")
        other.emissionprob_ = np.stack([e.probs for e in emissions])
        data = observations.numpy()[:, None]
    other.startprob_, other.transmat_ = model.initial.numpy(), model.transition.numpy()
    close(baum_welch.infer(model, observations).log_marginals.exp(), other.predict_proba(data))
    after, log_evidence = baum_welch.em_step(model, observations)
    close(log_evidence, other.score(data))
    other.fit(data)
    close(after.initial, other.startprob_)
    close(after.transition, other.transmat_)
    if isinstance(emissions[0], FullGaussian):
        close(torch.stack([e.mean for e in after.emissions]), other.means_)
        close(torch.stack([e.covariance for e in after.emissions]), other.covars_)
    else:
        close(torch.stack([e.probs for e in after.emissions]), other.emissionprob_)


def test_baum_welch_refuses_what_does_not_fit() -> None:
    model = gaussian_model()
    with pytest.raises(DataError, match="emissions must have one family"):
        baum_welch.HiddenMarkovModel(model.initial, model.transition, model.emissions[:1])
    with pytest.raises(DataError, match="expected another FullGaussian"):
        baum_welch.HiddenMarkovModel(
            model.initial, model.transition, (model.emissions[0], Categorical(torch.zeros(1)))
        )
    with pytest.raises(DataError, match="covariance"):
        baum_welch.em_step(model, torch.ones(5, 2).double())
    with pytest.raises(DataError, match="probabilities of all but the last class"):
        baum_welch.em_step(symbol_model(), torch.zeros(5, dtype=torch.long))


def test_a_state_that_is_never_left_keeps_its_row() -> None:
    """State 1 is entered at the last time only, so nothing is known of where it leads."""
    first, rows = torch.tensor([1.0, 0.0]).double(), torch.tensor([[0.0, 1.0], [0.3, 0.7]]).double()
    known = tuple(FixedGaussian(randn(64 + k, 1), torch.ones(()).double()) for k in range(2))
    after, _ = baum_welch.em_step(
        baum_welch.HiddenMarkovModel(first, rows, known), torch.tensor([[5.0], [8.0]]).double()
    )
    close(after.transition, rows)
    close(
        torch.cat([expectation_parameters(emission)[0] for emission in after.emissions]), [5.0, 8.0]
    )
    with pytest.raises(DataError, match=r"no observation belongs to emissions\[1\]"):
        baum_welch.em_step(baum_welch.HiddenMarkovModel(first, TWO, known), randn(62, 5, 1))


# --- elastic weight consolidation -----------------------------------------------------------------


def logistic_task(seed: int) -> tuple[Loss, Tensor, Tensor]:
    x = randn(seed, 40, 3)
    y = (x @ randn(seed + 1, 3) + randn(seed + 2, 40) > 0).double()

    def one(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x @ theta) - y * (x @ theta)

    return Loss.over_examples(one, (x, y)), x, y


def start(diagonal: bool = False) -> Gaussian:
    if diagonal:
        return DiagGaussian(torch.zeros(3).double(), torch.ones(3).double())
    return FullGaussian(torch.zeros(3).double(), torch.eye(3).double())


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_penalty_is_the_fisher_quadratic_form_and_not_zero(diagonal: bool) -> None:
    loss, x, _ = logistic_task(70)
    yesterday = consolidation.consolidate(loss, start(diagonal))
    probs = (x @ yesterday.mean).sigmoid()
    fisher = torch.einsum("b,bi,bj->ij", probs * (1 - probs), x, x) + torch.eye(3).double()
    if diagonal:
        fisher = fisher.diagonal().diag()
    theta = yesterday.mean + randn(73, 5, 3)
    away = theta - yesterday.mean
    expected = 0.5 * torch.einsum("bi,ij,bj->b", away, fisher, away)
    assert float(expected.min()) > 1
    # The run ends when a step is below 1e-10 standard deviations, and so does S(m) know m.
    close(consolidation.penalty(yesterday, theta), expected, 1e-9)
    close(consolidation.penalty(yesterday, yesterday.mean), 0.0)


@pytest.mark.parametrize("diagonal", [False, True])
def test_ewcs_penalty_and_yesterdays_prior_give_the_same_steps(diagonal: bool) -> None:
    yesterday = consolidation.consolidate(logistic_task(70)[0], start(diagonal))
    today, _, _ = logistic_task(80)
    by_prior = consolidation.ewc(yesterday, rate=0.5)
    by_penalty = Learner(AtMean(), ExactHessian(), Step(rate=0.5))
    loss = consolidation.penalised(today, yesterday)
    one, other = by_prior.init(yesterday), by_penalty.init(yesterday)
    for _ in range(20):
        one, other = by_prior.update(one, today), by_penalty.update(other, loss)
        close(one.q.mean, other.q.mean)
        close(one.q.variance, other.q.variance)
    assert float((one.q.mean - yesterday.mean).abs().max()) > 0.1


def test_ewc_rests_where_scipy_minimises_loss_plus_penalty() -> None:
    yesterday = consolidation.consolidate(logistic_task(70)[0], start())
    today, x, y = logistic_task(80)
    q = consolidation.consolidate(today, yesterday)
    anchor, precision = yesterday.mean.numpy(), -2 * natural_parameters(yesterday)[1].numpy()
    signs = 2 * y.numpy() - 1

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        margins, away = signs * (x.numpy() @ theta), theta - anchor
        value = np.logaddexp(0, -margins).sum() + 0.5 * away @ precision @ away
        pull = -signs / (1 + np.exp(margins))
        return float(value), x.numpy().T @ pull + precision @ away

    found = scipy.optimize.minimize(
        objective, np.zeros(3), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    # BFGS stops at a gradient of 1e-9, with curvature above 1.
    close(q.mean, found.x, 1e-8)
    probs = (x @ q.mean).sigmoid()
    fisher = torch.einsum("b,bi,bj->ij", probs * (1 - probs), x, x)
    close(-2 * natural_parameters(q)[1], fisher + torch.from_numpy(precision), 1e-8)


def test_ewc_with_the_full_fisher_on_linear_tasks_is_batch_bayes() -> None:
    x, y = regression_data()
    prior = linear_regression.as_full(broad_prior())

    def task(rows: slice) -> Loss:
        return Loss.of(lambda w: 0.5 * NOISE**-2 * (y[rows] - x[rows] @ w).square().sum())

    q: Gaussian = prior
    for rows in (slice(0, 8), slice(8, 20), slice(20, 30)):
        q = consolidation.consolidate(task(rows), q)
    whole = linear_regression.fit(prior, x, y, NOISE)
    close(q.mean, whole.mean)
    close(natural_parameters(q)[1], natural_parameters(whole)[1])


def test_ewc_with_the_empirical_fisher_sums_squared_gradients() -> None:
    loss, x, y = logistic_task(70)
    q = consolidation.consolidate(loss, start(), curvature=ExampleSquares(), rate=0.2)
    residual = (x @ q.mean).sigmoid() - y
    gradients = residual.unsqueeze(-1) * x
    close(-2 * natural_parameters(q)[1], gradients.mT @ gradients + torch.eye(3).double(), 1e-8)
    # The resting point is the same whatever stands for the curvature: the gradient is zero, as far
    # as a run knows that ends when a step is below 1e-10 standard deviations.
    close(gradients.sum(0) + q.mean, torch.zeros(3).double(), 1e-8)


def test_a_penalty_needs_a_fixed_yesterday() -> None:
    moving = FullGaussian(torch.zeros(3).double().requires_grad_(), torch.eye(3).double())
    with pytest.raises(DataError, match="yesterday must be fixed"):
        consolidation.penalised(logistic_task(70)[0], moving)
    with pytest.raises(DataError, match="the prior is over 2 weights"):
        consolidation.ewc(SMALL).init(start())


def test_evidence_of_one_observation_is_its_density() -> None:
    """The smallest case by hand: x ~ N(0, 1), y = x + N(0, 1), so y ~ N(0, 2)."""
    one = torch.eye(1).double()
    model = state_space.LinearGaussianModel(one, one, one, one)
    result = kalman_filter.filter(model, FullGaussian(torch.zeros(1).double(), one), 3 * one)
    close(result.log_evidence, -0.5 * math.log(4 * math.pi) - 9 / 4)
