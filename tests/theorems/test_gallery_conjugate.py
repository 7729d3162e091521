"""Conjugate models: message passing, stochastic variational inference, mixtures, and EM.

All in float64. ``close`` measures relative to the largest expected number; unless a test says
otherwise the tolerance 1e-10 is rounding of some thousand operations, with room.
"""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import sklearn.decomposition
import sklearn.mixture
import torch
from scipy import optimize, special, stats
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from credo.autodiff.loss import Loss
from credo.errors import DataError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian, GaussianMixture
from credo.rule.expectations import AtMean
from credo.rule.families import (
    Dirichlet,
    Gamma,
    NormalGamma,
    expectation_parameters,
    natural_parameters,
    with_expectation,
)
from credo.rule.gallery import expectation_maximisation as em
from credo.rule.gallery import message_passing as vmp
from credo.rule.gallery.gaussian_mixture_model import GaussianMixtureModel
from credo.rule.gallery.stochastic_variational_inference import TopicModel, robbins_monro
from credo.rule.learner import Learner, Step
from credo.rule.rule import step


def tensor(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def filled(value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: object, expected: object, tolerance: float = 1e-10) -> bool:
    actual, expected = tensor(actual), tensor(expected)
    assert actual.shape == expected.shape
    scale = max(float(expected.abs().max()), 1.0)
    return float((actual - expected).abs().max()) <= tolerance * scale


# --- variational message passing ------------------------------------------------------------------

X = tensor([[1.2], [-0.4], [2.5], [0.3], [1.9]])
MEAN_PRIOR = DiagGaussian(tensor([0.5]), tensor([2.0]))
PRECISION_PRIOR = Gamma(tensor([1.5]), tensor([0.7]))


def swept(count: int) -> list[tuple[DiagGaussian, Gamma]]:
    model, factors = vmp.normal_model(X, MEAN_PRIOR, PRECISION_PRIOR), (MEAN_PRIOR, PRECISION_PRIOR)
    history = [factors]
    for _ in range(count):
        history.append(vmp.sweep(history[-1], model))
    return history


def test_message_passing_is_coordinate_ascent():
    x, mean, precision = X.numpy().ravel(), 0.5, 1.5 / 0.7
    for q_mean, q_precision in swept(6)[1:]:
        certainty = 1 / 2.0**2 + len(x) * precision
        mean = (0.5 / 2.0**2 + precision * x.sum()) / certainty
        rate = 0.7 + 0.5 * ((x - mean) ** 2 + 1 / certainty).sum()
        precision = (1.5 + len(x) / 2) / rate
        assert close(q_mean.mean, [mean])
        assert close(q_mean.variance, [1 / certainty])
        assert close(q_precision.shape, [1.5 + len(x) / 2])
        assert close(q_precision.rate, [rate])


def test_message_passing_takes_a_prior_of_the_mean_that_depends_on_the_precision():
    """Bishop (10.24)–(10.30): the fixed point has its mean in closed form."""
    x, anchor, strength = X.numpy().ravel(), 0.5, 3.0
    rows = torch.cat([X, tensor([[anchor]])])
    weights = tensor([[1.0]] * len(X) + [[strength]])

    def model(mean, precision):
        (first, second), (log_tau, tau) = mean, precision
        logs = log_tau + weights.log() - math.log(2 * math.pi)
        data = 0.5 * (logs - weights * tau * (rows.square() - 2 * rows * first + second))
        return data.sum() + vmp.expected_log_prior(PRECISION_PRIOR, precision)

    factors = MEAN_PRIOR, PRECISION_PRIOR
    for _ in range(60):
        factors = vmp.sweep(factors, model)
    q_mean, q_precision = factors
    assert close(q_mean.mean, [(strength * anchor + x.sum()) / (strength + len(x))])
    assert close(q_mean.precision, (strength + len(x)) * q_precision.mean)
    assert close(q_precision.shape, [1.5 + (len(x) + 1) / 2])


def test_the_bound_is_its_integral():
    """scipy's densities; the tolerance 1e-7 is what the tails that are cut off may hold."""
    q_mean, q_precision = swept(1)[-1]
    normal = stats.norm(q_mean.mean.item(), q_mean.scale.item())
    gamma = stats.gamma(q_precision.shape.item(), scale=1 / q_precision.rate.item())

    # Gauss–Legendre of 80 × 80 points over all but 1e-12 of q.
    nodes, weights = np.polynomial.legendre.leggauss(80)
    (left, right), (low, high) = (law.ppf([1e-12, 1 - 1e-12]) for law in (normal, gamma))
    mean = 0.5 * ((right - left) * nodes[:, None] + left + right)
    tau = 0.5 * ((high - low) * nodes + low + high)
    joint = sum(stats.norm.logpdf(x, mean, tau**-0.5) for x in X.ravel().tolist())
    joint += stats.norm.logpdf(mean, 0.5, 2.0) + stats.gamma.logpdf(tau, 1.5, scale=1 / 0.7)
    own = normal.logpdf(mean) + gamma.logpdf(tau)
    table = np.exp(own) * (joint - own)
    expected = 0.25 * (right - left) * (high - low) * (weights @ table @ weights)
    model = vmp.normal_model(X, MEAN_PRIOR, PRECISION_PRIOR)
    assert close(vmp.elbo((q_mean, q_precision), model), expected, 1e-7)


def test_message_passing_never_lowers_the_bound():
    model = vmp.normal_model(X, MEAN_PRIOR, PRECISION_PRIOR)
    bounds = [vmp.elbo(factors, model).item() for factors in swept(30)]
    assert bounds[1] - bounds[0] > 0.1
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(bounds))


