r"""Memorable examples: which of the training examples the fit rests on.

    relevance        tr Λ_i                           how unsure the outputs of example i are
    leverage         tr(Λ_i J_iΣJ_iᵀ)                 the share of the fit that example i takes
    leave one out    ℓ_i(f_i + Δf_i) − ℓ_i(f_i)       how much worse it would be known without it

======  ==================================  ===================================================
symbol  argument                            shape
======  ==================================  ===================================================
Λ_i     ``posterior.model.likelihood``      (K, K), ∂²ℓ_i/∂f², of K outputs
J_i     the network at q's mean             (K, P), ∂f(x_i)/∂w
Σ       ``posterior.q``                     (P, P), never formed
Δf_i    —                                   (K,), what leaving i out is predicted to change
scores  what the three functions return     (N,)
======  ==================================  ===================================================

Relevance needs one forward pass. Leverage is the diagonal of the hat matrix, made for any loss:
with Σ⁻¹ = Σ_i J_iᵀΛ_iJ_i + δ it adds up to the effective number of weights, P − δ tr Σ. Without
example i one Newton step goes from the mean by Σ_{∖i}J_iᵀr_i, r_i = ∂ℓ_i/∂f, so with V = J_iΣJ_iᵀ

    Δf_i = V(I − Λ_iV)⁻¹ r_i        ℓ_i(f_i + Δf_i) − ℓ_i(f_i) ≈ r_iᵀΔf_i + ½Δf_iᵀΛ_iΔf_i

which is exact for linear regression. A Σ that is no inverse of such a sum (a diagonal one above
all) may put an eigenvalue of Λ_iV above 1; then I − Λ_iV is left out (``removes=False``), as to
first order in V.

    >>> import torch, credo
    >>> scores, labels = torch.tensor([0.3, 0.9, 0.1, 0.9, 0.5]), torch.tensor([0, 1, 0, 1, 0])
    >>> select(scores, 3)
    tensor([1, 3, 4])
    >>> select_per_class(scores, labels, 3)
    tensor([4, 0, 1])

References: Pan, Swaroop, Immer, Eschenhagen, Turner & Khan, "Continual deep learning by functional
regularisation of memorable past", 2020 (arXiv:2004.14070), for relevance; Khan, "Learning
algorithms from Bayesian principles", 2020; Cook, "Detection of influential observation in linear
regression", 1977, for the other two. Where the slides write ∇²_ff ℓ(y_i, f) no label is needed for
softmax, logistic and squared losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.errors import DataError, UnsupportedError
from credo.families import DiagGaussian, FixedGaussian, FullGaussian
from credo.functionspace.sampled import SampledGP, has_centre
from credo.functionspace.streams import (
    BATCH_SIZE,
    at_rest,
    batches,
    like_weights,
    model_of,
    number_of_batches,
    pieces,
    progress_bar,
)
from credo.likelihoods import Categorical
from credo.likelihoods.output_losses import (
    leading_roots,
    output_gradient,
    output_hessian,
    roots_needed,
    roots_of_curvature,
    trace_of_curvature,
)
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import map_inputs
from credo.posterior.covariance import output_covariance
from credo.posterior.outputs import Linearisation
from credo.posterior.posterior import Posterior
from credo.posterior.traces import diagonal_trace
from credo.types import Batch

# --- scores ---------------------------------------------------------------------------------------


def relevance(
    subject: Posterior | Model, data: Any, batch_size: int = BATCH_SIZE, progress: bool = True
) -> Tensor:
    """tr Λ of every example in the data's order, (N,): one forward pass.

    ``subject`` is a posterior, taken at its mean (an ensemble or another that has none: on average
    over its samples), or a model as it is. ``data`` is (inputs, targets), a dataset, or a loader
    that does not shuffle; of it one batch is held at a time.

    >>> import credo
    >>> net = torch.nn.Linear(1, 2)
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> relevance(model, (torch.zeros(3, 1), torch.tensor([0, 1, 0]))).shape
    torch.Size([3])
    """
    likelihood = model_of(subject).likelihood
    if isinstance(subject, Posterior) and not has_centre(subject.q):
        drawn, flat = SampledGP(subject).relevance, subject.model.flat
        return _stream(flat, data, "relevance", lambda b: drawn(*b), batch_size, progress)

    @torch.no_grad()
    def score(flat: FlatParams, batch: Batch) -> Tensor:
        return trace_of_curvature(likelihood, model_of(subject).outputs(batch[0]), batch[1])

    return _scored(subject, data, "relevance", score, batch_size, progress)


def leverage(
    posterior: Posterior,
    data: Any,
    tolerance: float = 2e-2,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> Tensor:
    """tr(ΛJΣJᵀ) of every example in the data's order, (N,), under any Gaussian posterior.

    Other posteriors, ensembles above all, have tr(E[Λ] Cov f) over the functions they draw.

    A backward pass for each root of Λ: one less than there are classes. Of a softmax those roots
    are left out, example by example, that hold less than ``tolerance`` of its trace, the unlikely
    classes'; 0 takes all. (On LeNet-5 after four epochs of 20,000 digits 0.02 left 3.4 of nine
    roots; the largest error of a score was 3.2 %, and the top tenth was the same.)
    """
    if not has_centre(posterior.q):
        drawn, weights = SampledGP(posterior).leverage, posterior.model.flat
        return _stream(weights, data, "leverage", lambda b: drawn(*b), batch_size, progress)
    model, likelihood = posterior.model, posterior.model.likelihood
    covariance, fitting = output_covariance(posterior.q), _Fitting(posterior)
    variance = posterior.q.variance if isinstance(posterior.q, DiagGaussian) else None

    def trace(flat: FlatParams, batch: Batch, count: int | None) -> Tensor:
        jacobians = Jacobians.at(model.net, flat, model.random, batch[0])
        if count is None:
            roots = roots_of_curvature(likelihood, jacobians.outputs, batch[1])
        else:
            assert isinstance(likelihood, Categorical)
            roots = leading_roots(likelihood, jacobians.outputs, batch[1], count)
        with torch.no_grad():
            if variance is not None:
                return diagonal_trace(jacobians, roots, variance)
            return covariance(jacobians, roots).diagonal(dim1=-2, dim2=-1).sum(-1)

    def score(flat: FlatParams, batch: Batch) -> Tensor:
        with torch.no_grad():
            outputs = model.outputs(batch[0])
        if not isinstance(likelihood, Categorical) or outputs.dim() > 2 or not tolerance:
            return torch.cat([trace(flat, part, None) for part in fitting(flat, batch)])
        needed = roots_needed(likelihood, outputs, tolerance)
        found = torch.empty_like(outputs[:, 0])
        for count in needed.unique().tolist():
            mine = (needed == count).nonzero().flatten()
            group = map_inputs(partial(_at, places=mine), batch[0]), batch[1][mine]
            found[mine] = torch.cat([trace(flat, part, count) for part in fitting(flat, group)])
        return found

    return _scored(posterior, data, "leverage", score, batch_size, progress)


def leave_one_out(
    posterior: Posterior,
    data: Any,
    removes: bool | None = None,
    batch_size: int = BATCH_SIZE,
    progress: bool = True,
) -> Tensor:
    """By how much the loss of every example is predicted to rise without it, (N,), in nats.

    ``removes`` says whether an example's own curvature is taken out of Σ⁻¹ as well; by default
    where q is a dense Gaussian, which holds it as it is.
    """
    model, q = posterior.model, posterior.q
    covariance = output_covariance(q)
    dense = isinstance(q, FullGaussian) or (isinstance(q, FixedGaussian) and q.precision.dim() == 2)
    removed = dense if removes is None else removes

    fitting = _Fitting(posterior)

    def score(flat: FlatParams, batch: Batch) -> Tensor:
        return torch.cat([rise(flat, part) for part in fitting(flat, batch)])

    def rise(flat: FlatParams, batch: Batch) -> Tensor:
        jacobians = Jacobians.at(model.net, flat, model.random, batch[0])
        outputs = jacobians.outputs
        slope = output_gradient(model.likelihood, outputs, batch[1]).flatten(1).unsqueeze(-1)
        bend = output_hessian(model.likelihood, outputs, batch[1])
        with torch.no_grad():
            spread = covariance(jacobians, None)
            if removed:
                slope_without = _without_own(bend, spread, slope)
            else:
                slope_without = slope
            change = spread @ slope_without
            return (slope.mT @ change + 0.5 * change.mT @ bend @ change).flatten()

    return _scored(posterior, data, "leave one out", score, batch_size, progress)


# --- choices --------------------------------------------------------------------------------------


def select(scores: Tensor, count: int, least: bool = False) -> Tensor:
    """The places of the ``count`` largest scores, largest first; of equal ones the first.

    ``least=True`` takes the smallest, smallest first.
    """
    _check(scores, count)
    return torch.argsort(scores, descending=not least, stable=True)[:count]


def select_per_class(scores: Tensor, labels: Tensor, count: int, least: bool = False) -> Tensor:
    """As many of the largest scores from every class: ``count`` places in all, class by class.

    Every class gets count/C; what is left over goes to the first classes, and what a small class
    can't fill to the others. Within a class the order is that of `select`.
    """
    _check(scores, count)
    _check_labels(scores, labels)
    order = torch.argsort(scores, descending=not least, stable=True)
    classes, sizes = labels.unique(return_counts=True)
    shares = _shares(sizes.tolist(), count)
    ordered = labels[order]
    chosen = [
        order[ordered == label][:share]
        for label, share in zip(classes.tolist(), shares, strict=True)
    ]
    return torch.cat(chosen)


class Memory:
    """The largest scores of a stream, overall or per class, in memory that does not grow with it.

    ``count`` places are kept for each class (``per_class=True``) or in all. After every batch each
    class is cut down to its places, so a class of one batch is held to them too.

    >>> memory = Memory(count=1)
    >>> memory.add(torch.tensor([0.1, 0.7]), torch.tensor([0, 0]))
    >>> memory.add(torch.tensor([0.7, 0.2]), torch.tensor([0, 1]))
    >>> memory.indices
    tensor([1, 3])
    """

    def __init__(self, count: int, per_class: bool = True) -> None:
        if count < 1:
            raise DataError(f"count={count} must be at least 1")
        self.count, self.per_class, self.seen = count, per_class, 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, scores: Tensor, labels: Tensor | None = None) -> None:
        """The next examples of the stream."""
        if self.per_class and labels is None:
            raise DataError("a memory per class needs the labels of the examples: give labels")
        places = torch.arange(self.seen, self.seen + len(scores), device=scores.device)
        self.seen += len(scores)
        if not len(scores):
            return
        _check(scores, 1)
        if not self.per_class or labels is None:
            self._keep(0, scores, places)
            return
        _check_labels(scores, labels)
        for label in labels.unique().tolist():
            mine = labels == label
            self._keep(int(label), scores[mine], places[mine])

    @property
    def indices(self) -> Tensor:
        """Places in the stream, class by class, each with its largest score first."""
        if not self._kept:
            return torch.empty(0, dtype=torch.int64)
        return torch.cat([self._kept[label][1] for label in sorted(self._kept)])

    @property
    def scores(self) -> Tensor:
        """The scores at `indices`."""
        if not self._kept:
            return torch.empty(0)
        return torch.cat([self._kept[label][0] for label in sorted(self._kept)])

    def _keep(self, label: int, scores: Tensor, places: Tensor) -> None:
        if label in self._kept:
            scores = torch.cat([self._kept[label][0], scores])
            places = torch.cat([self._kept[label][1], places])
        # What came earlier stands earlier, so a stable order settles ties as `select` does.
        best = torch.argsort(scores, descending=True, stable=True)[: self.count]
        self._kept[label] = scores[best], places[best]


# --- inside ---------------------------------------------------------------------------------------


def _scored(
    subject: Posterior | Model,
    data: Any,
    what: str,
    score: Callable[[FlatParams, Batch], Tensor],
    batch_size: int,
    progress: bool,
) -> Tensor:
    with at_rest(subject) as flat:
        return _stream(flat, data, what, partial(score, flat), batch_size, progress)


def _stream(
    flat: FlatParams,
    data: Any,
    what: str,
    score: Callable[[Batch], Tensor],
    batch_size: int,
    progress: bool,
) -> Tensor:
    """The scores of all batches, each on the weights' device and in their precision."""
    total = number_of_batches(data, batch_size)
    found: list[Tensor] = []
    with progress_bar(what, total, progress) as done:
        for batch in batches(data, batch_size):
            inputs = like_weights(batch[0], flat)
            targets = batch[1].to(flat.vector.device)
            found.append(score((inputs, targets)).cpu())
            done()
    if not found:
        raise DataError(f"the data yielded no batches: there is no {what} to take")
    return torch.cat(found)


