"""What `credo.Laplace` looks at before it begins, and before it is believed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from credo.errors import DataError, UnsupportedError
from credo.laplace.data_pass import DataPass
from credo.laplace.evidence import Evidence
from credo.laplace.low_rank import sketch_columns
from credo.likelihoods.curvature import FisherKind, curvature_roots
from credo.model import Model
from credo.network.batches import batch_rows
from credo.network.state import evaluating
from credo.types import Batch, Segment, Vector

UNTRAINED_GAIN = 0.1
"""A network is called untrained if one gradient step promises more nats than this per example."""
CHECKED_EXAMPLES = 512
"""From how many the gain is taken; that of so few differs from that of all by some 0.01."""
STEP = 1e-3
"""How far a directional derivative steps, next to the weights: rounding is 1e-4 of the change."""


def refuse_beyond(max_memory: float, structure: str, model: Model, rank: int) -> None:
    """Raise `UnsupportedError` before too much memory is taken, saying what would fit."""
    segments, itemsize = model.random.segments, model.like.element_size()

    def need(what: str, where: Iterable[Segment]) -> int:
        return needed_bytes(what, where, itemsize, rank)

    needed = need(structure, segments)
    if needed <= max_memory:
        return
    others = {f'structure="{name}"': need(name, segments) for name in ("kron", "low_rank", "diag")}
    try:
        last = model.replace(random="last_layer").random.segments
    except DataError:  # which one it is takes a forward pass, or is ambiguous
        last = ()
    if last:
        others |= {
            f'subset="last_layer", structure="{name}"': need(name, last)
            for name in ("full", "kron")
        }
    fitting = [
        f"{name} ({_gigabytes(size)})" for name, size in others.items() if size <= max_memory
    ]
    size = sum(segment.size for segment in segments)
    raise UnsupportedError(
        f'structure="{structure}" over {size} weights needs {_gigabytes(needed)}, but max_memory '
        f"is {_gigabytes(max_memory)}. What fits: {'; '.join(fitting) or 'nothing here'}"
    )


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def warn_if_untrained(gathered: DataPass, evidence: Evidence) -> None:
    """Warn if one step down the gradient would still gain much, by `gain_of_a_step`."""
    assert gathered.first is not None
    some = batch_rows(gathered.first, slice(CHECKED_EXAMPLES))
    norm, gain = gain_of_a_step(gathered.model, some, evidence)
    if gain <= UNTRAINED_GAIN:
        return
    warnings.warn(
        f"the network does not look trained: the gradient of the mean loss has norm {norm:.3g}, "
        f"and one step along it would gain about {gain:.2g} nats per example, where a minimum "
        f"gains none and {UNTRAINED_GAIN} is tolerated. Laplace's approximation describes a "
        "minimum: train first, or pass epochs=… to credo.fit. To silence this: "
        'warnings.filterwarnings("ignore", message="the network does not look trained")',
        UserWarning,
        stacklevel=2,
    )


def gain_of_a_step(model: Model, batch: Batch, evidence: Evidence) -> tuple[float, float]:
    r"""The norm of the mean loss's gradient, and what a step down it gains, in nats per example.

    Along the gradient g of a loss with curvature H the best step gains ½(gᵀg)²/gᵀHg: a number
    without units, 0 at a minimum. It is taken from some of the data, with H the Fisher matrix
    and Jg by a difference of outputs, both for the loss alone and for loss and prior together, and
    the smaller counts: a network trained without the prior is trained too.

    Multilayer perceptrons on digits and diabetes had gains of 0.2 to 0.5 before training, of 0.1
    half the way down, and of 0.001 to 0.03 once their loss had settled. With the noise set to a
    seventh of the residuals, so that a nat is little, it was 20 before and 0.1 to 0.5 after: there
    the noise is to be mended.
    """
    flat, random = model.bind(), model.random
    parameters = [flat.parameter_at[segment.start] for segment in random.segments]
    with evaluating(model.net):
        outputs = model.outputs(batch[0])
        loss = model.likelihood.mean_nll(outputs, batch[1])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        pieces = (
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
        )
        slope = torch.cat([piece.reshape(-1) for piece in pieces])
        kind: FisherKind = "empirical" if model.likelihood.kind == "loss" else "fisher"
        generator = torch.Generator(slope.device).manual_seed(0)
        (root,) = curvature_roots(kind, model.likelihood, outputs.detach(), batch[1], generator)
        gains = []
        delta = evidence.curvature.spread(evidence.precision).to(slope) / _examples(evidence)
        for gradient, precision in ((slope, 0 * delta), (slope + delta * evidence.mean, delta)):
            squared = float(gradient.square().sum())
            along = (root * _directional(model, batch, outputs, gradient)).flatten(1).sum(1)
            curvature = float(along.square().mean() + (precision * gradient.square()).sum())
            gains.append(0.5 * squared**2 / max(curvature, 1e-300) if squared else 0.0)
    return float(slope.norm()), min(gains)


def _examples(evidence: Evidence) -> float:
    """The number of examples that the prior is spread over, at the evidence's temperature."""
    return evidence.num_data / evidence.temperature


@torch.no_grad()
def _directional(model: Model, batch: Batch, outputs: Tensor, direction: Vector) -> Tensor:
    """J·direction, in the outputs' shape."""
    flat, random = model.bind(), model.random
    before = random.read(flat.vector)
    step = STEP * (float(before.norm()) or 1.0) / (float(direction.norm()) or 1.0)
    try:
        with flat.writing() as vector:
            random.write(vector, before + step * direction)
        return (model.outputs(batch[0]) - outputs) / step
    finally:
        with flat.writing() as vector:
            random.write(vector, before)


def needed_bytes(structure: str, segments: Iterable[Segment], itemsize: int, rank: int) -> int:
    """What the structure keeps at its largest: sums, eigenvectors or factors, and the Gaussian."""
    segments = list(segments)
    size = sum(segment.size for segment in segments)
    if structure == "full":
        numbers = 3 * size**2
    elif structure == "low_rank":
        numbers = size * (2 * sketch_columns(rank, size) + 2 * rank)
    elif structure == "kron":
        numbers = 2 * size + sum(_factor_numbers(segment) for segment in segments)
    else:
        numbers = 2 * size
    return numbers * itemsize


def _factor_numbers(segment: Segment) -> int:
    """Both factors and their eigenvectors; an embedding has a diagonal."""
    if "Embedding" in segment.layer_type or not segment.shape:
        return segment.size
    rows = segment.shape[0]
    return 2 * (rows**2 + (segment.size // max(1, rows)) ** 2)
