"""EVON is IVON in a basis: the same steps where that is the identity, exact where it is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.families import DiagGaussian, EigenKroneckerGaussian, FullGaussian
from credo.kl import kl
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.optim import EVON, IVON
from credo.optim.eigenbasis import Axis


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(numbers(size, size, seed=seed)).Q


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 2)
    ).to(dtype)


def train(opt: IVON, net: nn.Module, steps: int, blocks: int = 1) -> None:
    dtype = next(net.parameters()).dtype
    for step in range(steps):
        for block in range(blocks):
            x = numbers(8, 2, 4, 4, seed=10 * step + block).to(dtype)
            with opt.sampled():
                F.cross_entropy(net(x), (x.sum((1, 2, 3)) > 0).long()).backward()
        opt.step()
        opt.zero_grad()


def q_of(opt: IVON, net: nn.Module) -> Any:
    return opt.posterior(net, Categorical()).q


# --- IVON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    "held",
    [
        {"refresh": 10**6},  # bases are there, and are the identity
        {"refresh": None},
        {"max_size": 1},
    ],
    ids=str,
)
def test_in_the_identitys_basis_it_is_ivon_bit_for_bit(
    held: dict[str, Any], blocks: int, clip: float | None, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {
        "lr": 0.1, "num_data": 50, "betas": (0.9, 0.9), "clip_radius": clip,
    }  # fmt: skip
    if dtype is torch.float32:
        # IVON takes layers of several priors at once, with δ as a vector of that type, which in
        # float32 has another rounding than the number that EVON has for each layer.
        options |= {"prior_precision": 5.0, "hess_init": 0.5}
    plain, turned = network(dtype), network(dtype)
    ivon, evon = IVON(plain, **options), EVON(turned, **options, **held)
    train(ivon, plain, 6, blocks)
    train(evon, turned, 6, blocks)
    for one, other in zip(plain.parameters(), turned.parameters(), strict=True):
        assert torch.equal(one, other)
        for name in ("momentum", "curvature"):
            assert torch.equal(ivon.state[one][name], evon.state[other][name])
    has_bases = held.get("refresh") == 10**6
    assert ("left_basis" in evon.state[turned[3].weight]) == has_bases


def hold(opt: EVON, parameter: Tensor, left: Tensor | None, right: Tensor | None) -> None:
    """Give a parameter these bases, where there are some."""
    state = opt.state[parameter]
    for name, basis in (("left_basis", left), ("right_basis", right)):
        if basis is not None:
            state[name].copy_(basis)


def test_in_a_fixed_basis_it_is_ivon_of_the_turned_network() -> None:
    """W = Q_L V Q_Rᵀ with the noise, the mean and the gradient of V: 30 steps, roundings of 1e-15.

    The prior is round, so it is the same for V.
    """
    left, right = rotation(3, 1), rotation(4, 2)
    start, x, y = numbers(3, 4, seed=3), numbers(20, 4, seed=4), numbers(20, 3, seed=5)
    options: dict[str, Any] = {
        "lr": 0.3, "num_data": 20, "betas": (0.9, 0.9), "prior_precision": 2.0, "clip_radius": 0.5,
        "draws": "normal", "hess_init": 0.5,
    }  # fmt: skip
    turned, plain = nn.Linear(4, 3, bias=False).double(), nn.Linear(4, 3, bias=False).double()
    with torch.no_grad():
        turned.weight.copy_(start)
        plain.weight.copy_(left.mT @ start @ right)
    evon, ivon = EVON(turned, refresh=10**6, **options), IVON(plain, **options)
    hold(evon, turned.weight, left, right)
    for _ in range(30):
        with evon.sampled():
            F.cross_entropy(turned(x).tanh(), y.softmax(-1)).backward()
        evon.step()
        with ivon.sampled():
            weight = left @ plain.weight @ right.mT
            F.cross_entropy((x @ weight.mT).tanh(), y.softmax(-1)).backward()
        ivon.step()
    expected = left @ plain.weight @ right.mT
    torch.testing.assert_close(turned.weight, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        evon.state[turned.weight]["curvature"],
        ivon.state[plain.weight]["curvature"],
        rtol=1e-10,
        atol=1e-12,
    )


# --- the refresh ----------------------------------------------------------------------------------


def unturned_momentum(opt: EVON, parameter: Tensor) -> Tensor:
    state = opt.state[parameter]
    matrix = state["momentum"].reshape(len(parameter), -1)
    left, right = state.get("left_basis"), state.get("right_basis")
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.mT


def moved(old: EigenKroneckerGaussian, new: EigenKroneckerGaussian) -> float:
    """‖Σ' − Σ‖/‖Σ‖ in the Frobenius norm."""
    before, after = old.dense_covariance(), new.dense_covariance()
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("options", [{}, {"one_sided": True}, {"max_size": 4}], ids=str)
def test_a_refresh_moves_neither_mean_nor_momentum(options: dict[str, Any]) -> None:
    """One run refreshes at steps 4 and 8, one doesn't; they have the same noise until step 4.

    The mean is not touched, the momentum rotated there and back by rounding alone. Curvature is
    sorted and not rotated, so q's covariance moves: here by less than its own size.
    """
    common: dict[str, Any] = {"num_data": 50, "betas": (0.9, 0.9), **options}
    still, turning = network(), network()
    one, two = EVON(still, refresh=5, **common), EVON(turning, refresh=4, **common)
    train(one, still, 4)
    train(two, turning, 4)
    for p, other in zip(still.parameters(), turning.parameters(), strict=True):
        assert torch.equal(p, other)
        torch.testing.assert_close(
            unturned_momentum(two, other), unturned_momentum(one, p), rtol=1e-10, atol=1e-14
        )
        if "left_basis" in two.state[other]:
            assert not torch.equal(two.state[other]["left_basis"], one.state[p]["left_basis"])
    assert 0 < moved(q_of(one, still), q_of(two, turning)) < 1