def test_message_passing_ends_at_the_optimum_of_the_bound():
    model = vmp.normal_model(X, MEAN_PRIOR, PRECISION_PRIOR)

    def factors_at(point: np.ndarray) -> vmp.Factors:
        mean, scale, shape, rate = tensor(point).unsqueeze(-1)
        return DiagGaussian(mean, scale.exp()), Gamma(shape.exp(), rate.exp())

    def negative(point: np.ndarray) -> float:
        return -vmp.elbo(factors_at(point), model).item()

    found = optimize.minimize(negative, np.zeros(4), options={"gtol": 1e-7})
    best, (q_mean, q_precision) = factors_at(found.x), swept(60)[-1]
    # BFGS with numerical gradients locates an optimum to about the square root of rounding.
    assert close(q_mean.mean, best[0].mean, 1e-5)
    assert close(q_mean.scale, best[0].scale, 1e-5)
    assert close(q_precision.shape, best[1].shape, 1e-5)
    assert close(q_precision.rate, best[1].rate, 1e-5)
    assert vmp.elbo((q_mean, q_precision), model) >= -found.fun - 1e-12


@pytest.mark.parametrize("start_count", [0.1, 30.0])
def test_one_step_with_a_normal_gamma_prior_is_the_posterior(start_count):
    """log p(x, θ) − log q(θ) is one number, log p(x), wherever one looks; scipy's densities."""
    x = torch.randn(7, 2, generator=seeded(0), dtype=torch.float64) + 1
    prior = NormalGamma(tensor([0.5, -1]), tensor([2.0, 0.3]), tensor([1.5, 3]), tensor([0.7, 2]))
    model = vmp.normal_gamma_model(x, prior)
    start = NormalGamma(
        tensor([3.0, 4]), tensor([start_count] * 2), tensor([1.0, 2]), tensor([5.0, 1])
    )
    q = step(start, vmp.loss_gradient((start,), 0, model), rate=1.0)
    evidence = []
    for mean, tau in ((0.0, 1.0), (1.5, 0.2), (-2.0, 4.0)):
        joint = stats.norm.logpdf(x.numpy(), mean, tau**-0.5).sum()
        for k in range(2):
            m, c, a, b = (float(v[k]) for v in (prior.mean, prior.count, prior.shape, prior.rate))
            joint += stats.norm.logpdf(mean, m, (c * tau) ** -0.5)
            joint += stats.gamma.logpdf(tau, a, scale=1 / b)
        evidence.append(joint - q.log_prob(tensor([[mean, tau]] * 2)).item())
    assert close(evidence, [evidence[0]] * 3)
    assert close(vmp.elbo((q,), model), evidence[0])
    assert close(q.count, prior.count + 7)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X[:0], "x must be"),
        (X.ravel(), "x must be"),
        (X.expand(-1, 2), "x must be"),
        (X.float(), "x torch.float32"),
        (X / 0, "x has values that are not finite"),
    ],
)
def test_message_passing_refuses_rows_that_do_not_fit_the_prior(x, message):
    with pytest.raises(DataError, match=message):
        vmp.normal_model(x, MEAN_PRIOR, PRECISION_PRIOR)
    with pytest.raises(DataError, match=message):
        vmp.normal_gamma_model(x, NormalGamma(*[tensor([1.0])] * 4))


