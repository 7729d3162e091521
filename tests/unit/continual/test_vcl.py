"""Variational continual learning as a learner: its start, heads, coresets, folders."""

import json
import math

import pytest
import torch
from torch import nn

import credo
import credo.train.loop
from credo.continual import VCL, MultiHead, Stream, Training, permuted, run, split
from credo.continual.natural_vcl import NaturalVCL, SequentialIVON
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian
from credo.train.progress import Reporter
from credo.variational import VI

ADAM = Training(epochs=2, batch_size=32, lr=3e-3)
IVON = Training(epochs=2, batch_size=32, lr=0.5)
FEW = {"predict_samples": 3}
VARIANTS = {
    "vcl": lambda model: VCL(model, ADAM, **FEW),
    "no start": lambda model: VCL(model, ADAM, likelihood_start=False, noise="weight", **FEW),
    "coreset": lambda model: VCL(model, ADAM, coreset_size=10, **FEW),
    "k-centre": lambda model: VCL(model, ADAM, coreset_size=10, coreset="k-centre", **FEW),
    "natural": lambda model: NaturalVCL(model, IVON, **FEW),
    "natural coreset": lambda model: NaturalVCL(model, IVON, coreset_size=10, **FEW),
}


def stream_of(tasks=3):
    whole = split("digits", num_data=100, num_test=40)
    return Stream(whole.name, whole.tasks[:tasks])


def model_for(stream, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())
        net = MultiHead(body, 16, stream.head_sizes)
        return credo.Model(net, credo.likelihoods.Categorical(), credo.priors.Normal(scale=1.0))


class Killer(Reporter):
    def __init__(self, steps):
        self.steps = steps

    def step(self, epoch, batch, nll):
        self.steps -= 1
        if not self.steps:
            raise RuntimeError("killed")


