r"""A weight matrix seen in the eigenbases of its gradients' second moments, which follow training.

    L ← β₃L + (1 − β₃)GGᵀ,   R ← β₃R + (1 − β₃)GᵀG        G (a, b): the mean gradient of a step
    Q_L: at the first refresh the eigenvectors of L, largest first; later the Q of a QR
         decomposition of LQ_L, one power iteration, its columns sorted by diag(Q_LᵀLQ_L)

and the same for Q_R of R. Until the first refresh both are the identity. An axis without a basis
(one that is too large, or of length one) has the identity for good, and takes no memory.

At a refresh the mean stays what it is, and so does the momentum Q_LḠQ_Rᵀ. Curvature H, a number for
each direction, has no equal in another basis unless that is rotated too little to matter: it goes
along with its columns when they are sorted, and is not rotated (at the first refresh, where columns
have no predecessors, it becomes the diagonal of what it was, (Q_L∘Q_L)ᵀH(Q_R∘Q_R)).

Reference: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024
(arXiv:2409.11321). Not there: a diagonal of √ε of L's mean eigenvalue, ε the spacing of floats, is
added before both decompositions. Directions that no gradient ever had (dead inputs, fewer gradients
than units) would be chosen by rounding alone, anew at every refresh and differently on two ranks,
and so would signs, which are settled here: a draw depends on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from credo.types import Vector


class Axis:
    """One axis: its basis Q and the second moment that it follows, both (n, n).

    Args:
        size: n.
        like: Gives dtype and device.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        self.basis = torch.eye(size, dtype=like.dtype, device=like.device)
        self.moment = torch.zeros_like(self.basis)

    def absorb(self, matrix: Tensor, keep: float) -> None:
        """M ← keep·M + (1 − keep)·AAᵀ.

        Args:
            matrix: A, (n, ...).
            keep: The share β₃ of what was there.
        """
        self.moment.addmm_(matrix, matrix.mT, beta=keep, alpha=1.0 - keep)

    def refresh(self) -> Turn:
        """Follow the moment; what a matrix in the old basis needs to be seen in the new one."""
        # Half precision has no decompositions.
        precise = torch.promote_types(self.basis.dtype, torch.float32)
        old, moment = self.basis.to(precise), _with_distinct_values(self.moment.to(precise))
        if int(old.count_nonzero()) == len(old):  # it was never turned
            order = None
            new = torch.linalg.eigh(moment).eigenvectors.flip(-1)
            signs = torch.arange(1.0, len(old) + 1, device=old.device).sqrt().to(new) @ new
        else:
            product = moment @ old
            order = (old * product).sum(0).sort(descending=True, stable=True).indices
            new, triangle = torch.linalg.qr(product[:, order])
            signs = triangle.diagonal()
        new = new * torch.where(signs < 0, -1.0, 1.0)
        turn = Turn((old.mT @ new).to(self.basis.dtype), order)
        self.basis.copy_(new)
        return turn


def _with_distinct_values(moment: Tensor) -> Tensor:
    """The moment plus a little of a diagonal that falls from 2 to 1."""
    finfo = torch.finfo(moment.dtype)
    little = finfo.eps**0.5 * float(moment.diagonal().mean()) + finfo.tiny**0.5
    falling = torch.linspace(2.0, 1.0, len(moment), dtype=moment.dtype, device=moment.device)
    return moment + torch.diag(little * falling)


class Turn(NamedTuple):
    """From one basis to the next: U = QᵀQ', and the order in which columns were sorted, if any."""

    matrix: Tensor
    order: Tensor | None


