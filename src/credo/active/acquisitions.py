r"""Which examples to ask for: names, what each needs of a posterior, and the choice itself.

==================  =====================  ==========================================  ============
name                likelihood             posterior                                   batch
==================  =====================  ==========================================  ============
``"random"``        any                    any                                         –
``"entropy"``       classes                any                                         top n
``"relevance"``     classes                any                                         top n
``"bald"``          classes                any but a point                             top n
``"variance"``      any                    any but a point                             top n
``"leverage"``      with a closed form Λ   Gaussian                                    top n
``"batch_bald"``    classes, one per x     any but a point                             jointly
``"determinant"``   with a closed form Λ   Gaussian                                    jointly
==================  =====================  ==========================================  ============

Anything with ``choose`` is an acquisition, and so is a function from posterior and inputs to scores
(B,). What does not fit is refused by name: for a point estimate `bald` is zero everywhere, which
would be a random choice under another name.

    >>> import torch, credo
    >>> model = credo.Model(torch.nn.Linear(2, 3), credo.likelihoods.Categorical())
    >>> data = torch.randn(30, 2), torch.randint(3, (30,))
    >>> posterior = credo.fit(model, credo.VI(), data, epochs=1, progress=False)
    >>> find("bald").choose(posterior, torch.randn(100, 2), 5, torch.Generator()).shape
    torch.Size([5])
    >>> find(lambda posterior, x: x[:, 0]).choose(posterior, torch.eye(4, 2), 1, torch.Generator())
    tensor([0])

Equal scores are put in random order: a pool sorted by class would else be asked from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import torch
from torch import Generator, Tensor

from credo.active import determinant, scores
from credo.active.batchbald import batch_bald
from credo.autodiff.jacobians import Jacobians
from credo.checks import Count, Range, checked
from credo.errors import DataError, UnsupportedError
from credo.families import Delta, Gaussian
from credo.functionspace import memorable
from credo.likelihoods import Bernoulli, Categorical
from credo.network.batches import chunks, input_rows, number_of_examples
from credo.posterior.outputs import Linearisation
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.types import Inputs, Json

Name: TypeAlias = Literal[
    "random", "entropy", "relevance", "bald", "variance", "leverage", "batch_bald", "determinant"
]
NAMES: tuple[Name, ...] = get_args(Name)
ScoreName: TypeAlias = Literal["entropy", "relevance", "bald", "variance", "leverage"]
Several: TypeAlias = Annotated[int, Range(2)]
"""One sample never disagrees with itself."""
SCORES: dict[str, Callable[[Predictive], Tensor]] = {
    "entropy": scores.entropy,
    "relevance": scores.relevance,
    "bald": scores.bald,
    "variance": scores.variance,
}
NEEDS_CLASSES = ("entropy", "relevance", "bald", "batch_bald")
NEEDS_SPREAD = ("bald", "variance", "batch_bald")
NEEDS_GAUSSIAN = ("leverage", "determinant")
WEIGHT_BYTES = 256 * 2**20
"""How much of the drawn weights is held at once."""


@runtime_checkable
class Acquisition(Protocol):
    """A rule that chooses examples of a pool."""

    def choose(
        self, posterior: Posterior, inputs: Inputs, count: int, generator: Generator
    ) -> Tensor:
        """Choose examples, the most wanted first.

        Args:
            posterior: What is known of the weights so far.
            inputs: Those that may be chosen.
            count: How many to choose.
            generator: Of all random numbers.

        Returns:
            Rows of the chosen examples, int64 (count,), no row twice.
        """
        ...

    def config(self) -> Json:
        """JSON that names the rule and its settings."""
        ...


AcquisitionSpec: TypeAlias = Name | Acquisition | Callable[[Posterior, Inputs], Tensor]


@dataclass(frozen=True)
class Random:
    """All examples are equally likely: the baseline."""

    def choose(
        self, posterior: Posterior, inputs: Inputs, count: int, generator: Generator
    ) -> Tensor:
        """The beginning of a random permutation."""
        return torch.randperm(number_of_examples(inputs), generator=generator)[:count]

    def config(self) -> Json:
        """The name."""
        return {"type": "random"}


@checked
@dataclass(frozen=True)
class TopScores:
    """The examples with the largest score.

    Args:
        score: Which one: a name of the table above that says "top n".
        samples: Draws of the weights that the score averages over.
    """

    score: ScoreName
    samples: Several = 64

    def scores(self, posterior: Posterior, inputs: Inputs, generator: Generator) -> Tensor:
        """The score of every example, (B,).

        Args:
            posterior: What is known of the weights so far.
            inputs: The examples.
            generator: Of the draws.
        """
        check(self.score, posterior)
        if self.score == "leverage":
            return _leverages(posterior, inputs)
        pred = posterior.predict(
            inputs,
            samples=self.samples,
            generator=generator,
            keep_samples=False,
        )
        return SCORES[self.score](pred)

    def choose(
        self, posterior: Posterior, inputs: Inputs, count: int, generator: Generator
    ) -> Tensor:
        """The top of the list."""
        return largest(self.scores(posterior, inputs, generator), count, generator)

    def config(self) -> Json:
        """Name and settings."""
        return {"type": self.score, "samples": self.samples}


@dataclass(frozen=True)
class ByFunction:
    """The examples with the largest value of a user's own function.

    Args:
        function: From posterior and inputs to scores (B,).
    """

    function: Callable[[Posterior, Inputs], Tensor]

    def choose(
        self, posterior: Posterior, inputs: Inputs, count: int, generator: Generator
    ) -> Tensor:
        """The top of the list."""
        values = torch.as_tensor(self.function(posterior, inputs))
        if values.shape != (number_of_examples(inputs),):
            raise DataError(
                f"an acquisition function gives one score for each of {number_of_examples(inputs)} "
                f"examples, but this one gave shape {tuple(values.shape)}"
            )
        return largest(values, count, generator)

    def config(self) -> Json:
        """The function's name."""
        return {"type": getattr(self.function, "__qualname__", type(self.function).__name__)}