class _Fitting:
    """Batches in parts whose Jacobians fit; how large those may be is asked once."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior, self._size = posterior, 0

    def __call__(self, flat: FlatParams, batch: Batch) -> Iterator[Batch]:
        if not self._size:
            linear = Linearisation(self._posterior.model, flat, self._posterior.q)
            self._size = linear.batch_size(batch[0])
        return pieces(batch, self._size)


def _at(x: Tensor, places: Tensor) -> Tensor:
    return x[places]


def _without_own(bend: Tensor, spread: Tensor, slope: Tensor) -> Tensor:
    """(I − ΛV)⁻¹r."""
    share = bend @ spread
    largest = float(torch.linalg.eigvals(share).real.max())
    if largest >= 1:
        raise UnsupportedError(
            f"ΛJΣJᵀ has an eigenvalue of {largest:.3g}: this Σ does not hold the example's own "
            "curvature, or is an approximation of a posterior that does. Pass removes=False"
        )
    one = torch.eye(share.shape[-1], dtype=share.dtype, device=share.device)
    return torch.linalg.solve(one - share, slope)


def _shares(sizes: list[int], count: int) -> list[int]:
    """How many each class gives: equal shares, filled up from classes that have more."""
    shares = [0] * len(sizes)
    left = min(count, sum(sizes))
    while left:
        open_classes = [k for k, size in enumerate(sizes) if shares[k] < size]
        each, more = divmod(left, len(open_classes))
        for rank, k in enumerate(open_classes):
            given = min(each + (rank < more), sizes[k] - shares[k])
            shares[k] += given
            left -= given
    return shares


def _check(scores: Tensor, count: int) -> None:
    if scores.dim() != 1 or not len(scores):
        raise DataError(f"scores must be one number for each example, not {tuple(scores.shape)}")
    if count < 1:
        raise DataError(f"count={count} must be at least 1")
    if bool(scores.isnan().any()):
        raise DataError(f"{int(scores.isnan().sum())} scores are NaN and have no place in an order")


def _check_labels(scores: Tensor, labels: Tensor) -> None:
    if labels.shape != scores.shape:
        raise DataError(
            f"there must be one label for each score: {tuple(labels.shape)} labels for "
            f"{tuple(scores.shape)} scores"
        )
