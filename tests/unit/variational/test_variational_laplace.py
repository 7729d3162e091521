"""Variational Laplace as a method: routes that agree, networks of all kinds, refusals, resuming."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo import ZOO, specimen

import credo
from credo.autodiff.smoothing import smooth
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.likelihoods import Categorical, FromLoss, Gaussian
from credo.likelihoods.labels import draw_labels
from credo.model import Model
from credo.variational.variational_laplace import VariationalLaplace


def mlp(seed: int = 0, *, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        between = [nn.BatchNorm1d(6)] if norm else []
        between += [nn.Softplus(), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 3))


def data(n: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def gradients(net: nn.Module, batch, scale: float = 0.3, random=None, **settings):
    """Gradients of one step with all scales at this fraction of the prior's."""
    model = Model(net, Categorical(), random=random)
    method = VariationalLaplace(init_scale=scale, **settings)
    state = method.init(model, 100, torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    state.penalty.gradients(method._step(state, batch))
    return torch.cat([state.grad_mean, state.grad_point]), state


def plain_gradient(net: nn.Module, batch, state) -> torch.Tensor:
    torch.manual_seed(5)
    Model(net, Categorical()).mean_nll(batch).backward()
    parts = [torch.empty_like(state.grad_mean), torch.empty_like(state.grad_point)]
    state.flat.gradient(state.random, out=parts[0])
    if state.fixed.size:
        state.flat.gradient(state.fixed, out=parts[1])
    return torch.cat(parts)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_differences_agree_with_autograd_in_float32(name: str, scale: float) -> None:
    """Relative to the penalty's own gradient, 1e-2 is promised; both in float32."""
    net, x, y = specimen(name)
    smooth(net)
    exact, state = gradients(net, (x, y), scale, route="exact")
    penalty = exact - plain_gradient(net, (x, y), state)
    found, _ = gradients(net, (x, y), scale)
    assert (found - exact).norm() < 1e-2 * penalty.norm()


@pytest.mark.parametrize("name", ["attention", "transformer layer"])
def test_attention_has_a_hessian_too(name: str) -> None:
    net, x, y = specimen(name)
    found, _ = gradients(smooth(net), (x, y), curvature="hessian")
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("curvature", ["fisher", "empirical"])
@pytest.mark.parametrize("random", [None, "2.*", ["0.bias", "2.weight"]], ids=str)
def test_routes_agree_for_every_choice(share, curvature, random) -> None:
    """In float64 to 1e-6; random weights in one run or several."""
    net, (x, y) = mlp().double(), data(8)
    batch = (x.double(), y)
    settings = {"penalty_share": share, "curvature": curvature, "random": random}
    exact, _ = gradients(net, batch, route="exact", **settings)
    found, _ = gradients(net, batch, **settings)
    assert (found - exact).norm() < 1e-6 * exact.norm()


def test_both_passes_see_the_same_dropout_and_batch_statistics() -> None:
    net, (x, y) = mlp(dropout=0.5, norm=True).double(), data(16)
    batch = (x.double(), y)
    exact, _ = gradients(copy.deepcopy(net), batch, route="exact")
    found, _ = gradients(net, batch)
    assert (found - exact).norm() < 1e-6 * exact.norm()


def test_batch_statistics_are_counted_once() -> None:
    net, batch = mlp(norm=True), data(16)
    once = copy.deepcopy(net)
    once(batch[0])
    for settings in ({}, {"route": "exact"}, {"route": "exact", "penalty_share": 0.5}):
        other = copy.deepcopy(net)
        gradients(other, batch, **settings)
        for name, buffer in other.named_buffers():
            # The difference route counts them a hair beside the mean.
            torch.testing.assert_close(buffer, once.get_buffer(name), rtol=1e-4, atol=1e-4)


def test_labels_move_with_a_learned_noise_scale() -> None:
    """ỹ = f + scale·ε, so ∂ỹ/∂log scale = ỹ − f; a fixed scale leaves constants."""
    outputs = torch.randn(5, 1, requires_grad=True)
    likelihood = Gaussian(0.5, learned=True)
    labels = draw_labels(likelihood, outputs, outputs.detach(), torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(labels().sum(), likelihood.log_scale)
    torch.testing.assert_close(gradient, (labels() - outputs).sum().detach())
    assert not draw_labels(Gaussian(0.5), outputs, outputs.detach())().requires_grad


def test_ignored_labels_stay_ignored() -> None:
    targets = torch.tensor([[0, 9], [9, 1]])
    drawn = draw_labels(Categorical(ignore_index=9), torch.randn(2, 3, 2), targets)()
    assert ((drawn == 9) == (targets == 9)).all()


def test_with_batch_norm_a_part_is_normalised_by_itself() -> None:
    """Both parts as batches of their own, the penalty on the first: against autograd, float64."""
    net, (x, y) = mlp(norm=True).double(), data(16)
    batch = (x.double(), y)
    found, _ = gradients(net, batch, penalty_share=0.5)
    method = VariationalLaplace(init_scale=0.3, penalty_share=0.5)
    state = method.init(Model(net, Categorical()), 100, torch.Generator().manual_seed(0))
    step = method._step(state, batch)
    chosen = torch.zeros(16, dtype=torch.bool)
    chosen[step.rows] = True
    parameters = state.flat.parameters
    random = [state.flat.parameter_at[s.start] for s in state.random.segments]
    inputs, targets = step.penalised_batch
    outputs = net(inputs)
    labels = draw_labels(Categorical(), outputs, targets, step.generator)()
    gradient = torch.autograd.grad(cross_entropy(outputs, labels), random, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradient])
    nll = 0.5 * sum(cross_entropy(net(batch[0][part]), y[part]) for part in (chosen, ~chosen))
    loss = nll + 0.5 * 8 * (state.scale.square() * flat.square()).sum()
    exact = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])
    assert (found - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_last_batches_are_not_split_too_far(size: int) -> None:
    x, y = data(size)
    found, _ = gradients(mlp(norm=True), (x, y), penalty_share=0.5)
    assert torch.isfinite(found).all()


def test_the_network_is_at_the_mean_whatever_happens() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("broken")
            return self.net(x)

    net = Fragile()
    before = [p.detach().clone() for p in net.parameters()]
    model, method = Model(net, Categorical()), VariationalLaplace()
    state = method.init(model, 50)
    with pytest.raises(RuntimeError, match="broken"):
        method.update(state, data(8))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_relus_are_refused_with_the_remedy() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for method in (VariationalLaplace(), VariationalLaplace("hessian")):
        with pytest.raises(UnsupportedError, match=r"ReLU \(1×\).*credo\.smooth\(net\)"):
            credo.fit(Model(net, Categorical()), method, data(), epochs=1, progress=False)
    credo.fit(Model(smooth(net), Categorical()), VariationalLaplace(), data(), 1, progress=False)


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"curvature": "ggn"}, "curvature must be one of"),
     ({"route": "fast"}, "route must be one of"), ({"scales": "newton"}, "scales must be one of"),
     ({"penalty_share": 1.5}, "from 0 to 1, greater than 0"),
     ({"penalty_share": 0}, "penalty_share"), ({"lr": 0}, "lr"),
     ({"fisher_decay": 1}, "less than 1"), ({"scale_lr": -1}, "scale_lr"),
     ({"curvature": "hessian", "scales": "fixed_point"}, "never negative")],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused(settings, error) -> None:
    with pytest.raises((DataError, UnsupportedError), match=error):
        VariationalLaplace(**settings)