@pytest.mark.parametrize("scale", [math.inf, 0.0, -1.0, math.nan])
def test_message_passing_refuses_an_improper_prior(scale):
    with pytest.raises(DataError, match="mean_prior: scale must be positive and finite"):
        vmp.normal_model(X, DiagGaussian(tensor([0.0]), tensor([scale])), PRECISION_PRIOR)


# --- topics ---------------------------------------------------------------------------------------


def corpus(documents: int, length: int = 50) -> tuple[Tensor, Tensor]:
    """Counts (documents, 12) and the three topics (3, 12) they were drawn from."""
    rng = np.random.default_rng(0)
    topics = np.full((3, 12), 0.01)
    for k in range(3):
        topics[k, 4 * k : 4 * k + 4] = [0.4, 0.3, 0.2, 0.1]
    topics /= topics.sum(1, keepdims=True)
    shares = rng.dirichlet([0.3] * 3, size=documents)
    counts = np.stack([rng.multinomial(length, share @ topics) for share in shares])
    return tensor(counts), tensor(topics)


def topic_model(**settings: float) -> TopicModel:
    priors = Dirichlet(filled(0.2, 3, 12)), Dirichlet(filled(0.3, 3))
    return TopicModel(*priors, **settings)


def near(truth: Tensor) -> Dirichlet:
    """Topics that know the truth: from them, local steps settle within a few hundred sweeps."""
    return Dirichlet(0.2 + 200 * truth)


CONVERGED = {"tolerance": 1e-12, "sweeps": 2000}


def scikit_learn_topics(topics: Tensor, **settings: object):
    """scikit-learn's model at these topics; `partial_fit` continues from them."""
    reference = sklearn.decomposition.LatentDirichletAllocation(
        n_components=3,
        doc_topic_prior=0.3,
        topic_word_prior=0.2,
        mean_change_tol=1e-12,
        max_doc_update_iter=5000,
        random_state=0,
        **settings,
    )
    reference._init_latent_vars(12, dtype=np.float64)
    reference.components_ = topics.numpy().copy()
    logs = special.digamma(reference.components_)
    logs -= special.digamma(reference.components_.sum(1, keepdims=True))
    reference.exp_dirichlet_component_ = np.exp(logs)
    return reference


def test_topics_on_the_full_batch_at_rate_one_are_coordinate_ascent():
    """A loop over every single word, with scipy's digamma, run until it stands still."""
    counts, truth = corpus(6, length=15)
    model = topic_model(**CONVERGED)
    topics = near(truth)
    reference = topics.concentration.numpy()
    for _ in range(2):
        log_topics = special.digamma(reference) - special.digamma(reference.sum(1, keepdims=True))
        reference = np.full((3, 12), 0.2)
        for document in counts.numpy().astype(int):
            tokens = np.repeat(np.arange(12), document)
            shares = np.ones(3)
            for _ in range(500):
                logs = special.digamma(shares) + log_topics[:, tokens].T
                assigned = special.softmax(logs, axis=1)
                shares = 0.3 + assigned.sum(0)
            for token, row in zip(tokens, assigned, strict=True):
                reference[:, token] += row
        topics = model.update(topics, counts)
        assert close(topics.concentration, reference)