class EigenMatrix:
    """A parameter as an a×b matrix with a basis for one of its axes or for both.

    Args:
        where: Its place in the optimizer's vectors.
        shape: (a, b).
        sides: Whether the rows' axis and the columns' have bases.
        like: Gives dtype and device.
    """

    def __init__(
        self, where: slice, shape: tuple[int, int], sides: tuple[bool, bool], like: Tensor
    ) -> None:
        self.where, self.shape = where, shape
        self.left = Axis(shape[0], like) if sides[0] else None
        self.right = Axis(shape[1], like) if sides[1] else None
        self.mean = like.new_zeros(shape[0] * shape[1])
        """The mean Q_LᵀMQ_R in the basis, which moves by the same steps as M."""

    def remembered(self) -> dict[str, Tensor]:
        """What a resumed run needs, by name."""
        axes = {"left": self.left, "right": self.right}
        bases = {f"{side}_basis": axis.basis for side, axis in axes.items() if axis}
        moments = {f"{side}_moment": axis.moment for side, axis in axes.items() if axis}
        return {**bases, **moments, "mean_in_basis": self.mean}

    def into(self, matrix: Vector, out: Vector, between: Vector) -> Vector:
        """Q_LᵀMQ_R, all of them flat.

        Args:
            matrix: M, (ab,).
            out: Where to, (ab,), other memory.
            between: Memory for at least as many numbers.

        Returns:
            ``out``.
        """
        left = None if self.left is None else self.left.basis.mT
        right = None if self.right is None else self.right.basis
        return self._product(left, matrix, right, out, between)

    def out_of(self, matrix: Vector, out: Vector, between: Vector) -> Vector:
        """Q_LMQ_Rᵀ: back from the basis.

        Args:
            matrix: M, (ab,).
            out: Where to, (ab,), other memory.
            between: Memory for at least as many numbers.

        Returns:
            ``out``.
        """
        left = None if self.left is None else self.left.basis
        right = None if self.right is None else self.right.basis.mT
        return self._product(left, matrix, right, out, between)

    def absorb(self, gradient: Vector, keep: float) -> None:
        """Add a mean gradient to the moments.

        Args:
            gradient: G, (ab,).
            keep: The share β₃ of what was there.
        """
        matrix = gradient.view(self.shape)
        if self.left is not None:
            self.left.absorb(matrix, keep)
        if self.right is not None:
            self.right.absorb(matrix.mT, keep)

    def refresh(self, mean: Vector, momentum: Vector, curvature: Vector) -> None:
        """Let the bases follow their moments.

        Args:
            mean: M itself, which stays.
            momentum: Ḡ in the basis; it is rotated, so that Q_LḠQ_Rᵀ stays.
            curvature: H; it is sorted with the columns.
        """
        g, h = momentum.view(self.shape), curvature.view(self.shape)
        m = mean.view(self.shape)
        if self.left is not None:
            turn = self.left.refresh()
            g, m = turn.matrix.mT @ g, self.left.basis.mT @ m
            h = turn.matrix.square().mT @ h if turn.order is None else h[turn.order]
        if self.right is not None:
            turn = self.right.refresh()
            g, m = g @ turn.matrix, m @ self.right.basis
            h = h @ turn.matrix.square() if turn.order is None else h[:, turn.order]
        momentum.copy_(g.reshape(-1))
        curvature.copy_(h.reshape(-1))
        self.mean.copy_(m.reshape(-1))

    def _product(
        self, left: Tensor | None, matrix: Vector, right: Tensor | None, out: Vector, room: Vector
    ) -> Vector:
        source, target = matrix.view(self.shape), out.view(self.shape)
        if left is not None and right is not None:
            between = room[: len(matrix)].view(self.shape)
            torch.mm(torch.mm(left, source, out=between), right, out=target)
        elif left is not None:
            torch.mm(left, source, out=target)
        elif right is not None:
            torch.mm(source, right, out=target)
        return out


def sides(shape: tuple[int, int], max_size: int, one_sided: bool) -> tuple[bool, bool]:
    """Which axes get a basis: those of at most ``max_size``, of which the smaller if one-sided.

    >>> sides((400, 784), max_size=512, one_sided=False)
    (True, False)
    >>> sides((1, 5), max_size=512, one_sided=True)  # Linear(5, 1): a basis of one is none
    (False, True)

    Args:
        shape: (a, b).
        max_size: The longest axis that gets one.
        one_sided: Whether one axis has to do.
    """
    left, right = (1 < size <= max_size for size in shape)
    if one_sided and left and right:
        return shape[0] <= shape[1], shape[0] > shape[1]
    return left, right


def pieces(matrices: list[EigenMatrix], where: slice) -> Iterator[tuple[slice, EigenMatrix | None]]:
    """A stretch of weights, cut into matrices that have bases and what is between them.

    Args:
        matrices: Those of all weights, in their order.
        where: The stretch; no matrix lies across its ends.
    """
    start = where.start
    for matrix in matrices:
        if where.start <= matrix.where.start < where.stop:
            if start < matrix.where.start:
                yield slice(start, matrix.where.start), None
            yield matrix.where, matrix
            start = matrix.where.stop
    if start < where.stop:
        yield slice(start, where.stop), None
