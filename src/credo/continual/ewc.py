r"""Elastic weight consolidation: old tasks as quadratic forms of their Fisher information.

======================= =========================================================================
learner                 adds to the mean loss of a new task with n examples
======================= =========================================================================
`EWC`                   (λ/n)·½ Σ_t (θ − θ_t)ᵀF_t(θ − θ_t), a form for each old task
`OnlineEWC`             (λ/n)·½ (θ − θ_last)ᵀF̃(θ − θ_last), F̃ ← γF̃ + F_t
`KroneckerLaplace`      the same with γ = 1 and F̃ = Σ_t of every layer's Kronecker factors
======================= =========================================================================

symbols: λ ``strength``, θ_t the weights after task t, F_t = Σ_i J_iᵀΛ_iJ_i over the task's training
data at θ_t (``curvature="ggn"``: the exact Fisher of every likelihood in `credo.likelihoods`; or
"fisher", from ``samples`` labels drawn from the model for each example, or "empirical"), γ
``decay``, ``structure`` what is kept of F: "diag", "kron" or "full".

F sums over examples and the loss is a mean, hence 1/n: λ = 1 is Bayes' rule. λ of papers whose F is
a mean over examples is the same number where tasks are equally large.

`OnlineEWC` with γ = 1, λ = 1 and ``Training(temperature=1.0)`` is Laplace's approximation with
yesterday's posterior as prior, `credo.rule.gallery.elastic_weight_consolidation`; on linear
models with ``structure="full"`` that is exact. `EWC`'s separate forms count the oldest task too
often from the third task on (Huszár, 2017), since θ_t is not where task t alone would be, but has
the old tasks in it. The model's prior is pulled towards in every task by `EWC`; by the others in
the first task alone, after which it is part of F̃.

Heads: a head that a task does not use has no Fisher information from it, and is free.

    >>> import torch, credo
    >>> from credo.continual import EWC, Training, permuted
    >>> net = torch.nn.Linear(64, 10)
    >>> learner = EWC(credo.Model(net, credo.likelihoods.Categorical()), Training(epochs=2))
    >>> first, second = permuted("digits", tasks=2, num_data=200)
    >>> learner.learn(first, progress=False)
    >>> learner.memory_bytes                       # θ and F of 650 weights, and a weight
    5208
    >>> learner.learn(second, progress=False)

The anchors of `KroneckerLaplace` are the last weights, its factors those of every task by itself:
a sum of Kronecker products is no Kronecker product, and adding the factors would be a further
approximation. So its memory grows with the tasks, and so does its step.

References: Kirkpatrick et al., 2017 (arXiv:1612.00796); Huszár, 2017 (arXiv:1712.03847); Schwarz
et al., "Progress & compress", 2018 (arXiv:1805.06370), for γ; Ritter, Botev & Barber, "Online
structured Laplace approximations for overcoming catastrophic forgetting", 2018 (arXiv:1805.07810).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from credo.checks import Count, Positive, Share, checked
from credo.continual.learner import RegularisedLearner, Training
from credo.continual.quadratic import STRUCTURES, Quadratic, QuadraticPull
from credo.continual.regularised import Regulariser
from credo.continual.tasks import Task
from credo.errors import UnsupportedError
from credo.laplace.checks import needed_bytes
from credo.laplace.data_pass import DataPass
from credo.laplace.structures import DataCurvature, DiagonalCurvature, FullCurvature
from credo.likelihoods.curvature import FisherKind
from credo.model import Model
from credo.noise import key_to_seed
from credo.priors.normal import gaussian_around_zero
from credo.storage import under
from credo.train.feed import make_feed
from credo.types import Json, Vector

Structure = Literal["diag", "kron", "full"]

MAX_MEMORY = 4e9
"""Bytes that one task's Fisher information may take."""