def test_documents_are_scikit_learns_transform():
    counts, truth = corpus(30)
    topics = near(truth)
    documents, words = topic_model(**CONVERGED).local_factors(topics, counts)
    expected = scikit_learn_topics(topics.concentration).transform(counts.numpy())
    # Both start from equal shares and stop at one optimum; scikit-learn's digamma is a fast one.
    assert close(documents.mean, expected, 1e-8)
    assert words.probs.shape == (30, 12, 3)


def test_the_bound_of_topics_is_scikit_learns_score():
    counts, truth = corpus(30)
    topics = near(truth)
    expected = scikit_learn_topics(topics.concentration).score(counts.numpy())
    assert close(topic_model(**CONVERGED).elbo(topics, counts), expected, 1e-8)


def test_topics_on_minibatches_are_scikit_learns():
    """Two epochs of its online learning, whose rate (offset + t)^−κ has t = 1, 2, …"""
    counts, truth = corpus(60)
    model = topic_model(**CONVERGED)
    topics = near(truth)
    reference = scikit_learn_topics(
        topics.concentration, learning_decay=0.8, learning_offset=4.0, total_samples=60
    )
    for t, batch in enumerate(counts.split(12) * 2):
        topics = model.update(topics, batch, robbins_monro(t + 4, 0.8), num_documents=60)
        reference.partial_fit(batch.numpy())
        # It starts each document at random, but ends at the same optimum.
        assert close(topics.concentration, reference.components_, 1e-8)


def test_minibatch_messages_average_to_the_full_message():
    """Over the parts of a split, at one and the same state: for topics and for a mixture."""
    counts, truth = corpus(24)
    model = topic_model(tolerance=0.0, sweeps=20)
    topics = near(truth)
    parts = [model.update(topics, part, 0.3, num_documents=24) for part in counts.split(6)]
    average = torch.stack([natural_parameters(part)[0] for part in parts]).mean(0)
    assert close(average, natural_parameters(model.update(topics, counts, 0.3))[0])

    x, mixture = clusters(24), mixture_model(2, 2)
    state = mixture.init(x, seeded(0))
    parts = [mixture.update(state, part, 0.3, num_data=24) for part in x.split(6)]
    full = mixture.update(state, x, 0.3)
    for which in range(2):
        for index, expected in enumerate(natural_parameters(full[which])):
            naturals = [natural_parameters(part[which])[index] for part in parts]
            assert close(torch.stack(naturals).mean(0), expected)


def test_coordinate_ascent_never_lowers_the_bound_of_topics():
    counts, truth = corpus(12)
    model, topics = topic_model(**CONVERGED), near(truth)
    bounds = [model.elbo(topics, counts).item()]
    for _ in range(4):
        topics = model.update(topics, counts)
        bounds.append(model.elbo(topics, counts).item())
    assert all(after > before for before, after in itertools.pairwise(bounds))


def test_stochastic_topics_reach_coordinate_ascents_bound_and_find_the_topics():
    counts, truth = corpus(60)
    words = counts.sum().item()
    model = topic_model(sweeps=40)
    start = batch_topics = topics = model.init(seeded(4))
    for _ in range(12):
        batch_topics = model.update(batch_topics, counts)
    order = seeded(5)
    for epoch in range(6):
        for index, batch in enumerate(counts[torch.randperm(60, generator=order)].split(10)):
            rate = robbins_monro(6 * epoch + index, 0.7)
            topics = model.update(topics, batch, rate, num_documents=60)
    before, batch, stochastic = (
        model.elbo(q, counts).item() / words for q in (start, batch_topics, topics)
    )
    # The last rate, 36^−0.7 = 0.08, leaves half a percent of the gain to its noise.
    assert batch > before + 0.9
    assert stochastic > batch - 0.005
    for found in (batch_topics.mean, topics.mean):
        distance = min(
            float((found[list(order)] - truth).abs().max())
            for order in itertools.permutations(range(3))
        )
        # 1000 words a topic: 5 standard errors of the largest probability, 5 √(.24/1000).
        assert distance < 0.077


