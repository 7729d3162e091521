"""Active learning: the loop, what it refuses, what it survives; and important batches."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo import active
from credo.active import acquisitions
from credo.active.history import area
from credo.active.important import ImportantBatches, most_relevant
from credo.errors import CheckpointError, DataError, UnsupportedError
from credo.families import Delta, DiagGaussian, Empirical
from credo.likelihoods import Bernoulli, Categorical, FromLoss, Gaussian
from credo.noise import key_to_seed

CHEAP = {"start": 6, "per_round": 4, "rounds": 3, "epochs": 2, "progress": False}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def network(outputs=3, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


def model(outputs=3, likelihood=None, seed=0):
    return credo.Model(network(outputs, seed), likelihood or Categorical())


@pytest.fixture(scope="module")
def blobs():
    """Sixty points around three centres, and test points from the same."""
    centres = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0]])
    labels = torch.arange(120) % 3
    x = centres[labels] + 0.7 * torch.randn(120, 2, generator=seeded(1))
    return (x[:60], labels[:60]), (x[60:], labels[60:])


def run(blobs, acquisition="bald", method=None, **settings):
    (x, y), test = blobs
    method = method or credo.VI(lr=0.05)
    options = {**CHEAP, "test_data": test, "prediction_samples": 4} | settings
    return active.learn(
        options.pop("model", None) or model(), method, x, options.pop("oracle", y.__getitem__),
        acquisition, **options,
    )  # fmt: skip


def same(one, two):
    """Two histories agree in everything but the clock."""
    assert torch.equal(one.indices, two.indices)
    assert torch.equal(one.labels, two.labels)
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }
    assert torch.equal(one.posterior.mean, two.posterior.mean)


# --- the loop -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", acquisitions.NAMES)
def test_every_acquisition_learns_without_asking_twice(blobs, name):
    history = run(blobs, name)
    assert [r["labels"] for r in history.rounds] == [6, 10, 14, 18]
    assert len(set(history.indices.tolist())) == 18
    assert torch.equal(history.labels, blobs[0][1][history.indices])
    assert [i for r in history.rounds for i in r["asked"]] == history.indices.tolist()
    assert not history.exhausted
    assert set(history.rounds[0]["scores"]) == {"accuracy", "nll", "ece"}
    assert history.curve("nll")[0] == [6, 10, 14, 18]


def test_the_choice_is_the_one_of_the_rounds_own_posterior(blobs):
    """After one round, entropy's top four among the unlabelled are what was asked for."""
    (x, _), _ = blobs
    before = run(blobs, "entropy", credo.MAP(), rounds=0)
    after = run(blobs, "entropy", credo.MAP(), rounds=1)
    entropies = before.posterior.predict(x, samples=1).entropy
    entropies[before.indices] = -1
    assert set(after.rounds[1]["asked"]) == set(entropies.argsort(descending=True)[:4].tolist())


def test_same_seed_same_choices_and_another_seed_others(blobs):
    same(run(blobs, seed=3), run(blobs, seed=3))
    assert run(blobs, seed=3).indices.tolist() != run(blobs, seed=4).indices.tolist()


