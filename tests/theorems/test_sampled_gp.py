"""The process of a posterior's own functions, in float64.

For a linear network it is algebra on the weights' moments: equal to rounding, 1e-12 leaves room.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import credo
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, Empirical, GaussianMixture
from credo.functionspace import SampledGP, leave_one_out, leverage, relevance, to_gp
from credo.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian
from credo.posterior.posterior import Posterior

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def linear(outputs=1, likelihood=None):
    net = nn.Linear(2, outputs).double()
    return credo.Model(net, likelihood or Gaussian(scale=0.3))


def bag(model, members=5):
    return Posterior.at_network(model, Empirical(normal(members, model.random.size)))


def features(x, outputs=1):
    """J of `linear`, (B, K, P): weights, then biases."""
    one = torch.eye(outputs, dtype=x.dtype)
    weights = torch.einsum("kj,bi->bkji", one, x).flatten(2)
    return torch.cat([weights, one.expand(len(x), -1, -1)], 2)


@pytest.mark.parametrize("outputs", [1, 3])
def test_of_a_linear_network_the_kernel_is_that_of_the_weights_covariance(outputs):
    model, x, other = linear(outputs), normal(4, 2, seed=1), normal(6, 2, seed=2)
    posterior = bag(model)
    gp, samples = SampledGP(posterior), posterior.q.samples
    covariance = torch.from_numpy(np.cov(samples.numpy(), rowvar=False, bias=True))
    j, k = features(x, outputs), features(other, outputs)
    joint = torch.einsum("brp,pq,msq->brms", j, covariance, k)
    torch.testing.assert_close(gp.kernel(x, other, "joint"), joint, **EXACT)
    torch.testing.assert_close(gp.kernel(x, other), torch.einsum("brmr->bm", joint), **EXACT)
    each = torch.einsum("brmr->rbm", joint)
    torch.testing.assert_close(gp.kernel(x, other, "each"), each, **EXACT)
    torch.testing.assert_close(gp.mean(x), j @ samples.mean(0), **EXACT)
    own = gp.output_gaussian(x).covariance
    torch.testing.assert_close(own, j @ covariance @ j.mT, **EXACT)


@pytest.mark.parametrize("family", ["gaussian", "mixture"])
def test_draws_of_a_linear_network_estimate_the_moments_of_q(family):
    """A variance from S draws has a relative standard error of √(2/S) if they are Gaussian."""
    model, x, draws = linear(), normal(3, 2, seed=1), 20_000
    one, two = (DiagGaussian(normal(3, seed=s), normal(3, seed=s + 5).exp()) for s in (3, 4))
    q = one if family == "gaussian" else GaussianMixture(torch.zeros(1).double(), (one, two))
    posterior = Posterior.at_network(model, q)
    found = SampledGP(posterior, samples=draws).output_gaussian(x).variance.flatten()
    j = features(x)[:, 0]
    if family == "gaussian":
        expected = to_gp(posterior).output_gaussian(x).variance.flatten()
        error = math.sqrt(2 / draws)
    else:
        apart = j @ (one.mean - two.mean) / 2
        expected = j.square() @ (one.variance + two.variance) / 2 + apart.square()
        error = math.sqrt(6 / draws)  # a mixture's kurtosis is at most some 6 here
    torch.testing.assert_close(found, expected, rtol=4 * error, atol=0)


def test_variances_of_classes_add_up_to_those_of_the_average():
    model, x = linear(3, Categorical()), normal(7, 2, seed=1)
    posterior = bag(model)
    found = SampledGP(posterior).predict(x)
    average = posterior.predict(x, samples=5).probs
    torch.testing.assert_close(found.mean, average, **EXACT)
    torch.testing.assert_close(found.variance, average - average.square(), **EXACT)
    assert bool((found.model_variance > 0).all())
    kernel = SampledGP(posterior).kernel(x, outputs="each", of="probs")
    variances = kernel.diagonal(dim1=1, dim2=2).mT
    torch.testing.assert_close(variances, found.model_variance, **EXACT)
    with pytest.raises(UnsupportedError, match="for classes"):
        SampledGP(bag(linear())).kernel(x, of="probs")


def test_noise_of_a_regression_is_averaged_over_the_functions():
    x = normal(4, 2, seed=1)
    found = SampledGP(bag(linear())).predict(x)
    torch.testing.assert_close(found.noise_variance, torch.full_like(found.mean, 0.09), **EXACT)
    model = linear(2, HeteroscedasticGaussian())
    posterior = bag(model)
    means, scales = zip(
        *(model.likelihood.mean_and_scale(f) for f in SampledGP(posterior).functions(x)),
        strict=True,
    )
    found = SampledGP(posterior).predict(x)
    torch.testing.assert_close(found.mean, torch.stack(means).mean(0), **EXACT)
    expected = torch.stack(means).var(0, correction=0)
    torch.testing.assert_close(found.model_variance, expected, **EXACT)
    expected = torch.stack(scales).square().mean(0)
    torch.testing.assert_close(found.noise_variance, expected, **EXACT)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_scores_of_an_ensemble_are_those_of_its_members(likelihood):
    """Not those of the network halfway between them."""
    outputs = 3 if isinstance(likelihood, Categorical) else 1
    model, x = linear(outputs, likelihood), normal(9, 2, seed=1)
    y = torch.zeros(9, dtype=torch.int64) if outputs == 3 else torch.zeros(9, 1).double()
    posterior = bag(model)
    at_mean = Posterior.at_network(
        model, DiagGaussian(posterior.mean, torch.full_like(posterior.mean, 0.1))
    )
    members = [
        Posterior.at_network(model, credo.families.Delta(sample)) for sample in posterior.q.samples
    ]
    alone = torch.stack([relevance(m, (x, y), progress=False) for m in members])
    found = relevance(posterior, (x, y), batch_size=4, progress=False)
    torch.testing.assert_close(found, alone.mean(0), **EXACT)
    assert not torch.allclose(found, relevance(at_mean, (x, y), progress=False))
    f = torch.stack([m.predict(x, at="mean").outputs.squeeze(0).view(9, -1) for m in members])
    bend = torch.stack([likelihood.hessian(each) for each in f]).mean(0)
    spread = (f - f.mean(0)).permute(1, 2, 0)
    expected = torch.einsum("bkl,bls,bks->b", bend, spread, spread) / len(members)
    found = leverage(posterior, (x, y), batch_size=4, progress=False)
    torch.testing.assert_close(found, expected, **EXACT)


def test_what_needs_a_gaussian_says_so_and_what_to_use():
    posterior, data = bag(linear()), (normal(3, 2), normal(3, 1))
    with pytest.raises(UnsupportedError, match=r"Empirical is none.*SampledGP"):
        to_gp(posterior)
    with pytest.raises(UnsupportedError, match="Empirical is none"):
        leave_one_out(posterior, data, progress=False)
    with pytest.raises(DataError, match="one draw has no covariance"):
        SampledGP(Posterior.at_network(linear(), DiagGaussian(normal(3), normal(3).exp())), 1)
