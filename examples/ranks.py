"""What the launchers share: ranks, optimizers, the loop with its checkpoints, and the scores.

A run is a network, an optimizer that averages over ranks, and a function that gives this rank its
part of any batch of any epoch. All of the run's state is in one safetensors file, which any number
of ranks can go on from: batches and their order depend on the seed and the epoch alone.

Recipes and networks come from the package ``credo-papers``: ``pip install ./papers``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.collectives import Ranks
from credo.errors import CheckpointError
from credo.families import Delta
from credo.network import bind
from credo.network.selection import is_norm
from credo.noise import key_to_seed
from credo.optim import IVON, VOGN, NaturalOptimizer
from credo.packing import pack_optimizer, unpack_optimizer
from credo.storage import read_tensors, under, write_tensors
from credo_papers.recipes import Recipe

METHODS = ("ivon", "vogn", "adam")
LOG_SECONDS = 10.0

Batches = Callable[[int, int], Iterable[tuple[Tensor, Tensor]]]
"""From an epoch and a number of batches to skip: this rank's inputs and labels."""


@dataclass(frozen=True)
class Place:
    """This process among all of them."""

    rank: int
    ranks: int
    device: torch.device

    @classmethod
    def join(cls) -> Place:
        """Meet the other processes if torchrun started this one, each with its own GPU if any."""
        on_gpu = torch.cuda.is_available()
        device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu")
        if "RANK" not in os.environ:
            return cls(0, 1, device)
        if on_gpu:
            torch.cuda.set_device(device)
        # A rank that hangs is noticed after this time; one that dies, at once.
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def say(self, text: str) -> None:
        """Print once, not once for each rank."""
        if self.rank == 0:
            print(text, flush=True)

    def leave(self) -> None:
        """Part from the other processes."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Adam(torch.optim.Adam):
    """Torch's Adam with the two calls of a `NaturalOptimizer`, and gradients averaged over ranks.

    Decay is L2, and not on norm layers: the gradient of the prior that the others have.
    """

    def __init__(self, net: nn.Module, lr: float, weight_decay: float, beta2: float) -> None:
        flat = bind(net)
        parts: dict[bool, list[Tensor]] = {False: [], True: []}
        for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
            parts[is_norm(segment)].append(parameter)
        decays = {False: weight_decay, True: 0.0}
        groups = [
            {"params": some, "weight_decay": decays[norm]} for norm, some in parts.items() if some
        ]
        super().__init__(groups, lr, (0.9, beta2))
        self._ranks = Ranks()

    def sampled(self) -> AbstractContextManager[None]:
        """The weights as they are."""
        return nullcontext()

    def step(self, closure: Any = None) -> Any:
        """Average the gradients and move; the next backward starts from none."""
        if self._ranks.several:
            gradients = [p.grad for group in self.param_groups for p in group["params"]]
            total = torch.cat([gradient.flatten() for gradient in gradients])
            self._ranks.sum_([total])
            parts = total.div_(self._ranks.size).split([g.numel() for g in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        loss = super().step(closure)
        self.zero_grad()
        return loss

    def posterior(self, net: nn.Module, likelihood: credo.types.Likelihood) -> credo.Posterior:
        """The point that was found."""
        model = credo.Model(net, likelihood)
        return credo.Posterior.at_network(model, Delta(model.weights(model.random)))


Optimizer = NaturalOptimizer | Adam


def optimizer_for(
    method: str, recipe: Recipe, net: nn.Module, num_data: int, seed: int
) -> Optimizer:
    """The optimizer of a published run, on all ranks."""
    if method == "adam":
        return Adam(net, recipe.lr, recipe.weight_decay, recipe.beta2)
    shared: dict[str, Any] = {
        "betas": (0.9, recipe.beta2),
        "hess_init": recipe.hess_init,
        "damping": recipe.damping,
        "augmentation": recipe.augmentation,
        "prior_precision": recipe.prior_precision(num_data),
        "seed": seed,
    }
    kind = IVON if method == "ivon" else VOGN
    return kind(net, recipe.lr, num_data, **shared)


def parts_of_epoch(
    num_data: int, batch_size: int, epoch: int, seed: int, place: Place, skip: int = 0
) -> Iterator[Tensor]:
    """Which examples of each batch are this rank's; what does not fill a batch is left out."""
    generator = torch.Generator().manual_seed(key_to_seed(seed, 1, epoch))
    order = torch.randperm(num_data, generator=generator)
    share = batch_size // place.ranks
    for start in range(skip * batch_size, num_data - batch_size + 1, batch_size):
        yield order[start + place.rank * share : start + (place.rank + 1) * share]


