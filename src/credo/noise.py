"""Sources of standard normal noise, reproducible from a key.

Drawing normals dominates what a variational step adds to an ordinary one, so it is a component of
its own. A source fills a vector from ``(seed, *key)``, the key being the step, the sample and the
rank: nothing has to be saved to resume, and nothing depends on the order of calls.

* ``"normal"``: torch's generator. Exact to float precision; about 4 ns a number on one CPU core.
* ``"table"``: 16 random bits choose one of 65,536 *pairs* from a fixed table, so every two
  neighbouring weights cost one look-up. Marginals are the 65,536 equal-mass quantiles of N(0, 1),
  rescaled to variance one (largest |z| 4.3, kurtosis 2.998); the pairs lie on a rank-1 lattice,
  the two-dimensional point set of low discrepancy, so that mixed moments vanish too. Pairs are
  independent of each other, within a step and between steps. About 1.3 ns a number.
* ``"pool"``: a window of a pool of 2²⁰ table draws, at an offset and with a sign that change with
  every key, while a sixteenth of the pool is drawn anew at every step. A number is thus used by
  P/2¹⁶ weights, another one each time: the noise of one weight stays uncorrelated from step to
  step, but is not independent of what other weights got in recent steps. About 0.2 ns a number.
  Below 2¹⁷ weights it would gain little, and is the table.

``tests/unit/test_noise.py`` holds the moments, the correlations between weights and between steps,
and the trained ELBO.

    >>> import torch
    >>> noise = source("table", seed=1)
    >>> a, b = noise.draw(torch.empty(5), 3), noise.draw(torch.empty(5), 3)
    >>> bool((a == b).all())
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

Draws: TypeAlias = Literal["normal", "table", "pool"]

TABLE_BITS = 16
TABLE_BLOCK = 1 << 14
POOL_SIZE = 1 << 20
POOL_TURNS = 16
LATTICE_GENERATOR = 29989
"""Chosen among odd multipliers by the largest mixed moment up to order four (1.3e-3)."""


class NoiseSource(Protocol):
    """Vectors of standard normals, as a function of seed and key."""

    seed: int

    def draw(self, out: Vector, *key: int) -> Vector:
        """The noise of this key in the shape of ``out``: in ``out``, or in memory of its own.

        What is returned may only be written where it is ``out`` itself, and is valid until the next
        call.
        """
        ...


def source(draws: Draws, seed: int) -> NoiseSource:
    """The noise source of this name."""
    sources: dict[str, type[GeneratorNoise] | type[TableNoise] | type[PoolNoise]] = {
        "normal": GeneratorNoise,
        "table": TableNoise,
        "pool": PoolNoise,
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

    def draw(self, out: Vector, *key: int) -> Vector:
        """Overwrite ``out`` with the noise of this key."""
        generator = self._generators.get(out.device)
        if generator is None:
            generator = self._generators[out.device] = torch.Generator(out.device)
        generator.manual_seed(key_to_seed(self.seed, *key))
        return out.normal_(generator=generator)


class TableNoise:
    """Pairs of normals looked up by 16 random bits; elsewhere than float32 on a CPU, torch's own.

    The bits come from SFC64, the fastest of numpy's generators, seeded by the key.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._elsewhere = GeneratorNoise(seed)

    def draw(self, out: Vector, *key: int) -> Vector:
        """Overwrite ``out`` with the noise of this key."""
        if not _is_plain(out):
            return self._elsewhere.draw(out, *key)
        numbers: NDArray[np.float32] = out.numpy()
        slots = numbers[: len(numbers) // 2 * 2].view(np.float64)
        bits = np.random.SFC64(np.random.SeedSequence([self.seed, *key]))
        # In blocks: numpy widens the 16-bit indices, and what it makes of a block stays in cache.
        for start in range(0, len(slots), TABLE_BLOCK):
            block = slots[start : start + TABLE_BLOCK]
            words = bits.random_raw(-(-len(block) // 4)).view(np.uint16)[: len(block)]
            # mode="clip" skips numpy's bounds check; 16 bits can't be out of bounds.
            np.take(_pairs(), words, out=block, mode="clip")
        if len(numbers) % 2:
            numbers[-1] = _pairs().view(np.float32)[2 * (bits.random_raw() & 0xFFFF)]
        return out


class PoolNoise:
    """Windows of a slowly renewed pool of `TableNoise`; see the module's text for what that means.

    The first number of a key is taken as the step. The pool of a step is a function of the seed and
    the step alone: it is rebuilt when steps don't follow each other, as after a resume.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._table = TableNoise(seed)
        self._pool = torch.empty(0)
        self._step = -1

    def draw(self, out: Vector, *key: int) -> Vector:
        """A view of the pool where one window is enough, else ``out`` filled block by block."""
        size = out.numel()
        if not _is_plain(out) or size < POOL_SIZE // 8:
            return self._table.draw(out, *key)
        self._advance_to(key[0])
        bits = key_to_seed(self.seed, *key)
        if 2 * size <= POOL_SIZE:
            # The pool is followed by its negative, so the offset also chooses the sign.
            offset = bits % (2 * POOL_SIZE - size)
            return self._pool[offset : offset + size]
        for start in range(0, size, POOL_SIZE // 2):
            block = out[start : start + POOL_SIZE // 2]
            offset = key_to_seed(bits, start) % (2 * POOL_SIZE - block.numel())
            block.copy_(self._pool[offset : offset + block.numel()])
        return out

    def _advance_to(self, step: int) -> None:
        """Renew the stretch that is this step's turn, or everything if steps were skipped."""
        if step == self._step:
            return
        if not len(self._pool) or step != self._step + 1:
            self._pool = torch.empty(2 * POOL_SIZE)
            for past in range(step - POOL_TURNS + 1, step):
                self._renew(past)
        self._renew(step)
        self._step = step

    def _renew(self, step: int) -> None:
        numbers = self._table.draw(torch.empty(POOL_SIZE // POOL_TURNS), step + POOL_TURNS, 0, 1)
        self._write(step % POOL_TURNS * len(numbers), numbers)

    def _write(self, start: int, numbers: Vector) -> None:
        stop = start + len(numbers)
        self._pool[start:stop] = numbers
        torch.neg(numbers, out=self._pool[POOL_SIZE + start : POOL_SIZE + stop])


def _is_plain(out: Vector) -> bool:
    """Whether numpy can write it: float32, contiguous, on the CPU."""
    return out.device.type == "cpu" and out.dtype == torch.float32 and out.is_contiguous()


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
