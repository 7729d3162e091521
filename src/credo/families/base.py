"""What every family shares: its size, its tensors on disk, and how it serves as a prior."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import Generator, Tensor

from credo.errors import DataError, FileFormatError, UnsupportedError
from credo.noise import NoiseSource
from credo.types import Json, Segment, Vector


class Family(ABC):
    """A distribution over flat vectors (P,), stored as tensors.

    A family is one file: a frozen dataclass whose fields are tensors, ``__post_init__`` that checks
    their shapes, and the methods below. ``pack``, ``unpack``, ``on`` and ``config`` follow from the
    fields. A family is its own prior rule, so yesterday's posterior can be today's prior.
    """

    mean: Vector
    """The mean, (P,)."""

    is_continuous: ClassVar[bool] = True
    """Whether it has a density, so that its KL to a prior with a density is finite."""

    @property
    def points(self) -> int | None:
        """How many points have all the mass; None where they can't be counted."""
        return None

    if TYPE_CHECKING:
        # Either a field or a property of the concrete family. At run time a property here would
        # become the default value of the field.
        @property
        def scale(self) -> Vector:
            """The standard deviation of each weight, (P,)."""

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return self.mean.shape[-1]

    @property
    @abstractmethod
    def variance(self) -> Vector:
        """The variance of each weight, (P,)."""

    @abstractmethod
    def log_prob(self, w: Vector) -> Tensor:
        """Log-density summed over the last dimension: (..., P) → (...).

        Args:
            w: Weights, (..., P).
        """

    @abstractmethod
    def grad_log_prob(self, w: Vector) -> Tensor:
        """∇_w log q(w) in closed form: (..., P) → (..., P).

        Args:
            w: Weights, (..., P).
        """

    @abstractmethod
    def entropy(self) -> Tensor:
        """Differential entropy −E log q, in nats; 0-dim."""

    @abstractmethod
    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Draws, (n, P), in memory of their own.

        Args:
            n: How many draws.
            generator: Where the randomness comes from; torch's own if None.
        """

    @abstractmethod
    def walk(self, n: int, noise: NoiseSource, out: Vector) -> Iterator[Vector]:
        """One draw after the other, each (P,): what prediction loops over.

        A draw may be written into ``out`` and is valid until the next one. A point mass yields
        once, however many are asked for.

        Args:
            n: How many draws.
            noise: Where their normals come from.
            out: A vector (P,) that may be written into.
        """

    def on(self, segments: Sequence[Segment], like: Vector) -> Self:
        """This distribution itself, as the prior over ``segments``, cast to match ``like``."""
        total = sum(segment.size for segment in segments)
        if total != self.size:
            raise DataError(
                f"this {type(self).__name__} is over {self.size} weights but the {len(segments)} "
                f"segments it should be the prior of hold {total}; a family can only be the prior "
                "of a network with the parameters it was fitted to"
            )
        if (self.mean.dtype, self.mean.device) == (like.dtype, like.device):
            return self
        tensors, meta = self.pack()
        return self.unpack({name: tensor.to(like) for name, tensor in tensors.items()}, meta)

    def config(self) -> Json:
        """Names the family; its tensors travel separately, through ``pack``."""
        return {"type": type(self).__name__, "stored": True}

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Contiguous tensors plus JSON, as safetensors wants them; a constant vector is 0-dim."""
        values = ((field.name, getattr(self, field.name)) for field in _stored_fields(type(self)))
        tensors = {name: _compact(value.detach()) for name, value in values if value is not None}
        return tensors, {"type": type(self).__name__, "size": self.size}

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], meta: Json) -> Self:
        """The inverse of ``pack``; what can't have come from it is a `FileFormatError`.

        Args:
            tensors: The stored tensors by name.
            meta: The stored JSON.
        """
        size = stored_size(cls.__name__, meta)
        stored = _stored_fields(cls)
        known = {field.name for field in stored}
        required = {field.name for field in stored if field.default is dataclasses.MISSING}
        if not required <= tensors.keys() <= known:
            raise FileFormatError(
                f"a stored {cls.__name__} has the tensors {sorted(known)}, got {sorted(tensors)}"
            )
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise FileFormatError(
                    f"{name} of the stored {cls.__name__} has values that are not finite"
                )
        try:
            family = cls(
                **{
                    name: tensor.expand(size) if tensor.dim() == 0 else tensor
                    for name, tensor in tensors.items()
                }
            )
        except DataError as error:
            raise FileFormatError(
                f"the tensors of a stored {cls.__name__} don't fit: {error}"
            ) from error
        if family.size != size:
            raise FileFormatError(
                f"a stored {cls.__name__} says size {size} but its tensors have {family.size}"
            )
        return family


