"""ResNet-18 on a folder of images such as ImageNet, with IVON, VOGN or Adam, on many processes.

    torchrun --nnodes 16 --nproc-per-node 8 … examples/train_imagenet_ranks.py \\
        --method vogn --data IMAGENET --bf16

IMAGENET holds ``train/<class>/*.JPEG`` and ``val/<class>/*.JPEG``; a ``val`` whose images lie in it
directly has no labels and is predicted without scores. Every rank draws weights of its own and
takes its part of each batch, read and cropped by ``--workers`` processes. Call it again to go on
from the checkpoint, on the same or another number of ranks, also in the midst of an epoch.

The network comes from the package ``credo-papers`` (``pip install ./papers`` in a checkout;
``make`` does it).

Images that can't be read are replaced (in training) or left out (in validation), and counted;
``--strict`` stops at the first.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from ranks import Place, Run, optimizer_for, parser_for, parts_of_epoch, predict, scores
from ranks import refuse_batch_size as refuse
from torch import Tensor
from torch.utils.data import DataLoader

from credo.data.image_folder import Crop, Crops, ImageFolder
from credo.noise import key_to_seed
from credo_papers.networks import NetName, build
from credo_papers.recipes import Recipe

IMAGENET = 1_281_167
"""The training images of the published runs."""

PAPER = {
    # As VOGN's authors ran it (Osawa et al., 2019): their rate for heavy-ball momentum times ten,
    # their ema_decay of 0.9 as 1 − beta2, prior precision 133, 128 ranks with one sample each.
    "vogn": Recipe(
        lr=1.6e-2, epochs=91, batch_size=4096, weight_decay=133 / (5 * IMAGENET), beta2=0.1,
        damping=1e-4, augmentation=5, warmup=5, warmup_from=1 / 128, milestones=(30, 60, 80),
    ),
    # Their baseline.
    "adam": Recipe(
        lr=1.6e-3, epochs=91, batch_size=4096, weight_decay=1e-4, warmup=5, warmup_from=1 / 128,
        milestones=(30, 60, 80),
    ),
    # As IVON's authors ran it with a ResNet-50 (Shen et al., 2024). The batch size is our choice.
    "ivon": Recipe(
        lr=2.5, epochs=100, batch_size=1024, weight_decay=5e-5, beta2=0.999995, hess_init=0.05,
        warmup=5, warmup_from=0.2,
    ),
}  # fmt: skip
QUICK = {
    name: replace(recipe, epochs=3, batch_size=32, warmup=0.5, milestones=())
    for name, recipe in PAPER.items()
}
PRESETS = {"quick": (QUICK, 64), "paper": (PAPER, 224)}
"""Recipes and the side of the crops."""

VAL_SAMPLES = 10
TOLD_PROBLEMS = 5
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's red, green and blue in [0, 1]."""


class Reader:
    """This rank's crops of a folder, read ahead by other processes; it counts what is wrong."""

    def __init__(self, folder: ImageFolder, side: int, place: Place, args: argparse.Namespace):
        self.crops = Crops(folder, side, strict=args.strict)
        self.place, self.workers = place, args.workers
        self.problems: set[str] = set()
        self._mean = torch.tensor(MEAN, device=place.device).view(3, 1, 1)
        self._deviation = torch.tensor(DEVIATION, device=place.device).view(3, 1, 1)

    def read(self, keys: list[list[int]] | list[list[tuple[int, int]]]) -> Iterator[Crop]:
        """The crops of each list of keys as one batch, standardised and on the device."""
        loader: DataLoader[Crop] = DataLoader(
            self.crops,
            batch_sampler=keys,
            num_workers=self.workers,
            pin_memory=self.place.device.type == "cuda",
        )
        for crop in loader:
            self._note(problem for problem in crop.problem if problem)
            pixels = crop.image.to(self.place.device, non_blocking=True).float().div_(255)
            standardised = pixels.sub_(self._mean).div_(self._deviation)
            yield Crop(standardised, crop.label.to(self.place.device), crop.problem)

    def say_problems(self, where: str) -> None:
        """How many images of this rank could not be read."""
        if self.problems:
            print(
                f"rank {self.place.rank}: {len(self.problems)} unreadable image(s) in {where}",
                flush=True,
            )

    def _note(self, problems: Iterable[str]) -> None:
        for problem in set(problems) - self.problems:
            self.problems.add(problem)
            if len(self.problems) <= TOLD_PROBLEMS:
                print(f"rank {self.place.rank}: {problem}", flush=True)


