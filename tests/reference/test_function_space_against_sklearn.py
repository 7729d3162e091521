"""A network as a Gaussian process, against scikit-learn's own given the same kernel."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Kernel
from torch import nn

import credo
from credo.functionspace import to_gp


class Precomputed(Kernel):
    """A kernel whose inputs are places in a matrix."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __call__(self, X, Y=None, eval_gradient=False):
        rows = X.astype(int).ravel()
        columns = rows if Y is None else Y.astype(int).ravel()
        return self.matrix[np.ix_(rows, columns)]

    def diag(self, X):
        return self.matrix.diagonal()[X.astype(int).ravel()]

    def is_stationary(self):
        return False


def test_scikit_learn_finds_the_same_process_from_the_prior_kernel():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model = credo.Model(net, credo.likelihoods.Gaussian(0.2), credo.priors.Normal(scale=0.8))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True)
    fitted = credo.Laplace(structure="full", train=credo.MAP(lr=0.02))
    posterior = credo.fit(model, fitted, (x, y), epochs=60, progress=False)
    gp = to_gp(posterior)
    test = torch.randn(7, 2, generator=generator, dtype=torch.float64)
    pseudo = gp.pseudo_data((x, y))
    matrix = gp.prior_kernel(torch.cat([x, test])).numpy()
    theirs = GaussianProcessRegressor(Precomputed(matrix), alpha=0.2**2, optimizer=None)
    places = np.arange(37)[:, None]
    theirs.fit(places[:30], pseudo.targets.numpy().ravel())
    mean, covariance = theirs.predict(places[30:], return_cov=True)
    ours = pseudo.at(test)
    np.testing.assert_allclose(ours.mean.flatten(), mean, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(ours.covariance[:, 0, :, 0], covariance, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(
        gp.predict(test).model_variance.flatten(), covariance.diagonal(), rtol=1e-6, atol=1e-9
    )
    evidence = gp.log_marginal_likelihood((x, y))
    assert evidence == pytest.approx(theirs.log_marginal_likelihood_value_, rel=1e-8)
