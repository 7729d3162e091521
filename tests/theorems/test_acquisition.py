"""Acquisition scores on pools so small that everything can be written down.

Float64. Sums of a few dozen terms near one differ by some 1e-15 between two orders of summation,
so 1e-12 leaves room and would show any wrong term.
"""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import credo
from credo.active import acquisitions, determinant, scores
from credo.active.batchbald import batch_bald
from credo.active.determinant import greedy_determinant
from credo.families import DiagGaussian, FullGaussian, LowRankGaussian
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.posterior.outputs import Linearisation
from credo.posterior.predictive import Predictive

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def entropy_of(probabilities):
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


# --- scores of single examples --------------------------------------------------------------------


@pytest.fixture(scope="module")
def three_points():
    """Five samples, three examples, three classes: logits, probabilities as lists, predictive."""
    logits = 2 * torch.randn(5, 3, 3, generator=seeded(1), dtype=torch.float64)
    return logits.softmax(2).tolist(), Predictive(logits, Categorical())


def mean_probs(probs, b):
    return [math.fsum(sample[b][c] for sample in probs) / len(probs) for c in range(3)]


def test_entropy_and_bald_are_their_definitions(three_points):
    probs, pred = three_points
    entropies = [entropy_of(mean_probs(probs, b)) for b in range(3)]
    expected = [math.fsum(entropy_of(s[b]) for s in probs) / len(probs) for b in range(3)]
    assert scores.entropy(pred).tolist() == pytest.approx(entropies, rel=1e-12)
    difference = [h - e for h, e in zip(entropies, expected, strict=True)]
    assert scores.bald(pred).tolist() == pytest.approx(difference, rel=1e-12)


def test_bald_is_the_divergence_of_the_joint_from_independence(three_points):
    """I(y; s) = Σ_s Σ_y p(s) p_s(y) log p_s(y)/p̄(y): the definition that no entropy enters."""
    probs, pred = three_points
    found = scores.bald(pred)
    for b in range(3):
        mean = mean_probs(probs, b)
        terms = [s[b][c] * math.log(s[b][c] / mean[c]) for s in probs for c in range(3)]
        assert float(found[b]) == pytest.approx(math.fsum(terms) / len(probs), rel=1e-12)


def test_variance_and_relevance_are_their_definitions(three_points):
    probs, pred = three_points
    for b in range(3):
        mean = mean_probs(probs, b)
        spread = math.fsum((s[b][c] - mean[c]) ** 2 for s in probs for c in range(3)) / len(probs)
        assert float(scores.variance(pred)[b]) == pytest.approx(spread, rel=1e-12)
        p = torch.tensor(mean, dtype=torch.float64)
        curvature = torch.diag(p) - p.outer(p)
        assert float(scores.relevance(pred)[b]) == pytest.approx(
            float(curvature.trace()), rel=1e-12
        )


def test_variance_of_a_regression_leaves_the_noise_out():
    means = torch.tensor([[0.0, 1.0, 5.0], [2.0, 1.0, 8.0]], dtype=torch.float64).unsqueeze(-1)
    found = scores.variance(Predictive(means, Gaussian(scale=3.0)))
    assert found.tolist() == pytest.approx([1.0, 0.0, 2.25], rel=1e-12)


# --- leverage, determinant: against explicit Jacobians --------------------------------------------


