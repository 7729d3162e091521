"""FROMP as a learner: what it keeps, what it refuses, how it resumes."""

import json

import pytest
import torch
from torch import nn

import credo
import credo.train.loop
from credo.continual import FROMP, MultiHead, Naive, Stream, Task, Training, run, split
from credo.continual.coreset import choose, divided, k_centres
from credo.continual.functional_penalty import Anchor, FunctionalPenalty, prediction_kernels
from credo.continual.regularised import RegularisedMAP
from credo.errors import DataError, UnsupportedError
from credo.train.progress import Reporter

SETTINGS = Training(epochs=2, batch_size=32, lr=3e-3, clip=0.1)
VARIANTS = {
    "fromp": {},
    "l2": {"kernel": "identity"},
    "random memory": {"choice": "balanced"},
    "k-centre": {"choice": "k-centre"},
}


def stream_of(tasks=3):
    whole = split("digits", num_data=120, num_test=60)
    return Stream(whole.name, whole.tasks[:tasks])


def model_for(stream, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)
        )
        return credo.Model(MultiHead(body, 16, stream.head_sizes), credo.likelihoods.Categorical())


def learner_for(stream, variant, seed=0):
    return FROMP(model_for(stream, seed), SETTINGS, size=10, **VARIANTS[variant])