def test_a_document_without_words_keeps_its_prior_and_tells_the_topics_nothing():
    counts, truth = corpus(4)
    padded = torch.cat([counts, filled(0.0, 1, 12)])
    model = topic_model(**CONVERGED)
    topics = near(truth)
    documents, _ = model.local_factors(topics, padded)
    assert close(documents.concentration[-1], [0.3] * 3)
    alone, together = (model.update(topics, c).concentration for c in (counts, padded))
    assert close(together, alone)
    assert close(model.elbo(topics, padded), model.elbo(topics, counts))


def test_a_word_that_is_never_seen_keeps_its_prior():
    counts, _ = corpus(5)
    counts[:, 7] = 0
    topics = topic_model().update(topic_model().init(seeded(7)), counts)
    assert close(topics.concentration[:, 7], [0.2] * 3)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (-torch.eye(2, 12).double(), "counts must be zero or more"),
        (filled(math.nan, 2, 12), "counts has values that are not finite"),
        (filled(1.0, 2, 11), "counts must be"),
        (filled(1.0, 0, 12), "counts must be"),
        (filled(1.0, 12), "counts must be"),
        (torch.ones(2, 12, dtype=torch.int64), "counts torch.int64"),
    ],
)
def test_topics_refuse_counts_that_are_none(counts, message):
    with pytest.raises(DataError, match=message):
        topic_model().update(topic_model().init(seeded(0)), counts)


@pytest.mark.parametrize("decay", [0.5, 1.01, 0.0, -1.0, math.nan])
def test_a_decay_that_does_not_converge_is_refused(decay):
    with pytest.raises(DataError, match="decay must be"):
        robbins_monro(0, decay)


def test_the_rates_sum_to_infinity_and_their_squares_do_not():
    """ζ(2κ) bounds the squares; the rates' own sum passes any bound like t^{1−κ}/(1−κ)."""
    rates = np.array([robbins_monro(t, 0.6) for t in range(20000)])
    assert rates[0] == 1.0
    assert (rates**2).sum() < special.zeta(1.2)
    assert rates.sum() > (20000**0.4 - 1) / 0.4
    with pytest.raises(DataError, match="t must be 0 or a positive"):
        robbins_monro(-1, 0.6)


def test_priors_and_sizes_that_do_not_fit_are_refused_by_name():
    three, model = Dirichlet(tensor([1.0] * 3)), mixture_model(2, 1)
    with pytest.raises(DataError, match="document_prior"):
        TopicModel(Dirichlet(filled(1.0, 2, 5)), three)
    with pytest.raises(DataError, match="concentration must be positive"):
        TopicModel(Dirichlet(filled(0.0, 3, 5)), three)
    with pytest.raises(DataError, match="weight_prior"):
        GaussianMixtureModel(three, model.component_prior)
    with pytest.raises(DataError, match="num_documents is 2"):
        topic_model().update(topic_model().init(seeded(0)), corpus(3)[0], 0.5, num_documents=2)
    with pytest.raises(DataError, match="num_data is 2"):
        model.update(model.init(X, seeded(0)), X, 0.5, num_data=2)
    with pytest.raises(DataError, match="a row for each of the 2 components"):
        model.init(X[:1])
    with pytest.raises(DataError, match="the prior must be over"):
        vmp.normal_model(X, MEAN_PRIOR, Gamma(tensor([[1.0]]), tensor([[1.0]])))
    for bad in ({"sweeps": 0}, {"tolerance": -1.0}, {"tolerance": math.nan}):
        with pytest.raises(DataError, match=f"{next(iter(bad))} must be"):
            topic_model(**bad)


# --- the Bayesian mixture of Gaussians ------------------------------------------------------------


