"""Distillation: the student learns what the teacher says, is kept in a file, and refusals."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.families import DiagGaussian
from credo.posterior.distilled import DistilledPredictive, widened, within_dirichlet
from credo.posterior.predictive import Predictive
from credo.tools.distil import precision_of

D = torch.float64


def mlp(inputs: int, outputs: int, hidden: int = 16) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def teacher(likelihood, net: nn.Module, scale: float = 0.3) -> credo.Posterior:
    """A Gaussian around the network's weights: nothing need be trained."""
    model = credo.Model(net, likelihood)
    mean = model.weights(model.random)
    return credo.Posterior.at_network(model, DiagGaussian(mean, torch.full_like(mean, scale)))


def inputs(n: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))


KINDS = {
    "classes": (credo.likelihoods.Categorical(), 3),
    "binary": (credo.likelihoods.Bernoulli(), 2),
    "noise known": (credo.likelihoods.Gaussian(scale=0.2), 2),
    "noise learned": (credo.likelihoods.HeteroscedasticGaussian(), 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_predicts_what_the_teacher_does_and_is_kept_in_a_file(kind, tmp_path) -> None:
    likelihood, outputs = KINDS[kind]
    posterior = teacher(likelihood, mlp(2, outputs))
    student = credo.tools.distil(posterior, inputs(), epochs=60, lr=0.01, progress=False)
    x = inputs(100, seed=1)
    there, here = posterior.predict(x), student.predict(x)
    if likelihood.kind == "classification":
        assert here.probs.shape == there.probs.shape
        # Errors are small beside what predictions differ by from input to input.
        spread = (there.probs - there.probs.mean(0)).abs().mean()
        assert (here.probs - there.probs).abs().mean() < 0.3 * spread
        pairs = [(here.mutual_information, there.mutual_information)]
    else:
        assert here.mean.shape == there.mean.shape
        assert (here.mean - there.mean).abs().mean() < 0.3 * there.std.mean()
        pairs = [(here.epistemic_std, there.epistemic_std)]
        torch.testing.assert_close(here.aleatoric_std, there.aleatoric_std, rtol=0.5, atol=0.05)
        low, high = here.interval(0.9)
        assert (low < here.mean).all()
        assert (here.mean < high).all()
    for ours, theirs in pairs:
        together = torch.stack([ours.flatten(), theirs.flatten()]).corrcoef()[0, 1]
        assert together > 0.7
        assert 0.5 < ours.mean() / theirs.mean() < 2
    y = (
        there.labels
        if kind == "classes"
        else (there.labels.float() if kind == "binary" else there.mean)
    )
    assert here.log_prob(y).shape == (100,)
    student.save(tmp_path / "d.safetensors")
    again = credo.load(tmp_path / "d.safetensors", mlp(2, outputs)).predict(x)
    torch.testing.assert_close(again._moments.centre, here._moments.centre, rtol=0, atol=0)
    torch.testing.assert_close(again.epistemic_std, here.epistemic_std, rtol=0, atol=0)
    parts = DataLoader(TensorDataset(x), batch_size=30)
    torch.testing.assert_close(student.predict(parts).epistemic_std, here.epistemic_std)


def test_the_dirichlet_is_that_of_its_samples() -> None:
    """Entropies and deviations of 4,000 drawn vectors; four standard errors of 0.3/√4000."""
    alpha = torch.tensor([[0.5, 2.0, 1.5], [8.0, 1.0, 1.0]], dtype=D)
    pred = DistilledPredictive(alpha.log(), credo.likelihoods.Categorical())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = torch.distributions.Dirichlet(alpha).sample((4000,))
    sampled = Predictive(drawn.log(), credo.likelihoods.Categorical())
    for name in ("probs", "entropy", "expected_entropy", "mutual_information", "epistemic_std"):
        torch.testing.assert_close(getattr(pred, name), getattr(sampled, name), rtol=0, atol=0.02)
    torch.testing.assert_close(
        pred.log_prob(torch.tensor([1, 0])), torch.tensor([math.log(0.5), math.log(0.8)], dtype=D)
    )


def test_the_precision_gives_back_the_mutual_information() -> None:
    z = torch.randn(50, 4, dtype=D, generator=torch.Generator().manual_seed(0)) + 1
    probs = z.softmax(1)
    information = -(probs * probs.log()).sum(1) - within_dirichlet(z)
    torch.testing.assert_close(precision_of(probs, information), z.logsumexp(1), rtol=0, atol=1e-8)


def test_mixed_inputs_lie_between_two(monkeypatch) -> None:
    seen = []
    posterior = teacher(credo.likelihoods.Categorical(), mlp(2, 3))
    monkeypatch.setattr(
        type(posterior), "predict",
        lambda self, x, *a, _predict=credo.Posterior.predict, **k: seen.append(x)
        or _predict(self, x, *a, **k),
    )  # fmt: skip
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    credo.tools.distil(posterior, (x, torch.zeros(2)), mixed=10, epochs=1, progress=False)
    (given,) = seen
    assert given.shape == (22, 2)
    assert torch.equal(given[:2], x)
    between = given[2:]
    assert ((between >= 0) & (between <= 1)).all()
    assert torch.equal(between[:, 0], between[:, 1])


def test_a_widened_layer_keeps_its_first_outputs() -> None:
    net, x = mlp(2, 2), inputs(5)
    wide = widened(net, "2", 6)
    torch.testing.assert_close(wide(x)[:, :2], net(x))
    assert not wide(x)[:, 2:].any()
    assert widened(nn.Linear(2, 1), "", 3)(x).shape == (5, 3)


def test_what_can_not_be_distilled_is_refused(tmp_path) -> None:
    x = inputs(8)
    point = credo.Model(mlp(2, 3), credo.likelihoods.Categorical())
    trained = credo.fit(point, credo.MAP(), (x, torch.zeros(8).long()), epochs=1, progress=False)
    with pytest.raises(UnsupportedError, match="one network"):
        credo.tools.distil(trained, x)
    with pytest.raises(DataError, match="posterior must be a Posterior, but it is a Sequential"):
        credo.tools.distil(point.net, x)
    loss = credo.likelihoods.FromLoss(lambda f, y: (f - y).square().sum(1))
    with pytest.raises(UnsupportedError, match="FromLoss gives no probabilities"):
        credo.tools.distil(teacher(loss, mlp(2, 3)), x)
    image = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(2), nn.Conv1d(2, 1, 1))
    with pytest.raises(UnsupportedError, match=r"is a Conv1d.*student="):
        credo.tools.distil(
            teacher(credo.likelihoods.Gaussian(), image), torch.randn(4, 1, 5, 5), progress=False
        )
    posterior = teacher(credo.likelihoods.Gaussian(), mlp(2, 1))
    with pytest.raises(DataError, match=r"have shape \(B, 2\), but must have \(B, 3\)"):
        credo.tools.distil(posterior, x, student=mlp(2, 2), progress=False)
    student = credo.tools.distil(
        posterior, x, student=mlp(2, 3, hidden=4), epochs=1, progress=False
    )
    with pytest.raises(UnsupportedError, match="linear"):
        student.predict(x, at="linearised")
    with pytest.raises(AttributeError, match="no outputs"):
        student.predict(x).outputs  # noqa: B018
    wide = credo.tools.distil(posterior, x, epochs=1, progress=False)
    wide.save(tmp_path / "d.safetensors")
    with pytest.raises(FileFormatError, match="distilled from another network"):
        credo.load(tmp_path / "d.safetensors", nn.Sequential(nn.Linear(2, 1)))
