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
    >>> most_memorable(scores, 3)
    tensor([1, 3, 4])
    >>> most_memorable_per_class(scores, labels, 3)
    tensor([4, 0, 1])

References: Pan, Swaroop, Immer, Eschenhagen, Turner & Khan, "Continual deep learning by functional
regularisation of memorable past", 2020 (arXiv:2004.14070), for relevance; Khan, "Learning
algorithms from Bayesian principles", 2020; Cook, "Detection of influential observation in linear
regression", 1977, for the other two. Khan writes the relevance as ∇²_ff ℓ(y_i, f); no label is
needed for it with softmax, logistic and squared losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.autodiff.jacobians import Jacobians
from credo.checks import Count, Share, checked
from credo.errors import DataError, UnsupportedError
from credo.families import Family, FixedGaussian, FullGaussian
from credo.functionspace.sampled import SampledGP, has_centre
from credo.likelihoods import Categorical
from credo.likelihoods.curvature import (
    leading_roots,
    output_gradient,
    output_hessian,
    output_hessian_roots,
    output_hessian_trace,
    roots_needed,
)
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import (
    BATCH_SIZE,
    batch_rows,
    batches,
    like_weights,
    number_of_batches,
    pieces,
)
from credo.network.replica import private
from credo.posterior.covariance import weight_covariance
from credo.posterior.outputs import Linearisation
from credo.posterior.posterior import Posterior
from credo.train.progress import progress_bar
from credo.types import Batch, Vector

# --- scores ---------------------------------------------------------------------------------------


@checked
def relevance(
    subject: Posterior | Model, data: Any, batch_size: Count = BATCH_SIZE, progress: bool = True
) -> Tensor:
    """tr Λ of every example in the data's order: one forward pass.

    >>> import credo
    >>> net = torch.nn.Linear(1, 2)
    >>> model = credo.Model(net, credo.likelihoods.Categorical())
    >>> relevance(model, (torch.zeros(3, 1), torch.tensor([0, 1, 0]))).shape
    torch.Size([3])

    Args:
        subject: A posterior, taken at its mean (an ensemble or another that has none: on average
            over its samples), or a model as it is.
        data: (inputs, targets), a dataset, or a loader that does not shuffle; of it one batch is
            held at a time.
        batch_size: How many examples are scored at once, where the data do not say.
        progress: Whether to show a progress bar.

    Returns:
        (N,).
    """
    model = subject.model if isinstance(subject, Posterior) else subject
    if isinstance(subject, Posterior) and not has_centre(subject.q):
        drawn = SampledGP(subject).relevance
        return _stream(model.like, data, "relevance", lambda b: drawn(*b), batch_size, progress)

    @torch.no_grad()
    def score(model: Model, flat: FlatParams, batch: Batch) -> Tensor:
        return output_hessian_trace(model.likelihood, model.outputs(batch[0]), batch[1])

    return _scored(subject, data, "relevance", score, batch_size, progress)