class Killer(Reporter):
    def __init__(self, steps):
        self.steps = steps

    def step(self, epoch, batch, nll):
        self.steps -= 1
        if not self.steps:
            raise RuntimeError("killed")


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_inside_a_task_and_between_tasks_is_exact(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(credo.train.loop, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    stream = stream_of()
    undisturbed = learner_for(stream, variant)
    expected = run(undisturbed, stream, progress=False)

    killed = learner_for(stream, variant)
    killed.learn(stream[0], tmp_path, progress=False)
    with pytest.raises(RuntimeError, match="killed"):
        killed.learn(stream[1], tmp_path, progress=Killer(6))
    resumed = learner_for(stream, variant, seed=99)
    assert resumed.restore(tmp_path)
    report = run(resumed, stream, tmp_path, progress=False)
    assert torch.equal(resumed.model.bind().vector, undisturbed.model.bind().vector)
    assert report.rows[1:] == expected.rows[1:]
    assert report.memory_bytes[1:] == expected.memory_bytes[1:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_task_is_ordinary_training(variant):
    stream = stream_of(1)
    learner, naive = learner_for(stream, variant), Naive(model_for(stream), SETTINGS)
    for each in (learner, naive):
        each.learn(stream[0], progress=False)
    assert torch.equal(learner.model.bind().vector, naive.model.bind().vector)
    plain = model_for(stream)
    method = RegularisedMAP(lr=SETTINGS.lr, clip=SETTINGS.clip)
    credo.fit(plain, method, stream[0].train_data, epochs=2, batch_size=32, progress=False)
    assert torch.equal(learner.model.bind().vector, plain.bind().vector)


def test_packing_keeps_everything_the_next_task_needs():
    stream = stream_of(2)
    learner, copy = (learner_for(stream, "fromp", seed) for seed in (0, 8))
    learner.learn(stream[0], progress=False)
    tensors, meta = learner.pack()
    copy.unpack({k: t.clone() for k, t in tensors.items()}, json.loads(json.dumps(meta)))
    for each in (learner, copy):
        each.learn(stream[1], progress=False)
    assert torch.equal(copy.model.bind().vector, learner.model.bind().vector)
    # F in float32, and of ten inputs for each task 64 numbers and a head.
    size = learner.model.random.size
    assert copy.memory_bytes == learner.memory_bytes == 4 * size + 2 * 10 * (64 * 4 + 8)


def test_old_predictions_are_held_where_naive_training_loses_them():
    """Two tasks on one head that ask for opposite answers: the memory must show in the outputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator)
    labels = (x[:, 0] > 0).long()
    first = Task("one side", (x - 3, labels), (x - 3, labels))
    second = Task("other side", (x + 3, 1 - labels), (x + 3, 1 - labels))

    def accuracy_on_first(make):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 2))
        learner = make(credo.Model(net, credo.likelihoods.Categorical()))
        for task in (first, second):
            learner.learn(task, progress=False)
        probs = learner.predict(x - 3, first).probs
        return credo.metrics.accuracy(probs, labels)

    training = Training(epochs=40, lr=1e-2)
    naive = accuracy_on_first(lambda model: Naive(model, training))
    kept = accuracy_on_first(lambda model: FROMP(model, training, size=20, temperature=10.0))
    assert kept > 0.95 > 0.9 > naive


def test_one_logit_is_taken():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    model = credo.Model(
        nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), credo.likelihoods.Bernoulli()
    )
    learner = FROMP(model, SETTINGS, size=5)
    for name in "ab":
        learner.learn(Task(name, (x, (x[:, 0] > 0).long()), (x, x[:, 0])), progress=False)
    assert learner.variance.shape == (4,)


def test_the_network_is_in_eval_mode_at_the_memory_and_in_its_own_beside_it():
    stream = stream_of(2)
    learner = learner_for(stream, "fromp")
    learner.learn(stream[0], progress=False)
    regulariser = learner.regulariser(stream[1])
    state = RegularisedMAP(regulariser=regulariser).init(learner.model, 120)
    learner.model.net.train()
    statistics = [b.clone() for b in learner.model.net.buffers()]
    assert regulariser.value(state) == pytest.approx(0.0, abs=1e-6)
    assert learner.model.net.training
    buffers = learner.model.net.buffers()
    assert all(torch.equal(a, b) for a, b in zip(statistics, buffers, strict=True))


def test_tasks_of_different_sizes_share_a_penalty():
    model = credo.Model(nn.Linear(3, 2), credo.likelihoods.Categorical())
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, 3, generator=generator) for size in (4, 2, 4)]
    anchors = [Anchor.at(model, x) for x in inputs]
    with model.bind().writing() as vector:
        vector += 1.0 * torch.arange(8.0)
    likelihood = model.likelihood
    together = FunctionalPenalty(anchors)
    found = together.value(model.outputs(together.inputs), likelihood)
    apart = [FunctionalPenalty([a]).value(model.outputs(a.inputs), likelihood) for a in anchors]
    assert found.item() == pytest.approx(sum(float(p.detach()) for p in apart), rel=1e-5)


def test_names_tell_the_variants_apart():
    stream = stream_of(1)
    names = {learner_for(stream, variant).name for variant in VARIANTS}
    assert names == {"FROMP", "FROMP L2", "FROMP balanced", "FROMP k-centre"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size"),
        ({"temperature": 0.0}, "temperature"),
        ({"kernel": "rbf"}, "kernel must be one of 'posterior', 'identity', but it is 'rbf'"),
        ({"choice": "best"}, "choice must be one of .*, but it is 'best'"),
        ({"jitter": -1.0}, "jitter"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(DataError, match=message):
        FROMP(model_for(stream_of(1)), SETTINGS, **settings)


def test_what_has_no_predictions_or_no_variance_is_refused():
    model = credo.Model(
        nn.Linear(3, 2), credo.likelihoods.FromLoss(nn.functional.mse_loss), credo.priors.Normal()
    )
    with pytest.raises(UnsupportedError, match="probabilities or means"):
        prediction_kernels(model, torch.zeros(2, 3), torch.ones(8))
    with pytest.raises(DataError, match="8 weights are random"):
        prediction_kernels(model, torch.zeros(2, 3), torch.ones(7))
    with pytest.raises(DataError, match="at least one old task"):
        FunctionalPenalty([])


# --- coresets -------------------------------------------------------------------------------------


def test_k_centres_are_within_twice_the_best_cover():
    """Against all choices of three out of ten points."""
    points = torch.randn(10, 2, generator=torch.Generator().manual_seed(0)).double()
    distances = torch.cdist(points, points)
    best = min(
        float(distances[:, [a, b, c]].min(1).values.max())
        for a in range(10) for b in range(a) for c in range(b)
    )  # fmt: skip
    found = k_centres(points, 3, torch.Generator().manual_seed(1))
    assert float(distances[:, found].min(1).values.max()) <= 2 * best
    assert len(set(k_centres(torch.zeros(4, 2), 9).tolist())) == 4


def test_choices_are_functions_of_their_generator_and_balanced_where_they_say():
    model = credo.Model(nn.Linear(3, 3), credo.likelihoods.Categorical())
    x, y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    for rule in ("relevance", "balanced", "random", "k-centre"):
        rows = [choose(rule, model, (x, y), 12, torch.Generator().manual_seed(5)) for _ in range(2)]
        assert torch.equal(*rows)
        assert len(rows[0].unique()) == 12
        if rule in ("relevance", "balanced"):
            assert y[rows[0]].bincount().tolist() == [4, 4, 4]
        kept, rest = divided((x, y), rows[0])
        assert len(kept[1]) == 12
        assert len(rest[1]) == 48
        assert torch.equal(kept[0], x[rows[0]])