def clusters(count: int, size: int = 2) -> Tensor:
    """Three clusters of different spread, not round, (count, size)."""
    rng = np.random.default_rng(1)
    centres = np.array([[-4.0, 0.0], [0.0, 3.0], [4.0, -1.0]])[:, :size]
    labels = rng.choice(3, size=count, p=[0.5, 0.3, 0.2])
    shape = np.eye(size) + 0.5 * np.tri(size, k=-1)
    noise = rng.standard_normal((count, size)) @ shape.T
    return tensor(centres[labels] + noise * np.array([0.5, 1.0, 0.8])[labels, None])


def mixture_model(components: int, size: int) -> GaussianMixtureModel:
    like = filled(1.0, components, size)
    prior = NormalGamma(0.3 * like, 0.5 * like, 1.5 * like, 0.8 * like)
    return GaussianMixtureModel(Dirichlet(filled(0.7, components)), prior)


def test_a_bayesian_mixture_is_that_of_scikit_learn():
    """Step for step, in one dimension, where its Wishart is our Gamma(ν/2, νΣ/2)."""
    x, model = clusters(60)[:, :1], mixture_model(3, 1)
    weights, components = state = model.init(x, seeded(0))
    reference = sklearn.mixture.BayesianGaussianMixture(
        n_components=3,
        covariance_type="full",
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=0.7,
        mean_prior=[0.3],
        mean_precision_prior=0.5,
        degrees_of_freedom_prior=3.0,
        covariance_prior=[[1.6]],
        reg_covar=0.0,
        max_iter=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        reference.fit(x.numpy())  # sets the priors; the fit itself is thrown away
    reference.weight_concentration_ = weights.concentration.numpy()
    reference.mean_precision_ = components.count[:, 0].numpy()
    reference.means_ = components.mean.numpy()
    reference.degrees_of_freedom_ = 2 * components.shape[:, 0].numpy()
    reference.precisions_cholesky_ = (components.shape / components.rate).sqrt()[..., None].numpy()
    for _ in range(15):
        reference._m_step(x.numpy(), reference._e_step(x.numpy())[1])
        weights, components = state = model.update(state, x)
        assert close(weights.concentration, reference.weight_concentration_)
        assert close(components.mean, reference.means_)
        assert close(components.count[:, 0], reference.mean_precision_)
        assert close(2 * components.shape[:, 0], reference.degrees_of_freedom_)
        assert close((components.rate / components.shape)[..., None], reference.covariances_)
    assert close(model.with_labels(state, x)[0].probs, reference.predict_proba(x.numpy()))


def test_the_bound_of_a_mixture_is_its_average_over_draws():
    """torch.distributions' densities at draws from q; 5 standard errors of 4000 draws."""
    x, model = clusters(8), mixture_model(2, 2)
    state = model.update(model.init(x, seeded(0)), x)
    labels, weights, components = model.with_labels(state, x)
    draws, generator = 4000, seeded(1)
    z, pi, both = (q.sample(draws, generator) for q in (labels, weights, components))
    mean, tau = both.unbind(-1)
    law = torch.distributions
    prior = model.component_prior
    values = law.Dirichlet(model.weight_prior.concentration).log_prob(pi)
    values += law.Categorical(pi.unsqueeze(1)).log_prob(z).sum(-1)
    values += law.Gamma(prior.shape, prior.rate).log_prob(tau).sum((-2, -1))
    values += law.Normal(prior.mean, (prior.count * tau).rsqrt()).log_prob(mean).sum((-2, -1))
    rows = torch.arange(draws).unsqueeze(-1)
    values += law.Normal(mean[rows, z], tau[rows, z].rsqrt()).log_prob(x).sum((-2, -1))
    values -= labels.log_prob(z) + weights.log_prob(pi) + components.log_prob(both)
    error = 5 * values.std().item() / math.sqrt(draws)
    assert abs(model.elbo(state, x).item() - values.mean().item()) < error
    assert error < 0.2


def test_coordinate_ascent_never_lowers_the_bound_of_a_mixture_and_stays_below_the_evidence():
    """The evidence by brute force over all 2⁵ labellings, each with its closed form."""
    x, model = clusters(5), mixture_model(2, 2)
    state = model.init(x, seeded(2))
    bounds = [model.elbo(state, x).item()]
    for _ in range(20):
        state = model.update(state, x)
        bounds.append(model.elbo(state, x).item())
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(bounds))

    prior = NormalGamma(*(value[0] for value in vars(model.component_prior).values()))

    def marginal(rows: Tensor) -> float:
        if len(rows) == 0:
            return 0.0
        joint = vmp.normal_gamma_model(rows, prior)
        return vmp.elbo(vmp.sweep((prior,), joint), joint).item()  # one factor: exact

    terms = []
    for labelling in itertools.product((0, 1), repeat=5):
        z = torch.tensor(labelling)
        sizes = np.bincount(z.numpy(), minlength=2)
        # Dirichlet–multinomial probability of these very labels.
        log_prior = special.gammaln(1.4) - special.gammaln(1.4 + 5)
        log_prior += (special.gammaln(0.7 + sizes) - special.gammaln(0.7)).sum()
        terms.append(log_prior + marginal(x[z == 0]) + marginal(x[z == 1]))
    assert bounds[-1] <= special.logsumexp(terms)
    assert bounds[-1] >= special.logsumexp(terms) - 3.0