def validate(
    run: Run, val: ImageFolder, side: int, args: argparse.Namespace, samples: int
) -> tuple[Tensor, Tensor]:
    """Which images could be read, and their probabilities; each rank computes its share."""
    reader, place = Reader(val, side, run.place, args), run.place
    own = torch.arange(len(val))[place.rank :: place.ranks]
    keys = own.split(args.val_batch_size) if len(own) else ()

    def parts() -> Iterator[tuple[Tensor, Tensor]]:
        batches = reader.read([part.tolist() for part in keys])
        for part, crop in zip(keys, batches, strict=True):
            fine = torch.tensor([not problem for problem in crop.problem])
            if bool(fine.any()):
                yield part[fine], crop.image[fine.to(place.device)]

    probs = predict(run, parts(), len(val), len(val.classes), samples)
    reader.say_problems("val")
    readable = probs.sum(1).nonzero().flatten()
    return readable, probs[readable]


def write_predictions(path: Path, files: list[Path], probs: Tensor, classes: list[str]) -> None:
    """A line for each image: its most probable class, with how much confidence, and the entropy."""
    confidence, best = probs.max(1)
    entropy = torch.special.entr(probs).sum(1)
    with path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["file", "class", "confidence", "entropy"])
        numbers = torch.stack([confidence, entropy], 1).tolist()
        for file, index, (sure, unsure) in zip(files, best.tolist(), numbers, strict=True):
            table.writerow([file, classes[index], f"{sure:.6f}", f"{unsure:.6f}"])


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = parser_for("ResNet-18 on a folder of images", "imagenet_ranks.safetensors")
    parser.add_argument("--side", type=int, help="of the square crops, in pixels")
    parser.add_argument("--workers", type=int, default=4, help="processes that read, for each rank")
    parser.add_argument("--val-batch-size", type=int, default=256, help="on each rank")
    parser.add_argument("--predictions", type=Path, help="a CSV file for those on val")
    parser.add_argument("--strict", action="store_true", help="stop at an unreadable image")
    args = parser.parse_args()
    if args.data is None:
        parser.error("--data is missing: the folder that holds train and val")
    return args


def main() -> None:
    """Train with a checkpoint after every epoch, then predict the validation images."""
    args = arguments()
    recipes, side = PRESETS[args.preset]
    recipe, side = recipes[args.method], args.side or side
    recipe = replace(
        recipe, epochs=args.epochs or recipe.epochs,
        batch_size=args.batch_size or recipe.batch_size,
    )  # fmt: skip
    place = Place.join()
    train = ImageFolder.find(Path(args.data) / "train")
    if not train.is_labelled:
        raise SystemExit(f"{args.data}/train has images without a class: put them into folders")
    val = ImageFolder.find(Path(args.data) / "val", train.classes)
    refuse(recipe.batch_size, len(train), place.ranks)
    # The seed gives every rank the same first weights.
    name: NetName = "ResNet-18 GN" if args.norm == "group" else "ResNet-18"
    net = build(name, (3, side, side), args.seed, len(train.classes)).to(place.device)
    optimizer = optimizer_for(args.method, recipe, net, len(train), args.seed)
    run = Run(
        place, args.method, recipe, net, optimizer, len(train), args.seed, args.checkpoint,
        args.checkpoint_minutes, args.bf16,
    )  # fmt: skip
    reader = Reader(train, side, place, args)

    def batches(epoch: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        parts = parts_of_epoch(len(train), recipe.batch_size, epoch, args.seed, place, skip)
        keys = [[(i, key_to_seed(args.seed, 3, epoch, i)) for i in part.tolist()] for part in parts]
        for crop in reader.read(keys):
            yield crop.image, crop.label

    run.to_the_end(batches)
    reader.say_problems("train")
    readable, probs = validate(run, val, side, args, args.samples or VAL_SAMPLES)
    labels = val.labels[readable] if val.is_labelled else None
    place.say(f"{scores(probs, labels)}, {len(readable)} of {len(val)} images")
    if args.predictions and place.rank == 0:
        files = [val.files[place] for place in readable.tolist()]
        write_predictions(args.predictions, files, probs, list(train.classes))
    place.leave()


if __name__ == "__main__":
    main()
