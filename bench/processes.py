"""Two processes against one: images a second of `credo.fit`, one thread each."""

from __future__ import annotations

import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

import credo
from bench.nets import NETS, batch
from bench.timing import Row
from credo.method import Method

METHODS: dict[str, type[Method]] = {"MAP": credo.MAP, "VI": credo.VI, "IVON": credo.IVON}
BATCH, STEPS, ROUNDS = 64, 8, 5


class _Stopwatch(credo.train.Reporter):
    """When each step was done; the first ones find cold caches."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def step(self, epoch: int, batch: int, nll: float) -> None:
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of a step."""
        return (self.times[-1] - self.times[1]) / (len(self.times) - 2)


def _train(rank: int, size: int, meeting: str, net: str, name: str, answers) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    x, y = batch(net, BATCH * size * STEPS)
    model = credo.Model(NETS[net](), credo.likelihoods.Categorical())
    watch = _Stopwatch()
    credo.fit(model, METHODS[name](), (x, y), epochs=1, batch_size=BATCH, progress=watch)
    if rank == 0:
        answers.put(watch.seconds)
    if size > 1:
        dist.destroy_process_group()


def _seconds(size: int, net: str, name: str) -> float:
    context = get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        crew = [
            context.Process(target=_train, args=(rank, size, meeting, net, name, answers))
            for rank in range(size)
        ]
        for process in crew:
            process.start()
        found = answers.get(timeout=600)
        for process in crew:
            process.join()
    return found


def throughput(net: str = "resnet20", rounds: int = ROUNDS) -> list[Row]:
    """How many times the images of one process, with the same batch on each; more is better."""
    rows = []
    for name in METHODS:
        ratios = []
        for _ in range(rounds):
            one, two = _seconds(1, net, name), _seconds(2, net, name)
            ratios.append(2 * one / two)
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            Row(
                "throughput of two ranks", net, f"credo.fit {name}, batch {BATCH} per rank",
                round(middle, 3), (round(low, 3), round(high, 3)), "one process",
            )
        )  # fmt: skip
    return rows