def test_the_global_random_state_is_left_alone(blobs):
    before = torch.get_rng_state()
    run(blobs, model=model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pool_that_runs_out_ends_the_run(blobs):
    history = run(blobs, "entropy", credo.MAP(), start=50, per_round=4, rounds=9)
    assert [r["labels"] for r in history.rounds] == [50, 54, 58, 60]
    assert sorted(history.indices.tolist()) == list(range(60))
    assert history.exhausted
    assert not run(blobs, "random", credo.MAP(), start=60, rounds=0).exhausted


def test_retraining_starts_from_the_same_weights_and_warm_start_does_not(blobs):
    """With zero epochs the network stays where the round found it."""
    untouched = run(blobs, "random", credo.MAP(), epochs=0).posterior.mean
    assert torch.equal(untouched, model().bind().vector)
    one_round = run(blobs, "random", credo.MAP(lr=0.1), rounds=0, epochs=1).posterior.mean
    schedule = {6: 1}
    options = {"rounds": 2, "epochs": lambda n: schedule.get(n, 0)}
    again = run(blobs, "random", credo.MAP(lr=0.1), **options).posterior.mean
    warm = run(blobs, "random", credo.MAP(lr=0.1), warm_start=True, **options).posterior.mean
    assert torch.equal(again, untouched)
    assert torch.equal(warm, one_round)


def test_a_function_makes_a_new_network_each_round(blobs):
    made = []

    def factory():
        made.append(credo.Model(nn.Linear(2, 3), Categorical()))
        return made[-1]

    history = run(blobs, "random", credo.MAP(), model=factory)
    weights = [m.net.weight.detach().clone() for m in made]
    assert len({tuple(w.flatten().tolist()) for w in weights[1:]}) == 4
    assert torch.equal(history.posterior.model.net.weight, made[-1].net.weight)
    with pytest.raises(DataError, match=r"must return a credo\.Model"):
        run(blobs, model=lambda: nn.Linear(2, 3))


def test_candidates_are_a_subset_drawn_anew(blobs):
    """A score that grows with the index picks the pool's end, unless only a few are looked at."""
    seen = []

    def by_place(posterior, x):
        seen.append(len(x))
        return torch.arange(len(x)).float()

    whole = run(blobs, by_place, credo.MAP(), start=[0], rounds=1)
    assert sorted(whole.rounds[1]["asked"]) == [56, 57, 58, 59]
    few = run(blobs, by_place, credo.MAP(), start=[0], rounds=4, candidates=8)
    assert seen == [59, 8, 8, 8, 8]
    assert len(set(few.indices.tolist())) == 17
    assert set(few.rounds[1]["asked"]) != {56, 57, 58, 59}


def test_the_oracle_may_be_given_inputs(blobs):
    (x, y), _ = blobs

    def by_inputs(asked):
        return [int(y[(x == row).all(1)][0]) for row in asked]

    history = run(blobs, "random", credo.MAP(), oracle=by_inputs, ask="inputs")
    assert torch.equal(history.labels, y[history.indices])


def test_regression_has_its_own_curve():
    x = torch.linspace(-1, 1, 40)[:, None]
    history = active.learn(
        credo.Model(nn.Linear(1, 1), Gaussian(0.1)),
        credo.Laplace(structure="full", train=credo.MAP(lr=0.1)),
        x.numpy(), lambda rows: 3 * x[rows].numpy(), "variance", start=3, per_round=2, rounds=2,
        epochs=30, test_data=(x, 3 * x), progress=False,
    )  # fmt: skip
    assert set(history.rounds[0]["scores"]) == {"rmse", "nll"}
    # Where outputs are linear in x, they are least known at the ends.
    assert {0, 39} & set(history.rounds[1]["asked"]) or {0, 39} & set(history.rounds[0]["asked"])


def test_inputs_of_several_parts(blobs):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, left, right):
            return self.layer(left + right)

    (x, y), _ = blobs
    for pool in ({"left": x, "right": x}, (x, x)):
        history = active.learn(
            credo.Model(Sum(), Categorical()), credo.VI(), pool, y.__getitem__, "bald", **CHEAP
        )
        assert len(history.indices) == 18
        assert history.rounds[0]["scores"] == {}
        with pytest.raises(DataError, match="give test_data"):
            history.curve("accuracy")


# --- folders and failures -------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True], ids=["retrain", "warm start"])
@pytest.mark.parametrize("method", [credo.VI(lr=0.05), credo.Laplace(train=credo.MAP())])
def test_an_oracle_that_fails_loses_nothing(blobs, tmp_path, warm, method):
    (_, y), _ = blobs
    whole = run(blobs, method=method, warm_start=warm)
    asked = []

    def unreliable(rows):
        asked.append(rows.tolist())
        if len(asked) in (1, 3, 5):
            raise TimeoutError("the laboratory is closed")
        return y[rows]

    options = {"oracle": unreliable, "folder": tmp_path, "method": method, "warm_start": warm}
    for attempt in range(3):
        with pytest.raises(TimeoutError) as caught:
            run(blobs, **options, model=model(seed=attempt))
        assert "asks it again" in caught.value.__notes__[0]
    # Every question that failed was asked again, and none that was answered.
    assert asked[0] == asked[1]
    assert asked[2] == asked[3]
    # The network it is given to resume has other weights: those of the first call count.
    resumed = run(blobs, **options, model=model(seed=9))
    assert asked[4] == asked[5]
    assert len(asked) == 7
    same(resumed, whole)


