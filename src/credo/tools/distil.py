r"""A posterior distilled into one network: its probabilities and its doubt at the price of one
pass.

The posterior (the teacher) predicts at inputs that need no labels: the data, and as many again that
lie between two of them, where its samples differ most. A copy of its network (the student) learns
what came out, by

    classes      KL(p̄ ‖ softmax z) + w·½(ln Σ e^z − ln α₀)²
    regression   ½(m − m̄)²/(e² + a²) + w·[½(ln e' − ln e)² + ½(ln a' − ln a)²]

with p̄ the teacher's probabilities and α₀ the precision at which the Dirichlet with mean p̄ has the
teacher's mutual information, found by bisection; m̄, e and a its mean, epistemic and aleatoric
standard deviation, e' and a' the student's. A student without error thus has the teacher's
probabilities, entropy and mutual information (mean and both deviations) exactly. Malinin et al. fit
the Dirichlet to the samples by likelihood instead, where probabilities near zero outweigh all else,
and need smoothing and a falling temperature.

    >>> import torch, credo
    >>> x = torch.linspace(-2, 2, 64)[:, None]
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    >>> model = credo.Model(net, credo.likelihoods.Gaussian(scale=0.1))
    >>> method = credo.Ensemble(credo.MAP(lr=0.01), members=3)
    >>> teacher = credo.fit(model, method, (x, x.sin()), epochs=20, progress=False)
    >>> student = credo.tools.distil(teacher, x, epochs=20, progress=False)
    >>> student.predict(x).epistemic_std.shape
    torch.Size([64, 1])

Malinin, Mlodozeniec & Gales, "Ensemble distribution distillation", 2020 (arXiv:1905.00076); Hinton,
Vinyals & Dean, "Distilling the knowledge in a neural network", 2015 (arXiv:1503.02531).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from credo.checks import Count, NotNegative, Positive, checked
from credo.errors import DataError, UnsupportedError
from credo.likelihoods import Bernoulli, Categorical, FromLoss, Regression
from credo.map import MLE
from credo.model import Model
from credo.network import last_layer
from credo.network.batches import (
    input_rows,
    inputs_alone,
    is_loader,
    joined,
    map_inputs,
    number_of_examples,
    parts_of,
)
from credo.posterior.distilled import DistilledPosterior, widened, within_dirichlet
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.train import fit
from credo.types import Inputs, Likelihood

LEAST, MOST = -3.0, 9.0
"""Bounds of ln α₀: beyond them the mutual information is all of the entropy, or none."""

SMALLEST = 1e-4
"""Deviations are told apart down to this share of the predicted means' own."""


