r"""Synaptic intelligence: a weight is as important as the loss that it took down on its way.

    ω ← ω − g∘Δθ                                   at every step, g the gradient of the batch's loss
    Ω ← Ω + max(ω, 0)/((θ_end − θ_start)² + ξ)     after a task, and ω ← 0
    R(θ) = c Σ_k Ω_k (θ_k − θ*_k)²                 added to the mean loss of the next tasks

symbols: c ``strength``, ξ ``damping``, θ* the weights after the last task. Σ_k ω_k is the path
integral of the gradient, so for small steps it is the loss that training took away. With steps Δ on
a quadratic loss of Hessian A it exceeds that by exactly ½ Σ ΔᵀAΔ: an error of first order in the
learning rate. With minibatches g is noisy and correlated with the step it makes, which overstates ω
further; so it is in the paper.

g is that of the task's loss alone, without R and before clipping. Correction: a weight whose ω is
negative would get a negative importance, and R would have no minimum; here it gets none.

    >>> import torch, credo
    >>> from credo.continual import SI, Training, permuted
    >>> net = torch.nn.Linear(64, 10)
    >>> learner = SI(credo.Model(net, credo.likelihoods.Categorical()), Training(epochs=2))
    >>> learner.learn(permuted("digits", num_data=200)[0], progress=False)
    >>> bool((learner.importance > 0).any()), learner.memory_bytes            # Ω and θ*
    (True, 5200)

Reference: Zenke, Poole & Ganguli, "Continual learning through synaptic intelligence", 2017
(arXiv:1703.04200).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from credo.checks import Positive, checked
from credo.continual.learner import RegularisedLearner, Training
from credo.continual.regularised import Regulariser
from credo.continual.tasks import Task
from credo.map import MAPState
from credo.model import Model
from credo.types import Json, Vector


class PathIntegral(Regulariser):
    """Gathers ω on the way, and pulls to the last weights by R.

    ``start`` are the weights that training began with, ``path`` is ω; both (P,).

    Args:
        importance: Ω of the tasks before, None in the first.
        anchor: θ*, None in the first.
        strength: c.
    """

    def __init__(self, importance: Vector | None, anchor: Vector | None, strength: float) -> None:
        self.importance, self.anchor, self.strength = importance, anchor, strength
        self.start = torch.empty(0)
        self.path = torch.empty(0)
        self._before = torch.empty(0)
        self._gradient = torch.empty(0)

    def begin(self, state: MAPState) -> None:
        """ω = 0."""
        self.start = state.random.read(state.flat.vector)
        self.path = torch.zeros_like(self.start)

    def add_gradient(self, state: MAPState) -> None:
        """Note the loss's gradient and the weights; then add 2cΩ(θ − θ*)."""
        random = state.random
        self._before = random.read(state.flat.vector)
        self._gradient = random.read(state.gradient)
        if self.importance is None or self.anchor is None:
            return
        pull = self.importance * (self._before - self.anchor)
        random.write(state.gradient, self._gradient.add(pull, alpha=2 * self.strength))

    def stepped(self, state: MAPState) -> None:
        """ω ← ω − g∘Δθ."""
        moved = self._before.sub_(state.random.read(state.flat.vector))
        self.path.addcmul_(self._gradient, moved)

    def value(self, state: MAPState) -> float:
        """R."""
        if self.importance is None or self.anchor is None:
            return 0.0
        away = state.random.read(state.flat.vector) - self.anchor
        return self.strength * float(self.importance @ away.square())

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """ω so far and where it began."""
        return {"start": self.start, "path": self.path}, {}

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``."""
        self.start, self.path = tensors["start"].to(self.path), tensors["path"].to(self.path)

    def config(self) -> Json:
        """Its settings."""
        return {"type": "PathIntegral", "strength": self.strength}


@checked
class SI(RegularisedLearner):
    """Synaptic intelligence.

    Args:
        model: What learns.
        training: How each task is trained.
        strength: c: how much the old tasks count.
        damping: ξ: keeps the importance of weights that hardly moved finite.
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        strength: Positive = 0.1,
        damping: Positive = 0.1,
    ) -> None:
        super().__init__(model, training)
        self.strength, self.damping = strength, damping
        self.importance = torch.empty(0)
        self.anchor = torch.empty(0)

    def regulariser(self, task: Task) -> Regulariser:
        """The path integral of this task, with the pull of the tasks before."""
        if not self.learned:
            return PathIntegral(None, None, self.strength)
        return PathIntegral(self.importance, self.anchor, self.strength)

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """Ω ← Ω + max(ω, 0)/((θ_end − θ_start)² + ξ)."""
        assert isinstance(regulariser, PathIntegral)
        self.anchor = self.model.weights(self.model.random)
        travelled = (self.anchor - regulariser.start).square()
        new = regulariser.path.clamp(min=0) / (travelled + self.damping)
        self.importance = self.importance + new if self.learned else new

    def carried(self) -> dict[str, Tensor]:
        """Ω and θ*."""
        return {"importance": self.importance, "anchor": self.anchor} if self.learned else {}

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``carried``."""
        if tensors:
            self.importance, self.anchor = tensors["importance"], tensors["anchor"]