@checked
@dataclass(frozen=True)
class BatchBALD:
    """`batch_bald` on joint draws: of weights, or of the linearised network for Laplace.

    Args:
        samples: Joint draws of the weights; no batch can be worth more than ln of it.
        outcomes: How many outcomes of the labels so far the expectation runs over.
    """

    samples: Several = 128
    outcomes: Count = 500

    def choose(
        self, posterior: Posterior, inputs: Inputs, count: int, generator: Generator
    ) -> Tensor:
        """Greedily, the most informative first."""
        check("batch_bald", posterior)
        outputs = joint_outputs(posterior, inputs, self.samples, generator)
        probs = _class_probs(Predictive(outputs, posterior.model.likelihood))
        return torch.tensor(batch_bald(probs, count, self.outcomes, generator)[0])

    def config(self) -> Json:
        """Name and settings."""
        return {"type": "batch_bald", **asdict(self)}


@checked
@dataclass(frozen=True)
class Determinant:
    """`greedy_determinant` among the examples with the largest leverage.

    Every further example of the batch takes a pass over the candidates, cheap where their Jacobians
    fit into memory.

    Args:
        candidates: How many examples are looked at; None makes all of them candidates.
    """

    candidates: Count | None = 1000

    def choose(
        self, posterior: Posterior, inputs: Inputs, count: int, generator: Generator
    ) -> Tensor:
        """Greedily, the most informative first."""
        check("determinant", posterior)
        total = number_of_examples(inputs)
        kept = total if self.candidates is None else min(total, max(self.candidates, count))
        rows = torch.arange(total)
        if kept < total:
            rows = TopScores("leverage").choose(posterior, inputs, kept, generator)
        chosen, _ = determinant.choose(posterior, input_rows(inputs, rows), count)
        return rows[chosen]

    def config(self) -> Json:
        """Name and settings."""
        return {"type": "determinant", **asdict(self)}


def find(acquisition: AcquisitionSpec) -> Acquisition:
    """The acquisition of this name; one of the caller's own is taken as it is.

    Args:
        acquisition: A name, an object with ``choose``, or a function from posterior and inputs to
            scores.
    """
    if isinstance(acquisition, str) and acquisition in NAMES:
        if acquisition == "random":
            return Random()
        if acquisition == "batch_bald":
            return BatchBALD()
        return Determinant() if acquisition == "determinant" else TopScores(acquisition)
    if isinstance(acquisition, Acquisition) and not isinstance(acquisition, type):
        return acquisition
    if callable(acquisition) and not isinstance(acquisition, type):
        return ByFunction(acquisition)
    raise DataError(
        f"acquisition must be one of {', '.join(NAMES)}, an object with choose, or a function from "
        f"posterior and inputs to scores, not {acquisition!r}"
    )


def largest(values: Tensor, count: int, generator: Generator) -> Tensor:
    """Rows of the largest values, the largest first; equal ones in random order.

    Args:
        values: One for each example.
        count: How many rows.
        generator: Of the order of equal values.

    >>> largest(torch.tensor([1.0, 3.0, 2.0]), 2, torch.Generator())
    tensor([1, 2])
    """
    values = values.detach().cpu()
    if bool(values.isnan().any()):
        raise DataError(
            f"{int(values.isnan().sum())} of {len(values)} acquisition scores are not a number: "
            "the posterior's predictions are damaged"
        )
    order = torch.randperm(len(values), generator=generator)
    return order[values[order].argsort(descending=True, stable=True)][:count]


