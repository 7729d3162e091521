"""ResNet-20 on CIFAR-10 with IVON, VOGN or Adam, on as many processes as there are.

    torchrun --nproc-per-node 2 examples/train_cifar10_ranks.py --method ivon --data DATA_FOLDER

Network and presets come from the package ``credo-papers`` (``pip install ./papers`` in a checkout;
``make`` does it). They are those of the experiment 004-resnet20: ``paper`` has the published
settings, and ``quick`` is for a laptop. Every rank draws weights of its own and takes its part of
each batch; ``optimizer.step()`` averages. Call it again to go on from the checkpoint, with the same
or another ``--nproc-per-node`` (or with plain ``python``, on one process). ``--synthetic`` trains
on a few made-up images, to try it out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
from ranks import Place, Run, optimizer_for, parser_for, parts_of_epoch, predict, scores
from ranks import refuse_batch_size as refuse
from torch import Tensor
from torch.nn.functional import avg_pool2d

import credo
from credo.data.augment import draw_moves, move
from credo.noise import key_to_seed
from credo_papers.networks import NetName, build
from credo_papers.resnet20 import EXPERIMENT

TEST_BATCH = 500

Examples = tuple[Tensor, Tensor]


def made_up_images(count: int, seed: int) -> Examples:
    """Noise that is brighter in one of ten stripes, which is the class."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 32, 32, generator=generator)
    labels = torch.arange(count) % 10
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, :, 3 * label : 3 * label + 4] += 1.0
    return images, labels


def examples(args: argparse.Namespace) -> tuple[Examples, Examples]:
    """Training and test images, standardised, as many and as large as the preset says."""
    settings = EXPERIMENT.presets[args.preset]
    if args.synthetic:
        train, test = made_up_images(40, seed=1), made_up_images(20, seed=2)
    else:
        images = credo.data.load("cifar10", args.data)
        train, test = images.train, images.test
    n, n_test = settings.num_data, settings.test_images
    x, x_test = credo.data.standardise(
        *(avg_pool2d(part, settings.reduction) for part in (train[0][:n], test[0][:n_test]))
    )
    return (x, train[1][:n]), (x_test, test[1][:n_test])


def main() -> None:
    """Train, keep a checkpoint of every epoch, and say how good the predictions are."""
    parser = parser_for("ResNet-20 on CIFAR-10, on one or many ranks", "cifar10_ranks.safetensors")
    parser.add_argument("--synthetic", action="store_true", help="a few made-up images instead")
    args = parser.parse_args()
    settings = EXPERIMENT.presets[args.preset]
    recipe = settings.recipes[args.method]
    recipe = replace(
        recipe, epochs=args.epochs or recipe.epochs,
        batch_size=args.batch_size or recipe.batch_size,
    )  # fmt: skip
    place = Place.join()
    (x, y), (x_test, y_test) = examples(args)
    refuse(recipe.batch_size, len(x), place.ranks)
    # The seed gives every rank the same first weights.
    name: NetName = "ResNet-20 GN" if args.norm == "group" else "ResNet-20"
    net = build(name, x.shape[1:], args.seed).to(place.device)
    run = Run(
        place, args.method, recipe, net, optimizer_for(args.method, recipe, net, len(x), args.seed),
        len(x), args.seed, args.checkpoint, args.checkpoint_minutes, args.bf16,
    )  # fmt: skip
    padding = x.shape[-1] // 8

    def batches(epoch: int, skip: int) -> Iterator[Examples]:
        generator = torch.Generator().manual_seed(key_to_seed(args.seed, 2, epoch))
        moves = draw_moves(len(x), padding, generator)
        for part in parts_of_epoch(len(x), recipe.batch_size, epoch, args.seed, place, skip):
            moved = move(x[part], moves[part], padding)
            yield moved.to(place.device), y[part].to(place.device)

    run.to_the_end(batches)
    own = torch.arange(len(x_test))[place.rank :: place.ranks].split(TEST_BATCH)
    samples = args.samples or settings.prediction_samples
    probs = predict(run, ((part, x_test[part]) for part in own), len(x_test), 10, samples)
    place.say(scores(probs, y_test))
    place.leave()


if __name__ == "__main__":
    main()
