"""Extreme eigenvalues of a network's curvature, against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

import credo
from credo.autodiff.loss import Loss
from credo.errors import DataError, UnsupportedError
from credo.tools import extreme_eigenvalues
from credo.tools.spectrum import lanczos


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classifier() -> tuple[credo.Model, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    x = torch.randn(20, 3, generator=generator(), dtype=torch.float64)
    y = torch.randint(3, (20,), generator=generator(1))
    return credo.Model(net, credo.likelihoods.Categorical()), (x, y)


def dense_hessian(model: credo.Model, batch: tuple[Tensor, Tensor]) -> np.ndarray:
    net = model.net
    net.eval()
    names, shapes = zip(*((n, p.shape) for n, p in net.named_parameters()), strict=True)

    def loss(theta: Tensor) -> Tensor:
        pieces = theta.split([shape.numel() for shape in shapes])
        weights = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        outputs = torch.func.functional_call(net, weights, (batch[0],))
        return nn.functional.cross_entropy(outputs, batch[1])

    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    hessian = torch.autograd.functional.hessian(loss, theta).numpy()
    net.train()
    return hessian


def test_all_products_give_the_hessians_own_eigenvalues() -> None:
    model, batch = classifier()
    values = scipy.linalg.eigvalsh(dense_hessian(model, batch))
    found = extreme_eigenvalues(model, batch, products=100, generator=generator())
    assert model.net.training
    assert found.largest == pytest.approx(values[-1], rel=1e-9)
    assert found.smallest == pytest.approx(values[0], rel=1e-9)
    # The softmax is blind to a shift of all outputs: zeros, which are not positive ones.
    positive = values[values > 1e-10]
    assert found.smallest_positive == pytest.approx(positive[0], rel=1e-6)


def test_few_products_bracket_by_their_residuals() -> None:
    model, batch = classifier()
    values = scipy.linalg.eigvalsh(dense_hessian(model, batch))
    found = extreme_eigenvalues(model, batch, products=6, generator=generator())
    assert found.products == 6
    assert not found.exact
    assert found.largest <= values[-1] * (1 + 1e-12)
    for value, error in (
        (found.largest, found.largest_error),
        (found.smallest, found.smallest_error),
        (found.smallest_positive, found.smallest_positive_error),
    ):
        assert value is not None
        assert error is not None
        assert np.abs(values - value).min() <= error + 1e-12


def test_gauss_newton_products_are_those_of_the_dense_matrix() -> None:
    model, batch = classifier()
    model.net.eval()
    theta = model.weights(model.random)
    values = scipy.linalg.eigvalsh(Loss.of_model(model, batch).gauss_newton(theta).numpy())
    model.net.train()
    found = extreme_eigenvalues(model, batch, "ggn", products=100, generator=generator())
    assert found.largest == pytest.approx(values[-1], rel=1e-9)
    assert found.smallest >= -1e-12
    assert found.smallest_positive == pytest.approx(values[values > 1e-10][0], rel=1e-5)


def test_batches_add_up_to_all_data() -> None:
    model, (x, y) = classifier()
    whole = extreme_eigenvalues(model, (x, y), generator=generator())
    parts = [(x[:13], y[:13]), (x[13:], y[13:])]
    split = extreme_eigenvalues(model, parts, generator=generator())
    assert split.largest == pytest.approx(whole.largest, rel=1e-10)


def test_a_quadratic_has_the_curvatures_it_was_given() -> None:
    """A linear model under unit noise: xᵀx/n."""
    x = torch.randn(50, 6, generator=generator(), dtype=torch.float64)
    x *= torch.tensor([0.1, 1, 1, 1, 1, 30.0])
    model = credo.Model(nn.Linear(6, 1, bias=False).double(), credo.likelihoods.Gaussian(1.0))
    y = torch.zeros(50, 1, dtype=torch.float64)
    values = np.linalg.eigvalsh((x.mT @ x / 50).numpy())
    for matrix in ("hessian", "ggn"):
        found = extreme_eigenvalues(model, (x, y), matrix, generator=generator())
        assert found.smallest_positive == pytest.approx(values[0], rel=1e-8)
        assert found.largest == pytest.approx(values[-1], rel=1e-12)
        region = credo.tools.robust_region(found.smallest_positive, found.largest)
        assert 0 < region.least_momentum < 1


def test_lanczos_stops_where_the_space_is_exhausted() -> None:
    """Two distinct eigenvalues: two products say everything."""
    matrix = torch.diag(torch.tensor([1.0] * 5 + [4.0] * 5, dtype=torch.float64))
    start = torch.randn(10, generator=generator(), dtype=torch.float64)
    diagonal, off, left = lanczos(lambda v: matrix @ v, start, 10)
    assert len(diagonal) == 2
    assert left == 0.0
    assert float(diagonal.sum()) == pytest.approx(5.0)
    assert len(off) == 1


def test_nonsense_is_refused() -> None:
    model, batch = classifier()
    with pytest.raises(DataError, match="hessian"):
        extreme_eigenvalues(model, batch, "fisher")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="products must be a whole number"):
        extreme_eigenvalues(model, batch, products=0)
    with pytest.raises(UnsupportedError, match="GB"):
        extreme_eigenvalues(model, batch, max_memory=10)
    with pytest.raises(DataError, match="there are no data"):
        extreme_eigenvalues(model, iter(()))
