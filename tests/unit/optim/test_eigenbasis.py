"""Which axes get a basis, and that a matrix is turned, absorbed and cut up as it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from credo.optim.eigenbasis import EigenMatrix, pieces, sides


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(numbers(size, size, seed=seed)).Q


LIKE = torch.zeros(0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "max_size", "one_sided", "expected"),
    [
        ((3, 4), 4, False, (True, True)),
        ((3, 4), 3, False, (True, False)),
        ((5, 4), 4, False, (False, True)),
        ((5, 4), 3, False, (False, False)),
        ((3, 4), 9, True, (True, False)),
        ((4, 3), 9, True, (False, True)),
        ((3, 3), 9, True, (True, False)),
        ((1, 4), 9, True, (False, True)),  # a Linear(4, 1): the other axis has nothing to turn
        ((1, 1), 9, False, (False, False)),
        ((9, 4), 8, True, (False, True)),
    ],
)
def test_sides(
    shape: tuple[int, int], max_size: int, one_sided: bool, expected: tuple[bool, bool]
) -> None:
    assert sides(shape, max_size, one_sided) == expected


def matrix(axes: tuple[bool, bool], start: int = 0) -> EigenMatrix:
    found = EigenMatrix(slice(start, start + 12), (3, 4), axes, LIKE)
    if found.left is not None:
        found.left.basis.copy_(rotation(3, 1))
    if found.right is not None:
        found.right.basis.copy_(rotation(4, 2))
    return found


@pytest.mark.parametrize("axes", [(True, True), (True, False), (False, True)])
def test_into_and_out_of_are_products_with_the_bases(axes: tuple[bool, bool]) -> None:
    block, m, room = matrix(axes), numbers(12, seed=3), torch.empty(20, dtype=torch.float64)
    left = rotation(3, 1) if axes[0] else torch.eye(3).double()
    right = rotation(4, 2) if axes[1] else torch.eye(4).double()
    turned = block.into(m, torch.empty_like(m), room)
    torch.testing.assert_close(turned.view(3, 4), left.mT @ m.view(3, 4) @ right)
    torch.testing.assert_close(block.out_of(turned, torch.empty_like(m), room), m)


def test_moments_are_averages_of_squares() -> None:
    block, g = matrix((True, True)), numbers(2, 12, seed=4)
    for one in g:
        block.absorb(one, keep=0.9)
    first, second = g.view(2, 3, 4)
    assert block.left is not None
    assert block.right is not None
    torch.testing.assert_close(
        block.left.moment, 0.09 * first @ first.mT + 0.1 * second @ second.mT
    )
    torch.testing.assert_close(
        block.right.moment, 0.09 * first.mT @ first + 0.1 * second.mT @ second
    )


def test_a_refresh_sorts_the_curvature_of_both_axes_with_their_columns() -> None:
    """The moments' eigenvectors are the bases' columns in another order: all else stays."""
    block, h = matrix((True, True)), numbers(12, seed=5).square()
    mean, momentum = numbers(12, seed=6), numbers(12, seed=7)
    old_momentum, old_h = momentum.clone(), h.clone()
    assert block.left is not None
    assert block.right is not None
    for axis, values in ((block.left, [1.0, 9.0, 4.0]), (block.right, [1.0, 2.0, 8.0, 4.0])):
        axis.moment.copy_(axis.basis * torch.tensor(values).double() @ axis.basis.mT)
    block.refresh(mean, momentum, h)
    rows, columns = [1, 2, 0], [2, 3, 1, 0]
    torch.testing.assert_close(h.view(3, 4), old_h.view(3, 4)[rows][:, columns])
    # √ε of the moments is added to tell equal values apart, which turns the bases that much.
    expected = old_momentum.view(3, 4)[rows][:, columns]
    torch.testing.assert_close(momentum.view(3, 4), expected, rtol=0, atol=1e-6)
    turned = block.into(mean, torch.empty_like(mean), torch.empty_like(mean))
    torch.testing.assert_close(block.mean, turned)


def test_the_first_refresh_keeps_the_diagonal_of_the_curvature() -> None:
    """From the identity there is no order to follow: h becomes diag(Qᵀ diag(h) Q)."""
    block, h = EigenMatrix(slice(0, 3), (3, 1), (True, False), LIKE), numbers(3, seed=8).square()
    assert block.left is not None
    root = numbers(3, 3, seed=9)
    block.left.moment.copy_(root @ root.mT)
    before = h.clone()
    block.refresh(numbers(3, seed=1), numbers(3, seed=2), h)
    basis = block.left.basis
    torch.testing.assert_close(h, (basis.mT @ before.diag() @ basis).diagonal())


def test_pieces_cover_a_stretch_in_order() -> None:
    blocks = [matrix((True, True), start) for start in (2, 14, 30)]
    found = [(place.start, place.stop, block) for place, block in pieces(blocks, slice(0, 44))]
    assert found == [
        (0, 2, None), (2, 14, blocks[0]), (14, 26, blocks[1]), (26, 30, None), (30, 42, blocks[2]),
        (42, 44, None),
    ]  # fmt: skip
    assert list(pieces(blocks, slice(26, 30))) == [(slice(26, 30), None)]


def test_half_precision_has_bases_too() -> None:
    block = EigenMatrix(slice(0, 12), (3, 4), (True, True), torch.zeros(0, dtype=torch.bfloat16))
    for seed in range(3):
        block.absorb(numbers(12, seed=seed).bfloat16(), keep=0.9)
        block.refresh(*(numbers(12, seed=s).bfloat16() for s in range(3)))
    assert block.left is not None
    product = block.left.basis.float().mT @ block.left.basis.float()
    torch.testing.assert_close(product, torch.eye(3), rtol=0, atol=2e-2)