@checked
def distil(
    posterior: Posterior,
    data: Any,
    *,
    student: nn.Module | None = None,
    samples: Count | None = None,
    mixed: NotNegative = 1.0,
    weight: Positive = 0.1,
    epochs: Count = 100,
    batch_size: Count = 128,
    lr: Positive = 1e-3,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> DistilledPosterior:
    """One network that predicts as the posterior does, and how much its samples disagree.

    Args:
        posterior: An ensemble, a bag of draws, a Gaussian, dropout masks: any that has more than
            one network.
        data: Inputs, with or without targets beside them: what `credo.fit` or ``predict`` takes.
            Targets are not used; more inputs than were labelled do good.
        student: The network to train; by default a copy of the posterior's, its last layer made
            wider where it must be. It has C outputs for C classes, 2 for every output of
            `Bernoulli`, 3 for every target of a regression.
        samples: Draws of the posterior at each input, as its ``predict`` takes them.
        mixed: For each input so many more are made, each at a random place between two inputs. They
            must be floating-point numbers; of others (tokens) none are made.
        weight: Of the uncertainty's error beside the prediction's.
        epochs: Of training the student.
        batch_size: Inputs of one step.
        lr: Adam's rate; it falls to zero along a cosine.
        seed: Of the mixed inputs and the order.
        folder: A run folder, as `credo.fit` keeps it.
        progress: Whether to show progress.

    Raises:
        UnsupportedError: There is nothing to distil (one network), nothing that can be (a bare
            loss), or no layer that can be widened.
        DataError: The student's outputs are of another shape.
    """
    likelihood = _likelihood_of(posterior)
    inputs = _with_mixed(_inputs_of(data), mixed, seed)
    teacher = posterior.predict(inputs, samples=samples, keep_samples=False)
    targets = _targets(teacher)
    net, head, outputs = _student(posterior, student, likelihood, inputs)
    model = Model(net, FromLoss(_loss(likelihood, weight), "distillation"))
    with torch.no_grad():
        model.net.eval()
        given = model.outputs(input_rows(inputs, slice(2)))
    wanted = (
        targets.shape[1:] if not isinstance(likelihood, Categorical) else teacher.probs.shape[1:]
    )
    if given.shape[1:] != wanted:
        raise DataError(
            f"the student's outputs have shape (B, {', '.join(map(str, given.shape[1:]))}), but "
            f"must have (B, {', '.join(map(str, wanted))}): one for each class, two for each "
            "output of Bernoulli, three for each target of a regression"
        )
    trained = fit(
        model, MLE(lr=lr), (inputs, targets), epochs=epochs, batch_size=batch_size, seed=seed,
        schedule="cosine", folder=folder, progress=progress,
    )  # fmt: skip
    return DistilledPosterior.of(trained, copy.deepcopy(likelihood), head, outputs)


def precision_of(probs: Tensor, mutual_information: Tensor) -> Tensor:
    """ln α₀ at which the Dirichlet with this mean (B, C, …) has this mutual information (B, …).

    Args:
        probs: The mean over dim 1.
        mutual_information: In nats.

    >>> z = torch.tensor([[0.5, 2.0, 1.0]], dtype=torch.float64)
    >>> probs = z.softmax(1)
    >>> information = -(probs * probs.log()).sum(1) - within_dirichlet(z)
    >>> torch.allclose(precision_of(probs, information), z.logsumexp(1))
    True
    """
    probs, information = probs.double(), mutual_information.double()
    logarithms = probs.clamp(min=1e-30).log()
    entropy = -(probs * logarithms).sum(1)
    low = torch.full_like(information, LEAST)
    high = torch.full_like(information, MOST)
    for _ in range(50):
        middle = (low + high) / 2
        found = entropy - within_dirichlet(middle.unsqueeze(1) + logarithms)
        low = torch.where(found > information, middle, low)
        high = torch.where(found > information, high, middle)
    return (low + high) / 2


def _likelihood_of(posterior: Posterior) -> Likelihood:
    if posterior.points == 1:
        raise UnsupportedError(
            "this posterior is one network: it has no uncertainty over weights to distil, and "
            "predicts in one pass already. Give an ensemble, a Gaussian or a sampler's posterior"
        )
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, Categorical | Bernoulli | Regression):
        raise UnsupportedError(
            f"the likelihood {type(likelihood).__name__} gives no probabilities and no noise, so "
            "there is no predictive distribution to distil: use Categorical, Bernoulli or Gaussian"
        )
    return likelihood


def _inputs_of(data: Any) -> Inputs:
    if isinstance(data, torch.utils.data.Dataset) and not is_loader(data):
        data = torch.utils.data.DataLoader(data, 1024)
    if not is_loader(data):
        return inputs_alone(data)
    parts = [inputs_alone(batch) for batch in data]
    if not parts:
        raise DataError("the loader yields no batches: there is nothing to distil on")
    return joined([(part, torch.empty(number_of_examples(part))) for part in parts])[0]


