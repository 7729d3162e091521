"""Laplace approximations against laplace-torch, an implementation that shares no code with ours.

Both are float64 and exact but for rounding, so 1e-4 relative (next to the largest entry, where a
matrix has zeros) would already mean another formula. They agree to 1e-14, but for "full", where
laplace-torch goes through single precision: 2e-8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.families import DiagGaussian, EigenKroneckerGaussian, FullGaussian

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    laplace = pytest.importorskip("laplace")

pytestmark = pytest.mark.filterwarnings("ignore")

RELATIVE = 1e-4
PRECISION = 3.0
NOISE = 0.4


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, outputs)
    )


def cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(16, outputs),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "cnn": (cnn, (2, 6, 6)),
}
TASKS = ["classification", "regression"]
every_case = pytest.mark.parametrize(("network", "task"), list(product(NETWORKS, TASKS)))


@cache
def problem(network: str, task: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """A network trained a little, data, and the likelihood."""
    build, shape = NETWORKS[network]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build(3).double()
        x = torch.randn(40, *shape, dtype=torch.float64)
        features = x.flatten(1)[:, :3]
        y = features.argmax(1) if task == "classification" else features.sin()
    likelihood = (
        credo.likelihoods.Categorical()
        if task == "classification"
        else credo.likelihoods.Gaussian(scale=NOISE)
    )
    model = credo.Model(net, likelihood, credo.priors.Normal(PRECISION**-0.5))
    credo.fit(model, credo.MAP(lr=0.02), (x, y), epochs=40, progress=False)
    return net, x, y, model


def ours(case: tuple[Any, ...], batch_size: int = 40, **settings: Any) -> Any:
    _, x, y, model = case
    method = credo.Laplace(**settings)
    return credo.fit(model, method, (x, y), batch_size=batch_size, progress=False)


def theirs(case: tuple[Any, ...], task: str, subset: str, structure: str, **more: Any) -> Any:
    net, x, y, _ = case
    credo.network.unbind(net)
    noise = {} if task == "classification" else {"sigma_noise": NOISE}
    fitted = laplace.Laplace(
        net, task, subset_of_weights=subset, hessian_structure=structure,
        prior_precision=PRECISION, **noise, **more,
    )  # fmt: skip
    fitted.fit(DataLoader(TensorDataset(x, y), batch_size=16))
    return fitted


def dense(q: Any) -> Tensor:
    if isinstance(q, DiagGaussian):
        return torch.diag(q.precision)
    if isinstance(q, FullGaussian):
        return q.precision
    assert isinstance(q, EigenKroneckerGaussian)
    return q.dense_precision()


def their_precision(fitted: Any) -> Tensor:
    precision = fitted.posterior_precision
    if not isinstance(precision, Tensor):
        return precision.to_matrix()
    return torch.diag(precision) if precision.dim() == 1 else precision


def error(mine: Tensor, its: Tensor) -> float:
    return float((mine - its.detach()).abs().max() / its.detach().abs().max())


@every_case
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_precision_evidence_and_linearised_predictive(
    network: str, task: str, subset: str, structure: str
) -> None:
    case = problem(network, task)
    x = case[1][:9] + 0.3
    posterior = ours(case, structure=structure, subset=subset)
    link = {"link": "probit"} if task == "classification" else {}
    mine = posterior.predict(x, at="linearised", **link)
    reference = theirs(case, task, subset, structure)
    assert error(dense(posterior.q), their_precision(reference)) < RELATIVE
    evidence = reference.log_marginal_likelihood()
    assert error(posterior.log_marginal_likelihood(), evidence) < RELATIVE
    if task == "classification":
        its = reference(x, pred_type="glm", link_approx="probit")
        assert error(mine.probs, its) < RELATIVE
        return
    mean, covariance = reference(x, pred_type="glm")
    assert error(mine.mean, mean) < RELATIVE
    assert error(mine.epistemic_std.square(), covariance.diagonal(dim1=1, dim2=2)) < RELATIVE
