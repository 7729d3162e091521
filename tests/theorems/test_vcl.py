"""Variational continual learning: where Bayes' rule has an answer, the sequence finds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.continual import Task, Training
from credo.continual.natural_vcl import AnchoredIVON
from credo.continual.vcl import VCL
from credo.families import DiagGaussian

NOISE, DELTA = 1.0, 0.5
TRAINING = Training(epochs=150, batch_size=100, lr=1.0, optimizer="sgd-plain")


def task(name: str, seed: int, rows: int = 8) -> Task:
    """Every example has one feature, so that the features of any of them are orthogonal."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64)
    x = torch.eye(4, dtype=torch.float64)[torch.arange(rows) % 4] * size[:, None]
    y = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return Task(name, (x, y), (x, y))


def bayes(*tasks: Task) -> DiagGaussian:
    """The posterior of all their data."""
    x, y = (torch.cat([t.train[part] for t in tasks]) for part in (0, 1))
    precision = x.square().sum(0) / NOISE**2 + DELTA
    return DiagGaussian((x.mT @ y).flatten() / NOISE**2 / precision, precision.rsqrt())


def linear(**settings: object) -> VCL:
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False).double()
    prior = credo.priors.Normal(scale=DELTA**-0.5)
    model = credo.Model(net, credo.likelihoods.Gaussian(NOISE), prior)
    settings = {"noise": "weight", "estimator": "path", "likelihood_start": False, **settings}
    return VCL(model, TRAINING, log_variance=-1.0, **settings)


def assert_same(found: DiagGaussian | None, expected: DiagGaussian) -> None:
    """Sticking the landing, the gradient's noise vanishes with the distance to the posterior, so
    that steps of a fixed size end there; 150 of them leave about 1e-9 of the way."""
    assert found is not None
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.scale, expected.scale, rtol=1e-7, atol=0)


def test_one_task_after_the_other_is_all_at_once() -> None:
    tasks = [task(name, seed) for seed, name in enumerate("abc")]
    learner = linear()
    for index, each in enumerate(tasks):
        learner.learn(each, progress=False)
        assert_same(learner.q, bayes(*tasks[: index + 1]))


@pytest.mark.parametrize("rule", ["random", "k-centre"])
def test_a_coreset_counts_once(rule: str) -> None:
    """q_t is the posterior without the held-out examples, and refined that of all data."""
    tasks = [task(name, seed) for seed, name in enumerate("ab")]
    learner = linear(coreset_size=3, coreset=rule)
    for each in tasks:
        learner.learn(each, progress=False)
    refined = learner.posterior().q
    assert isinstance(refined, DiagGaussian)
    assert_same(refined, bayes(*tasks))
    assert learner.q is not None
    held_out = [Task("held out", batch, batch) for batch in learner._coresets]
    total = learner.q.precision + sum(t.train[0].square().sum(0) for t in held_out) / NOISE**2
    torch.testing.assert_close(total, refined.precision, rtol=1e-6, atol=0)


def test_a_start_at_the_likelihood_changes_nothing_in_the_end() -> None:
    learner = linear(likelihood_start=True)
    learner.learn(task("a", 0), progress=False)
    assert_same(learner.q, bayes(task("a", 0)))


# --- by natural gradient --------------------------------------------------------------------------


def steps(net: nn.Module, optimizer: credo.optim.IVON, shift: Tensor | float = 0.0) -> Tensor:
    """Twenty steps on a loss that is not quadratic, with its weights moved by ``shift``."""
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(10, 3)
    y = torch.arange(10) % 2
    for _ in range(20):
        with optimizer.sampled():
            weights = torch.cat([p.flatten() for p in net.parameters()]) + shift
            outputs = x @ weights[:6].view(2, 3).mT + weights[6:]
            torch.nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def linear_net(start: Tensor) -> nn.Module:
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        net.weight.copy_(start[:6].view(2, 3))
        net.bias.copy_(start[6:])
    return net


SETTINGS = {"lr": 0.5, "num_data": 10, "hess_init": 0.3, "betas": (0.9, 0.99), "seed": 3}
START = torch.linspace(-1, 1, 8, dtype=torch.float64)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_a_precision_for_every_weight_is_that_of_ivons_groups(damping: float) -> None:
    """The same arithmetic in another order: 20 steps agree to rounding."""
    ours, theirs = linear_net(START), linear_net(START)
    precision = torch.tensor([2.0] * 6 + [0.7] * 2, dtype=torch.float64)
    groups = [
        {"params": [theirs.weight], "prior_precision": 2.0},
        {"params": [theirs.bias], "prior_precision": 0.7},
    ]
    anchored = AnchoredIVON(
        [{"params": list(ours.parameters()), "prior_precision": 1.0}], damping=damping, **SETTINGS
    )
    anchored.anchor(DiagGaussian(torch.zeros(8).double(), precision.rsqrt()))
    plain = credo.optim.IVON(groups, damping=damping, rescale_lr=False, **SETTINGS)
    # IVON's rates are in units of h₀ + δ, and δ is a group's own.
    for group in anchored.param_groups:
        group["rescale_lr"] = False
    torch.testing.assert_close(steps(ours, anchored), steps(theirs, plain), rtol=1e-11, atol=1e-12)
    scales = [
        o.posterior(n, credo.likelihoods.Categorical()).q.scale
        for o, n in ((anchored, ours), (plain, theirs))
    ]
    torch.testing.assert_close(*scales, rtol=1e-11, atol=0)


def test_a_prior_around_other_weights_is_ivon_on_the_shifted_loss() -> None:
    centre = torch.linspace(0.5, -0.3, 8, dtype=torch.float64)
    ours, theirs = linear_net(START + centre), linear_net(START)
    anchored = AnchoredIVON(
        [{"params": list(ours.parameters()), "prior_precision": 1.0}], **SETTINGS
    )
    anchored.anchor(DiagGaussian(centre, torch.ones(8).double()))
    plain = credo.optim.IVON(theirs.parameters(), prior_precision=1.0, **SETTINGS)
    found, expected = steps(ours, anchored), steps(theirs, plain, shift=centre)
    torch.testing.assert_close(found, expected + centre, rtol=1e-11, atol=1e-12)
