"""ResNet-20 on CIFAR-10 with IVON or VOGN, on as many processes as there are.

    torchrun --nproc-per-node 2 examples/train_cifar10_ranks.py --method ivon --data DATA_FOLDER

Every rank draws weights of its own and takes its part of each batch; ``optimizer.step()`` averages.
Call it again to go on from the checkpoint, with the same or another ``--nproc-per-node`` (or with
plain ``python``, on one process). ``--synthetic`` trains on a few made-up images, to try it out.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.data.image_set import standardise
from credo.optim import IVON, VOGN, NaturalOptimizer


class Block(nn.Module):
    """Two 3×3 convolutions around which the input is passed."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.stride = 1 if channels_in == channels else 2
        self.first = nn.Conv2d(channels_in, channels, 3, self.stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.extra = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut skips pixels and pads channels where the sizes change."""
        h = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return torch.relu(h + short)


def resnet20() -> nn.Module:
    """Three stages of three blocks, with 16, 32 and 64 channels."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    sizes = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def made_up_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise that is brighter in one of ten stripes, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 32, 32, generator=generator)
    labels = torch.arange(count) % 10
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, :, 3 * label : 3 * label + 4] += 1.0
    return images, labels


def optimizer_for(method: str, net: nn.Module, num_data: int, seed: int) -> NaturalOptimizer:
    """IVON with its published values for CIFAR, VOGN with those for a ResNet-18.

    VOGN's published heavy-ball rate of 1e-4 is 1e-3 here.
    """
    if method == "ivon":
        return IVON(net, 0.2, num_data, weight_decay=2e-4, hess_init=0.5, seed=seed)
    return VOGN(
        net, 1e-3, num_data, prior_precision=50.0, damping=1e-3, augmentation=10.0, seed=seed
    )


def batches(
    images: Tensor, labels: Tensor, size: int, epoch: int, seed: int, rank: int, ranks: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's parts of the epoch's batches, the same order of examples on all ranks."""
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(len(images), generator=generator)
    shifts = torch.randint(9, (len(images), 2), generator=generator)
    flips = torch.rand(len(images), generator=generator) < 0.5
    share = size // ranks
    for start in range(0, len(images) - size + 1, size):
        part = order[start + rank * share : start + (rank + 1) * share]
        padded = F.pad(images[part], (4, 4, 4, 4))
        moved = [
            (image.flip(-1) if flips[index] else image)[:, y : y + 32, x : x + 32]
            for image, index, (y, x) in zip(padded, part, shifts[part].tolist(), strict=True)
        ]
        yield torch.stack(moved), labels[part]


def train_epoch(
    net: nn.Module, opt: NaturalOptimizer, data: Iterator[tuple[Tensor, Tensor]], device: str
) -> float:
    """The mean loss on this rank."""
    net.train()
    losses = []
    for x, y in data:
        with opt.sampled():
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
        opt.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def save(path: Path, net: nn.Module, opt: NaturalOptimizer, epoch: int) -> None:
    """All or nothing: a run that is killed meanwhile leaves the old file."""
    part = path.with_name(f".{path.name}.part")
    torch.save({"net": net.state_dict(), "optimizer": opt.state_dict(), "epoch": epoch}, part)
    os.replace(part, path)


def resume(path: Path, net: nn.Module, opt: NaturalOptimizer, device: str) -> int:
    """The epoch to go on with. Every rank loads the same file, however many wrote it."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, map_location=device)
    net.load_state_dict(saved["net"])
    opt.load_state_dict(saved["optimizer"])
    return int(saved["epoch"])


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="ResNet-20 on CIFAR-10, on one or many ranks")
    parser.add_argument("--method", choices=("ivon", "vogn"), default="ivon")
    parser.add_argument("--data", help="the folder with CIFAR-10; by default that of CREDO_DATA")
    parser.add_argument("--synthetic", action="store_true", help="a few made-up images instead")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--samples", type=int, default=32, help="draws for the final prediction")
    parser.add_argument("--checkpoint", type=Path, default=Path("cifar10_ranks.pt"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, keep a checkpoint of every epoch, and say how good the predictions are."""
    args = arguments()
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    rank, ranks = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        # A rank that hangs is noticed after this time; one that dies, at once.
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=10))
        rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.batch_size % ranks:
        raise SystemExit(f"--batch-size {args.batch_size} can't be shared by {ranks} ranks equally")
    if args.synthetic:
        train, test = made_up_images(40, seed=1), made_up_images(20, seed=2)
    else:
        images = credo.data.load("cifar10", args.data)
        train, test = images.train, images.test
    if len(train[0]) < args.batch_size:
        raise SystemExit(f"--batch-size {args.batch_size} is more than the training examples")
    x_train, x_test = standardise(train[0], test[0])

    torch.manual_seed(args.seed)  # the same first weights on every rank
    net = resnet20().to(device)
    opt = optimizer_for(args.method, net, len(x_train), args.seed)
    rates = [group["lr"] for group in opt.param_groups]
    first = resume(args.checkpoint, net, opt, device)
    if rank == 0:
        print(f"{ranks} rank(s), from epoch {first} of {args.epochs}", flush=True)
    for epoch in range(first, args.epochs):
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = 0.5 * rate * (1 + math.cos(math.pi * epoch / args.epochs))
        data = batches(x_train, train[1], args.batch_size, epoch, args.seed, rank, ranks)
        loss = train_epoch(net, opt, data, device)
        if rank == 0:
            save(args.checkpoint, net, opt, epoch + 1)
            print(f"epoch {epoch + 1}: loss {loss:.3f} on rank 0", flush=True)

    if rank == 0:
        net.eval()
        posterior = opt.posterior(net, credo.likelihoods.Categorical())
        probs = posterior.predict(x_test.to(device), args.samples, batch_size=500).probs.cpu()
        accuracy = float((probs.argmax(1) == test[1]).float().mean())
        nll, ece = credo.metrics.nll(probs, test[1]), credo.metrics.ece(probs, test[1])
        print(f"accuracy {accuracy:.3f}, nll {float(nll):.3f}, ece {float(ece):.3f}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
