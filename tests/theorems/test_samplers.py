"""Samplers draw what they say: exact dynamics, exact Gaussian posteriors, exact discretisation."""

import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributions import Normal

import credo
from credo.metrics import effective_sample_size
from credo.sampling import MALA
from credo.sampling.hamiltonian import Point, energy_change, leapfrog
from credo.sampling.nuts import no_u_turn

D = torch.float64
NOISE, PRIOR, NUM_DATA, FEATURES = 0.5, 0.8, 12, 3


# --- the dynamics ---------------------------------------------------------------------------------


def anharmonic(w: torch.Tensor) -> Point:
    """U = Σ w⁴/4 + (Σ w)²/2: neither quadratic nor separable."""
    total = w.sum(1)
    energy = 0.25 * w.pow(4).sum(1) + 0.5 * total.square()
    return Point(w, energy, energy, w.pow(3) + total[:, None])


def start(chains: int = 3, size: int = 4) -> tuple[Point, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights, momentum = torch.randn(2, chains, size, generator=generator, dtype=D)
    return anharmonic(weights), momentum, torch.linspace(0.5, 2, size, dtype=D).expand_as(weights)


def test_leapfrog_is_reversible() -> None:
    """Rounding of 80 steps, which the dynamics amplify by less than a hundredfold."""
    point, momentum, inverse_mass = start()
    step = torch.tensor([0.05, 0.1, 0.15], dtype=D)
    there, p = leapfrog(anharmonic, point, momentum, inverse_mass, step, 40)
    assert (there.weights - point.weights).abs().min() > 1e-3
    back, p = leapfrog(anharmonic, there, -p, inverse_mass, step, 40)
    torch.testing.assert_close(back.weights, point.weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(-p, momentum, rtol=0, atol=1e-12)


def test_leapfrog_conserves_energy_to_second_order() -> None:
    """|ΔH| over a trajectory of fixed length falls as s²: slope 2, the next term is s⁴."""
    point, momentum, inverse_mass = start()
    steps = torch.tensor([20, 40, 80, 160])
    errors = []
    for count in steps.tolist():
        size = torch.full((3,), 1.3 / count, dtype=D)
        end = leapfrog(anharmonic, point, momentum, inverse_mass, size, count)
        errors.append(energy_change((point, momentum), end, inverse_mass).abs())
    slopes = -torch.stack(errors).log().diff(dim=0) / math.log(2)
    assert (slopes[-1] - 2).abs().max() < 0.02


def test_leapfrog_keeps_volume() -> None:
    size = 3

    def flow(state: torch.Tensor) -> torch.Tensor:
        point, momentum = anharmonic(state[None, :size]), state[None, size:]
        mass = torch.linspace(0.5, 2, size, dtype=D)[None]
        end, p = leapfrog(anharmonic, point, momentum, mass, torch.tensor([0.2], dtype=D), 7)
        return torch.cat([end.weights[0], p[0]])

    here = torch.randn(2 * size, generator=torch.Generator().manual_seed(1), dtype=D)
    jacobian = torch.autograd.functional.jacobian(flow, here)
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1.0, abs=1e-11)


def test_one_leapfrog_step_is_the_metropolis_adjusted_langevin_proposal() -> None:
    """Proposal and acceptance as the textbook writes them, with torch's normal densities."""
    point, momentum, v = start()
    s = torch.tensor([0.3, 0.5, 0.7], dtype=D)
    end, p = leapfrog(anharmonic, point, momentum, v, s, 1)
    xi = momentum * v.sqrt()
    spread = s[:, None] * v.sqrt()

    def forward(at: Point) -> Normal:
        return Normal(at.weights - 0.5 * s[:, None] ** 2 * v * at.gradient, spread)

    torch.testing.assert_close(end.weights, forward(point).loc + spread * xi)
    there = forward(point).log_prob(end.weights).sum(1)
    back = forward(end).log_prob(point.weights).sum(1)
    log_ratio = point.energy - end.energy + back - there
    torch.testing.assert_close(-energy_change((point, momentum), (end, p), v), log_ratio)


def test_no_u_turn_trajectories_leave_an_anharmonic_law_as_it_is() -> None:
    """4,000 chains that start from draws of e^{−U}, U = w⁴/4 in 2-D, are draws of it after 4 turns.

    E w² and E w⁴ of each coordinate are known: E w⁴ = 1 by parts, E w² = 2Γ(3/4)/Γ(1/4). Steps of
    0.9 make ΔH matter: without the weights e^{−H} the moments are off by many standard errors.
    """
    generator = torch.Generator().manual_seed(3)

    def quartic(w: torch.Tensor) -> Point:
        energy = 0.25 * w.pow(4).sum(1)
        return Point(w, energy, energy, w.pow(3))

    count = 4000
    gamma = torch.distributions.Gamma(torch.tensor(0.25, dtype=D), torch.tensor(1.0, dtype=D))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        size = (4 * gamma.sample((count, 2))).pow(0.25)
        point = quartic(size * torch.randint(0, 2, (count, 2), dtype=D).mul(2).sub(1))
    one, step = torch.ones(count, 2, dtype=D), torch.full((count,), 0.9, dtype=D)
    before = point.weights
    for _ in range(4):
        momentum = torch.randn(count, 2, generator=generator, dtype=D)
        found = no_u_turn(quartic, point, momentum, one, step, 10, generator)
        point = found.point
        torch.testing.assert_close(point.energy, quartic(point.weights).energy)
        torch.testing.assert_close(point.gradient, quartic(point.weights).gradient)
    assert (point.weights != before).all(1).double().mean() > 0.95
    assert not found.cut.any()
    for power, expected in ((2, 2 * math.gamma(0.75) / math.gamma(0.25)), (4, 1.0)):
        values = point.weights.pow(power).flatten()
        assert abs(float(values.mean()) - expected) < 4 * float(values.std()) / (2 * count) ** 0.5
    # By symmetry no direction of time or space is preferred.
    assert point.weights.mean(0).abs().max() < 4 * float(point.weights.std()) / count**0.5


# --- Gaussian posteriors --------------------------------------------------------------------------


def regression(temperature: float) -> tuple[tuple, torch.Tensor, torch.Tensor]:
    """Correlated features; mean and covariance of the posterior ∝ likelihood^(1/η)·prior."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_DATA, FEATURES, generator=generator, dtype=D)
    x[:, 1] += 0.8 * x[:, 0]
    y = x @ torch.tensor([1.0, -0.5, 0.3], dtype=D)
    y = y + NOISE * torch.randn(NUM_DATA, generator=generator, dtype=D)
    precision = x.mT @ x / NOISE**2 / temperature + torch.eye(FEATURES, dtype=D) / PRIOR**2
    covariance = torch.linalg.inv(precision)
    return (x, y[:, None]), covariance @ x.mT @ y / NOISE**2 / temperature, covariance


def model() -> credo.Model:
    net = nn.Linear(FEATURES, 1, bias=False).to(D)
    nn.init.zeros_(net.weight)
    return credo.Model(net, credo.likelihoods.Gaussian(scale=NOISE), credo.priors.Normal(PRIOR))


def worst_z(draws: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor) -> float:
    """The largest deviation of first and second moments, in Monte Carlo standard errors.

    ``draws`` are (chains, draws, P). The moments are averages of series with known expectations;
    their standard error is their deviation over the root of the effective sample size.
    """
    off = draws - mean
    products = (off[..., :, None] * off[..., None, :]).flatten(2)
    series = torch.cat([off, products - covariance.flatten()], dim=2)
    size = torch.as_tensor(effective_sample_size(series))
    error = series.flatten(0, 1).std(0) / size.sqrt()
    return float((series.flatten(0, 1).mean(0) / error).abs().max())


def draws_of(posterior: credo.Posterior, chains: int) -> torch.Tensor:
    return posterior.q.samples.unflatten(0, (chains, -1))


@cache
def drawn_by_hmc(temperature: float, leapfrog: int | None = 5) -> credo.Posterior:
    method = credo.HMC(temperature=temperature, chains=24, leapfrog=leapfrog, warmup=60)
    return credo.fit(model(), method, regression(temperature)[0], epochs=140, progress=False)


@pytest.mark.parametrize(("temperature", "leapfrog"), [(1.0, 5), (0.2, 5), (3.0, 5), (0.2, None)])
def test_hmc_draws_the_tempered_posterior(temperature: float, leapfrog: int | None) -> None:
    """12 moments in 4 runs: 5 standard errors of all of them are one in 10⁵."""
    _, mean, covariance = regression(temperature)
    posterior = drawn_by_hmc(temperature, leapfrog)
    assert worst_z(draws_of(posterior, 24), mean, covariance) < 5
    assert posterior.chains.r_hat["weights_max"] < 1.05
    assert 0.6 < sum(posterior.history[-1]["acceptance"]) / 24 < 0.98
    # The same draws don't pass for another temperature's.
    _, other_mean, other = regression(temperature * 1.5)
    assert worst_z(draws_of(posterior, 24), other_mean, other) > 8


@pytest.mark.filterwarnings("ignore:the chains disagree")  # 160 dependent draws of each
def test_mala_draws_it_too() -> None:
    data, mean, covariance = regression(0.5)
    method = MALA(temperature=0.5, chains=40, warmup=100)
    posterior = credo.fit(model(), method, data, epochs=260, progress=False)
    assert worst_z(draws_of(posterior, 40), mean, covariance) < 5


def test_langevin_without_metropolis_has_the_covariance_of_its_discretisation() -> None:
    """w ← (I − ½εA)w + √ε ξ is stationary at Σ = (I − ½εA)Σ(I − ½εA) + εI = A⁻¹(I − ¼εA)⁻¹."""
    temperature = 0.5
    data, mean, covariance = regression(temperature)
    precision = torch.linalg.inv(covariance)
    epsilon = 2.0 / float(torch.linalg.eigvalsh(precision).max())
    step = torch.eye(FEATURES, dtype=D) - 0.25 * epsilon * precision
    discretised = covariance @ torch.linalg.inv(step)
    drift = torch.eye(FEATURES, dtype=D) - 0.5 * epsilon * precision
    fixed_point = drift @ discretised @ drift + epsilon * torch.eye(FEATURES, dtype=D)
    torch.testing.assert_close(fixed_point, discretised)
    method = credo.SGLD(
        temperature=temperature, lr=0.5 * epsilon * NUM_DATA / temperature, precondition=False,
        chains=60, warmup=40, thin=2,
    )  # fmt: skip
    posterior = credo.fit(model(), method, data, epochs=240, batch_size=NUM_DATA, progress=False)
    draws = draws_of(posterior, 60)
    assert worst_z(draws, mean, discretised) < 5
    assert worst_z(draws, mean, covariance) > 8


def test_momentum_without_metropolis_has_the_covariance_of_its_discretisation() -> None:
    """v ← (1−α)v − εAw + √(2αε)ξ, w ← w + v rests at A⁻¹(I − εA/(2(2−α)))⁻¹: a linear recursion
    whose three second moments solve a linear system, checked here against it as well."""
    temperature, friction = 0.5, 0.3
    data, mean, covariance = regression(temperature)
    precision = torch.linalg.inv(covariance)
    epsilon = 1.6 / float(torch.linalg.eigvalsh(precision).max())
    one = torch.eye(FEATURES, dtype=D)
    discretised = covariance @ torch.linalg.inv(one - epsilon / (2 * (2 - friction)) * precision)
    for curvature in torch.linalg.eigvalsh(precision).tolist():
        # (w, v) ← M(w, v) + (s, s)ξ; its covariance is MCMᵀ + s²·11ᵀ.
        keep, pull = 1 - friction, epsilon * curvature
        step = torch.tensor([[1 - pull, keep], [-pull, keep]], dtype=D)
        noise = torch.full((4,), 2 * friction * epsilon, dtype=D)
        moments = torch.linalg.solve(torch.eye(4, dtype=D) - torch.kron(step, step), noise)
        expected = 1 / curvature / (1 - pull / (2 * (2 - friction)))
        assert float(moments[0]) == pytest.approx(expected, rel=1e-10)
    method = credo.SGHMC(
        temperature=temperature, lr=epsilon * NUM_DATA / temperature, precondition=False,
        chains=60, warmup=60, thin=3, friction=friction,
    )  # fmt: skip
    posterior = credo.fit(model(), method, data, epochs=360, batch_size=NUM_DATA, progress=False)
    draws = draws_of(posterior, 60)
    assert worst_z(draws, mean, discretised) < 5
    assert worst_z(draws, mean, covariance) > 8


@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_momentum_with_full_friction_is_langevin() -> None:
    """The same noise, the same steps; rounding of 60 of them."""
    data = regression(1.0)[0]
    settings = {"lr": 0.01, "chains": 3, "warmup": 20, "thin": 2}
    chains = [
        credo.fit(model(), method, data, epochs=30, batch_size=6, progress=False).q.samples
        for method in (credo.SGLD(**settings), credo.SGHMC(**settings, friction=1.0))
    ]
    torch.testing.assert_close(*chains, rtol=0, atol=1e-12)


def test_small_preconditioned_steps_draw_the_posterior() -> None:
    """The preconditioner rests after warm-up, so only the discretisation is left: here 10 %."""
    data, mean, covariance = regression(1.0)
    method = credo.SGLD(lr=0.02, chains=60, warmup=200, thin=10, spread=0.2)
    posterior = credo.fit(model(), method, data, epochs=700, batch_size=NUM_DATA, progress=False)
    draws = draws_of(posterior, 60).flatten(0, 1)
    scale = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean) / scale).abs().max() < 0.1
    relative = draws.T.cov() / scale / scale[:, None] - covariance / scale / scale[:, None]
    assert relative.abs().max() < 0.2


def test_a_tempered_laplace_and_hmc_mean_the_same_posterior() -> None:
    """Both are L^{1/η}·p, which for a linear network is a Gaussian."""
    temperature = 0.2
    data, mean, covariance = regression(temperature)
    method = credo.Laplace(
        structure="full", temperature=temperature, train=credo.MAP(temperature=temperature, lr=0.1)
    )
    q = credo.fit(
        model(), method, data, epochs=200, batch_size=NUM_DATA, schedule="cosine", progress=False
    ).q
    torch.testing.assert_close(q.mean, mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(q.covariance, covariance, rtol=1e-9, atol=0)
    assert worst_z(draws_of(drawn_by_hmc(temperature), 24), q.mean, q.covariance) < 5
