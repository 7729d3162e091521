"""Sources of standard normal noise, reproducible from a key.

Drawing normals dominates what a variational step adds to an ordinary one, so it is a component of
its own. A source fills a vector from ``(seed, *key)``, the key being the step, the sample and the
rank: nothing has to be saved to resume, and nothing depends on the order of calls.

* ``"normal"``: torch's generator. Exact to float precision; about 4 ns a number on one CPU core.
* ``"table"``: 16 random bits choose one of 65,536 *pairs* from a fixed table, so every two
  neighbouring weights cost one look-up. Marginals are the 65,536 equal-mass quantiles of N(0, 1),
  rescaled to variance one (largest |z| 4.3, kurtosis 2.998); the pairs lie on a rank-1 lattice,
  the two-dimensional point set of low discrepancy, so that mixed moments vanish too. Pairs are
  independent of each other, within a step and between steps. About 1 ns a number.

``tests/unit/test_noise.py`` holds the moments, the correlations between weights and between steps,
and the trained ELBO.

    >>> import torch
    >>> noise = source("table", seed=1)
    >>> a, b = torch.empty(5), torch.empty(5)
    >>> noise.fill(a, 3); noise.fill(b, 3); bool((a == b).all())
    True
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from credo.errors import DataError
from credo.types import Vector

Draws: TypeAlias = Literal["normal", "table"]

TABLE_BITS = 16
LATTICE_GENERATOR = 29989
"""Chosen among odd multipliers by the largest mixed moment up to order four (1.3e-3)."""


class NoiseSource(Protocol):
    """Fills vectors with standard normals, as a function of seed and key."""

    seed: int

    def fill(self, out: Vector, *key: int) -> None:
        """Overwrite ``out`` with the noise of this key."""
        ...


def source(draws: Draws, seed: int) -> NoiseSource:
    """The noise source of this name."""
    sources: dict[str, type[GeneratorNoise] | type[TableNoise]] = {
        "normal": GeneratorNoise,
        "table": TableNoise,
    }
    if draws not in sources:
        raise DataError(f"draws={draws!r} is not a noise source; choose from {sorted(sources)}")
    return sources[draws](seed)


def key_to_seed(seed: int, *key: int) -> int:
    """One well-mixed 63-bit seed from several small numbers."""
    state = np.random.SeedSequence([seed, *key]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


class GeneratorNoise:
    """Torch's own normals, on any device and in any dtype."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def fill(self, out: Vector, *key: int) -> None:
        """Overwrite ``out`` with the noise of this key."""
        generator = self._generators.get(out.device)
        if generator is None:
            generator = self._generators[out.device] = torch.Generator(out.device)
        generator.manual_seed(key_to_seed(self.seed, *key))
        out.normal_(generator=generator)


class TableNoise:
    """Pairs of normals looked up by 16 random bits; elsewhere than float32 on a CPU, torch's own.

    The bits come from SFC64, the fastest of numpy's generators, seeded by the key.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._elsewhere = GeneratorNoise(seed)

    def fill(self, out: Vector, *key: int) -> None:
        """Overwrite ``out`` with the noise of this key."""
        if out.device.type != "cpu" or out.dtype != torch.float32 or not out.is_contiguous():
            self._elsewhere.fill(out, *key)
            return
        numbers: NDArray[np.float32] = out.numpy()
        pairs = len(numbers) // 2
        bits = np.random.SFC64(np.random.SeedSequence([self.seed, *key]))
        words = bits.random_raw(pairs // 4 + 1).view(np.uint16)
        # mode="clip" skips numpy's bounds check; 16 bits can't be out of bounds.
        np.take(_pairs(), words[:pairs], out=numbers[: 2 * pairs].view(np.float64), mode="clip")
        if len(numbers) % 2:
            numbers[-1] = _pairs().view(np.float32)[2 * int(words[pairs])]


@cache
def _pairs() -> NDArray[np.float64]:
    """The table: two float32 normals to each float64 slot."""
    size = 1 << TABLE_BITS
    ranks = np.arange(size)
    quantiles = ndtri((ranks + 0.5) / size)
    quantiles /= quantiles.std()
    partners = quantiles[ranks * LATTICE_GENERATOR % size]
    pairs = np.stack([quantiles, partners], axis=1).astype(np.float32)
    return np.ascontiguousarray(pairs).view(np.float64).ravel()
