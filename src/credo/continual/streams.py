"""Streams of tasks made from data sets: permuted, split, rotated, or one set after the other.

================ ====================================== ============================== ============
function         task t                                 changes                        heads
================ ====================================== ============================== ============
`permuted`       all classes, pixels in another order   the inputs                     one
`rotated`        all classes, turned by another angle   the inputs                     one
`split`          some of the classes                    the classes                    many or one
`sequence`       another data set                       everything                     many or one
================ ====================================== ============================== ============

Data sets are named (`credo.data.load`), `credo.data.ImageSet`, or anything with ``train``, ``test``
and ``classes``. ``num_data`` and ``num_test`` keep so many examples of each task, chosen at random
by ``seed``; the same seed gives the same stream. Permutations come from the seed alone, so that a
smaller stream has the same tasks.

    >>> stream = split("digits", num_data=100)
    >>> [task.name for task in stream], stream.head_sizes
    (['digits 0 1', 'digits 2 3', 'digits 4 5', 'digits 6 7', 'digits 8 9'], (2, 2, 2, 2, 2))
    >>> stream[1].train[0].shape, sorted(set(stream[1].train[1].tolist()))
    (torch.Size([100, 1, 8, 8]), [0, 1])

References: permuted MNIST, Goodfellow et al., 2013 (arXiv:1312.6211); split MNIST, Zenke, Poole &
Ganguli, 2017 (arXiv:1703.04200); rotated MNIST, Lopez-Paz & Ranzato, 2017 (arXiv:1706.08840).
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from credo.checks import Count, checked
from credo.continual.tasks import Examples, Stream, Task
from credo.data import load
from credo.errors import DataError
from credo.noise import key_to_seed

Heads: TypeAlias = Literal["multi", "single"]


class DataSet(Protocol):
    """What streams are made from."""

    @property
    def name(self) -> str:
        """For the names of the tasks."""
        ...

    @property
    def train(self) -> Examples:
        """Inputs (N, ...) and labels (N,)."""
        ...

    @property
    def test(self) -> Examples:
        """The same, unseen."""
        ...

    @property
    def classes(self) -> Sequence[str]:
        """What the labels count."""
        ...


@checked
def permuted(
    data: str | DataSet,
    tasks: Count = 10,
    seed: int = 0,
    num_data: Count | None = None,
    num_test: Count | None = None,
    root: str | PathLike[str] | None = None,
) -> Stream:
    """All classes in every task, the inputs flattened to (N, D) and their numbers reordered.

    The first task has the order of the data set itself.

    Args:
        data: The name of a data set for `credo.data.load`, or the data set.
        tasks: How many.
        seed: Of all random choices.
        num_data: Training examples of each task, a random choice; None takes all.
        num_test: Test examples of each task, the same way.
        root: The folder with the data sets, if not CREDO_DATA's.
    """
    source = _data_set(data, root)
    train, test = ((x.flatten(1), y) for x, y in (source.train, source.test))
    made = []
    for index in range(tasks):
        order = torch.arange(train[0].shape[1])
        if index:
            order = order[torch.randperm(len(order), generator=_generator(seed, 0, index))]
        few, few_test = _few(train, num_data, seed, index), _few(test, num_test, seed, index, 1)
        made.append(
            Task(
                f"{source.name} permuted {index}",
                (few[0][:, order], few[1]),
                (few_test[0][:, order], few_test[1]),
                tuple(range(len(source.classes))),
            )
        )
    return Stream(f"permuted {source.name}", tuple(made))


@checked
def rotated(
    data: str | DataSet,
    angles: Sequence[float] = (0.0, 20.0, 40.0, 60.0, 80.0),
    seed: int = 0,
    num_data: Count | None = None,
    num_test: Count | None = None,
    root: str | PathLike[str] | None = None,
) -> Stream:
    """All classes in every task, the images (N, C, H, W) turned.

    Args:
        data: The name of a data set for `credo.data.load`, or the data set.
        angles: In degrees, one for each task.
        seed: Of all random choices.
        num_data: Training examples of each task, a random choice; None takes all.
        num_test: Test examples of each task, the same way.
        root: The folder with the data sets, if not CREDO_DATA's.
    """
    source = _data_set(data, root)
    made = []
    for index, angle in enumerate(angles):
        parts = (
            _few(source.train, num_data, seed, index),
            _few(source.test, num_test, seed, index, 1),
        )
        train, test = ((turned(x, angle), y) for x, y in parts)
        classes = tuple(range(len(source.classes)))
        made.append(Task(f"{source.name} turned {angle:g}°", train, test, classes))
    return Stream(f"rotated {source.name}", tuple(made))


@checked
def split(
    data: str | DataSet,
    per_task: int | Sequence[Sequence[int]] = 2,
    heads: Heads = "multi",
    seed: int = 0,
    num_data: Count | None = None,
    num_test: Count | None = None,
    root: str | PathLike[str] | None = None,
) -> Stream:
    """The classes in groups, one task for each.

    Args:
        data: The name of a data set for `credo.data.load`, or the data set.
        per_task: How many neighbouring classes a group has, or the groups themselves.
        heads: With "multi" labels count from 0 in each task. With "single" they stay those of the
            data set, and a learner has to tell all classes from each other ("class-incremental").
        seed: Of all random choices.
        num_data: Training examples of each task, a random choice; None takes all.
        num_test: Test examples of each task, the same way.
        root: The folder with the data sets, if not CREDO_DATA's.
    """
    source = _data_set(data, root)
    groups = _groups(len(source.classes), per_task)
    made = []
    for index, group in enumerate(groups):
        wanted = None if heads == "single" else {label: place for place, label in enumerate(group)}
        train = _of_classes(source.train, group, wanted)
        test = _of_classes(source.test, group, wanted)
        names = " ".join(str(source.classes[label]) for label in group)
        made.append(
            Task(
                f"{source.name} {names}",
                _few(train, num_data, seed, index),
                _few(test, num_test, seed, index, 1),
                tuple(group) if heads == "multi" else tuple(range(len(source.classes))),
                index if heads == "multi" else None,
            )
        )
    return Stream(f"split {source.name}", tuple(made))


@checked
def sequence(
    sets: Sequence[str | DataSet],
    heads: Heads = "multi",
    seed: int = 0,
    num_data: Count | None = None,
    num_test: Count | None = None,
    root: str | PathLike[str] | None = None,
) -> Stream:
    """Any data sets, one after the other; with a single head their labels share one meaning.

    Streams can also be made by hand: ``Stream(name, (Task(...), Task(...)))``.

    Args:
        sets: Names for `credo.data.load`, or data sets.
        heads: "multi" for outputs of its own for each, "single" for shared ones.
        seed: Of all random choices.
        num_data: Training examples of each task, a random choice; None takes all.
        num_test: Test examples of each task, the same way.
        root: The folder with the data sets, if not CREDO_DATA's.
    """
    made = []
    for index, each in enumerate(sets):
        source = _data_set(each, root)
        made.append(
            Task(
                source.name,
                _few(source.train, num_data, seed, index),
                _few(source.test, num_test, seed, index, 1),
                tuple(range(len(source.classes))),
                index if heads == "multi" else None,
            )
        )
    return Stream(" then ".join(task.name for task in made), tuple(made))


def turned(images: Tensor, degrees: float) -> Tensor:
    """Images (N, C, H, W) turned counter-clockwise around their centre, zeros from outside.

    Quarter turns are exact, other angles interpolate bilinearly.

    Args:
        images: (N, C, H, W).
        degrees: Counter-clockwise.

    >>> turned(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90)
    tensor([[[[2., 4.], [1., 3.]]]])
    """
    if images.ndim != 4:
        raise DataError(f"images are (N, C, H, W), but these have shape {tuple(images.shape)}")
    if degrees % 90 == 0 and (images.shape[2] == images.shape[3] or degrees % 180 == 0):
        return torch.rot90(images, int(degrees // 90), dims=(2, 3))
    angle = torch.deg2rad(torch.tensor(float(degrees), dtype=torch.float64))
    cosine, sine = float(angle.cos()), float(angle.sin())
    # Coordinates run from −1 to 1 in both directions, whatever the sides are.
    height, width = images.shape[2:]
    matrix = images.new_tensor(
        [[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]
    )
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def _data_set(data: str | DataSet, root: str | PathLike[str] | None) -> DataSet:
    return load(data, root) if isinstance(data, str) else data


def _groups(classes: int, per_task: int | Sequence[Sequence[int]]) -> list[list[int]]:
    if isinstance(per_task, int):
        if per_task < 1 or classes % per_task:
            raise DataError(
                f"{classes} classes do not divide into tasks of {per_task}; give a divisor, or the "
                "groups of classes themselves"
            )
        return [list(range(i, i + per_task)) for i in range(0, classes, per_task)]
    groups = [list(group) for group in per_task]
    if not groups or not all(groups) or not all(0 <= c < classes for g in groups for c in g):
        raise DataError(f"per_task={per_task!r} must be groups of the classes 0 to {classes - 1}")
    return groups


def _of_classes(data: Examples, group: Sequence[int], renamed: dict[int, int] | None) -> Examples:
    x, y = data
    rows = torch.isin(y, torch.tensor(list(group), dtype=y.dtype))
    labels = y[rows]
    if renamed is not None:
        labels = torch.tensor([renamed[int(label)] for label in labels], dtype=y.dtype)
    return x[rows], labels


def _few(data: Examples, count: int | None, seed: int, *key: int) -> Examples:
    """So many examples, a random choice without repetition; all where there are not so many."""
    x, y = data
    if count is None or count >= len(y):
        return x, y
    rows = torch.randperm(len(y), generator=_generator(seed, 1, *key))[:count]
    return x[rows], y[rows]


def _generator(seed: int, *key: int) -> Generator:
    return torch.Generator().manual_seed(key_to_seed(seed, *key))
