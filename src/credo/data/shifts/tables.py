r"""Shifts of tables (N, D), made from the training table that says what is usual of a column.

================ ===================================================================================
feature_noise    x + a·s∘ε, s the columns' standard deviations in training
missingness      each entry is lost with probability a, and the training mean put in its place
covariate_tilt   rows drawn again with weights ∝ exp(a·z), z the standardised score of a row on the
                 training table's first principal component: exponential tilting
================ ===================================================================================

Exponential tilting is the covariate shift of Tibshirani et al., "Conformal prediction under
covariate shift", 2019 (arXiv:1904.06019): p(y | x) stays and p(x) moves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from torch import Generator, Tensor

from credo.data.shifts.base import check_floats, check_severity, generator_of
from credo.errors import DataError, UnsupportedError


class TableShift(ABC):
    """A shift of tables at five severities.

    Args:
        train: The training table (N, D), before or after standardisation, as the inputs will be.
    """

    name: ClassVar[str]
    amounts: ClassVar[tuple[float, float, float, float, float]]
    unit: ClassVar[str]

    def __init__(self, train: Tensor) -> None:
        train = _check_table(self.name, train)
        if len(train) < 2:
            raise DataError(f"{self.name} needs a training table of two rows at least")
        wide = train.detach().cpu().double()
        self.mean, self.std = wide.mean(0), wide.std(0, correction=0)

    def __call__(self, x: Tensor, severity: int, seed: int = 0) -> Tensor:
        """The shifted rows, each in its place.

        Args:
            x: A table (N, D) with the training table's columns.
            severity: 1 to 5; 0 gives ``x`` back.
            seed: Of whatever is drawn at random, the same draws at every severity.

        Raises:
            DataError: ``x`` is no such table, or the severity is another.
        """
        severity = check_severity(self.name, severity)
        x = self._check(x)
        if severity == 0:
            return x
        changed = self._change(
            x.detach().cpu().double(), self.amounts[severity - 1], generator_of(seed)
        )
        return changed.to(x)

    def with_labels(
        self, x: Tensor, y: Tensor, severity: int, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Shifted rows and their labels, which stay.

        Args:
            x: A table.
            y: One label for each row.
            severity: 0 to 5.
            seed: As in a call.
        """
        return self(x, severity, seed), y

    def _check(self, x: Tensor) -> Tensor:
        x = _check_table(self.name, x)
        if x.shape[1] != len(self.mean):
            raise DataError(
                f"{self.name} was made from a training table of {len(self.mean)} columns, but got "
                f"one of {x.shape[1]}"
            )
        return x

    @abstractmethod
    def _change(self, x: Tensor, amount: float, generator: Generator) -> Tensor:
        """The rows at this amount, in float64."""

    def __repr__(self) -> str:
        listed = ", ".join(f"{amount:g}" for amount in self.amounts)
        return f"{type(self).__name__}({len(self.mean)} columns: {listed}; {self.unit})"


@final
class FeatureNoise(TableShift):
    """Gaussian noise on every entry, in units of the column's standard deviation in training.

    A column that is constant in training stays as it is.

    Args:
        train: The training table (N, D).

    >>> train = torch.tensor([[0.0, 10.0], [2.0, 10.0]])
    >>> FeatureNoise(train)(train, 5)[:, 1]
    tensor([10., 10.])
    """

    name = "feature_noise"
    amounts = (0.1, 0.25, 0.5, 0.75, 1.0)
    unit = "of a column's standard deviation"

    def _change(self, x: Tensor, amount: float, generator: Generator) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x + amount * self.std * noise


@final
class Missingness(TableShift):
    """Entries lost at random, the training table's mean in their place.

    What is lost at one severity is lost at the higher ones too.

    Args:
        train: The training table (N, D).

    >>> train = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    >>> Missingness(train)(train, 5)
    tensor([[0., 1.], [1., 3.]])
    """

    name = "missingness"
    amounts = (0.05, 0.1, 0.2, 0.3, 0.5)
    unit = "of the entries, filled with the training mean"

    def _change(self, x: Tensor, amount: float, generator: Generator) -> Tensor:
        lost = torch.rand(x.shape, generator=generator, dtype=torch.float64) < amount
        return torch.where(lost, self.mean, x)


