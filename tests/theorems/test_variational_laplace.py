"""What Variational Laplace's objective is: against exact ELBOs, enumeration and differences."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import credo
from credo.autodiff.twice_differentiable import twice_differentiable
from credo.likelihoods import Bernoulli, Categorical, FromLoss, Gaussian
from credo.model import Model
from credo.priors import Normal as NormalPrior
from credo.variational.expansion import SquaredGradientPenalty
from credo.variational.variational_laplace import VariationalLaplace

NOISE, PRIOR, EXAMPLES, FEATURES = 0.5, 0.8, 6, 3


class Given(SquaredGradientPenalty):
    """The penalty on labels that a test chose, in the place of drawn ones."""

    def __init__(self, targets, route="exact") -> None:
        super().__init__("fisher", route)
        self.targets = targets

    def labels(self, likelihood, outputs, targets, generator):
        return self.targets if callable(self.targets) else lambda: self.targets


def linear_problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randn(EXAMPLES, 1, generator=generator, dtype=torch.float64)


def small_net(seed: int = 0, inputs: int = 3, outputs: int = 3, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(4)] if norm else []
        net = nn.Sequential(nn.Linear(inputs, 4), *middle, nn.Softplus(), nn.Linear(4, outputs))
    return net.double()


def prepared(model, batch, num_data=100, penalty=None, **settings):
    """A state whose penalty may be replaced, and a step on this batch with scales of all sizes."""
    method = VariationalLaplace(**{"temperature": 1.0, "route": "exact", **settings})
    state = method.init(model, num_data, torch.Generator().manual_seed(1))
    state.scale.copy_(torch.linspace(0.05, 0.9, len(state.scale)))
    if penalty is not None:
        state.penalty = penalty
    return method, state, method._step(state, batch)


def noise_directions(size: int) -> Tensor:
    """Vectors e with mean of q(e) = E q(ε) for every quadratic q and ε ~ N(0, I), (size, size)."""
    return math.sqrt(size) * torch.eye(size, dtype=torch.float64)


def hessian_of(function):
    """By two reverse passes: torch's forward mode scripts its formulas, which warns."""
    return torch.func.jacrev(torch.func.grad(function))


def exact_elbo(x, y, mean, scale, temperature: float) -> Tensor:
    """E_q log p(y | x, w) − η·KL, both in closed form (per data set)."""
    fit = x @ mean[:, None]
    spread = (x.square() @ scale.square()[:, None]) / NOISE**2
    log_lik = Normal(fit, torch.tensor(NOISE).double()).log_prob(y) - 0.5 * spread
    prior = Normal(torch.zeros_like(mean), torch.tensor(PRIOR).double())
    return log_lik.sum() - temperature * kl_divergence(Normal(mean, scale), prior).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("route", ["exact", "difference"])
def test_it_is_the_exact_elbo_of_linear_gaussian_models(temperature: float, route: str) -> None:
    """The expansion is exact there; the expectation over drawn labels is taken exactly too.

    Tolerance: sums of a few float64s; the difference route takes its NLL 1e-9 beside the mean.
    """
    x, y = linear_problem()
    model = Model(nn.Linear(FEATURES, 1, bias=False).double(), Gaussian(NOISE), NormalPrior(PRIOR))
    outputs = model.outputs(x).detach()
    values = []
    for noise in noise_directions(EXAMPLES):
        labels = outputs + NOISE * noise[:, None]
        _, state, step = prepared(model, (x, y), EXAMPLES, Given(labels, route))
        result = state.penalty.gradients(step)
        values.append(result.nll + result.penalty)
    q = credo.families.DiagGaussian(state.mean, state.scale)
    divergence = credo.families.DiagGaussian.kl(q, state.prior)
    value = sum(values) / len(values) + temperature / EXAMPLES * divergence
    expected = -exact_elbo(x, y, state.mean, state.scale, temperature) / EXAMPLES
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=0)


def test_drawn_labels_have_that_expectation() -> None:
    """500 draws, within five standard errors."""
    x, y = linear_problem()
    model = Model(nn.Linear(FEATURES, 1, bias=False).double(), Gaussian(NOISE), NormalPrior(PRIOR))
    _, state, step = prepared(model, (x, y), EXAMPLES)
    draws = []
    for seed in range(500):
        step.generator.manual_seed(seed)
        draws.append(state.penalty.gradients(step).penalty)
    draws = torch.tensor(draws)
    exact = 0.5 * (x.square() @ state.scale.square()).mean() / NOISE**2
    assert abs(draws.mean() - exact) < 5 * draws.std() / math.sqrt(len(draws))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=["softmax", "logistic"])
