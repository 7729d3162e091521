"""Policy search: its estimates, what it converges to, and environments with and without gym."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_are
from scipy.stats import rankdata, zscore

from credo.errors import CredoError, DataError, NonFiniteError
from credo.families import DiagGaussian, FullGaussian
from credo.rule.gallery.policy_search import PolicySearch, ranks, score_estimates
from credo.rule.learner import Step
from credo_papers import policy_search_control

CENTRE = torch.tensor([1.0, -2.0], dtype=torch.float64)
STIFFNESS = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)


def families():
    mean = torch.tensor([0.3, 0.1], dtype=torch.float64)
    precision = torch.tensor([[1.5, 0.4], [0.4, 0.8]], dtype=torch.float64)
    return [DiagGaussian(mean, torch.tensor([0.8, 1.2], dtype=torch.float64)),
            FullGaussian(mean, precision)]  # fmt: skip


@pytest.mark.parametrize("q", families(), ids=lambda q: type(q).__name__)
def test_score_estimates_are_unbiased(q):
    """Small generations, where a baseline of all draws divided by K would be off by a tenth."""
    draws, repeats = 10, 4000
    thetas = q.sample(draws * repeats, torch.Generator().manual_seed(0)).view(repeats, draws, 2)
    offsets = thetas - CENTRE
    losses = 0.5 * torch.einsum("rki,ij,rkj->rk", offsets, STIFFNESS, offsets)
    found = [score_estimates(q, t, loss) for t, loss in zip(thetas, losses, strict=True)]
    gradient = STIFFNESS @ (q.mean - CENTRE)
    hessian = STIFFNESS.diagonal() if isinstance(q, DiagGaussian) else STIFFNESS
    for index, exact in enumerate((gradient, hessian)):
        estimates = torch.stack([pair[index] for pair in found])
        error = estimates.std(0) / math.sqrt(repeats)
        assert bool(((estimates.mean(0) - exact).abs() < 5 * error).all())
        assert bool((error < 0.04 * exact.abs().max()).all()), "too noisy to tell a tenth"


def test_the_search_converges_to_the_maximum_entropy_policy_of_a_quadratic_return():
    """max E[R] + τH is N(centre, τ·stiffness⁻¹)."""
    temperature = 0.5
    step = Step(rate=0.1, temperature=temperature, keep_positive=True)
    search = PolicySearch(draws=500, step=step)
    state = search.init(FullGaussian(torch.zeros_like(CENTRE), torch.eye(2, dtype=torch.float64)))
    means, precisions = [], []
    for generation in range(150):
        offsets = (policies := search.policies(state)) - CENTRE
        returns = -0.5 * torch.einsum("ki,ij,kj->k", offsets, STIFFNESS, offsets)
        state = search.learn(state, policies, returns.tolist())
        if generation >= 50:
            means.append(state.q.mean)
            precisions.append(state.q.precision)
    # averages over 100 correlated generations: ten independent ones of relative noise ~ 1/√500,
    # and ρ/2 ≈ 5 % of the curvature's variance from the second-order term of the improved step
    torch.testing.assert_close(torch.stack(means).mean(0), CENTRE, rtol=0, atol=0.05)
    target = STIFFNESS / temperature
    torch.testing.assert_close(torch.stack(precisions).mean(0), target, rtol=0.1, atol=0.1)


def test_ranks_are_those_of_scipy_and_know_no_scale():
    losses = torch.tensor([3.0, -1.0, 3.0, 1e9, 0.5], dtype=torch.float64)
    reference = zscore(rankdata(losses.numpy()))
    np.testing.assert_allclose(ranks(losses).numpy(), reference, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(ranks(losses.exp().clamp(max=1e300)), ranks(losses))
    assert bool((ranks(torch.ones(4)) == 0).all())


def test_it_steers_a_mass_as_the_riccati_equation_says():
    """A toy environment: a mass on a rail, pushed by −θ·(place, speed), for a quadratic cost."""
    dynamics = np.array([[1.0, 0.3], [0.0, 1.0]])
    push = np.array([[0.0], [0.3]])
    cost, effort = np.eye(2), np.array([[0.5]])
    riccati = solve_discrete_are(dynamics, push, cost, effort)
    gain = np.linalg.solve(effort + push.T @ riccati @ push, push.T @ riccati @ dynamics)[0]

    def episode_return(theta, seed):
        place = np.random.default_rng(seed).normal(size=(2, 4))
        total = 0.0
        for _ in range(40):
            force = np.clip(-theta.numpy() @ place, -1e3, 1e3)
            total -= float((place**2).sum() + 0.5 * (force**2).sum())
            place = np.clip(dynamics @ place + push * force, -1e3, 1e3)
        return total / 4

    step = Step(rate=0.1, mean_rate=0.5, temperature=0.05, keep_positive=True)
    search = PolicySearch(draws=12, step=step, shaping="ranks")
    start = torch.zeros(2, dtype=torch.float64)
    state = search.init(DiagGaussian(start, torch.ones_like(start)))
    for _ in range(60):
        state = search.update(state, episode_return)
    best = np.mean([episode_return(torch.tensor(gain), s) for s in range(20)])
    found = np.mean([episode_return(state.q.mean, s) for s in range(20)])
    # the cost is flat at its minimum: a tenth in the gain is about a percent of the cost
    np.testing.assert_allclose(state.q.mean.numpy(), gain, atol=0.25)
    assert best >= found > 1.03 * best


def test_a_search_repeats_itself_and_all_draws_play_the_same_episode():
    seeds = []

    def episode_return(theta, seed):
        seeds.append(seed)
        return float(theta.sum())

    search = PolicySearch(draws=6, step=Step(rate=0.1, keep_positive=True), seed=3)

    def run():
        state = search.init(DiagGaussian(torch.zeros(2), torch.ones(2)))
        for _ in range(3):
            state = search.update(state, episode_return)
        return state.q.mean

    assert torch.equal(run(), run())
    assert seeds[:18] == seeds[18:]
    assert [len(set(seeds[i : i + 6])) for i in (0, 6, 12)] == [1, 1, 1]
    assert len(set(seeds)) == 3


def test_what_can_not_be_searched_is_refused_by_name():
    step = Step(rate=0.1, keep_positive=True)
    with pytest.raises(DataError, match="draws"):
        PolicySearch(draws=1, step=step)
    with pytest.raises(DataError, match="shaping"):
        PolicySearch(draws=4, step=step, shaping="rank")
    search = PolicySearch(draws=4, step=step)
    state = search.init(DiagGaussian(torch.zeros(1), torch.ones(1)))
    with pytest.raises(NonFiniteError, match="generation 0 needs 4 finite returns"):
        search.update(state, lambda theta, seed: math.nan)


# --- the experiment -------------------------------------------------------------------------------


def test_without_gymnasium_the_experiment_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    experiment = policy_search_control.EXPERIMENT
    with pytest.raises(CredoError, match=r"pip install .credo-bayes\[rl\]"):
        experiment.run_one(experiment.presets["quick"], 0, tmp_path)


def test_both_ways_of_exploring_play_the_same_number_of_episodes(tmp_path):
    pytest.importorskip("gymnasium")
    experiment = policy_search_control.EXPERIMENT
    settings = policy_search_control.ControlSettings(num_data=40, epochs=1)
    result = experiment.run_one(settings, 0, tmp_path)
    for policy in ("linear", "mlp"):
        for way in ("parameters", "actions"):
            curve = result[f"{policy}_{way}_curve"]
            assert len(curve) == 40
            assert all(1 <= episode <= 500 for episode in curve)
            assert result[f"{policy}_{way}_return"] == pytest.approx(np.mean(curve))
    assert result == experiment.run_one(settings, 0, tmp_path)
    verdict = experiment.check([result, result])
    assert verdict.verdict in ("reproduced", "not reproduced", "inconclusive")
    (figure,) = experiment.figures([result], tmp_path)
    assert figure.stat().st_size > 0


def test_the_verdict_follows_both_policies():
    def result(linear, mlp):
        return {
            "linear_parameters_return": 100.0 + linear, "linear_actions_return": 100.0,
            "mlp_parameters_return": 100.0 + mlp, "mlp_actions_return": 100.0,
        }  # fmt: skip

    def judge(*pairs):
        return policy_search_control.check([result(*pair) for pair in pairs]).verdict

    assert judge((9, 9), (10, 10), (11, 11)) == "reproduced"
    assert judge((9, -9), (10, -10), (11, -11)) == "not reproduced"
    assert judge((9, -9), (10, 10), (11, 1)) == "inconclusive"
    assert judge((9, 9)) == "inconclusive"