def test_what_does_not_fit_together_is_refused() -> None:
    def fit(method, likelihood=None, prior=None, net=None, **more) -> None:
        model = Model(mlp() if net is None else net, likelihood or Categorical(), prior)
        credo.fit(model, method, data(), epochs=1, progress=False, **more)

    loss = FromLoss(lambda f, y: f[:, 0].square())
    mixture = credo.priors.ScaleMixture()
    with pytest.raises(UnsupportedError, match="none to draw"):
        fit(VariationalLaplace(), loss)
    fit(VariationalLaplace("empirical"), loss)
    with pytest.raises(UnsupportedError, match="closed form"):
        fit(VariationalLaplace(), prior=mixture)
    with pytest.raises(UnsupportedError, match="normal prior"):
        fit(VariationalLaplace(scales="fixed_point"), prior=credo.priors.Laplace(1.0))
    fit(VariationalLaplace(), prior=credo.priors.Laplace(1.0))
    with pytest.raises(DataError, match="temperature 0"):
        fit(VariationalLaplace(scales="fixed_point", temperature=0.0))


def test_low_precision_has_the_exact_route_alone() -> None:
    net, (x, y) = mlp().bfloat16(), data(8)
    with pytest.raises(UnsupportedError, match='route="exact"'):
        gradients(net, (x.bfloat16(), y))
    found, _ = gradients(net, (x.bfloat16(), y), route="exact")
    assert torch.isfinite(found).all()
    with pytest.raises(UnsupportedError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        gradients(mlp(), (x, y))


METHODS = {
    "fisher": lambda: VariationalLaplace(lr=0.01),
    "half, exact": lambda: VariationalLaplace(lr=0.01, penalty_share=0.5, route="exact"),
    "half": lambda: VariationalLaplace(lr=0.01, penalty_share=0.5),
    "hessian": lambda: VariationalLaplace("hessian", lr=0.01),
    "fixed point": lambda: VariationalLaplace("empirical", lr=0.01, scales="fixed_point"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_packed_state_goes_on_as_if_nothing_had_happened(name: str) -> None:
    """Bit for bit, with dropout, batch norm, and a last batch of another size."""
    method, (x, y) = METHODS[name](), data(50)
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 50, 16)]

    def start():
        net = mlp(dropout=0.2, norm=True)
        return method.init(Model(net, Categorical()), 50, torch.Generator().manual_seed(0))

    state, torch_state = start(), None
    torch.manual_seed(3)
    for index, batch in enumerate(batches):
        if index == 2:
            packed, buffers = method.pack(state), copy.deepcopy(state.model.buffers())
            packed = copy.deepcopy(packed[0]), packed[1] | {}
            torch_state = torch.get_rng_state()
        state, _ = method.update(state, batch)
    resumed = method.unpack(start(), *packed)
    with torch.no_grad():
        for key, buffer in resumed.model.buffers().items():
            buffer.copy_(buffers[key])
    torch.set_rng_state(torch_state)
    for batch in batches[2:]:
        resumed, _ = method.update(resumed, batch)
    first, second = (method.posterior(s).q.pack()[0] for s in (state, resumed))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert resumed.clock.step == 4
    assert "temperature" in method.summary(resumed)
    assert method.config()["type"] == type(method).__name__


def test_it_learns() -> None:
    """Far more than the half that the largest class has; scales that tell weights apart."""
    x, y = data(200)
    method = VariationalLaplace(lr=0.02, temperature=0.1)
    model = Model(mlp(), Categorical())
    posterior = credo.fit(model, method, (x, y), epochs=40, batch_size=50, progress=False)
    assert credo.metrics.accuracy(posterior.predict(x).probs, y) > 0.75
    assert posterior.history[-1]["elbo"] > posterior.history[0]["elbo"]
    relative = posterior.q.scale / torch.as_tensor(model.prior_over_weights().scale)
    assert relative.min() < 0.3 * relative.max()


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    x, _ = data(8)
    x[0, 0] = torch.inf
    net = mlp()
    before = [p.detach().clone() for p in net.parameters()]
    method = VariationalLaplace()
    state = method.init(Model(net, Gaussian()), 50)
    with pytest.raises(NonFiniteError, match="step 0"):
        method.update(state, (x, torch.zeros(8, 3)))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