def test_the_squared_batch_gradient_is_unbiased_for_the_fisher_information(
    likelihood, norm
) -> None:
    """All label combinations enumerated: E[(Σ g_i)²] = Σ E[g_i²], also with batch norm."""
    classes = 3 if isinstance(likelihood, Categorical) else 1
    net = small_net(outputs=classes, norm=norm)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Model(net, likelihood)
    every = torch.tensor(list(itertools.product(range(max(2, classes)), repeat=4)))
    every = every if classes > 1 else every[..., None].double()
    _, state, step = prepared(model, (x, every[0]))
    parameters = [state.flat.parameter_at[s.start] for s in state.random.segments]

    def score(value: Tensor) -> Tensor:
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, parameters)])

    penalty, by_scale = 0.0, torch.zeros_like(state.scale)
    for labels in every:
        chance = likelihood.log_prob(model.outputs(x), labels).sum().exp().item()
        state.penalty = Given(labels)
        penalty += chance * state.penalty.gradients(step).penalty
        by_scale += chance * state.grad_scale
    fisher = torch.zeros_like(state.scale)
    for example in range(4):
        for labels in every:
            logs = likelihood.log_prob(model.outputs(x), labels)
            fisher += logs.sum().exp().detach() * score(logs[example]).square()
    torch.testing.assert_close(by_scale, state.scale * fisher / 4)
    assert penalty == pytest.approx(float(0.5 * (state.scale.square() * fisher).sum() / 4))


