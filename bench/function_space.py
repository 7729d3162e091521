"""Function space: the kernel of many inputs, and the ranking of examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import credo
from bench.laplace import BATCH_SIZE, adam_epoch
from bench.nets import NETS, batch
from bench.timing import Contestants, Row, interleave
from credo.errors import DataError
from credo.families import DiagGaussian
from credo.functionspace import leverage, relevance, to_gp

ROUNDS = 3


def diagonal_posterior(net: nn.Module) -> credo.Posterior:
    """Scales that differ, so that nothing separates by accident."""
    model = credo.Model(net, credo.likelihoods.Categorical())
    generator = torch.Generator().manual_seed(0)
    scale = 0.01 + 0.1 * torch.rand(model.random.size, generator=generator)
    return credo.Posterior.at_network(model, DiagGaussian(model.weights(), scale))


def loop_kernel(net: nn.Module, x: Tensor, variance: Tensor) -> Tensor:
    """One backward pass for each input and class, one class of rows held at a time."""
    parameters = list(net.parameters())
    total = torch.zeros(len(x), len(x))
    for output in range(net(x[:1]).shape[1]):
        rows = torch.empty(len(x), len(variance))
        for i in range(len(x)):
            found = torch.autograd.grad(net(x[i : i + 1])[0, output], parameters)
            rows[i] = torch.cat([g.flatten() for g in found])
        rows *= variance.sqrt()
        total += rows @ rows.mT
    return total


def kernel(net: str = "lenet5", inputs: int = 1000, rounds: int = ROUNDS) -> list[Row]:
    """JΣJᵀ between ``inputs``, summed over the classes, relative to a loop of autograd."""
    x, _ = batch(net, inputs)
    posterior = diagonal_posterior(NETS[net]())
    gp, plain = to_gp(posterior), posterior.model.net
    ones = DiagGaussian(posterior.mean, torch.tensor(1.0))
    isotropic = to_gp(credo.Posterior.at_network(posterior.model, ones))
    contestants: Contestants = {
        "loop of autograd": lambda: loop_kernel(plain, x, posterior.q.variance),
        "credo, diagonal": lambda: gp.kernel(x),
        "credo, one scale": lambda: isotropic.kernel(x),
    }
    baselines = {"loop of autograd": "a loop of autograd"}
    return interleave("kernel", net, contestants, baselines, rounds, steps=1, long=True)


def digits_or_noise(net: str, num_data: int) -> tuple[Tensor, Tensor]:
    """MNIST where it is installed: a network that is sure of its classes is ranked sooner."""
    try:
        x, y = credo.data.load("mnist").train
    except DataError as error:
        print(f"ranking noise, which takes longer than digits do: {error}")
        return batch(net, num_data)
    return x[:num_data], y[:num_data]


def ranking(net: str = "lenet5", num_data: int = 60_000, rounds: int = ROUNDS) -> list[Row]:
    """Scores of all examples, relative to an epoch of forward passes and one of training."""
    make, (x, y) = NETS[net], digits_or_noise(net, num_data)
    trained = make()
    warm = adam_epoch(trained, x, y)
    for _ in range(2):
        warm()
    posterior = diagonal_posterior(trained.eval())

    @torch.no_grad()
    def forward() -> None:
        for part in x.split(BATCH_SIZE):
            trained(part)

    contestants: Contestants = {
        "forward epoch": forward,
        "adam": adam_epoch(make(), x, y),
        "relevance": lambda: relevance(posterior, (x, y), progress=False),
        "leverage, diagonal": lambda: leverage(posterior, (x, y), progress=False),
        "leverage, diagonal, all roots": lambda: leverage(
            posterior, (x, y), tolerance=0.0, progress=False
        ),
    }
    baselines = {"forward epoch": "a forward epoch", "adam": "epoch of adam"}
    return interleave("ranking", net, contestants, baselines, rounds, steps=1, long=True)