@final
class CovariateTilt(TableShift):
    """Rows drawn again, the more often the further they lie along the main direction of the table.

    The rows change places, so labels must come along: `with_labels` or `rows`. A call with inputs
    alone is refused, because labels would no longer belong to them.

    Args:
        train: The training table (N, D); its first principal component, of columns divided by
            their standard deviations, is the direction.

    >>> train = torch.arange(10.0)[:, None]
    >>> rows, labels = CovariateTilt(train).with_labels(train, torch.arange(10), severity=5)
    >>> bool(rows.mean() > train.mean()), bool((rows[:, 0] == labels).all())
    (True, True)
    """

    name = "covariate_tilt"
    amounts = (0.25, 0.5, 1.0, 1.5, 2.0)
    unit = "a of the weights exp(a·z)"

    def __init__(self, train: Tensor) -> None:
        super().__init__(train)
        scaled = self._scaled(train.detach().cpu().double())
        _, values, vectors = torch.linalg.svd(scaled, full_matrices=False)
        direction = vectors[0]
        # The sign of a singular vector is arbitrary: let its largest entry be positive.
        self.direction = direction * direction[direction.abs().argmax()].sign()
        self.deviation = float(values[0]) / len(scaled) ** 0.5

    def rows(self, x: Tensor, severity: int, seed: int = 0) -> Tensor:
        """The numbers of the rows that are drawn, as many as there are.

        Args:
            x: A table (N, D).
            severity: 1 to 5; 0 are all rows in their order.
            seed: Of the draws.
        """
        severity = check_severity(self.name, severity)
        x = self._check(x)
        if severity == 0:
            return torch.arange(len(x), device=x.device)
        weights = self.weights(x, severity)
        # The inverse of the distribution function at uniform draws, sorted along the direction:
        # a higher severity moves every draw further along.
        order = self.scores(x).argsort(stable=True)
        uniform = torch.rand(len(x), generator=generator_of(seed), dtype=torch.float64)
        place = torch.searchsorted(weights[order].cumsum(0), uniform).clamp(max=len(x) - 1)
        return order[place].to(x.device)

    def weights(self, x: Tensor, severity: int) -> Tensor:
        """How likely each row is to be drawn, (N,), adding up to 1.

        Args:
            x: A table (N, D).
            severity: 1 to 5; with 0 all rows are equally likely.
        """
        severity = check_severity(self.name, severity)
        amount = self.amounts[severity - 1] if severity else 0.0
        return torch.softmax(amount * self.scores(self._check(x)), 0)

    def scores(self, x: Tensor) -> Tensor:
        """Each row's standardised place along the direction, (N,), in float64.

        Args:
            x: A table (N, D).
        """
        return self._scaled(x.detach().cpu().double()) @ self.direction / self.deviation

    def with_labels(
        self, x: Tensor, y: Tensor, severity: int, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """The drawn rows and their labels.

        Args:
            x: A table.
            y: One label for each row.
            severity: 0 to 5.
            seed: Of the draws.
        """
        if len(y) != len(x):
            raise DataError(f"{self.name}: there are {len(x)} rows and {len(y)} labels")
        rows = self.rows(x, severity, seed)
        return x[rows], y[rows.to(y.device)]

    def _change(self, x: Tensor, amount: float, generator: Generator) -> Tensor:
        raise UnsupportedError(
            "covariate_tilt draws the rows again, and labels kept elsewhere would no longer belong "
            "to them: take x, y = tilt.with_labels(x, y, severity), or tilt.rows(x, severity)"
        )

    def _scaled(self, x: Tensor) -> Tensor:
        return (x - self.mean) / torch.where(self.std > 0, self.std, 1.0)


TABLES: dict[str, type[TableShift]] = {
    shift.name: shift for shift in (FeatureNoise, Missingness, CovariateTilt)
}
"""The kinds of table shifts by name; each is made from the training table."""


def of_table(train: Tensor) -> dict[str, TableShift]:
    """Every shift of `TABLES` for tables like this one.

    Args:
        train: The training table (N, D).

    >>> list(of_table(torch.randn(20, 3)))
    ['feature_noise', 'missingness', 'covariate_tilt']
    """
    return {name: kind(train) for name, kind in TABLES.items()}


def _check_table(name: str, x: object) -> Tensor:
    table = check_floats(name, x)
    if table.ndim != 2 or 0 in table.shape:
        raise DataError(
            f"{name} needs a table (N, D) with at least one row and column, but its shape is "
            f"{tuple(table.shape)}"
        )
    return table