def small_net(outputs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


def explicit_jacobians(net, x):
    """(B, K, P) by torch.func, parameters in the network's order."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def outputs(values):
        return functional_call(net, values, (x,))

    found = jacrev(outputs)(parameters)
    return torch.cat([found[name].flatten(2) for name in parameters], dim=2)


FAMILIES = ("diag", "full", "low_rank")
LIKELIHOODS = {"classes": (Categorical(), 3), "yes or no": (Bernoulli(), 1),
               "numbers": (Gaussian(scale=0.4), 2)}  # fmt: skip


def gaussian_posterior(family, likelihood, outputs):
    """A posterior at a small network, with its covariance (P, P) written out."""
    net = small_net(outputs)
    model = credo.Model(net, likelihood, random="all")
    mean = model.weights(model.random).clone()
    size = len(mean)
    noise = torch.randn(size, size, generator=seeded(2), dtype=torch.float64)
    if family == "diag":
        scale = 0.1 + noise[0].abs()
        q, covariance = DiagGaussian(mean, scale), torch.diag(scale.square())
    elif family == "full":
        precision = noise @ noise.T / size + torch.eye(size, dtype=torch.float64)
        q, covariance = FullGaussian(mean, precision), torch.linalg.inv(precision)
    else:
        factor, diagonal = noise[:, :2], 0.5 + noise[2].abs()
        q = LowRankGaussian(mean, factor, diagonal)
        covariance = torch.linalg.inv(torch.diag(diagonal) + factor @ factor.T)
    return credo.Posterior.at_network(model, q), covariance


def pool_of(count):
    return torch.randn(count, 2, generator=seeded(5), dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_leverage_is_the_trace_with_explicit_jacobians(family, kind):
    likelihood, outputs = LIKELIHOODS[kind]
    posterior, covariance = gaussian_posterior(family, likelihood, outputs)
    x = pool_of(3)
    rows = explicit_jacobians(posterior.model.net, x)
    curvature = likelihood.hessian(posterior.model.net(x).detach())
    expected = torch.stack(
        [(c @ j @ covariance @ j.T).trace() for c, j in zip(curvature, rows, strict=True)]
    )
    with posterior.in_network() as flat:
        outputs_at_x = Linearisation(posterior.model, flat, posterior.q).at(x)
    found = scores.leverage(outputs_at_x, likelihood)
    # Inverses of matrices with condition numbers below 100 cost two of the sixteen digits.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    # The acquisition leaves out directions that hold less than a thousandth of Λ.
    streamed = acquisitions.TopScores("leverage").scores(posterior, x, seeded())
    torch.testing.assert_close(streamed, expected, rtol=1e-2, atol=0)


def explicit_kernel(posterior, covariance, x):
    """K_ij = Λ_i^½ J_i Σ J_jᵀ Λ_j^½ with the symmetric roots, as one matrix (B·K, B·K)."""
    net, likelihood = posterior.model.net, posterior.model.likelihood
    values, vectors = torch.linalg.eigh(likelihood.hessian(net(x).detach()))
    roots = vectors @ torch.diag_embed(values.clamp_min(0).sqrt()) @ vectors.mT
    features = (roots @ explicit_jacobians(net, x)).flatten(0, 1)
    return features @ covariance @ features.T


def information(kernel, outputs, batch):
    """½ log det(I + K_AA)."""
    rows = [b * outputs + k for b in batch for k in range(outputs)]
    block = kernel[rows][:, rows]
    return 0.5 * float(torch.logdet(torch.eye(len(rows), dtype=torch.float64) + block))


@pytest.mark.parametrize("kept", [True, False], ids=["rows kept", "rows made again"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_greedy_determinant_adds_up_to_the_information(family, kind, kept, monkeypatch):
    """Each gain is the greedy one, and all together are ½ log det(I + K) of the batch."""
    if not kept:
        monkeypatch.setattr(determinant, "KEPT_BYTES", 0)
    likelihood, outputs = LIKELIHOODS[kind]
    posterior, covariance = gaussian_posterior(family, likelihood, outputs)
    x = pool_of(6)
    kernel = explicit_kernel(posterior, covariance, x)
    chosen, gains = determinant.choose(posterior, x, 4)
    for step in range(4):
        before = chosen[:step]
        left = [b for b in range(6) if b not in before]
        best = max(left, key=lambda b: information(kernel, outputs, [*before, b]))
        assert chosen[step] == best
        total = information(kernel, outputs, chosen[: step + 1])
        assert math.fsum(gains[: step + 1]) == pytest.approx(total, rel=1e-9)


def test_the_determinant_is_the_entropy_that_labels_take_from_the_weights():
    """Linear regression, where the posterior after the batch is known: H[q] − H[q | batch]."""
    x = pool_of(5)
    net = nn.Linear(2, 1).double()
    model = credo.Model(net, Gaussian(scale=0.3), random="all")
    precision = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, 0.0], [0.1, 0.0, 3.0]]).double()
    posterior = credo.Posterior.at_network(model, FullGaussian(model.weights(), precision))
    chosen, gains = determinant.choose(posterior, x, 3)
    features = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], dim=1)[chosen]
    after = precision + features.T @ features / 0.3**2
    lost = 0.5 * float(torch.logdet(after) - torch.logdet(precision))
    assert math.fsum(gains) == pytest.approx(lost, rel=1e-10)


def test_greedy_is_the_best_batch_where_examples_do_not_share_information():
    values = torch.tensor([0.3, 5.0, 0.1, 2.0, 7.0, 1.0], dtype=torch.float64)
    kernel = torch.diag(values)
    chosen, _ = greedy_determinant(values[:, None, None], lambda i: kernel[:, i, None, None], 3)
    best = max(itertools.combinations(range(6), 3), key=lambda a: information(kernel, 1, a))
    assert sorted(chosen) == sorted(best)


# --- BatchBALD ------------------------------------------------------------------------------------


def joint_information(probs, batch):
    """I(y_A; s) by listing all outcomes: H[joint] − (1/S) Σ_s Σ_i H[p_s(y_i)]."""
    samples, _, classes = probs.shape
    joint = []
    for outcome in itertools.product(range(classes), repeat=len(batch)):
        each = [
            math.prod(float(probs[s, b, y]) for b, y in zip(batch, outcome, strict=True))
            for s in range(samples)
        ]
        joint.append(math.fsum(each) / samples)
    inside = math.fsum(entropy_of(probs[s, b].tolist()) for s in range(samples) for b in batch)
    return entropy_of(joint) - inside / samples


def random_probs(samples, examples, classes, seed=4):
    noise = torch.randn(samples, examples, classes, generator=seeded(seed), dtype=torch.float64)
    return (2 * noise).softmax(2)


def test_batch_bald_is_the_enumeration_of_all_outcomes():
    probs = random_probs(7, 3, 3)
    chosen, gains = batch_bald(probs, 3)
    assert sorted(chosen) == [0, 1, 2]
    for size in (1, 2, 3):
        expected = joint_information(probs, chosen[:size])
        assert math.fsum(gains[:size]) == pytest.approx(expected, rel=1e-11)


def test_every_step_of_batch_bald_is_the_best_extension():
    probs = random_probs(6, 5, 3, seed=8)
    chosen, _ = batch_bald(probs, 3)
    for step in range(3):
        left = [b for b in range(5) if b not in chosen[:step]]
        best = max(left, key=lambda b: joint_information(probs, [*chosen[:step], b]))
        assert chosen[step] == best


def test_batch_bald_of_one_is_bald():
    probs = random_probs(9, 6, 4)
    pred = Predictive(probs.log(), Categorical())
    chosen, gains = batch_bald(probs, 1)
    assert chosen == [int(scores.bald(pred).argmax())]
    assert gains[0] == pytest.approx(float(scores.bald(pred).max()), rel=1e-12)


def test_batch_bald_is_the_best_batch_where_examples_do_not_share_information():
    """Sample (a, b, c, d) of a product: example i depends on coordinate i alone."""
    beliefs = [(0.9, 0.2), (0.6, 0.5), (0.99, 0.05), (0.7, 0.2)]
    probs = torch.tensor(
        [[[p, 1 - p] for p in sample] for sample in itertools.product(*beliefs)]
    ).double()
    chosen, _ = batch_bald(probs, 2)
    best = max(itertools.combinations(range(4), 2), key=lambda a: joint_information(probs, a))
    assert sorted(chosen) == sorted(best) == [0, 2]


def test_a_copy_adds_less_than_another_question():
    """BALD alone would ask the same question twice."""
    disputed, other = [[0.95, 0.05], [0.05, 0.95]], [[0.8, 0.2], [0.3, 0.7]]
    probs = torch.tensor(
        [[disputed[s], disputed[s], other[t]] for s in range(2) for t in range(2)]
    ).double()
    single = scores.bald(Predictive(probs.log(), Categorical()))
    assert single.argsort(descending=True)[:2].sort().values.tolist() == [0, 1]
    assert sorted(batch_bald(probs, 2)[0]) in ([0, 2], [1, 2])


def test_drawn_outcomes_agree_with_all_outcomes():
    """The same batch by 27 or 81 outcomes and by drawn ones; each gain within 5 standard errors.

    What one outcome adds lies between 0 and ln 3, so one of n draws has a standard deviation of at
    most ½ ln 3 and their mean one of ½ ln 3/√n.
    """
    probs = random_probs(6, 4, 3, seed=2)
    chosen, exact = batch_bald(probs, 4, outcomes=81)
    draws = 20_000
    again, drawn = batch_bald(probs[:, chosen], 4, outcomes=draws)
    assert again == [0, 1, 2, 3]
    assert drawn == pytest.approx(exact, abs=1e-12)  # 81 ≤ 20,000: all were listed
    limited = _with_draws_only(probs[:, chosen], draws)
    for found, expected in zip(limited, exact, strict=True):
        assert abs(found - expected) < 5 * 0.5 * math.log(3) / math.sqrt(draws)


def _with_draws_only(probs, draws):
    """The gains of examples in their order, every expectation but the first by draws."""
    from credo.active import batchbald

    entropies = torch.special.entr(probs).sum(-1)
    known = batchbald._Outcomes(probs.new_zeros(len(probs), 1), probs.new_ones(1))
    gains, generator = [], seeded(11)
    for b in range(probs.shape[1]):
        gains.append(float(batchbald._gains(probs, entropies, known)[b]))
        if known.drawn_by is None:
            drawn_by = torch.randint(len(probs), (draws,), generator=generator)
            blank = probs.new_zeros(len(probs), draws)
            known = batchbald._Outcomes(blank, probs.new_full((draws,), 1 / draws), drawn_by)
        known = batchbald._drawn(known, probs, b, generator)
    return gains


def test_no_batch_says_more_than_which_sample_it_was():
    """I ≤ ln S, and a pool that tells the samples apart reaches it."""
    probs = random_probs(4, 40, 3, seed=6)
    gains = batch_bald(probs, 30, outcomes=500, generator=seeded())[1]
    # The first six are exact, 3⁵ ≤ 500, and leave less than 0.02 for all others to find.
    assert math.fsum(gains[:6]) < math.log(4)
    assert math.fsum(gains) == pytest.approx(math.log(4), abs=0.02)


def test_batch_bald_in_small_pieces_is_the_same(monkeypatch):
    from credo.active import batchbald

    probs = random_probs(5, 7, 3)
    whole = batch_bald(probs, 4)
    monkeypatch.setattr(batchbald, "MAX_NUMBERS", 1)
    pieces = batch_bald(probs, 4)
    assert pieces[0] == whole[0]
    assert pieces[1] == pytest.approx(whole[1], rel=1e-12)


# --- joint draws ----------------------------------------------------------------------------------


def test_joint_draws_of_a_linearised_network_are_one_set_of_weights_for_all_examples():
    posterior, _ = gaussian_posterior("full", Categorical(), 3)
    posterior.predicts = "linearised"
    x = pool_of(4)
    found = acquisitions.joint_outputs(posterior, x, 5, seeded(7))
    away = posterior.sample(5, seeded(7)) - posterior.mean
    rows = explicit_jacobians(posterior.model.net, x)
    expected = posterior.model.net(x).detach() + torch.einsum("bkp,sp->sbk", rows, away)
    torch.testing.assert_close(found, expected, **EXACT)
