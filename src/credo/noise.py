"""Sources of standard normal noise, reproducible from a key.

Drawing normals dominates what a variational step adds to an ordinary one, so it is a component of
its own. A source fills a vector from ``(seed, *key)``, the key being the step, the sample and the
rank: nothing has to be saved to resume, and nothing depends on the order of calls.

* ``"normal"``: torch's generator. Exact to float precision; about 6 ns a number inside a step.
* ``"table"``: 13 random bits choose one of 8,192 *pairs* from a fixed table, so every two
  neighbouring weights cost one look-up, and the table stays in cache. Marginals are the 8,192
  equal-mass quantiles of N(0, 1), rescaled to variance one (largest |z| 3.8, kurtosis 2.99); the
  pairs lie on a rank-1 lattice, the two-dimensional point set of low discrepancy, so that mixed
  moments vanish too. Pairs are independent of each other, within a step and between steps. About
  2 ns a number inside a training step, a third of torch's. Below 2¹³ weights beginning takes longer
  than drawing: there it is torch's, and up to 2¹⁰ the noise of sixteen steps is drawn at once.
* ``"pool"``: a window of a pool of 2²⁰ numbers of torch's, at an offset and with a sign that change
  with every key, while 2¹⁴ of the pool are drawn anew at every fourth step. A number is thus used
  by P/2¹² weights, another one each time: the noise of one weight stays uncorrelated from step to
  step, but is not independent of what other weights got in recent steps. Nearly free. Below 2¹⁷
  weights it would gain little, and is the table.

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

from credo.checks import checked
from credo.types import Vector

Draws: TypeAlias = Literal["normal", "table", "pool"]

TABLE_BITS = 13
TABLE_BLOCK = 1 << 15
TABLE_FROM = 1 << 13
FEW = 1 << 10
FEW_STEPS = 16
"""Vectors of up to so many numbers are drawn for so many steps at once."""
POOL_SIZE = 1 << 20
POOL_TURNS = 64
STEPS_PER_TURN = 4
_MASK = (1 << 64) - 1
LATTICE_GENERATOR = 1467
"""Chosen among odd multipliers by the largest mixed moment up to order four."""


class NoiseSource(Protocol):
    """Vectors of standard normals, as a function of seed and key."""

    seed: int

    def draw(self, out: Vector, *key: int) -> Vector:
        """The noise of this key in the shape of ``out``: in ``out``, or in memory of its own.

        What is returned may only be written where it is ``out`` itself, and is valid until the next
        call.

        Args:
            out: A flat vector, the memory that may be used.
            key: What tells one draw from another: the step first, then rank, sample and the like.
        """
        ...


@checked
def source(draws: Draws, seed: int) -> NoiseSource:
    """The noise source of this name.

    Args:
        draws: "normal", "table" or "pool".
        seed: Where all its randomness comes from.
    """
    sources: dict[str, type[GeneratorNoise] | type[TableNoise] | type[PoolNoise]] = {
        "normal": GeneratorNoise,
        "table": TableNoise,
        "pool": PoolNoise,
    }
    return sources[draws](seed)


def key_to_seed(seed: int, *key: int) -> int:
    """One well-mixed 63-bit seed from several numbers: SplitMix64, absorbing one after the other.

    In plain Python, because numpy's SeedSequence takes longer than a small network's forward pass.

    Args:
        seed: The first number.
        key: The others.
    """
    state = 0
    for number in (seed, *key, len(key)):
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class GeneratorNoise(NoiseSource):
    """Torch's own normals, on any device and in any dtype.

    Args:
        seed: Where all its randomness comes from.
    """

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


class TableNoise(NoiseSource):
    """Pairs of normals looked up by 13 random bits; of few, or on GPUs or in float64, torch's own.

    The bits come from SFC64, the fastest of numpy's generators, seeded by the key. The first number
    of a key is taken as the step.

    Args:
        seed: Where all its randomness comes from.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._elsewhere = GeneratorNoise(seed)
        self._ahead: dict[tuple[int, ...], tuple[Vector, ...]] = {}
        self._turn = -1

    def draw(self, out: Vector, *key: int) -> Vector:
        """The noise of this key: in ``out``, or in memory of its own where numbers are few."""
        size = out.numel()
        if FEW < size < TABLE_FROM or not _is_plain(out):
            return self._elsewhere.draw(out, *key)
        if size > FEW or not key:
            return self._fill(out, key)
        turn, place = divmod(key[0], FEW_STEPS)
        if turn != self._turn:
            self._turn = turn
            self._ahead.clear()
        rest = (size, *key[1:])
        rows = self._ahead.get(rest)
        if rows is None:
            block = torch.empty(FEW_STEPS * (size + size % 2))
            rows = tuple(self._fill(block, (turn, *rest)).view(FEW_STEPS, -1)[:, :size].unbind())
            self._ahead[rest] = rows
        return rows[place]

    def _fill(self, out: Vector, key: tuple[int, ...]) -> Vector:
        numbers: NDArray[np.float32] = out.numpy()
        slots = numbers[: len(numbers) // 2 * 2].view(np.float64)
        bits = np.random.SFC64(key_to_seed(self.seed, *key))
        # In blocks: numpy widens the indices, and what it makes of a block stays in cache.
        for start in range(0, len(slots), TABLE_BLOCK):
            block = slots[start : start + TABLE_BLOCK]
            words = bits.random_raw(-(-len(block) // 4)).view(np.uint16)[: len(block)]
            words >>= np.uint16(16 - TABLE_BITS)
            # mode="clip" skips numpy's bounds check; these indices can't be out of bounds.
            np.take(_pairs(), words, out=block, mode="clip")
        if len(numbers) % 2:
            numbers[-1] = _pairs().view(np.float32)[2 * (bits.random_raw() >> (64 - TABLE_BITS))]
        return out


class PoolNoise(NoiseSource):
    """Windows of a slowly renewed pool of normals; see the module's text for what that means.

    The first number of a key is taken as the step. The pool of a step is a function of the seed and
    the step alone: it is rebuilt when steps don't follow each other, as after a resume.

    Args:
        seed: Where all its randomness comes from.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._table, self._fresh = TableNoise(seed), GeneratorNoise(seed)
        self._pool = torch.empty(0)
        self._turn = -1

    def draw(self, out: Vector, *key: int) -> Vector:
        """A view of the pool where one window is enough, else ``out`` filled block by block."""
        size = out.numel()
        if not _is_plain(out) or size < POOL_SIZE // 8:
            return self._table.draw(out, *key)
        self._advance_to(key[0] // STEPS_PER_TURN)
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

    def _advance_to(self, turn: int) -> None:
        """Renew the stretch whose turn it is, or everything if turns were skipped."""
        if turn == self._turn:
            return
        if not len(self._pool) or turn != self._turn + 1:
            self._pool = torch.empty(2 * POOL_SIZE)
            for past in range(turn - POOL_TURNS + 1, turn):
                self._renew(past)
        self._renew(turn)
        self._turn = turn

    def _renew(self, turn: int) -> None:
        numbers = self._fresh.draw(torch.empty(POOL_SIZE // POOL_TURNS), turn + POOL_TURNS, 0, 1)
        self._write(turn % POOL_TURNS * len(numbers), numbers)

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
    # Shifted, so that no pair has both its numbers in the farthest corner.
    partners = quantiles[(ranks * LATTICE_GENERATOR + size // 3) % size]
    pairs = np.stack([quantiles, partners], axis=1).astype(np.float32)
    return np.ascontiguousarray(pairs).view(np.float64).ravel()