def test_a_kill_at_any_moment_resumes_exactly(blobs, tmp_path, monkeypatch):
    whole = run(blobs)
    from credo.active import loop

    original, calls = loop.evaluate, []

    def killed(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(loop, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        run(blobs, folder=tmp_path)
    stored = json.loads((tmp_path / "curve.json").read_text())
    assert [r["labels"] for r in stored] == [6, 10]
    same(run(blobs, folder=tmp_path), whole)


def test_a_finished_run_is_read_back_and_can_be_prolonged(blobs, tmp_path):
    asked = []

    def oracle(rows):
        asked.append(len(rows))
        return blobs[0][1][rows]

    finished = run(blobs, folder=tmp_path, oracle=oracle)
    same(run(blobs, folder=tmp_path, oracle=oracle), finished)
    assert asked == [6, 4, 4, 4]
    assert [p.name for p in tmp_path.glob("training-*")] == ["training-003"]
    longer = run(blobs, folder=tmp_path, oracle=oracle, rounds=5)
    assert asked == [6, 4, 4, 4, 4, 4]
    same(longer, run(blobs, rounds=5))
    anew = run(blobs, folder=tmp_path, oracle=oracle, resume=False)
    same(anew, finished)
    assert len(asked) == 10


def test_a_folder_of_another_run_is_refused(blobs, tmp_path):
    run(blobs, folder=tmp_path, rounds=0)
    with pytest.raises(CheckpointError, match=r"acquisition\.type was 'bald' and is now 'entropy'"):
        run(blobs, "entropy", folder=tmp_path)
    (x, y), test = blobs
    with pytest.raises(CheckpointError, match="pool was"):
        run(((x + 1, y), test), folder=tmp_path)
    with pytest.raises(CheckpointError, match="weights"):
        run(blobs, folder=tmp_path, model=credo.Model(nn.Linear(2, 3), Categorical()))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 1], "asked for 6 labels"),
        ([0, 1, 2, 0, 1, 7], "is not a class"),
        ("cat", "not an array of labels"),
        (None, "not an array of labels"),
    ],
)
def test_a_wrong_answer_does_not_get_into_the_record(blobs, tmp_path, answer, message):
    with pytest.raises(DataError, match=message):
        run(blobs, oracle=lambda rows: answer, folder=tmp_path)
    same(run(blobs, folder=tmp_path), run(blobs))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 0}, "start=0"),
        ({"start": 61}, "pool's size, 60"),
        ({"start": [1, 1]}, "each once"),
        ({"start": [60]}, "from 0 to 59"),
        ({"per_round": 0}, "per_round must be a whole number of at least 1, but it is 0"),
        ({"candidates": 0}, "candidates must be .* or None, but it is 0"),
        ({"rounds": -1}, "rounds must be 0 or .*, but it is -1"),
        ({"ask": "politely"}, "ask must be one of 'indices', 'inputs', but it is 'politely'"),
        ({"acquisition": "bold"}, "must be one of random, entropy"),
        ({"acquisition": 3}, "object with choose"),
        ({"acquisition": lambda posterior, x: x}, "one score for each of 54"),
    ],
)
def test_what_cannot_be_meant_is_refused(blobs, settings, message):
    with pytest.raises(DataError, match=message):
        run(blobs, settings.pop("acquisition", "random"), credo.MAP(), **settings)


# --- acquisitions ---------------------------------------------------------------------------------


def posterior_of(q_of, outputs=3, likelihood=None):
    made = model(outputs, likelihood)
    return credo.Posterior.at_network(made, q_of(made.bind().vector.clone()))


def bag(mean):
    return Empirical(mean + 0.5 * torch.randn(5, len(mean), generator=seeded(3)))


POINT = posterior_of(Delta)
BAG = posterior_of(bag)
NUMBERS = posterior_of(lambda m: DiagGaussian(m, 0.1 * torch.ones_like(m)), 1, Gaussian())
LOSS = posterior_of(
    lambda m: DiagGaussian(m, 0.1 * torch.ones_like(m)), 1, FromLoss(nn.functional.l1_loss)
)


@pytest.mark.parametrize(
    ("name", "posterior", "message"),
    [
        ("bald", POINT, "zero everywhere for a point"),
        ("variance", POINT, "zero everywhere for a point"),
        ("batch_bald", POINT, "zero everywhere for a point"),
        ("leverage", POINT, "Gaussian over the weights"),
        ("leverage", BAG, 'is a Empirical.*"entropy", "bald"'),
        ("determinant", BAG, "Gaussian over the weights"),
        ("entropy", NUMBERS, 'use "variance"'),
        ("relevance", NUMBERS, 'use "variance"'),
        ("bald", NUMBERS, "class probabilities"),
        ("batch_bald", NUMBERS, "class probabilities"),
        ("leverage", LOSS, "no curvature without a label"),
        ("determinant", LOSS, "no curvature without a label"),
    ],
)
def test_what_does_not_fit_a_posterior_is_refused_by_name(name, posterior, message):
    with pytest.raises(UnsupportedError, match=message):
        acquisitions.find(name).choose(posterior, torch.randn(5, 2), 2, seeded())