@checked
def leverage(
    posterior: Posterior,
    data: Any,
    tolerance: Share = 2e-2,
    batch_size: Count = BATCH_SIZE,
    progress: bool = True,
) -> Tensor:
    """tr(ΛJΣJᵀ) of every example in the data's order, under any Gaussian posterior.

    Other posteriors, ensembles above all, have tr(E[Λ] Cov f) over the functions they draw.

    A backward pass for each root of Λ: one less than there are classes. Of a softmax those roots
    are left out, example by example, that hold less than ``tolerance`` of its trace, the unlikely
    classes'. (On LeNet-5 after four epochs of 20,000 digits 0.02 left 3.4 of nine roots; the
    largest error of a score was 3.2 %, and the top tenth was the same.)

    Args:
        posterior: What was fitted.
        data: (inputs, targets), a dataset, or a loader that does not shuffle.
        tolerance: The share of tr Λ that may be left out; 0 takes all roots.
        batch_size: How many examples are scored at once, where the data do not say.
        progress: Whether to show a progress bar.

    Returns:
        (N,).
    """
    if not has_centre(posterior.q):
        drawn, like = SampledGP(posterior).leverage, posterior.model.like
        return _stream(like, data, "leverage", lambda b: drawn(*b), batch_size, progress)
    likelihood = posterior.model.likelihood
    covariance, fitting = weight_covariance(posterior.q), _Fitting(posterior.q)

    def trace(model: Model, flat: FlatParams, batch: Batch, count: int | None) -> Tensor:
        jacobians = Jacobians.at(model.net, flat, model.random, batch[0])
        if count is None:
            roots = output_hessian_roots(likelihood, jacobians.outputs, batch[1])
        else:
            assert isinstance(likelihood, Categorical)
            roots = leading_roots(likelihood, jacobians.outputs, batch[1], count)
        with torch.no_grad():
            return covariance.trace(jacobians, roots)

    def score(model: Model, flat: FlatParams, batch: Batch) -> Tensor:
        with torch.no_grad():
            outputs = model.outputs(batch[0])
        if not isinstance(likelihood, Categorical) or outputs.dim() > 2 or not tolerance:
            whole = fitting(model, flat, batch)
            return torch.cat([trace(model, flat, part, None) for part in whole])
        needed = roots_needed(likelihood, outputs, tolerance)
        scores = torch.empty_like(outputs[:, 0])
        for count in needed.unique().tolist():
            mine = (needed == count).nonzero().flatten()
            group = fitting(model, flat, batch_rows(batch, mine))
            scores[mine] = torch.cat([trace(model, flat, part, count) for part in group])
        return scores

    return _scored(posterior, data, "leverage", score, batch_size, progress)


@checked
def leave_one_out(
    posterior: Posterior,
    data: Any,
    removes: bool | None = None,
    batch_size: Count = BATCH_SIZE,
    progress: bool = True,
) -> Tensor:
    """By how much the loss of every example is predicted to rise without it, in nats.

    Args:
        posterior: What was fitted, a Gaussian over the weights.
        data: (inputs, targets), a dataset, or a loader that does not shuffle.
        removes: Whether an example's own curvature is taken out of Σ⁻¹ as well; by default where
            q is a dense Gaussian, which holds it as it is.
        batch_size: How many examples are scored at once, where the data do not say.
        progress: Whether to show a progress bar.

    Returns:
        (N,).
    """
    q = posterior.q
    covariance = weight_covariance(q)
    dense = isinstance(q, FullGaussian) or (isinstance(q, FixedGaussian) and q.precision.dim() == 2)
    removed = dense if removes is None else removes

    fitting = _Fitting(q)

    def score(model: Model, flat: FlatParams, batch: Batch) -> Tensor:
        return torch.cat([rise(model, flat, part) for part in fitting(model, flat, batch)])

    def rise(model: Model, flat: FlatParams, batch: Batch) -> Tensor:
        jacobians = Jacobians.at(model.net, flat, model.random, batch[0])
        outputs = jacobians.outputs
        gradient = output_gradient(model.likelihood, outputs, batch[1]).flatten(1).unsqueeze(-1)
        hessian = output_hessian(model.likelihood, outputs, batch[1])
        with torch.no_grad():
            variance = covariance.of_outputs(jacobians)
            if removed:
                gradient_without = _without_own(hessian, variance, gradient)
            else:
                gradient_without = gradient
            change = variance @ gradient_without
            return (gradient.mT @ change + 0.5 * change.mT @ hessian @ change).flatten()

    return _scored(posterior, data, "leave one out", score, batch_size, progress)


# --- choices --------------------------------------------------------------------------------------


@checked
def most_memorable(scores: Tensor, count: Count, least: bool = False) -> Tensor:
    """The places of the largest scores, largest first; of equal ones the first.

    Args:
        scores: One number for each example, (N,).
        count: How many to take.
        least: Take the smallest instead, smallest first.

    Returns:
        Places in the data, (count,).
    """
    _check(scores)
    return torch.argsort(scores, descending=not least, stable=True)[:count]