def test_a_stochastic_mixture_reaches_coordinate_ascents_bound():
    x, model = clusters(200), mixture_model(3, 2)
    state = best = model.init(x, seeded(4))
    for _ in range(30):
        best = model.update(best, x)
    order = seeded(5)
    for epoch in range(8):
        for index, batch in enumerate(x[torch.randperm(200, generator=order)].split(40)):
            rate = robbins_monro(5 * epoch + index, 0.7)
            state = model.update(state, batch, rate, num_data=200)
    bound, goal = model.elbo(state, x).item(), model.elbo(best, x).item()
    # The last rate, 40^−0.7 = 0.08, leaves noise: under 0.005 nats a row.
    assert bound >= goal - 1.0


# --- expectation maximisation ---------------------------------------------------------------------

KINDS = {"full": FullGaussian, "diag": DiagGaussian}


def starting_mixture(x: Tensor, kind: str) -> GaussianMixture:
    weights, rows = tensor([0.2, 0.3, 0.5]), x[[0, 7, 11]]
    precision = torch.diag(tensor([0.5, 0.8]))
    components = (
        FullGaussian(mean, precision)
        if kind == "full"
        else DiagGaussian(mean, precision.diagonal().rsqrt())
        for mean in rows
    )
    return GaussianMixture((weights[:-1] / weights[-1]).log(), tuple(components))