@pytest.mark.parametrize("name", ["random", "entropy", "relevance", "bald", "variance",
                                  "batch_bald"])  # fmt: skip
def test_a_bag_of_samples_is_enough_for_what_asks_for_predictions(name):
    x = torch.randn(9, 2, generator=seeded(1))
    chosen = acquisitions.find(name).choose(BAG, x, 4, seeded())
    assert len(set(chosen.tolist())) == 4
    if name == "bald":
        # Every member of the bag once: the mutual information of these five networks.
        expected = BAG.predict(x, samples=5).mutual_information
        assert chosen.tolist() == expected.argsort(descending=True)[:4].tolist()


def test_yes_or_no_is_two_classes():
    """Bernoulli's one logit and Categorical's two with the same probabilities ask the same."""
    x = torch.randn(12, 2, generator=seeded(1))
    one = posterior_of(bag, 1, Bernoulli())
    logits = one.predict(x, samples=5).outputs
    probs = acquisitions._class_probs(one.predict(x, samples=5))
    torch.testing.assert_close(
        probs, torch.cat([torch.zeros_like(logits), logits], dim=2).softmax(2)
    )
    assert len(acquisitions.find("batch_bald").choose(one, x, 3, seeded())) == 3
    several = posterior_of(bag, 2, Bernoulli())
    with pytest.raises(UnsupportedError, match="one label for each example"):
        acquisitions.find("batch_bald").choose(several, x, 3, seeded())
    assert len(acquisitions.find("bald").choose(several, x, 3, seeded())) == 3


def test_random_is_uniform():
    """Counts of 20 examples in 2,000 choices of 5: chi-square at a level of 1 in 1,000.

    Choices without replacement make the statistic smaller by the factor 15/19.
    """
    counts, generator = torch.zeros(20), seeded(5)
    for _ in range(2000):
        chosen = acquisitions.Random().choose(POINT, torch.zeros(20, 2), 5, generator)
        assert len(set(chosen.tolist())) == 5
        counts[chosen] += 1
    statistic = float(((counts - 500).square() / 500).sum()) * 19 / 15
    assert statistic < stats.chi2.ppf(0.999, 19)
    assert statistic > stats.chi2.ppf(0.001, 19)


def test_equal_scores_are_taken_in_random_order():
    generator = seeded(0)
    chosen = [acquisitions.largest(torch.ones(50), 1, generator).item() for _ in range(40)]
    assert len(set(chosen)) > 15
    with pytest.raises(DataError, match="not a number"):
        acquisitions.largest(torch.tensor([1.0, math.nan]), 1, generator)


def test_the_determinant_among_few_candidates_is_that_of_the_largest_leverages():
    posterior = posterior_of(lambda m: DiagGaussian(m, torch.linspace(0.1, 1, len(m))))
    x = torch.randn(30, 2, generator=seeded(2))
    first = acquisitions.find("leverage").choose(posterior, x, 1, seeded())
    x = torch.cat([x, x[first].repeat(6, 1)])  # seven times the largest leverage
    leverages = acquisitions.TopScores("leverage").scores(posterior, x, seeded())
    top = set(leverages.argsort(descending=True)[:7].tolist())
    chosen = acquisitions.Determinant(candidates=7).choose(posterior, x, 4, seeded())
    assert set(chosen.tolist()) < top
    whole = acquisitions.Determinant(candidates=None).choose(posterior, x, 4, seeded())
    assert len(set(whole.tolist()) & top) < 4  # copies are not worth four questions


def test_settings_are_checked():
    for wrong in (
        lambda: active.TopScores("bald", samples=1),
        lambda: active.TopScores("random"),
        lambda: active.BatchBALD(outcomes=0),
        lambda: active.Determinant(candidates=0),
        lambda: active.batch_bald(torch.rand(2, 3), 1),
        lambda: active.batch_bald(torch.rand(2, 3, 2), 4),
        lambda: active.greedy_determinant(torch.rand(3, 1, 1), lambda i: torch.rand(3, 1, 1), 4),
    ):
        with pytest.raises(DataError):
            wrong()


# --- curves ---------------------------------------------------------------------------------------