@checked
def most_memorable_per_class(
    scores: Tensor, labels: Tensor, count: Count, least: bool = False
) -> Tensor:
    """As many of the largest scores from every class: ``count`` places in all, class by class.

    Every class gets count/C; what is left over goes to the first classes, and what a small class
    can't fill to the others. Within a class the order is that of `most_memorable`.

    Args:
        scores: One number for each example, (N,).
        labels: The class of each example, (N,).
        count: How many to take in all.
        least: Take the smallest instead.

    Returns:
        Places in the data, (count,).
    """
    _check(scores)
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


# --- inside ---------------------------------------------------------------------------------------


def _scored(
    subject: Posterior | Model,
    data: Any,
    what: str,
    score: Callable[[Model, FlatParams, Batch], Tensor],
    batch_size: int,
    progress: bool,
) -> Tensor:
    with _at_rest(subject) as (model, flat):
        scored = partial(score, model, flat)
        return _stream(flat.vector, data, what, scored, batch_size, progress)


@contextmanager
def _at_rest(subject: Posterior | Model) -> Iterator[tuple[Model, FlatParams]]:
    """A copy in eval mode: at a posterior's mean, or at the weights that a model has now."""
    if isinstance(subject, Posterior):
        with subject.on_copy() as at_mean:
            yield at_mean
    else:
        with private(subject.net, {}) as flat:
            yield subject.replace(net=flat.module), flat


def _stream(
    like: Vector,
    data: Any,
    what: str,
    score: Callable[[Batch], Tensor],
    batch_size: int,
    progress: bool,
) -> Tensor:
    """The scores of all batches, each on the weights' device and in their precision."""
    total = number_of_batches(data, batch_size)
    scores: list[Tensor] = []
    with progress_bar(progress, total, what) as bar:
        for batch in batches(data, batch_size):
            inputs = like_weights(batch[0], like)
            targets = batch[1].to(like.device)
            scores.append(score((inputs, targets)).cpu())
            bar.advance()
    if not scores:
        raise DataError(f"the data yielded no batches: there is no {what} to take")
    return torch.cat(scores)


class _Fitting:
    """Batches in parts whose Jacobians fit; how large those may be is asked once."""

    def __init__(self, q: Family) -> None:
        self._q, self._size = q, 0

    def __call__(self, model: Model, flat: FlatParams, batch: Batch) -> Iterator[Batch]:
        if not self._size:
            linear = Linearisation(model, flat, self._q)
            self._size = linear.batch_size(batch[0])
        return pieces(batch, self._size)


def _without_own(hessian: Tensor, variance: Tensor, gradient: Tensor) -> Tensor:
    """(I − ΛV)⁻¹r."""
    share = hessian @ variance
    largest = float(torch.linalg.eigvals(share).real.max())
    if largest >= 1:
        raise UnsupportedError(
            f"ΛJΣJᵀ has an eigenvalue of {largest:.3g}: this Σ does not hold the example's own "
            "curvature, or is an approximation of a posterior that does. Pass removes=False"
        )
    one = torch.eye(share.shape[-1], dtype=share.dtype, device=share.device)
    return torch.linalg.solve(one - share, gradient)


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


def _check(scores: Tensor) -> None:
    if scores.dim() != 1 or not len(scores):
        raise DataError(f"scores must be one number for each example, not {tuple(scores.shape)}")
    if bool(scores.isnan().any()):
        raise DataError(f"{int(scores.isnan().sum())} scores are NaN and have no place in an order")


def _check_labels(scores: Tensor, labels: Tensor) -> None:
    if labels.shape != scores.shape:
        raise DataError(
            f"there must be one label for each score: {tuple(labels.shape)} labels for "
            f"{tuple(scores.shape)} scores"
        )
