"""Data: readers that don't trust their files, an embedded set, toys, and named sets."""

from credo.data.cifar import read_cifar
from credo.data.embedded import digits
from credo.data.idx import read_idx
from credo.data.image_set import ImageSet, standardise
from credo.data.mat import read_svhn
from credo.data.sets import load
from credo.data.toys import and_gate, sinus_with_gap, two_moons

__all__ = [
    "ImageSet",
    "and_gate",
    "digits",
    "load",
    "read_cifar",
    "read_idx",
    "read_svhn",
    "sinus_with_gap",
    "standardise",
    "two_moons",
]