def test_later_refreshes_follow_by_power_iterations() -> None:
    """On a fixed moment they converge to the eigenvectors, largest first.

    The error of a direction falls by the ratio of neighbouring eigenvalues, here one half: 60 of
    them leave 1e-17 of it, so rounding and √ε of the mean eigenvalue, 1.5e-8·(1.3 of 4), over the
    smallest gap 1/32 are left: 4e-7.
    """
    axis = Axis(6, torch.zeros(0, dtype=torch.float64))
    vectors = rotation(6, 7)
    values = 4 * 0.5 ** torch.arange(6, dtype=torch.float64)
    axis.moment.copy_(vectors * values @ vectors.mT)
    axis.basis.copy_(rotation(6, 8))
    for _ in range(60):
        axis.refresh()
    torch.testing.assert_close((axis.basis.mT @ vectors).abs(), torch.eye(6).double(),
                               rtol=0, atol=1e-6)  # fmt: skip
    axis.basis.copy_(torch.eye(6))
    axis.refresh()
    torch.testing.assert_close((axis.basis.mT @ vectors).abs(), torch.eye(6).double(),
                               rtol=0, atol=1e-6)  # fmt: skip


def test_columns_that_change_places_take_their_curvature_along() -> None:
    axis = Axis(3, torch.zeros(0, dtype=torch.float64))
    basis = rotation(3, 9)
    axis.basis.copy_(basis)
    axis.moment.copy_(basis * torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64) @ basis.mT)
    turn = axis.refresh()
    assert turn.order is not None
    assert turn.order.tolist() == [1, 2, 0]
    # The diagonal that tells equal values apart, √ε of the moment, turns them a little.
    torch.testing.assert_close(axis.basis, basis[:, [1, 2, 0]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_directions_without_gradients_stay_where_they_are(rank: int) -> None:
    """A moment that is zero, or of rank one: the basis stays orthonormal and does not wander."""
    axis = Axis(5, torch.zeros(0, dtype=torch.float32))
    axis.moment.addr_(torch.ones(5), torch.ones(5), alpha=float(rank))
    axis.refresh()
    for _ in range(50):
        before = axis.basis.clone()
        axis.refresh()
    torch.testing.assert_close(axis.basis, before, rtol=0, atol=1e-3)
    torch.testing.assert_close(axis.basis.mT @ axis.basis, torch.eye(5), rtol=0, atol=1e-5)


# --- the posterior --------------------------------------------------------------------------------

ROWS = 30
X = numbers(ROWS, 3, seed=21) @ torch.tensor(
    [[1.0, 0.9, 0.0], [0.0, 0.5, 0.4], [0.0, 0.0, 1.2]], dtype=torch.float64
)
Y = (X[:, 0] - X[:, 1] + numbers(ROWS, seed=22) > 0).double()
PRIOR = 1.0
NODES, WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(50))
SHARES = WEIGHTS / WEIGHTS.sum()


def expectations(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """E_q of the mean loss's gradient and Hessian: one-dimensional integrals over each logit."""
    sd = (X @ covariance * X).sum(1).sqrt()
    p = ((X @ mean)[:, None] + sd[:, None] * NODES).sigmoid()
    hessian = (X.mT * ((p * (1 - p)) @ SHARES)) @ X / ROWS
    return X.mT @ (p @ SHARES - Y) / ROWS, hessian


def best_full_gaussian() -> tuple[Tensor, Tensor]:
    """The KL-optimal N(m, S⁻¹): S = nE_q[∇²ℓ̄] + p and nE_q[∇ℓ̄] + pm = 0, to rounding."""
    mean, precision = torch.zeros(3).double(), torch.eye(3).double()
    for _ in range(300):
        gradient, hessian = expectations(mean, torch.linalg.inv(precision))
        precision = 0.5 * precision + 0.5 * (ROWS * hessian + PRIOR * torch.eye(3))
        mean = mean - 0.5 * torch.linalg.solve(precision, ROWS * gradient + PRIOR * mean)
    return mean, precision


def expected_step(opt: EVON, net: nn.Linear) -> None:
    """A step with the expectations of what draws would give, by quadrature.

    E[Ĥ] of a direction is the Hessian's diagonal in the basis (Stein's identity).
    """
    q = q_of_logistic(opt, net)
    gradient, hessian = expectations(q.mean, q.dense_covariance())
    with opt.sampled():
        net.weight.grad = gradient[None].clone()
    basis = opt.state[net.weight]["right_basis"]
    h = opt.state[net.weight]["curvature"]
    # Ĥ = √N(h + δ)·product, the way `IVON._learn` reads it.
    products = (basis.mT @ hessian @ basis).diagonal() / (h[0] + PRIOR / ROWS) / ROWS**0.5
    opt._products.copy_(products)
    opt.step()


def q_of_logistic(opt: EVON, net: nn.Linear) -> EigenKroneckerGaussian:
    q = opt.posterior(net, Bernoulli()).q
    assert isinstance(q, EigenKroneckerGaussian)
    return q


def test_in_the_right_basis_it_has_the_exact_covariance_of_logistic_regression() -> None:
    """Q the eigenvectors of E_q[∇²ℓ] at the KL-optimal full Gaussian, held fixed.

    Expected steps contract towards the fixed point; 400 of rate 0.2 leave rounding, 1e-12. The
    eigenvectors of the Hessian at the mean alone leave 1e-3 to 1e-1, so the tolerance can fail.
    """
    mean, precision = best_full_gaussian()
    _, hessian = expectations(mean, torch.linalg.inv(precision))
    found = {}
    p = (X @ mean).sigmoid()
    at_the_mean = (X.mT * (p * (1 - p))) @ X / ROWS
    for name, matrix in {"expected": hessian, "at the mean": at_the_mean}.items():
        net = nn.Linear(3, 1, bias=False).double()
        opt = EVON(net, lr=0.3, num_data=ROWS, betas=(0.0, 0.8), prior_precision=PRIOR,
                   hess_init=0.1, rescale_lr=False, refresh=10**6)  # fmt: skip
        hold(opt, net.weight, None, torch.linalg.eigh(matrix).eigenvectors)
        # The mean in the basis is read from the weights in the first step.
        for _ in range(400):
            expected_step(opt, net)
        q = q_of_logistic(opt, net)
        covariance = torch.linalg.inv(precision)
        found[name] = float((q.dense_covariance() - covariance).norm() / covariance.norm())
        if name == "expected":
            torch.testing.assert_close(q.mean, mean, rtol=0, atol=1e-10)
            full = FullGaussian(mean, precision)
            prior = DiagGaussian(torch.zeros(3).double(), torch.ones(3).double())
            assert float(kl(q, prior)) == pytest.approx(float(kl(full, prior)), rel=1e-10)
    assert found["expected"] < 1e-12
    assert found["at the mean"] > 1e-5


def test_it_rests_at_the_precision_of_a_kronecker_quadratic() -> None:
    """ℓ̄ = ½ vec(W)ᵀ(A ⊗ B)vec(W): S* = N(αβᵀ + δ) in the eigenbasis of A and B.

    The positive step raises h by r·Var(Ĥ)/(2(h + δ)); in the right basis directions don't mix, so
    Var(Ĥ) = 2h², which is added to what is expected. The average of T steps has the relative
    standard error √(2/T), 2 %; five of them are allowed.
    """
    left, right = rotation(2, 31), rotation(3, 32)
    alpha, beta = torch.tensor([2.0, 0.5]).double(), torch.tensor([1.5, 1.0, 0.3]).double()
    a, b = left * alpha @ left.mT, right * beta @ right.mT
    rate, delta, n, late = 0.005, 0.05, 100, 4000
    net = nn.Linear(3, 2, bias=False).double()
    nn.init.zeros_(net.weight)
    opt = EVON(net, lr=1e-3, num_data=n, betas=(0.9, 1 - rate), weight_decay=delta,
               refresh=10**6, draws="normal")  # fmt: skip
    hold(opt, net.weight, left, right)
    total = torch.zeros(2, 3).double()
    for step in range(1200 + late):
        with opt.sampled():
            (0.5 * (net.weight * (a @ net.weight @ b)).sum()).backward()
        opt.step()
        if step >= 1200:
            total += opt.state[net.weight]["curvature"] / late
    h = torch.outer(alpha, beta)
    expected = h + rate * h.square() / (h + delta)
    torch.testing.assert_close(total, expected, rtol=5 * (2 / late) ** 0.5, atol=0)
    q = opt.posterior(net, Gaussian(1.0)).q
    assert isinstance(q, EigenKroneckerGaussian)
    (block,) = q.blocks
    torch.testing.assert_close(
        block.values, n * (opt.state[net.weight]["curvature"] + delta), rtol=1e-12, atol=0
    )


def test_the_draws_are_those_of_its_posterior() -> None:
    """Covariance of 4,000 draws against that of q, within 6 standard errors of an entry."""
    net = network()
    opt = EVON(net, num_data=20, betas=(0.9, 0.5), refresh=3, draws="normal")
    train(opt, net, 9)
    q = q_of(opt, net)
    draws = []
    for step in range(4000):
        opt.param_groups[0]["skipped"] = 1000 + step
        with torch.no_grad():
            draw = opt._layout.room_for_draw(0)
            opt._perturb(draw)
            opt._layout.show_mean()
            draws.append(draw.vector.clone())
    covariance = torch.cov(torch.stack(draws).mT)
    exact = q.dense_covariance()
    variance = exact.diagonal()
    error = ((torch.outer(variance, variance) + exact.square()) / len(draws)).sqrt()
    assert bool(((covariance - exact).abs() < 6 * error).all())
    assert float((exact - variance.diag()).abs().max()) > 20 * float(error.min()), "correlated"