def scikit_learn_fit(x: Tensor, kind: str, max_iter: int, tol: float):
    precision = np.diag([0.5, 0.8]) if kind == "full" else np.array([0.5, 0.8])
    reference = sklearn.mixture.GaussianMixture(
        3,
        covariance_type=kind,
        reg_covar=0.0,
        weights_init=[0.2, 0.3, 0.5],
        means_init=x[[0, 7, 11]].numpy(),
        precisions_init=np.stack([precision] * 3),
        max_iter=max_iter,
        tol=tol,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return reference.fit(x.numpy())


def agree(mixture: GaussianMixture, reference, tolerance: float) -> bool:
    components = mixture.components
    spreads = [q.covariance if isinstance(q, FullGaussian) else q.variance for q in components]
    return (
        close(mixture.weights, reference.weights_, tolerance)
        and close(torch.stack([q.mean for q in components]), reference.means_, tolerance)
        and close(torch.stack(spreads), reference.covariances_, tolerance)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_em_step_is_that_of_scikit_learn(kind):
    x = clusters(80)
    mixture = em.update(starting_mixture(x, kind), x)
    assert isinstance(mixture.components[0], KINDS[kind])
    # scikit-learn adds 10 machine epsilons to every cluster's size.
    assert agree(mixture, scikit_learn_fit(x, kind, max_iter=1, tol=1e-3), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_em_never_lowers_the_likelihood_and_ends_where_scikit_learn_does(kind):
    x = clusters(80)
    mixture, likelihoods = starting_mixture(x, kind), []
    for _ in range(150):
        likelihoods.append(mixture.log_prob(x).sum().item())
        mixture = em.update(mixture, x)
    assert likelihoods[-1] > likelihoods[0] + 10
    assert all(after >= before - 1e-10 for before, after in itertools.pairwise(likelihoods))
    # By then a step changes nothing that float64 can tell.
    assert agree(mixture, scikit_learn_fit(x, kind, max_iter=150, tol=0.0), 1e-10)


def test_the_e_step_is_bayes_rule():
    x = clusters(20)
    mixture = starting_mixture(x, "full")
    densities = np.stack(
        [
            weight * stats.multivariate_normal.pdf(x.numpy(), q.mean.numpy(), q.covariance.numpy())
            for weight, q in zip(mixture.weights.tolist(), mixture.components, strict=True)
        ],
        axis=1,
    )
    expected = densities / densities.sum(1, keepdims=True)
    assert close(em.expectation_step(mixture, x).probs, expected)


def test_em_with_one_component_is_maximum_likelihood_in_one_step():
    x = clusters(20)
    start = FullGaussian(tensor([9.0, 9]), torch.eye(2, dtype=torch.float64))
    (component,) = em.update(GaussianMixture(tensor([]), (start,)), x).components
    assert close(component.mean, x.mean(0))
    assert close(component.covariance, np.cov(x.numpy().T, bias=True))


def test_the_m_step_is_the_rule_for_a_gaussian_of_fixed_precision_seen_from_its_mean():
    """η ← η − (NF)⁻¹∇_ηℓ, with both derivatives by autodiff, is η ← T̄."""
    x = clusters(30, size=1)
    mixture = GaussianMixture(
        tensor([0.4]),
        (DiagGaussian(tensor([-1.0]), tensor([1.5])), DiagGaussian(tensor([1.0]), tensor([0.7]))),
    )
    labels = em.expectation_step(mixture, x)

    def mixture_at(eta: Tensor) -> GaussianMixture:
        return with_expectation(mixture, tuple(eta.split(1)))

    def loss(eta: Tensor) -> Tensor:
        at = mixture_at(eta)
        joint = torch.stack([q.log_prob(x) for q in at.components], -1) + at.log_weights
        return -(labels.probs * joint).sum()

    def cross_entropy(eta: Tensor) -> Tensor:
        """−E log p(x, z | η) over the model at hand: its Hessian there is the Fisher matrix."""
        at, value = mixture_at(eta), 0.0
        for k, (q, here) in enumerate(zip(at.components, mixture.components, strict=True)):
            value -= mixture.weights[k] * (at.log_weights[k] - here.kl(q))
        return value

    eta = torch.cat(expectation_parameters(mixture))
    fisher = torch.autograd.functional.hessian(cross_entropy, eta)
    learner = Learner(AtMean(), None, Step(rate=1.0))
    state = learner.init(FixedGaussian(eta, len(x) * fisher))
    moved = learner.update(state, Loss.of(loss)).q.mean
    expected = torch.cat(expectation_parameters(em.maximisation_step(mixture, x, labels)))
    assert not close(eta, expected, 0.05)
    assert close(moved, expected)


def test_a_component_that_collapses_onto_one_point_is_refused_by_number():
    x = tensor([[0.0], [10.0], [11.0], [12.0]])
    narrow, wide = ((tensor([0.0]), tensor([1e-3])), (tensor([11.0]), tensor([1.0])))
    mixture = GaussianMixture(tensor([0.0]), (DiagGaussian(*narrow), DiagGaussian(*wide)))
    with pytest.raises(DataError, match=r"component 0: .*variance.* positive"):
        em.update(mixture, x)


def test_em_refuses_rows_that_do_not_fit():
    x = clusters(20)
    mixture = starting_mixture(x, "diag")
    for bad, message in ((x[:, :1], "x must be"), (x[:0], "x must be"), (x / 0, "not finite")):
        with pytest.raises(DataError, match=message):
            em.update(mixture, bad)
