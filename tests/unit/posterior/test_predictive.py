"""Predictive: mixtures over samples, against definitions, scipy and brute force."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from credo.errors import DataError, UnsupportedError
from credo.likelihoods import Bernoulli, Categorical, FromLoss, Gaussian, HeteroscedasticGaussian
from credo.posterior.predictive import Predictive, PredictiveError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def squared(outputs, targets):
    return (outputs - targets).square().sum(1)


CLASSIFICATION = ["probs", "entropy", "expected_entropy", "mutual_information", "confidence",
                  "labels", "epistemic_std"]  # fmt: skip
REGRESSION = ["mean", "std", "variance", "epistemic_std", "aleatoric_std"]
LOSS = ["mean", "epistemic_std"]

CASES = {
    "categorical": (Categorical(), (7, 5, 3), CLASSIFICATION),
    "dense": (Categorical(), (7, 5, 3, 2, 4), CLASSIFICATION),
    "bernoulli": (Bernoulli(), (7, 5), CLASSIFICATION),
    "bernoulli multi": (Bernoulli(), (7, 5, 2), CLASSIFICATION),
    "gaussian": (Gaussian(0.3), (7, 5), REGRESSION),
    "gaussian learned": (Gaussian(0.3, learned=True), (7, 5, 2), REGRESSION),
    "heteroscedastic": (HeteroscedasticGaussian(), (7, 5, 4), REGRESSION),
    "loss": (FromLoss(squared), (7, 5, 2), LOSS),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request):
    return request.param


# --- classification


@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 4, 3, 2, 5)], ids=["plain", "dense"])
def test_categorical_quantities_are_their_definitions(shape):
    outputs = 3 * normal(*shape)
    pred = Predictive(outputs, Categorical())
    each = outputs.softmax(2)
    mixture = each.mean(0)
    entropy = -(mixture * mixture.log()).sum(1)
    expected = -(each * each.log()).sum(2).mean(0)
    # the mutual information is also the mean divergence of a sample from the mixture
    divergence = (each * (each.log() - mixture.log())).sum(2).mean(0)
    torch.testing.assert_close(pred.sample_probs, each, **EXACT)
    torch.testing.assert_close(pred.probs, mixture, **EXACT)
    torch.testing.assert_close(pred.entropy, entropy, **EXACT)
    torch.testing.assert_close(pred.expected_entropy, expected, **EXACT)
    torch.testing.assert_close(pred.mutual_information, divergence, **EXACT)
    torch.testing.assert_close(pred.confidence, mixture.max(1).values, **EXACT)
    assert torch.equal(pred.labels, mixture.argmax(1))
    torch.testing.assert_close(pred.epistemic_std, each.std(0, correction=0), **EXACT)
    assert pred.entropy.shape == (shape[1], *shape[3:])


def test_probabilities_are_averaged_after_the_softmax():
    outputs = torch.tensor([[[8.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64)
    pred = Predictive(outputs, Categorical())
    assert not torch.allclose(pred.probs, outputs.mean(0).softmax(1), atol=0.1)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 1), (6, 4, 3)])
def test_bernoulli_is_the_categorical_of_two_classes(shape):
    outputs = 3 * normal(*shape)
    pred = Predictive(outputs, Bernoulli())
    flat = outputs.reshape(6, -1)
    two = Predictive(torch.stack([torch.zeros_like(flat), flat], dim=2), Categorical())
    assert pred.probs.shape == shape[1:]
    torch.testing.assert_close(pred.probs.flatten(), two.probs[:, 1], **EXACT)
    for name in ("entropy", "expected_entropy", "mutual_information", "confidence", "labels"):
        assert getattr(pred, name).shape == shape[1:]
        torch.testing.assert_close(getattr(pred, name).flatten(), getattr(two, name), **EXACT)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([1e-3, 1.0, 30.0, 300.0]))
def test_entropy_splits_and_stays_in_its_bounds_in_float32(seed, samples, spread):
    outputs = spread * normal(samples, 4, 5, seed=seed, dtype=torch.float32)
    pred = Predictive(outputs, Categorical())
    exact = Predictive(outputs.double(), Categorical())
    assert (pred.mutual_information >= 0).all()
    assert (pred.entropy <= math.log(5) + 1e-6).all()
    assert (pred.mutual_information <= math.log(samples) + 1e-6).all()
    for name in ("probs", "entropy", "expected_entropy", "mutual_information"):
        single, double = getattr(pred, name), getattr(exact, name)
        # entropies of size one, a dozen float32 roundings of 6e-8 each
        torch.testing.assert_close(single.double(), double, rtol=0, atol=1e-6)


def test_identical_samples_share_no_information():
    outputs = normal(1, 6, 4).expand(50, -1, -1)
    pred = Predictive(outputs, Categorical())
    torch.testing.assert_close(pred.mutual_information, torch.zeros(6).double(), **EXACT)
    torch.testing.assert_close(pred.entropy, pred.expected_entropy, **EXACT)


def test_rounding_never_makes_information_negative():
    outputs = normal(1, 1000, 5, dtype=torch.float32) + 1e-4 * normal(9, 1000, 5).float()
    pred = Predictive(outputs, Categorical())
    assert (pred.entropy < pred.expected_entropy).any()
    assert (pred.mutual_information >= 0).all()


def test_saturated_and_impossible_classes_give_numbers():
    outputs = torch.tensor([[[1e4, 0.0, -math.inf]], [[0.0, 1e4, -math.inf]]])
    pred = Predictive(outputs, Categorical())
    torch.testing.assert_close(pred.mutual_information, torch.tensor([math.log(2)]))
    assert pred.expected_entropy.item() == 0


# --- regression


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), HeteroscedasticGaussian()], ids=str)
def test_moments_are_those_of_the_mixture_by_quadrature(likelihood):
    outputs = normal(5, 1, 2)
    pred = Predictive(outputs, likelihood)
    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    last = pred.mean.shape[-1] - 1
    mean, scale = likelihood.mean_and_scale(outputs.squeeze(1))
    components = torch.distributions.Normal(
        mean[:, last, None], scale.expand_as(mean)[:, last, None]
    )
    density = components.log_prob(grid).exp().mean(0)
    first = torch.trapezoid(grid * density, grid)
    second = torch.trapezoid((grid - first).square() * density, grid)
    # trapezoids on a smooth density that vanishes at both ends converge geometrically
    torch.testing.assert_close(pred.mean[0, last], first, rtol=0, atol=1e-10)
    torch.testing.assert_close(pred.variance[0, last], second, rtol=0, atol=1e-10)
    torch.testing.assert_close(pred.std, pred.variance.sqrt(), **EXACT)
    torch.testing.assert_close(
        pred.variance, pred.epistemic_std.square() + pred.aleatoric_std.square(), **EXACT
    )


def test_a_small_spread_far_from_zero_does_not_cancel():
    outputs = 1e4 + 0.5 * normal(200, 3, dtype=torch.float32)
    expected = outputs.double().std(0, correction=0).float()
    # the data themselves are rounded to 1e-3, the running mean too
    torch.testing.assert_close(
        Predictive(outputs, Gaussian()).epistemic_std, expected, rtol=2e-3, atol=0
    )


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(-4, 4)), min_size=1, max_size=6),
    st.sampled_from([0.05, 0.5, 0.9, 0.999]),
)
def test_interval_ends_are_the_mixtures_quantiles_by_scipy(components, level):
    likelihood = HeteroscedasticGaussian(min_scale=0.05)
    outputs = torch.tensor(components, dtype=torch.float64).unsqueeze(1)
    lower, upper = Predictive(outputs, likelihood).interval(level)
    assert lower.shape == upper.shape == (1, 1)
    mean, scale = (part.numpy()[:, 0] for part in likelihood.mean_and_scale(outputs[:, 0]))
    for end, probability in ((lower, (1 - level) / 2), (upper, (1 + level) / 2)):
        # where the mixture has a gap its quantile is ill-conditioned, its cdf is not
        assert stats.norm.cdf(end.item(), mean, scale).mean() == pytest.approx(
            probability, abs=1e-12
        )


def test_interval_of_two_far_components_against_a_root_finder():
    outputs = torch.tensor([[-3.0], [5.0]], dtype=torch.float64)
    lower, upper = Predictive(outputs, Gaussian(0.7)).interval(0.8)
    means = np.array([-3.0, 5.0])

    def quantile(p):
        return optimize.brentq(lambda t: stats.norm.cdf(t, means, 0.7).mean() - p, -20, 20,
                               xtol=1e-14)  # fmt: skip

    assert lower.item() == pytest.approx(quantile(0.1), abs=1e-11)
    assert upper.item() == pytest.approx(quantile(0.9), abs=1e-11)


def test_interval_keeps_float32_and_its_tails():
    outputs = normal(20, 4, 2, dtype=torch.float32)
    for level in (0.9, 1 - 1e-7):
        single = Predictive(outputs, Gaussian(0.5)).interval(level)
        double = Predictive(outputs.double(), Gaussian(0.5)).interval(level)
        for end, exact in zip(single, double, strict=True):
            assert end.dtype == torch.float32
            torch.testing.assert_close(end.double(), exact, rtol=1e-5, atol=1e-5)


def test_interval_holds_as_many_draws_as_it_says():
    outputs, draws = normal(8, 3), 20_000
    lower, upper = Predictive(outputs, Gaussian(0.5)).interval(0.8)
    generator = torch.Generator().manual_seed(1)
    component = torch.randint(8, (draws,), generator=generator)
    y = Gaussian(0.5).sample(outputs[component], generator)
    covered = ((y > lower) & (y < upper)).double().mean(0)
    assert ((covered - 0.8).abs() < 5 * math.sqrt(0.8 * 0.2 / draws)).all()


@pytest.mark.parametrize("level", [0, 1, 95, -0.1, math.nan])
def test_interval_levels_are_probabilities(level):
    with pytest.raises(DataError, match="level must be a number from 0 to 1"):
        Predictive(normal(2, 3), Gaussian()).interval(level)


# --- log_prob


def test_log_prob_is_the_mixtures(case):
    likelihood, shape, _ = case
    outputs = normal(*shape)
    y = outputs[0] if likelihood.kind == "loss" else likelihood.sample(outputs[0])
    each = torch.stack([likelihood.log_prob(f, y) for f in outputs]).exp()
    log_prob = Predictive(outputs, likelihood).log_prob(y)
    assert log_prob.shape == (5,)
    assert not log_prob.requires_grad
    torch.testing.assert_close(log_prob, each.mean(0).log().detach(), rtol=1e-7, atol=1e-7)


def test_log_prob_of_labels_reads_off_the_mean_probabilities():
    pred = Predictive(normal(6, 4, 3), Categorical())
    y = np.array([0, 2, 1, 1])
    expected = pred.probs[torch.arange(4), torch.from_numpy(y)].log()
    torch.testing.assert_close(pred.log_prob(y), expected, **EXACT)


def test_log_prob_does_not_underflow():
    outputs = torch.tensor([[0.0], [1.0]])
    log_prob = Predictive(outputs, Gaussian(0.01)).log_prob(torch.tensor([101.0]))
    expected = -0.5 * (100 / 0.01) ** 2 - math.log(0.01) - 0.5 * math.log(2 * math.pi) - math.log(2)
    assert log_prob.item() == pytest.approx(expected, rel=1e-6)


def test_log_prob_refuses_impossible_targets():
    with pytest.raises(DataError, match="Label 3"):
        Predictive(normal(2, 1, 3), Categorical()).log_prob(torch.tensor([3]))


# --- streams and parts


def test_a_stream_gives_the_same_without_keeping_samples(case):
    likelihood, shape, names = case
    outputs = normal(*shape)
    kept = Predictive(outputs, likelihood)
    streamed = Predictive.from_stream((f for f in outputs), likelihood)
    assert streamed.samples == kept.samples == 7
    for name in names:
        assert torch.equal(getattr(streamed, name), getattr(kept, name))


def test_a_stream_says_why_it_has_no_samples():
    pred = Predictive.from_stream(normal(3, 2), Gaussian())
    classes = Predictive.from_stream(normal(3, 2, 4), Categorical())
    for ask in (
        lambda: pred.outputs,
        lambda: pred.interval(0.9),
        lambda: pred.log_prob(torch.zeros(2)),
        lambda: classes.sample_probs,
    ):
        with pytest.raises(PredictiveError, match="keeps no samples"):
            ask()


def test_a_stream_is_not_changed_and_its_buffer_may_be_reused():
    outputs = normal(4, 3, 2)
    buffer = torch.empty(3, 2, dtype=torch.float64)
    pred = Predictive.from_stream((buffer.copy_(f) for f in outputs), Gaussian())
    torch.testing.assert_close(pred.mean, outputs.mean(0), **EXACT)


def test_streams_must_agree_and_not_be_empty():
    with pytest.raises(DataError, match="no samples"):
        Predictive.from_stream([], Gaussian())
    with pytest.raises(DataError, match=r"Sample 2 predicts shape \(2,\).*\(3,\)"):
        Predictive.from_stream([torch.zeros(3), torch.zeros(2)], Gaussian())


@pytest.mark.parametrize("streamed", [False, True])
def test_concatenated_minibatches_are_the_whole(case, streamed):
    likelihood, shape, names = case
    outputs = normal(*shape)
    make = Predictive.from_stream if streamed else Predictive
    parts = [make(part, likelihood) for part in outputs.split(2, dim=1)]
    joined = Predictive.concatenate(iter(parts))
    whole = make(outputs, likelihood)
    assert joined.samples == 7
    for name in names:
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name), **EXACT)


def test_parts_that_do_not_belong_together_are_refused():
    gaussian = Predictive(normal(3, 2), Gaussian())
    others = {
        "samples": Predictive(normal(4, 2), Gaussian()),
        "likelihoods": Predictive(normal(3, 2), Gaussian(0.5)),
        "stream": Predictive.from_stream(normal(3, 2), Gaussian()),
    }
    for word, other in others.items():
        with pytest.raises(DataError, match=word):
            Predictive.concatenate([gaussian, other])
    with pytest.raises(DataError, match="at least one"):
        Predictive.concatenate([])


# --- the object


def test_each_kind_has_its_own_quantities_and_names_them_otherwise(case):
    likelihood, shape, names = case
    pred = Predictive(normal(*shape), likelihood)
    for name in names:
        assert hasattr(pred, name)
    for name in {*CLASSIFICATION, *REGRESSION, "sample_probs"} - {*names, "sample_probs"}:
        assert not hasattr(pred, name)
        with pytest.raises(UnsupportedError, match=rf"has no {name}.*{names[0]}"):
            getattr(pred, name)
    if likelihood.kind != "regression":
        with pytest.raises(UnsupportedError, match="has no interval"):
            pred.interval(0.9)


def test_nothing_can_be_set_and_copies_work(case):
    likelihood, shape, names = case
    pred = Predictive(normal(*shape), likelihood)
    for name in ("outputs", "likelihood", "samples", *names):
        with pytest.raises(AttributeError, match=name):
            setattr(pred, name, None)
    assert torch.equal(getattr(copy.deepcopy(pred), names[0]), getattr(pred, names[0]))
    assert f"{likelihood.kind}, samples=7" in repr(pred)


def test_quantities_are_computed_once_and_carry_no_gradient(case):
    likelihood, shape, names = case
    pred = Predictive(normal(*shape).requires_grad_(), likelihood)
    assert not pred.outputs.requires_grad
    for name in names:
        assert getattr(pred, name) is getattr(pred, name)
        assert not getattr(pred, name).requires_grad


def test_half_precision_is_raised(case):
    likelihood, shape, names = case
    outputs = normal(*shape).bfloat16()
    assert getattr(Predictive(outputs, likelihood), names[0]).dtype == torch.float32
    assert getattr(Predictive.from_stream(outputs, likelihood), names[0]).dtype == torch.float32


@pytest.mark.parametrize("outputs", [torch.zeros(3), torch.zeros(0, 3), torch.zeros(2, 0)])
def test_samples_come_first_and_there_is_one(outputs):
    with pytest.raises(DataError, match="samples first"):
        Predictive(outputs, Gaussian())


def test_outputs_are_floats():
    with pytest.raises(DataError, match="int64"):
        Predictive(torch.zeros(2, 3, dtype=torch.int64), Gaussian())
