"""Data: readers that don't trust their files, an embedded set, toys, named sets, and shifts."""

from credo.data import shifts
from credo.data.cifar import read_cifar
from credo.data.corrupted import corruptions, read_cifar_c, read_mnist_c
from credo.data.embedded import digits
from credo.data.idx import read_idx
from credo.data.image_set import ImageSet, standardise
from credo.data.mat import read_svhn
from credo.data.sets import load
from credo.data.toys import and_gate, sinus_with_gap, two_moons

__all__ = [
    "ImageSet",
    "and_gate",
    "corruptions",
    "digits",
    "load",
    "read_cifar",
    "read_cifar_c",
    "read_idx",
    "read_mnist_c",
    "read_svhn",
    "shifts",
    "sinus_with_gap",
    "standardise",
    "two_moons",
]