def test_bands_are_means_and_standard_errors(blobs, tmp_path):
    runs = [run(blobs, "random", credo.MAP(), seed=seed) for seed in range(3)]
    found = active.band(runs, "accuracy")
    values = np.array([history.curve("accuracy")[1] for history in runs])
    assert found.labels.tolist() == [6, 10, 14, 18]
    np.testing.assert_allclose(found.mean, values.mean(0))
    np.testing.assert_allclose(found.error, stats.sem(values, axis=0))
    assert np.isnan(active.band(runs[:1], "accuracy").error).all()
    assert runs[0].mean_over_labels("nll") == pytest.approx(area(*runs[0].curve("nll")))
    path = active.plot({"random": runs, "one": runs[:1]}, "accuracy", tmp_path / "curve.png")
    assert path.stat().st_size > 5000
    with pytest.raises(DataError, match="different numbers of labels"):
        active.band([runs[0], run(blobs, "random", credo.MAP(), per_round=5)], "accuracy")
    with pytest.raises(DataError, match="'f1' was not recorded; there are accuracy"):
        active.band(runs, "f1")


# --- important batches ----------------------------------------------------------------------------


def test_important_batches_are_the_most_relevant_of_each_pool(blobs):
    (x, _), _ = blobs
    net = network()
    chosen = ImportantBatches(net, Categorical(), x, batch_size=5, pool=4, seed=2)
    uniform = ImportantBatches(net, Categorical(), x, batch_size=5, pool=4, share=0, seed=2)
    probs = net(x).softmax(1).detach()
    relevance = 1 - probs.square().sum(1)
    for batch in chosen:
        assert torch.equal(torch.tensor(batch), chosen.last)
    assert len(chosen) == len(uniform) == len(list(uniform)) == 3
    order = torch.randperm(60, generator=seeded(key_to_seed(2, 0)))
    for batch, candidates in zip(
        ImportantBatches(net, Categorical(), x, 5, 4, seed=2), order.split(20), strict=True
    ):
        top = candidates[relevance[candidates].argsort(descending=True)[:5]]
        assert set(batch) == set(top.tolist())


def test_the_choice_follows_the_weights_and_leaves_the_mode_alone(blobs):
    (x, _), _ = blobs
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train()
    chosen = iter(ImportantBatches(net, Categorical(), x, 5, 6))
    statistics = net[1].running_mean.clone()
    next(chosen)
    assert net.training
    assert net[1].training
    assert torch.equal(net[1].running_mean, statistics)
    same_seed = [list(ImportantBatches(net, Categorical(), x, 5, 6))[1] for _ in range(2)]
    assert same_seed[0] == same_seed[1]
    with torch.no_grad():
        net[0].weight.mul_(-3)
    assert next(chosen) != same_seed[0]


def test_share_mixes_and_epochs_differ(blobs):
    (x, _), _ = blobs
    net = network()
    half = ImportantBatches(net, Categorical(), x, 10, 3, share=0.5)
    top = ImportantBatches(net, Categorical(), x, 10, 3)
    one, other = next(iter(half)), next(iter(top))
    assert one[:5] == other[:5]
    assert len(set(one)) == 10
    assert next(iter(top)) != other  # another permutation
    uniform = ImportantBatches(net, Categorical(), x, 8, 1, share=0)
    seen = [i for batch in uniform for i in batch]
    assert sorted(seen) == list(range(60))  # pools of one batch leave nothing out
    assert [len(b) for b in uniform] == [8] * 7 + [4]


def test_important_batches_train_by_fit_and_by_hand(blobs):
    (x, y), test = blobs
    net = network()
    sampler = ImportantBatches(net, Categorical(), x, 5, 3)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=sampler)
    posterior = credo.fit(
        credo.Model(net, Categorical()), credo.MAP(lr=0.03), loader, epochs=30, progress=False
    )
    assert posterior.history[-1]["step"] == 30 * len(loader) == 120
    assert credo.metrics.accuracy(posterior.predict(test[0], samples=1).probs, test[1]) > 0.85


def test_important_batches_refuse_what_they_cannot_rank(blobs):
    (x, _), _ = blobs
    with pytest.raises(UnsupportedError, match="does not tell them apart"):
        ImportantBatches(network(), Gaussian(), x)
    with pytest.raises(UnsupportedError, match="does not tell them apart"):
        most_relevant(torch.zeros(2, 1), Gaussian(), 1)
    for wrong in ({"batch_size": 0}, {"pool": 0}, {"share": 1.5}):
        with pytest.raises(DataError):
            ImportantBatches(network(), Categorical(), x, **wrong)