def check(name: Name, posterior: Posterior) -> None:
    """Raise `UnsupportedError` if this acquisition means nothing for this posterior.

    Args:
        name: The acquisition.
        posterior: What is known of the weights so far.
    """
    kind, q = posterior.model.likelihood.kind, posterior.q
    if name in NEEDS_CLASSES and kind != "classification":
        raise UnsupportedError(
            f'acquisition="{name}" is about class probabilities, and this is a {kind} model; use '
            '"variance", "leverage" or "determinant"'
        )
    if name in NEEDS_GAUSSIAN and not isinstance(q, Gaussian):
        raise UnsupportedError(
            f'acquisition="{name}" needs a Gaussian over the weights, with mean and covariance, '
            f"and this posterior is a {type(q).__name__}; use one that asks for predictions only: "
            '"entropy", "bald", "batch_bald" or "variance", or fit by credo.Laplace()'
        )
    if name in NEEDS_GAUSSIAN and kind == "loss":
        raise UnsupportedError(
            f'acquisition="{name}" weighs outputs by the loss\'s curvature, and a bare loss has no '
            'curvature without a label; use "variance", or a likelihood'
        )
    if name in NEEDS_SPREAD and isinstance(q, Delta):
        raise UnsupportedError(
            f'acquisition="{name}" is zero everywhere for a point estimate, whose samples never '
            'disagree; use "entropy" or "relevance", or fit by a method with uncertainty, such as '
            "credo.Laplace() or credo.VI()"
        )
    likelihood = posterior.model.likelihood
    if name == "batch_bald" and not isinstance(likelihood, Categorical | Bernoulli):
        raise UnsupportedError(
            f'acquisition="batch_bald" knows Categorical and Bernoulli, not '
            f'{type(likelihood).__name__}; use "bald"'
        )


def joint_outputs(
    posterior: Posterior, inputs: Inputs, samples: int, generator: Generator
) -> Tensor:
    """Outputs (S, B, ...) of the same S networks for all inputs, linear ones where q is Laplace's.

    ``predict`` of a linearised network draws each example's outputs by themselves, which is right
    for one label and no help for the labels of a batch together.

    Args:
        posterior: What is known of the weights so far.
        inputs: The examples.
        samples: How many networks are drawn.
        generator: Of the draws.
    """
    if posterior.predicts != "linearised":
        return posterior.predict(inputs, samples, generator=generator, at="samples").outputs
    with posterior.on_copy() as (model, flat), torch.no_grad():
        net, random = model.net, model.random
        length = Linearisation(model, flat, posterior.q).batch_size(
            next(chunks(inputs, 1, flat.vector))
        )
        at_once = max(1, WEIGHT_BYTES // (posterior.q.size * flat.vector.element_size()))
        drawn = []
        for start in range(0, samples, at_once):
            weights = posterior.sample(min(at_once, samples - start), generator)
            away = (weights - posterior.mean).mT
            pieces = []
            for piece in chunks(inputs, length, flat.vector):
                jacobians = Jacobians.at(net, flat, random, piece)
                moved = jacobians.times(away).movedim(-1, 0)
                pieces.append(jacobians.outputs + moved.reshape(-1, *jacobians.outputs.shape))
            drawn.append(torch.cat(pieces, dim=1))
        return torch.cat(drawn)


def _leverages(posterior: Posterior, inputs: Inputs) -> Tensor:
    """tr(Λ J Σ Jᵀ) of every example, streamed."""
    # Λ at no label in particular: none is known, and none is to be ignored.
    ignored = posterior.model.likelihood.ignore_index
    labels = torch.full((number_of_examples(inputs),), 0 if ignored is None else ignored + 1)
    data = (*inputs, labels) if isinstance(inputs, list | tuple) else (inputs, labels)
    return memorable.leverage(posterior, data, progress=False)


def _class_probs(pred: Predictive) -> Tensor:
    """(S, B, C), two classes for yes or no."""
    probs = pred.sample_probs
    if isinstance(pred.likelihood, Bernoulli):
        yes = probs.flatten(2).squeeze(-1) if probs.dim() > 2 else probs
        probs = torch.stack([1 - yes, yes], dim=-1)
    if probs.dim() != 3:
        raise UnsupportedError(
            f'acquisition="batch_bald" takes one label for each example, but the predictions have '
            f'shape {tuple(probs.shape[1:])}; use "bald", which adds labels up'
        )
    return probs