def test_a_random_part_of_the_batch_is_unbiased_too() -> None:
    """Averaged over all labels and all pairs of four examples."""
    net = small_net(outputs=2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = Model(net, Categorical())
    _, state, step = prepared(model, (x, torch.zeros(4, dtype=torch.long)))

    def expected_penalty(rows: Tensor | None) -> float:
        step.rows, total = rows, 0.0
        chosen = x if rows is None else x[rows]
        for labels in itertools.product((0, 1), repeat=len(chosen)):
            labels = torch.tensor(labels)
            chance = Categorical().log_prob(net(chosen), labels).sum().exp().item()
            state.penalty = Given(labels)
            total += chance * state.penalty.gradients(step).penalty
        return total

    pairs = [torch.tensor(pair) for pair in itertools.combinations(range(4), 2)]
    halves = sum(expected_penalty(pair) for pair in pairs) / len(pairs)
    assert halves == pytest.approx(expected_penalty(None), rel=1e-12)


def test_labels_are_constants_when_the_penalty_is_differentiated() -> None:
    """E[∇penalty] is the gradient of ½Σσ² JᵀΛJ with Λ held fixed: the score of the draw is out."""
    net = small_net(outputs=2)
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.tensor([0, 1, 1])
    model = Model(net, Categorical())
    _, state, step = prepared(model, (x, y))
    mean = torch.zeros_like(state.mean)
    for labels in itertools.product((0, 1), repeat=3):
        labels = torch.tensor(labels)
        chance = Categorical().log_prob(net(x), labels).sum().exp().item()
        state.penalty = Given(labels)
        state.penalty.gradients(step)
        mean += chance * state.grad_mean
    names = [s.name for s in state.random.segments]
    shapes = {s.name: s.shape for s in state.random.segments}
    sizes = [s.size for s in state.random.segments]

    def outputs(w: Tensor) -> Tensor:
        pieces = zip(names, w.split(sizes), strict=True)
        weights = {name: piece.view(shapes[name]) for name, piece in pieces}
        return torch.func.functional_call(net, weights, (x,))

    inner = Categorical().hessian(outputs(state.mean)).detach()

    def objective(w: Tensor) -> Tensor:
        J = torch.func.jacrev(outputs)(w)
        fisher = torch.einsum("bcp,bcd,bdp->p", J, inner, J)
        nll = F.cross_entropy(outputs(w), y)
        return nll + 0.5 * (state.scale.square() * fisher).sum() / len(x)

    torch.testing.assert_close(mean, torch.func.grad(objective)(state.mean))


def test_stationary_variances() -> None:
    """∂/∂log σ of the expected objective vanishes at σ² = η/(F + η/s²), and nowhere else."""
    x, y = linear_problem()
    model = Model(nn.Linear(FEATURES, 1, bias=False).double(), Gaussian(NOISE), NormalPrior(PRIOR))
    outputs, eta = model.outputs(x).detach(), 0.3
    fisher = x.square().sum(0) / NOISE**2
    method, state, step = prepared(model, (x, y), EXAMPLES, temperature=eta)
    for factor in (1.0, 0.9, 1.1):
        state.scale.copy_(factor * (eta / (fisher + eta / PRIOR**2)).sqrt())
        total = torch.zeros_like(state.scale)
        for noise in noise_directions(EXAMPLES):
            state.penalty = Given(outputs + NOISE * noise[:, None])
            state.penalty.gradients(step)
            method._add_kl(state, eta / EXAMPLES)
            total += state.grad_scale / EXAMPLES
        if factor == 1:
            assert total.abs().max() < 1e-15
        else:
            assert (total.sign() == (1 if factor > 1 else -1)).all()


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_fixed_point_puts_the_running_fisher_information_there(decay: float) -> None:
    """σ² = η/(F + η/s²) with F = n·f, f ← d·f + (1 − d)·S·ḡ²; it starts at the initial scale."""
    x, y = linear_problem()
    eta, num_data = 0.3, 50
    model = Model(nn.Linear(FEATURES, 1, bias=False).double(), Gaussian(NOISE), NormalPrior(PRIOR))
    method = VariationalLaplace(temperature=eta, scales="fixed_point", fisher_decay=decay)
    state = method.init(model, num_data)
    torch.testing.assert_close(
        method._q(state).scale, torch.full((3,), PRIOR * math.exp(-3)).double()
    )
    start = eta / num_data * (math.exp(6) - 1) / PRIOR**2
    labels = model.outputs(x).detach() + 0.1
    state.penalty = Given(labels)
    method.update(state, (x, y))
    gradient = (x * -0.1).mean(0) / NOISE**2
    fisher = num_data * (decay * start + (1 - decay) * EXAMPLES * gradient.square())
    torch.testing.assert_close(method._q(state).variance, eta / (fisher + eta / PRIOR**2))


@settings(deadline=None, max_examples=50)
@given(
    curvature=st.floats(-3, 3), scale=st.floats(0.3, 3), temperature=st.floats(0.1, 2),
)  # fmt: skip
def test_the_hessian_is_unbounded_exactly_where_the_prior_does_not_outweigh_it(
    curvature: float, scale: float, temperature: float
) -> None:
    """Loss ½k·w² at w = 0: H = −n·k. If H > η/s² more spread is always better; else the optimum."""
    num_data = 4
    threshold = temperature / scale**2
    if abs(-num_data * curvature - threshold) < 1e-3:
        return
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    loss = FromLoss(lambda f, y: (0.5 * curvature * (f - y).square()).sum(1))
    model = Model(net, loss, NormalPrior(scale))
    batch = (torch.ones(num_data, 1).double(), torch.zeros(num_data, 1).double())
    method, state, step = prepared(
        model, batch, num_data, curvature="hessian", temperature=temperature
    )

    def slope(sigma: float) -> float:
        """∂objective/∂log σ."""
        state.scale.fill_(sigma)
        state.penalty.gradients(step)
        method._add_kl(state, temperature / num_data)
        return float(state.grad_scale)

    if -num_data * curvature > threshold:
        assert all(slope(sigma) < 0 for sigma in (1e-3, 1.0, 1e3, 1e6))
    else:
        best = math.sqrt(temperature / (num_data * curvature + threshold))
        assert slope(best) == pytest.approx(0, abs=1e-9)
        assert slope(0.5 * best) < 0 < slope(2 * best)


def double_well(guard: bool) -> credo.Posterior:
    """At the maximum between two wells, where the prior is too wide to hold the variance."""
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(net.weight)
    model = Model(net, FromLoss(lambda f, y: (f.square() - 1).square().sum(1)), NormalPrior(1.0))
    data = (torch.ones(8, 1).double(), torch.zeros(8, 1).double())
    method = VariationalLaplace("hessian", temperature=1.0, guard=guard, lr=1e-9, scale_lr=0.2)
    return credo.fit(model, method, data, epochs=60, progress=False)


def test_the_variance_at_a_maximum_runs_away_unless_guarded() -> None:
    assert double_well(guard=False).q.scale > 1e3
    assert double_well(guard=True).q.scale == pytest.approx(1.0)


def test_signs_give_the_diagonal_of_the_hessian() -> None:
    """All 2⁷ sign vectors: value, gradient of scales and gradient of means, against autograd."""
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    x = torch.randn(5, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Model(net, Gaussian(0.7))
    _, state, step = prepared(model, (x, x.sin()), curvature="hessian")
    size = len(state.mean)
    names = {s.name: s for s in state.random.segments}

    def nll(w: Tensor) -> Tensor:
        weights = {name: w[s.slice].view(s.shape) for name, s in names.items()}
        return Gaussian(0.7).mean_nll(torch.func.functional_call(net, weights, (x,)), x.sin())

    def objective(w: Tensor) -> Tensor:
        return nll(w) + 0.5 * (state.scale.square() * hessian_of(nll)(w).diagonal()).sum()

    value, by_mean, by_scale = 0.0, 0.0, 0.0
    original = torch.randint
    for signs in itertools.product((0, 1), repeat=size):
        torch.randint = lambda *_, signs=signs, **__: torch.tensor(signs)
        try:
            result = state.penalty.gradients(step)
        finally:
            torch.randint = original
        value += (result.nll + result.penalty) / 2**size
        by_mean += state.grad_mean / 2**size
        by_scale += state.grad_scale / 2**size
    mean = state.mean.clone()
    assert value == pytest.approx(float(objective(mean)), rel=1e-12)
    torch.testing.assert_close(by_mean, torch.func.grad(objective)(mean))
    torch.testing.assert_close(by_scale, state.scale * hessian_of(nll)(mean).diagonal())


def conv_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.Softplus(),
            nn.Conv2d(4, 2, 2, groups=2, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(2, 2),
        ).double()  # fmt: skip


@pytest.mark.parametrize("route", ["exact", "difference"])
@pytest.mark.parametrize(
    ("likelihood", "labels"),
    [(Categorical(), torch.tensor([0, 1, 1, 0])),
     (Bernoulli(), torch.tensor([[0.0, 1], [1, 1], [0, 0], [1, 0]])),
     (Gaussian(0.7), torch.tensor([[0.3, 1], [1, -1], [0, 2], [1, 0]]))],
    ids=["softmax", "logistic", "gaussian"],
)  # fmt: skip
def test_the_gradient_is_that_of_central_differences(likelihood, labels, route: str) -> None:
    """Every weight, norm layers included, relative to the gradient's length.

    A central difference of step 1e-5 errs by 1e-9 or so, the route of that name by about 1e-8.
    """
    labels = labels if isinstance(likelihood, Categorical) else labels.double()
    x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = Model(conv_net(), likelihood)
    batch = (x, labels)
    flipped = labels.flip(0)
    _, state, step = prepared(model, batch, penalty=Given(flipped, route))
    state.penalty.gradients(step)
    found = torch.cat([state.grad_mean, state.grad_point])
    assert state.fixed.size == 8
    steep = Given(flipped)
    _, state, step = prepared(model, batch, penalty=steep)

    def objective() -> float:
        result = steep.gradients(step)
        return result.nll + result.penalty

    expected = torch.zeros_like(found)
    vector = state.flat.vector
    for index in range(len(vector)):
        for sign in (1, -1):
            with state.flat.writing():
                vector[index] += sign * 1e-5
            expected[index] += sign * objective() / 2e-5
            with state.flat.writing():
                vector[index] -= sign * 1e-5
    assert (found - expected).norm() < (1e-8 if route == "exact" else 1e-6) * expected.norm()


@pytest.mark.parametrize("route", ["exact", "difference"])
def test_learned_noise_gets_the_gradient_of_the_expected_penalty(route: str) -> None:
    """Labels move with the noise scale: ∂/∂log s of NLL(s) + ½Σσ²Σx²/(n·s²), to rounding."""
    x, y = linear_problem()
    likelihood = Gaussian(NOISE, learned=True).double()
    model = Model(nn.Linear(FEATURES, 1, bias=False).double(), likelihood, NormalPrior(PRIOR))
    outputs, total = model.outputs(x).detach(), 0.0
    for noise in noise_directions(EXAMPLES):

        def labels(noise: Tensor = noise) -> Tensor:
            return outputs + likelihood.log_scale.exp() * noise[:, None]

        _, state, step = prepared(model, (x, y), EXAMPLES, Given(labels, route))
        state.penalty.gradients(step)
        total += float(likelihood.log_scale.grad) / EXAMPLES
        likelihood.log_scale.grad = None
    log_scale = likelihood.log_scale.detach().clone().requires_grad_()
    spread = (x.square() @ state.scale.square()).mean()
    nll = -Normal(outputs, log_scale.exp()).log_prob(y).mean()
    (nll + 0.5 * spread * (-2 * log_scale).exp()).backward()
    assert total == pytest.approx(float(log_scale.grad), rel=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(2, 4, 3, 2, 1, groups=2), (3, 2, 5, 5)),
     (nn.Conv2d(2, 3, 2, dilation=2, bias=False), (2, 2, 4, 4)),
     (nn.Conv1d(2, 3, 3, padding=1), (2, 2, 5)),
     (nn.BatchNorm2d(2), (3, 2, 2, 3)),
     (nn.BatchNorm1d(3), (4, 3)),
     (nn.Softplus(), (3, 4))],
    ids=repr,
)  # fmt: skip
def test_cheap_second_derivatives_are_torchs(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Against torch's own double backward, weights and inputs, in float64."""
    layer = layer.double()
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()]
    leaves += list(layer.parameters())
    results = []
    for context in (torch.enable_grad, twice_differentiable):
        with context():
            out = layer(leaves[0])
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        loss = (weights * out + out.square().sin()).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        assert "Backward" in first[0].grad_fn.name()
        second = sum((g * torch.cos(3 * g.detach() + 1)).sum() for g in first)
        results.append([*first, *torch.autograd.grad(second, leaves)])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected)
