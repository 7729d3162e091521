"""Likelihoods against torch.distributions, automatic differentiation and quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import distributions

from credo.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian

# float64, a handful of operations on numbers of size 10 to 100
EXACT = {"rtol": 1e-11, "atol": 1e-11}
DRAWS = 40_000

finite = st.floats(-30, 30)


def logits(*shape):
    return arrays(np.float64, shape, elements=finite).map(torch.from_numpy)


def hessian_by_autograd(likelihood, outputs, target):
    """−∂² log p / ∂f² of one example."""

    def nll(f):
        return -likelihood.log_prob(f.unsqueeze(0), target.unsqueeze(0)).squeeze(0)

    return torch.autograd.functional.hessian(nll, outputs)


@settings(deadline=None, max_examples=50)
@given(logits(3, 4), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_categorical(f, y):
    likelihood, y = Categorical(), torch.tensor(y)
    reference = distributions.Categorical(logits=f)
    torch.testing.assert_close(likelihood.log_prob(f, y), reference.log_prob(y), **EXACT)
    probs = likelihood.probs(f)
    torch.testing.assert_close(probs, reference.probs, **EXACT)
    torch.testing.assert_close(likelihood.entropy(probs), reference.entropy(), **EXACT)
    autograd = torch.stack(
        [hessian_by_autograd(likelihood, *pair) for pair in zip(f, y, strict=True)]
    )
    torch.testing.assert_close(likelihood.hessian(f), autograd, **EXACT)


def test_dense_categorical():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (2, 4, 5), generator=generator)
    reference = distributions.Categorical(logits=f.movedim(1, -1))
    likelihood = Categorical()
    expected = reference.log_prob(y).sum((1, 2))
    torch.testing.assert_close(likelihood.log_prob(f, y), expected, **EXACT)
    torch.testing.assert_close(
        likelihood.entropy(likelihood.probs(f)), reference.entropy(), **EXACT
    )
    pixel = hessian_by_autograd(likelihood, f[1], y[1])
    for row, column in ((0, 0), (3, 1)):
        torch.testing.assert_close(
            likelihood.hessian(f)[1, row, column], pixel[:, row, column, :, row, column], **EXACT
        )


@settings(deadline=None, max_examples=50)
@given(logits(3, 2), arrays(np.float64, (3, 2), elements=st.sampled_from([0.0, 1.0])))
def test_bernoulli(f, y):
    likelihood, y = Bernoulli(), torch.from_numpy(y)
    reference = distributions.Bernoulli(logits=f)
    torch.testing.assert_close(likelihood.log_prob(f, y), reference.log_prob(y).sum(1), **EXACT)
    probs = likelihood.probs(f)
    torch.testing.assert_close(probs, reference.probs, **EXACT)
    torch.testing.assert_close(likelihood.entropy(probs), reference.entropy(), **EXACT)
    autograd = torch.stack(
        [hessian_by_autograd(likelihood, *pair) for pair in zip(f, y, strict=True)]
    )
    torch.testing.assert_close(likelihood.hessian(f), autograd, **EXACT)


@settings(deadline=None, max_examples=50)
@given(logits(3, 2), logits(3, 2), st.floats(0.05, 20))
def test_gaussian(f, y, scale):
    likelihood = Gaussian(scale)
    reference = distributions.Normal(f, scale)
    torch.testing.assert_close(likelihood.log_prob(f, y), reference.log_prob(y).sum(1), **EXACT)
    torch.testing.assert_close(likelihood.mean(f), reference.mean, **EXACT)
    torch.testing.assert_close(likelihood.variance(f), reference.variance, **EXACT)
    torch.testing.assert_close(likelihood.cdf(f, y), reference.cdf(y), **EXACT)
    torch.testing.assert_close(likelihood.survival(f, y), 1 - reference.cdf(y), **EXACT)
    autograd = torch.stack(
        [hessian_by_autograd(likelihood, *pair) for pair in zip(f, y, strict=True)]
    )
    torch.testing.assert_close(likelihood.hessian(f), autograd, **EXACT)
    median_and_tail = [likelihood.quantile(f, p) for p in (0.5, 0.01)]
    expected = [reference.icdf(torch.tensor(p, dtype=f.dtype)) for p in (0.5, 0.01)]
    torch.testing.assert_close(median_and_tail, expected, **EXACT)


@settings(deadline=None, max_examples=50)
@given(arrays(np.float64, (3, 4), elements=st.floats(-5, 5)).map(torch.from_numpy), logits(3, 2))
def test_heteroscedastic_gaussian(f, y):
    likelihood = HeteroscedasticGaussian(min_scale=0.1)
    mean, raw = f.chunk(2, dim=1)
    reference = distributions.Normal(mean, 0.1 + torch.nn.functional.softplus(raw))
    torch.testing.assert_close(likelihood.log_prob(f, y), reference.log_prob(y).sum(1), **EXACT)
    torch.testing.assert_close(likelihood.mean(f), reference.mean, **EXACT)
    torch.testing.assert_close(likelihood.variance(f), reference.variance, **EXACT)
    torch.testing.assert_close(likelihood.cdf(f, y), reference.cdf(y), **EXACT)


@pytest.mark.parametrize("raw", [-3.0, 0.0, 2.0])
def test_heteroscedastic_hessian_is_autograds_averaged_over_targets(raw):
    likelihood = HeteroscedasticGaussian(min_scale=0.1)
    f = torch.tensor([0.7, raw], dtype=torch.float64)
    mean, scale = likelihood.mean_and_scale(f.unsqueeze(0))
    # the Hessian is quadratic in y, so Gauss–Hermite with two nodes or more is exact
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    averaged = sum(
        weight / math.sqrt(2 * math.pi) * hessian_by_autograd(likelihood, f, (mean + scale * z)[0])
        for z, weight in zip(nodes, weights, strict=True)
    )
    torch.testing.assert_close(likelihood.hessian(f.unsqueeze(0))[0], averaged, **EXACT)


def test_categorical_samples_have_the_probabilities_of_their_logits():
    f = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]]).double()
    dense = f.T.reshape(1, 3, 2).expand(DRAWS, -1, -1)  # two pixels
    drawn = Categorical().sample(dense, torch.Generator().manual_seed(0))
    frequency = torch.nn.functional.one_hot(drawn, 3).double().mean(0)
    probs = f.softmax(1)
    standard_error = (probs * (1 - probs) / DRAWS).sqrt()
    assert ((frequency - probs).abs() < 5 * standard_error).all()


def test_bernoulli_samples_have_the_probability_of_their_logits():
    f = torch.tensor([-2.0, 0.0, 1.0]).double()
    drawn = Bernoulli().sample(f.expand(DRAWS, -1), torch.Generator().manual_seed(0))
    probs = f.sigmoid()
    standard_error = (probs * (1 - probs) / DRAWS).sqrt()
    assert ((drawn.mean(0) - probs).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("likelihood", [Gaussian(0.5), HeteroscedasticGaussian()], ids=str)
def test_regression_samples_have_mean_and_variance(likelihood):
    f = torch.tensor([[1.0, -2.0]]).double()
    drawn = likelihood.sample(f.expand(DRAWS, -1), torch.Generator().manual_seed(0))
    variance = likelihood.variance(f)[0]
    mean_error = (drawn.mean(0) - likelihood.mean(f)[0]).abs()
    assert (mean_error < 5 * (variance / DRAWS).sqrt()).all()
    # Var of a normal's sample variance is 2σ⁴/(n − 1)
    variance_error = (drawn.var(0) - variance).abs()
    assert (variance_error < 5 * variance * math.sqrt(2 / (DRAWS - 1))).all()