@dataclass
class Run:
    """A training that can be killed at any time and continued on another number of ranks."""

    place: Place
    method: str
    recipe: Recipe
    net: nn.Module
    optimizer: Optimizer
    num_data: int
    seed: int
    checkpoint: Path
    minutes: float = 10.0
    bfloat16: bool = False
    epoch: int = 0
    batch: int = 0
    losses: list[Tensor] = field(default_factory=list)

    @property
    def num_batches(self) -> int:
        """Whole batches in an epoch."""
        return self.num_data // self.recipe.batch_size

    def to_the_end(self, batches: Batches) -> None:
        """All epochs that are left, with a checkpoint after each and every so many minutes."""
        self.resume()
        recipe, place = self.recipe, self.place
        place.say(f"{place.ranks} rank(s), from epoch {self.epoch} of {recipe.epochs}")
        saved = said = time.monotonic()
        steps = 0
        self.net.train()
        while self.epoch < recipe.epochs:
            for x, y in batches(self.epoch, self.batch):
                self.step(x, y)
                steps, now = steps + 1, time.monotonic()
                if now - said > LOG_SECONDS:
                    self._say_progress(steps * recipe.batch_size / (now - said))
                    steps, said = 0, now
                if now - saved > 60 * self.minutes:
                    saved = now
                    self.save()
            loss = self._mean_loss()
            self.epoch, self.batch = self.epoch + 1, 0
            self.save()
            place.say(f"epoch {self.epoch}: loss {loss:.3f} on rank 0")

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on this rank's part of a batch."""
        epochs = self.epoch + self.batch / self.num_batches
        rate = self.recipe.lr * self.recipe.factor(epochs / self.recipe.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        kind = self.place.device.type
        for _ in range(1 if self.method == "adam" else self.recipe.samples):
            with self.optimizer.sampled():
                with torch.autocast(kind, torch.bfloat16, enabled=self.bfloat16):
                    loss = F.cross_entropy(self.net(x), y)
                loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.batch += 1

    def save(self) -> None:
        """Rank 0 writes all or nothing: a run that is killed meanwhile leaves the old file."""
        if self.place.rank == 0:
            tensors, meta = pack_optimizer(self.optimizer)
            tensors = {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
            tensors |= {f"net.{name}": tensor for name, tensor in self.net.state_dict().items()}
            where = {"epoch": self.epoch, "batch": self.batch}
            write_tensors(self.checkpoint, tensors, {**self._identity(), **where, "groups": meta})

    def resume(self) -> None:
        """Every rank loads the same file, if there is one, however many wrote it."""
        if not self.checkpoint.exists():
            return
        tensors, meta = read_tensors(self.checkpoint, self.place.device)
        for name, value in self._identity().items():
            if meta.get(name) != value:
                raise CheckpointError(
                    f"{self.checkpoint} is of a run with {name} {meta.get(name)!r}, not {value!r}: "
                    "go on with the same, or give another --checkpoint"
                )
        try:
            self.net.load_state_dict(under("net.", tensors))
            unpack_optimizer(self.optimizer, under("optimizer.", tensors), meta["groups"])
            self.epoch, self.batch = meta["epoch"], meta["batch"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.checkpoint} does not fit this network and method ({error}); give another "
                "--checkpoint"
            ) from error

    def _identity(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "seed": self.seed,
            "num_data": self.num_data,
            "batch_size": self.recipe.batch_size,
        }

    def _say_progress(self, speed: float) -> None:
        self.place.say(
            f"epoch {self.epoch + 1}/{self.recipe.epochs}, batch {self.batch}/{self.num_batches}: "
            f"loss {float(self.losses[-1]):.3f} on rank 0, {speed:.0f} images/s"
        )

    def _mean_loss(self) -> float:
        losses, self.losses = self.losses, []
        return float(torch.stack(losses).mean()) if losses else float("nan")


def predict(
    run: Run, parts: Iterable[tuple[Tensor, Tensor]], num_images: int, classes: int, samples: int
) -> Tensor:
    """Probabilities (num_images, classes) on every rank, of which each computes its own parts.

    A part is the places of some images and their pixels; images of no part have zeros. Predictions
    are made in full precision.
    """
    probs = torch.zeros(num_images, classes, device=run.place.device)
    run.net.eval()
    posterior = run.optimizer.posterior(run.net, credo.likelihoods.Categorical())
    for places, x in parts:
        predictive = posterior.predict(x.to(run.place.device), samples, keep_samples=False)
        probs[places.to(run.place.device)] = predictive.probs
    Ranks().sum_([probs.view(-1)])
    return probs.cpu()


def scores(probs: Tensor, labels: Tensor | None) -> str:
    """How good probabilities are, or without labels how sure."""
    if labels is None:
        confidence = float(probs.amax(1).mean())
        entropy = float(torch.special.entr(probs).sum(1).mean())
        return f"no labels: mean confidence {confidence:.3f}, mean entropy {entropy:.3f}"
    accuracy, nll = credo.metrics.accuracy(probs, labels), credo.metrics.nll(probs, labels)
    return f"accuracy {accuracy:.3f}, nll {nll:.3f}, ece {credo.metrics.ece(probs, labels):.3f}"


def parser_for(description: str, checkpoint: str) -> argparse.ArgumentParser:
    """The options that the launchers share; None is what the preset says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--method", choices=METHODS, default="ivon")
    parser.add_argument("--preset", choices=("quick", "paper"), default="paper")
    parser.add_argument(
        "--norm", choices=("batch", "group"), default="batch",
        help="with group norm examples don't mix, and VOGN's squared gradients are exact",
    )  # fmt: skip
    parser.add_argument("--data", help="the folder with the images")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch-size", type=int, help="of all ranks together")
    parser.add_argument("--samples", type=int, help="draws for the final prediction")
    parser.add_argument("--checkpoint", type=Path, default=Path(checkpoint))
    parser.add_argument("--checkpoint-minutes", type=float, default=10.0)
    parser.add_argument("--bf16", action="store_true", help="train in mixed bfloat16 precision")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def refuse_batch_size(batch_size: int, num_data: int, ranks: int) -> None:
    """Stop if the batches can't be shared equally, or if there is not even one."""
    if batch_size % ranks:
        raise SystemExit(f"--batch-size {batch_size} can't be shared by {ranks} ranks equally")
    if not 0 < batch_size <= num_data:
        raise SystemExit(f"--batch-size {batch_size} must be 1 to {num_data}, the training images")