def _with_mixed(inputs: Inputs, share: float, seed: int) -> Inputs:
    """The inputs, and as many between them as ``share`` says."""
    count = number_of_examples(inputs)
    extra = round(share * count)
    if not extra or not all(part.is_floating_point() for part in parts_of(inputs)):
        return inputs
    generator = Generator().manual_seed(seed)
    one, other = (torch.randint(count, (extra,), generator=generator) for _ in range(2))
    place = torch.rand(extra, generator=generator)

    def with_between(x: Tensor) -> Tensor:
        at = place.to(x).view(-1, *[1] * (x.dim() - 1))
        return torch.cat([x, torch.lerp(x[one], x[other], at)])

    return map_inputs(with_between, inputs)


def _targets(teacher: Predictive) -> Tensor:
    """What the student learns, side by side in dim 1."""
    likelihood = teacher.likelihood
    if isinstance(likelihood, Categorical):
        precision = precision_of(teacher.probs, teacher.mutual_information)
        return torch.cat([teacher.probs, precision.unsqueeze(1).to(teacher.probs)], 1)
    if isinstance(likelihood, Bernoulli):
        both = torch.stack([teacher.probs, 1 - teacher.probs], 1)
        precision = precision_of(both, teacher.mutual_information).to(both)
        return torch.cat([teacher.probs, precision], -1)
    floor = SMALLEST * teacher.mean.std(0, correction=0).clamp(min=1e-12)
    deviations = [teacher.epistemic_std, teacher.aleatoric_std]
    return torch.cat([teacher.mean, *(torch.maximum(d, floor).log() for d in deviations)], -1)


def _loss(likelihood: Likelihood, weight: float) -> Any:
    """(outputs, targets) to one loss per example."""

    def dirichlet(z: Tensor, probs: Tensor, precision: Tensor) -> Tensor:
        cross = -(probs * F.log_softmax(z, 1)).sum(1)
        # The cross-entropy lacks the teacher's entropy, which the student can't change.
        losses = cross + weight * 0.5 * (z.logsumexp(1) - precision).square()
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def classes(z: Tensor, targets: Tensor) -> Tensor:
        return dirichlet(z, targets[:, :-1], targets[:, -1])

    def binary(z: Tensor, targets: Tensor) -> Tensor:
        probs, precision = targets.chunk(2, -1)
        both = torch.stack(z.chunk(2, -1), 1)
        return dirichlet(both, torch.stack([probs, 1 - probs], 1), precision)

    def moments(outputs: Tensor, targets: Tensor) -> Tensor:
        mean, epistemic, aleatoric = outputs.chunk(3, -1)
        wanted, log_e, log_a = targets.chunk(3, -1)
        error = (mean - wanted).square() / ((2 * log_e).exp() + (2 * log_a).exp())
        spread = (epistemic - log_e).square() + (aleatoric - log_a).square()
        return (0.5 * error + weight * 0.5 * spread).flatten(1).sum(1)

    if isinstance(likelihood, Categorical):
        return classes
    return binary if isinstance(likelihood, Bernoulli) else moments


def _student(
    posterior: Posterior, student: nn.Module | None, likelihood: Likelihood, inputs: Inputs
) -> tuple[nn.Module, str | None, int]:
    """The network to train, the layer that was widened, and its outputs."""
    if student is not None:
        return student, None, 0
    with posterior.on_copy() as (model, _):
        net = copy.deepcopy(model.net)
    net.train()
    if isinstance(likelihood, Categorical):
        return net, None, 0
    path = last_layer(net, input_rows(inputs, slice(2)))
    layer = net.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise UnsupportedError(
            f"the network's last layer {path!r} is a {type(layer).__name__}, and only an nn.Linear "
            "can be given the outputs that the uncertainty needs: pass student=, a network with 2 "
            "outputs for every one of Bernoulli, 3 for every target of a regression"
        )
    targets = _outputs_per_target(likelihood, layer.out_features)
    return widened(net, path, targets), path, targets


def _outputs_per_target(likelihood: Likelihood, outputs: int) -> int:
    if isinstance(likelihood, Bernoulli):
        return 2 * outputs
    assert isinstance(likelihood, Regression)
    return 3 * likelihood.mean(torch.zeros(1, outputs)).shape[-1]
