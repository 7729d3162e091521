"""Learning five tasks one after the other: every learner's time over that of naive fine-tuning.

The stream has the shape of split MNIST (five tasks of two classes, 784-256-256 with heads, batches
of 128, FROMP with 40 examples of each task) with a tenth of its examples and a third of its epochs.
What is done once for each task (curvature, memory, kernels) weighs the more the shorter the
training, so that the ratios are upper bounds for the full length; `full_length` has that, for FROMP
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import credo
from bench.timing import Contestants, Row, interleave
from credo.continual import EWC, FROMP, SI, VCL, MultiHead, Naive, Replay, Stream, Task, Training
from credo.continual.learner import Learner
from credo.continual.natural_vcl import NaturalVCL

NUM_DATA = 1200
EPOCHS = 5
ROUNDS = 3

LEARNERS: dict[str, Callable[[credo.Model, Training], Learner]] = {
    "naive": Naive,
    "naive again (control)": Naive,
    "FROMP": FROMP,
    "FROMP, L2": lambda model, training: FROMP(model, training, kernel="identity"),
    "FROMP, random memory": lambda model, training: FROMP(model, training, choice="balanced"),
    "replay": lambda model, training: Replay(model, training, size=40),
    "EWC": EWC,
    "SI": SI,
    "VCL": VCL,
    "VCL, natural gradient": NaturalVCL,
}


def stream(num_data: int = NUM_DATA, tasks: int = 5) -> Stream:
    """Noise in the shape of split MNIST: what it is of does not change the time."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(tasks):
        x = torch.rand(num_data, 1, 28, 28, generator=generator)
        y = torch.arange(num_data) % 2
        made.append(Task(f"task {index}", (x, y), (x[:2], y[:2]), (0, 1), index))
    return Stream("split noise", tuple(made))


def model(tasks: Stream, width: int = 256) -> credo.Model:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    )
    net = MultiHead(body, width, tasks.head_sizes)
    return credo.Model(net, credo.likelihoods.Categorical(), credo.priors.Normal(scale=1.0))


def learning(
    num_data: int = NUM_DATA,
    epochs: int = EPOCHS,
    rounds: int = ROUNDS,
    learners: Sequence[str] = tuple(LEARNERS),
    bench: str = "continual",
) -> list[Row]:
    """All five tasks, relative to naive fine-tuning with the same optimizer."""
    tasks, training = stream(num_data), Training(epochs=epochs, lr=1e-4, clip=0.1)

    def all_of_them(make: Callable[[credo.Model, Training], Learner]) -> Callable[[], None]:
        def learn() -> None:
            learner = make(model(tasks), training)
            for task in tasks:
                learner.learn(task, progress=False)

        return learn

    contestants: Contestants = {name: all_of_them(LEARNERS[name]) for name in learners}
    baselines = {"naive": "naive fine-tuning"}
    return interleave(bench, "mlp 256-256", contestants, baselines, rounds, steps=1, long=True)


def full_length() -> list[Row]:
    """As many examples as split MNIST has, fifteen epochs of each task."""
    few = ("naive", "naive again (control)", "FROMP")
    return learning(12_000, 15, rounds=3, learners=few, bench="continual, full length")