@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_inside_a_task_and_between_tasks_is_exact(variant, tmp_path, monkeypatch):
    """Killed in the first task's second training, which follows the start, and in the second."""
    monkeypatch.setattr(credo.train.loop, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    stream, make = stream_of(), VARIANTS[variant]
    undisturbed = make(model_for(stream))
    expected = run(undisturbed, stream, progress=False)

    killed = make(model_for(stream))
    with pytest.raises(RuntimeError, match="killed"):
        killed.learn(stream[0], tmp_path, progress=Killer(7 if variant == "no start" else 11))
    killed = make(model_for(stream))
    killed.learn(stream[0], tmp_path, progress=False)
    with pytest.raises(RuntimeError, match="killed"):
        killed.learn(stream[1], tmp_path, progress=Killer(6))
    resumed = make(model_for(stream, seed=99))
    assert resumed.restore(tmp_path)
    report = run(resumed, stream, tmp_path, progress=False)
    assert torch.equal(resumed.q.mean, undisturbed.q.mean)
    assert torch.equal(resumed.q.scale, undisturbed.q.scale)
    assert torch.equal(resumed.model.bind().vector, undisturbed.model.bind().vector)
    assert report.rows[1:] == expected.rows[1:]
    assert report.memory_bytes[1:] == expected.memory_bytes[1:]


def test_one_task_is_ordinary_variational_inference():
    stream = stream_of(1)
    learner = VCL(model_for(stream), ADAM, likelihood_start=False, log_variance=-4.0)
    learner.learn(stream[0], progress=False)
    model = model_for(stream)
    # e^−2 of the prior's scale, which is 1.
    settings = {"lr": 3e-3, "noise": "local", "temperature": 1.0, "scale_ratio": 1.0}
    method = credo.VI(init_scale=math.exp(-2), **settings)
    plain = credo.fit(model, method, stream[0].train_data, epochs=2, batch_size=32, progress=False)
    torch.testing.assert_close(learner.q.mean, plain.q.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(learner.q.scale, plain.q.scale, rtol=1e-5, atol=1e-6)


def test_the_first_means_start_at_a_maximum_likelihood_fit_of_the_same_length(monkeypatch):
    stream = stream_of(2)
    starts = []
    init = VI.init

    def watched(self, *args):
        starts.append((self.start, args[0].prior))
        return init(self, *args)

    monkeypatch.setattr(VI, "init", watched)
    learner = VCL(model_for(stream), ADAM)
    learner.learn(stream[0], progress=False)
    reference = model_for(stream)
    method = credo.MLE(lr=ADAM.lr)
    credo.fit(reference, method, stream[0].train_data, epochs=2, batch_size=32, progress=False)
    used = [n.removesuffix(".weight") for n in ("body.1.weight", "heads.0.weight")]
    segments = [s for s in reference.random.segments if s.layer in used]
    expected = torch.cat([reference.bind().vector[s.slice] for s in segments])
    torch.testing.assert_close(starts[0][0].mean, expected)
    torch.testing.assert_close(starts[0][0].scale, torch.full_like(expected, -3.0).exp())

    yesterday = learner.q
    fresh = learner.model.net.heads[1].weight.detach().flatten().clone()
    learner.learn(stream[1], progress=False)
    (start, prior), body = starts[1], 64 * 16 + 16
    for each in (start, prior):
        torch.testing.assert_close(each.mean[:body], yesterday.mean[:body])
        torch.testing.assert_close(each.scale[:body], yesterday.scale[:body])
    torch.testing.assert_close(start.mean[body : body + 32], fresh)
    torch.testing.assert_close(start.scale[body:], torch.full((34,), -3.0).exp())
    torch.testing.assert_close(prior.scale[body:], torch.ones(34))
    assert not prior.mean[body:].any()


@pytest.mark.parametrize("variant", ["vcl", "natural"])
def test_heads_that_a_task_does_not_use_keep_their_posterior(variant):
    stream = stream_of(2)
    learner = VARIANTS[variant](model_for(stream))
    learner.learn(stream[0], progress=False)
    before = learner.q
    learner.learn(stream[1], progress=False)
    places = learner.model.random.slices()
    for name, place in places.items():
        same = torch.equal(before.mean[place], learner.q.mean[place])
        assert same == name.startswith("heads.0"), name
    assert learner.heads == [0, 1]


def test_coresets_are_held_out_and_leave_the_network_where_it_was():
    stream = stream_of(2)
    learner = VCL(model_for(stream), ADAM, coreset_size=10, **FEW)
    for task in stream:
        learner.learn(task, progress=False)
    before = learner.model.weights()
    buffers = [b.clone() for b in learner.model.net.buffers()]
    refined = learner.posterior()
    assert torch.equal(learner.model.bind().vector, before)
    assert all(torch.equal(a, b) for a, b in zip(buffers, learner.model.net.buffers(), strict=True))
    assert not torch.equal(refined.q.mean, learner.q.mean)
    assert learner.posterior().q is refined.q  # once for each task
    held_out = learner._coresets[0][0][0]
    assert len(held_out) == 10
    # Two vectors, and of each held-out example 64 pixels, a head and a label.
    size = learner.model.random.size
    assert learner.memory_bytes == 2 * 4 * size + 2 * 10 * (64 * 4 + 8 + 8)


def test_packing_keeps_everything_the_next_task_needs():
    stream = stream_of(2)
    for variant in ("coreset", "natural"):
        learner, copy = (VARIANTS[variant](model_for(stream, seed)) for seed in (0, 8))
        learner.learn(stream[0], progress=False)
        tensors, meta = learner.pack()
        copy.unpack({k: t.clone() for k, t in tensors.items()}, json.loads(json.dumps(meta)))
        for each in (learner, copy):
            each.learn(stream[1], progress=False)
        assert torch.equal(copy.posterior().q.mean, learner.posterior().q.mean)


def test_a_single_head_is_shared():
    stream = permuted("digits", tasks=2, num_data=100, num_test=40)
    net = nn.Linear(64, 10)
    model = credo.Model(net, credo.likelihoods.Categorical(), credo.priors.Normal(scale=1.0))
    report = run(VCL(model, ADAM, coreset_size=10, **FEW), stream, progress=False)
    assert report.accuracy.shape == (2, 2)


def test_predictions_average_over_draws():
    stream = stream_of(1)
    learner = VARIANTS["vcl"](model_for(stream))
    learner.learn(stream[0], progress=False)
    predictive = learner.predict(stream[0].test[0], stream[0])
    assert predictive.outputs.shape == (3, 40, 2)
    assert float(predictive.mutual_information.max()) > 0


def test_natural_steps_hold_fast_what_yesterday_knew_precisely():
    """A prior that is sure of its weights keeps them; one that is not lets the data have them."""
    x = torch.linspace(-1, 1, 40)[:, None]
    moved = {}
    for scale in (1e-4, 10.0):
        net = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            net.weight.fill_(1.0)
        prior = DiagGaussian(torch.ones(1), torch.tensor([scale]))
        model = credo.Model(net, credo.likelihoods.Gaussian(1.0), prior)
        method = SequentialIVON(lr=0.5, temperature=1.0, hess_init=0.3, betas=(0.9, 0.999))
        posterior = credo.fit(model, method, (x, 3 * x), epochs=60, batch_size=40, progress=False)
        moved[scale] = float(posterior.mean[0])
    assert moved[1e-4] == pytest.approx(1.0, abs=1e-3)
    assert moved[10.0] == pytest.approx(3.0, abs=0.5)


def test_what_cannot_be_meant_is_refused():
    stream = stream_of(1)
    model = model_for(stream)
    with pytest.raises(DataError, match=r"coreset_size must be .* but it is -1"):
        VCL(model, ADAM, coreset_size=-1)
    with pytest.raises(DataError, match=r"coreset must be one of .*, but it is 'all'"):
        VCL(model, ADAM, coreset="all")
    laplace = credo.Model(model.net, model.likelihood, credo.priors.Laplace(scale=1.0))
    with pytest.raises(UnsupportedError, match="Gaussian prior"):
        VCL(laplace, ADAM)
    with pytest.raises(DataError, match="no parameter 'clip_radius'"):
        SequentialIVON(clip_radius=1.0)


def test_names_tell_the_variants_apart():
    stream = stream_of(1)
    names = [VARIANTS[v](model_for(stream)).name for v in VARIANTS if v != "no start"]
    assert len(set(names)) == len(names)
