"""The learning-rate range test: what it suggests, and that it leaves no trace."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import credo
from credo.errors import ConvergenceError, DataError, UnsupportedError
from credo.tools import RateRange, robust_rates

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(256, 2, generator=GENERATOR)
Y = (X[:, 0] > 0).long()


def model() -> credo.Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Softplus(), nn.Linear(16, 2))
    return credo.Model(net, credo.likelihoods.Categorical())


def test_sgd_on_a_parabola_diverges_at_twice_the_inverse_curvature() -> None:
    """With NLL ½(w − y)²/s² a step multiplies the error by 1 − α/s², which grows if α > 2s²."""
    # Batches that differ keep the error from becoming exactly zero, where it would stay.
    x, y = torch.ones(256, 1), 3 + 0.1 * X[:, :1]
    linear = nn.Linear(1, 1, bias=False)
    parabola = credo.Model(linear, credo.likelihoods.Gaussian(scale=0.1))
    method = credo.MAP(temperature=0.0, optimizer=lambda groups: torch.optim.SGD(groups))
    found = credo.lr_range_test(
        parabola, method, (x, y), start=1e-5, stop=10, steps=200, batch_size=16, progress=False
    )
    step = (10 / 1e-5) ** (1 / 199)
    assert found.diverged is not None
    assert found.lowest < 0.02 * step**10, "the loss can't fall at rates that diverge"
    # Growing from where it has shrunk to, smoothed over ten steps, takes a decade at the most.
    assert 0.02 < found.diverged < 0.2
    assert found.suggestion == found.lowest / 10 < 0.02


@pytest.mark.parametrize(
    "method",
    [credo.MAP(), credo.VI(), credo.VariationalLaplace(), credo.VOGN(), credo.IVON(),
     credo.Vadam()],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_the_network_is_left_exactly_as_it_was(method) -> None:
    subject = model()
    subject.net.eval()
    subject.net[0].train()
    before = {name: t.clone() for name, t in subject.net.state_dict().items()}
    random_before = torch.get_rng_state()
    found = credo.lr_range_test(subject, method, (X, Y), steps=20, batch_size=64, progress=False)
    after = subject.net.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [m.training for m in subject.net] == [True, False, False, False]
    assert torch.equal(torch.get_rng_state(), random_before)
    assert all(p.grad is None for p in subject.net.parameters())
    assert len(found.rates) == len(found.losses) <= 20
    # And it can be trained as if nothing had happened.
    fitted = credo.fit(subject, credo.MAP(), (X, Y), epochs=1, progress=False)
    assert torch.equal(
        fitted.mean, credo.fit(model(), credo.MAP(), (X, Y), epochs=1, progress=False).mean
    )


def test_rates_rise_geometrically_and_scales_keep_their_ratio() -> None:
    seen = []

    def watching(groups):
        class Watched(torch.optim.SGD):
            def step(self, closure=None):
                seen.append([group["lr"] for group in self.param_groups])

        return Watched(groups)

    method = credo.VI(optimizer=watching, lr=0.3, scale_ratio=0.1)
    credo.lr_range_test(
        model(), method, (X, Y), start=1e-4, stop=1e-1, steps=31, progress=False, batch_size=256
    )
    assert seen == [
        [pytest.approx(10 ** (-4 + t / 10)), pytest.approx(10 ** (-5 + t / 10))] for t in range(31)
    ]


def test_it_is_the_same_again_and_with_a_loader() -> None:
    first, second = (
        credo.lr_range_test(model(), credo.VI(), (X, Y), steps=20, progress=False) for _ in "ab"
    )
    assert first == second
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=64)
    by_loader = credo.lr_range_test(model(), credo.VI(), loader, steps=20, progress=False)
    assert all(map(math.isfinite, by_loader.losses))


def test_the_marks_of_a_known_curve() -> None:
    rates = tuple(10.0 ** (k / 10 - 4) for k in range(31))
    # A logistic fall around 1e-2, a rise after 10^-1.4.
    losses = tuple(
        2 / (1 + (rate / 1e-2) ** 2) + (5 * (rate - 0.04) if rate > 0.04 else 0) for rate in rates
    )
    curve = RateRange(rates, losses, None)
    assert curve.lowest == rates[losses.index(min(losses))]
    assert curve.suggestion == curve.lowest / 10
    assert 0.005 < curve.steepest < 0.03


def test_a_loss_that_never_fell_gives_no_suggestion() -> None:
    """The first smoothed losses are means of few: the lowest of them is luck."""
    rates = tuple(10.0 ** (k / 10 - 4) for k in range(31))
    lucky = RateRange(rates, (0.5, 0.8, *[1.0] * 28, 0.95), None, noise=0.2)
    assert lucky.lowest == rates[-1]
    assert not lucky.fell
    assert "none" in repr(lucky)
    with pytest.raises(ConvergenceError, match="raise stop"):
        _ = lucky.suggestion
    assert RateRange(rates, (0.5, 0.8, *[1.0] * 28, 0.8), None, noise=0.2).fell


def test_the_plot_is_written(tmp_path) -> None:
    path = RateRange((1e-3, 1e-2, 1e-1), (2.0, 1.0, 3.0), 0.3).plot(tmp_path / "new" / "range.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    flat = RateRange((1e-3, 1e-2), (1.0, 1.0), None)  # has no suggestion to mark
    assert flat.plot(tmp_path / "flat.svg").exists()


def test_the_network_is_put_back_after_an_error_too() -> None:
    subject = model()
    before = subject.bind().vector.clone()

    class Broken(credo.MAP):
        def update(self, state, batch):
            with state.flat.writing() as vector:
                vector.zero_()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        credo.lr_range_test(subject, Broken(), (X, Y), progress=False)
    assert torch.equal(subject.bind().vector, before)


def test_what_makes_no_sense_is_refused() -> None:
    subject = model()

    class WithoutOptimizer(credo.MAP):
        def optimizer_of(self, state):
            return None

    with pytest.raises(UnsupportedError, match="trains by an optimizer"):
        credo.lr_range_test(subject, WithoutOptimizer(), (X, Y), progress=False)
    with pytest.raises(DataError, match="less than stop"):
        credo.lr_range_test(subject, credo.MAP(), (X, Y), start=1.0, stop=0.1)
    with pytest.raises(DataError, match="steps must be a whole number of at least 20, but it is 5"):
        credo.lr_range_test(subject, credo.MAP(), (X, Y), steps=5)
    with pytest.raises(ConvergenceError, match="diverged at its first steps"):
        credo.lr_range_test(
            subject, credo.MAP(optimizer="sgd"), (X, Y), start=1e30, stop=1e35, progress=False
        )


def test_robust_rates_are_those_of_the_loss_curvature() -> None:
    """Linear regression: the Hessian is XᵀX/(n·σ²) + temperature/(n·s²), by numpy's eigenvalues."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    regression = credo.Model(
        nn.Linear(3, 1, bias=False, dtype=torch.float64),
        credo.likelihoods.Gaussian(scale=0.5),
        credo.priors.Normal(scale=0.2),
    )
    found = robust_rates(regression, (x, x[:, :1]), momentum=0.81, batch_size=16)
    h = np.linalg.eigvalsh(x.numpy().T @ x.numpy()) / (40 * 0.25) + 1 / (40 * 0.04)
    assert found.low == pytest.approx((1 - 0.9) ** 2 / h[0], rel=1e-6)
    assert found.high == pytest.approx((1 + 0.9) ** 2 / h[-1], rel=1e-6)
    # Inside the region both directions shrink like √μ in the long run; above it one of them grows.
    for rate, radius in ((found.low, 0.9), (found.high, 0.9), (1.1 * found.high, None)):
        matrices = [np.array([[1 + 0.81 - rate * c, -0.81], [1, 0]]) for c in (h[0], h[-1])]
        largest = max(np.abs(np.linalg.eigvals(m)).max() for m in matrices)
        assert largest == pytest.approx(radius, rel=1e-3) if radius else largest > 1


def test_a_loss_without_curvature_has_no_robust_rates() -> None:
    still = credo.Model(nn.Linear(1, 1, bias=False), credo.likelihoods.Gaussian(scale=0.5))
    with pytest.raises(DataError, match="no curvature"):
        robust_rates(still, (torch.zeros(4, 1), torch.zeros(4, 1)), temperature=0.0)