class Atomic(Family):
    """A family that puts its mass on finitely many points, and so has no density."""

    is_continuous: ClassVar[bool] = False
    _why_no_density: ClassVar[str]

    @property
    def scale(self) -> Vector:
        """The standard deviation of each weight, (P,)."""
        return self.variance.sqrt()

    def log_prob(self, w: Vector) -> NoReturn:
        """Refused: there is no density."""
        raise UnsupportedError(f"{type(self).__name__} has no log_prob: {self._why_no_density}")

    def grad_log_prob(self, w: Vector) -> NoReturn:
        """Refused: there is no density."""
        raise UnsupportedError(
            f"{type(self).__name__} has no grad_log_prob: {self._why_no_density}"
        )

    def entropy(self) -> NoReturn:
        """Refused: it would be −∞, which would poison an objective without a word."""
        raise UnsupportedError(f"{type(self).__name__} has no entropy: {self._why_no_density}")


def stored_size(family: str, meta: Json) -> int:
    """The size that a stored family says it has, or a `FileFormatError`."""
    size = meta.get("size")
    if not isinstance(size, int) or size < 1:
        raise FileFormatError(
            f"a stored {family} must say its size as a positive integer, got {size!r}"
        )
    return size


def check_floating(**tensors: Tensor) -> None:
    """Raise `DataError` unless all are floating and share one dtype and device."""
    kinds = {name: (tensor.dtype, tensor.device) for name, tensor in tensors.items()}
    if len(set(kinds.values())) > 1 or not all(t.is_floating_point() for t in tensors.values()):
        given = ", ".join(f"{name} {dtype} on {device}" for name, (dtype, device) in kinds.items())
        raise DataError(f"expected floating-point tensors of one dtype and device, got {given}")


def check_points(w: Tensor, size: int) -> None:
    """Raise `DataError` unless ``w`` is (..., size): a silent broadcast would miscount weights."""
    if w.dim() == 0 or w.shape[-1] != size:
        raise DataError(f"expected points (..., {size}), got shape {tuple(w.shape)}")


def check_count(n: int) -> None:
    """Raise `DataError` unless ``n`` draws can be made."""
    if n < 1:
        raise DataError(f"the number of samples must be at least 1, got {n}")


def refuse_unless(valid: Tensor, value: Tensor, family: str, name: str, requirement: str) -> None:
    """Raise `DataError` naming the first entry of ``value`` where ``valid`` is False.

    Args:
        valid: Whether each entry may be as it is; of the shape of ``value``.
        value: What was given.
        family: Whose parameter it is.
        name: What it is called.
        requirement: What it must be.

    >>> rate = torch.tensor([1.0, -1.0])
    >>> refuse_unless(rate > 0, rate, "Gamma", "rate", "positive")
    Traceback (most recent call last):
        ...
    credo.errors.DataError: Gamma: rate must be positive, but entry [1] is -1
    """
    if bool(valid.all()):
        return
    where = tuple(torch.nonzero(~valid)[0].tolist())
    at = f"entry {list(where)} is" if where else "it is"
    raise DataError(f"{family}: {name} must be {requirement}, but {at} {value[where].item():.6g}")


def _stored_fields(family: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(family) if field.init]


def _compact(tensor: Tensor) -> Tensor:
    """A vector expanded from one number as that number; anything else made contiguous."""
    if tensor.dim() == 1 and tensor.stride() == (0,):
        return tensor[0].clone()
    return tensor.contiguous()