@checked
class EWC(RegularisedLearner):
    """A quadratic form of the Fisher information for each task that is over.

    Args:
        model: What learns.
        training: How each task is trained.
        strength: λ: how much the old tasks count; 1 is Bayes' rule.
        structure: What is kept of F: "diag", "kron" or "full".
        curvature: "ggn", the exact Fisher information; "fisher", from drawn labels; or "empirical",
            from the data's own.
        samples: Labels drawn for each example by "fisher".
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        strength: Positive = 1.0,
        structure: Structure = "diag",
        curvature: FisherKind = "ggn",
        samples: Count = 1,
    ) -> None:
        super().__init__(model, training)
        self.strength, self.structure = strength, structure
        self.curvature, self.samples = curvature, samples
        self.forms: list[Quadratic] = []

    def regulariser(self, task: Task) -> Regulariser:
        """The forms, weighted for the mean loss of this task."""
        if not self.forms:
            return Regulariser()
        return QuadraticPull(self.forms, self.strength / task.num_data)

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """The task's Fisher information at the weights that it ends with."""
        self.forms.append(Quadratic(self._weights(), [self.fisher(task)]))

    def fisher(self, task: Task) -> DataCurvature:
        """F, summed over the task's training data at the present weights.

        Args:
            task: Whose training data are gone through.
        """
        model, seed = self.model, key_to_seed(self.seed, 5)
        segments, like = model.random.segments, model.like
        needed = needed_bytes(self.structure, segments, like.element_size(), rank=0)
        if needed > MAX_MEMORY:
            raise UnsupportedError(
                f"structure={self.structure!r} of {model.random.size} weights takes "
                f"{needed / 1e9:.1f} GB for each task, more than {MAX_MEMORY / 1e9:.0f}; use "
                'structure="kron" or "diag"'
            )
        gathered = DataPass(
            model,
            STRUCTURES[self.structure](segments, like),
            self.curvature,
            torch.Generator(like.device).manual_seed(seed),
            self.samples,
            MAX_MEMORY,
        )
        gathered.take(make_feed(task.train_data, 1024, model).batches(seed, 0))
        rounding = torch.finfo(like.dtype).eps ** 2 * gathered.examples
        if not gathered.curvature.trace > rounding:
            warnings.warn(
                f"the Fisher information of task {task.name!r} is zero: the network is so sure of "
                "all its examples that no weight matters, and nothing will hold on to this task. "
                "Train for fewer epochs or at a lower rate",
                stacklevel=2,
            )
        return gathered.curvature

    def carried(self) -> dict[str, Tensor]:
        """Anchors and Fisher information."""
        return {
            f"{index}.{name}": tensor
            for index, form in enumerate(self.forms)
            for name, tensor in form.pack().items()
        }

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``carried``."""
        self.forms = []
        segments = self.model.random.segments
        while stored := under(f"{len(self.forms)}.", tensors):
            self.forms.append(Quadratic.unpack(stored, self.structure, segments))

    def _weights(self) -> Vector:
        return self.model.weights(self.model.random)


@checked
class OnlineEWC(EWC):
    """One quadratic form around the last weights, for all tasks that are over.

    Args:
        model: What learns.
        training: How each task is trained.
        strength: λ: how much the old tasks count; 1 is Bayes' rule.
        decay: γ: the share of F̃ that the next task leaves, from 0 (only the last task counts) to 1
            (all alike).
        structure: What is kept of F: "diag", "kron" or "full".
        curvature: "ggn", the exact Fisher information; "fisher", from drawn labels; or "empirical",
            from the data's own.
        samples: Labels drawn for each example by "fisher".
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        strength: Positive = 1.0,
        decay: Share = 1.0,
        structure: Structure = "diag",
        curvature: FisherKind = "ggn",
        samples: Count = 1,
    ) -> None:
        super().__init__(
            model,
            training,
            strength=strength,
            structure=structure,
            curvature=curvature,
            samples=samples,
        )
        self.decay = decay

    def prior_weight(self, task: Task) -> float:
        """The prior counts in the first task, and is part of the form afterwards."""
        return 0.0 if self.forms else self.training.temperature

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """F̃ ← γF̃ + F, and the anchor moves on."""
        new = self.fisher(task)
        if not self.forms:
            self.forms = [Quadratic(self._weights(), [new], [], self._prior_precision())]
            return
        form = self.forms[0]
        form.anchor = self._weights()
        old = form.curvatures[0]
        if isinstance(old, DiagonalCurvature) and isinstance(new, DiagonalCurvature):
            old.diagonal.mul_(self.decay).add_(new.diagonal)
        elif isinstance(old, FullCurvature) and isinstance(new, FullCurvature):
            old.matrix.mul_(self.decay).add_(new.matrix)
        else:
            form.weights = [*(self.decay * weight for weight in form.weights), 1.0]
            form.curvatures.append(new)

    def _prior_precision(self) -> Vector | None:
        if not self.training.temperature:
            return None
        prior = gaussian_around_zero(self.model.prior_over_weights(), self.name)
        return self.training.temperature * prior.precision.expand_as(self._weights()).clone()


@checked
class KroneckerLaplace(OnlineEWC):
    """Laplace's approximation with Kronecker factors of every layer, task after task.

    Args:
        model: What learns.
        training: How each task is trained.
        strength: λ: how much the old tasks count; 1 is Bayes' rule.
        decay: γ: the share of F̃ that the next task leaves, from 0 (only the last task counts) to 1
            (all alike).
        curvature: "ggn", the exact Fisher information; "fisher", from drawn labels; or "empirical",
            from the data's own.
        samples: Labels drawn for each example by "fisher".
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        strength: Positive = 1.0,
        decay: Share = 1.0,
        curvature: FisherKind = "ggn",
        samples: Count = 1,
    ) -> None:
        super().__init__(
            model,
            training,
            strength=strength,
            decay=decay,
            structure="kron",
            curvature=curvature,
            samples=samples,
        )
