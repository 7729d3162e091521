r"""FROMP: functional regularisation of the memorable past.

    minimise  (1/τ)·mean NLL(w; new task) + ½ Σ_t Σ_c d_tcᵀ K_tc⁻¹ d_tc
    d_tc = p_c(X_t; w) − p_c(X_t; w_old),   K_tc = J_tc diag(v) J_tcᵀ + εI,   v = 1/(F + δ)

The old tasks' predictions p at a few remembered inputs X_t stay where the network left them before
the new task, and the more firmly the surer the posterior N(w_old, diag v) was of them. After each
task (1) F ← F + Σ_i diag(J_iᵀΛ_iJ_i) over its data, never reset; (2) the inputs with the largest
tr Λ of each class are remembered, for good. Before each new task p and K are taken anew for *all*
old tasks at the weights that the last one left, and then stay constant.

======  ===================  =====================================================================
symbol  argument             meaning
======  ===================  =====================================================================
|X_t|   ``size``             examples remembered of each task, 1/C of them of each class
τ       ``temperature``      weight of the old tasks beside the *mean* loss; Bayes' rule has 1/n
δ       ``prior_precision``  precision of the first prior
ε       ``jitter``           on the kernels' diagonal
K       ``kernel``           "posterior", or "identity" for K = I: the L2 variant, which needs no F
X_t     ``choice``           "relevance", "balanced", "random", "k-centre": see `coreset`
======  ===================  =====================================================================

Steps are those of ``training``: its optimizer is a new one for each task, ``clip`` bounds the whole
gradient's norm. On the first task nothing is remembered, and training is ordinary training. The
network is in eval mode at the remembered inputs. What the paper's objective has beside this (a
log-determinant and a trace) is left out, as in the authors' code. Settings of that code, all with
Adam and in batches of 128 (256 for CIFAR):

==============  =====================  =====================  ====  ====  =====  =====  =====
stream          network                rate, epochs           size  τ     δ      clip   ε
==============  =====================  =====================  ====  ====  =====  =====  =====
permuted MNIST  100-100, single head   1e-3, 10               200   0.5   1e-5   0.01   1e-5
split MNIST     256-256, heads         1e-4, 15               40    10    1e-3   0.1    1e-6
split CIFAR     32-32-64-64-512,       1e-3, 80               200   10    1e-4   100    1e-6
                dropout, heads
==============  =====================  =====================  ====  ====  =====  =====  =====

    >>> import credo
    >>> from credo.continual import MultiHead, Training, split
    >>> stream = split("digits", num_data=100)
    >>> body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
    >>> model = credo.Model(MultiHead(body, 32, stream.head_sizes), credo.likelihoods.Categorical())
    >>> learner = FROMP(model, Training(epochs=2, clip=0.1), size=10)
    >>> for task in stream[:2]:
    ...     learner.learn(task, progress=False)
    >>> learner.predict(stream[0].test[0], stream[0]).probs.shape
    torch.Size([88, 2])

Reference: Pan, Swaroop, Immer, Eschenhagen, Turner & Khan, "Continual deep learning by functional
regularisation of memorable past", 2020 (arXiv:2004.14070). Correction: the authors' selection reads
the data in batches and does not cut down a class that it meets in one batch only; here every class
has its share. On the first task the authors' code weighs the loss by 1/τ too, which Adam
undoes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from credo.checks import Count, Positive, checked
from credo.continual.coreset import Choice, choose, divided
from credo.continual.functional_penalty import (
    Anchor,
    FunctionalPenalty,
    prediction_kernels,
    whiteners,
)
from credo.continual.learner import RegularisedLearner, Training
from credo.continual.memory import pack_inputs, unpack_inputs
from credo.continual.regularised import Regulariser
from credo.continual.tasks import Task
from credo.laplace.data_pass import DataPass
from credo.laplace.structures import DiagonalCurvature
from credo.map import MAPState
from credo.model import Model
from credo.network.state import evaluating
from credo.noise import key_to_seed
from credo.types import Batch, Inputs, Json, Vector

Kernel: TypeAlias = Literal["posterior", "identity"]


@checked
class FROMP(RegularisedLearner):
    """Fine-tuning that keeps its predictions at memorable examples of the old tasks.

    Args:
        model: What learns.
        training: How each task is trained.
        size: Examples remembered of each task.
        temperature: τ: the weight of the old tasks beside the mean loss.
        prior_precision: δ: precision of the first prior.
        jitter: ε: added to the kernels' diagonal.
        kernel: "posterior", or "identity" for the L2 variant.
        choice: Which examples: "relevance", "balanced", "random" or "k-centre".
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        size: Count = 40,
        temperature: Positive = 10.0,
        prior_precision: Positive = 1e-3,
        jitter: Positive = 1e-6,
        kernel: Kernel = "posterior",
        choice: Choice = "relevance",
    ) -> None:
        super().__init__(model, training)
        self.size, self.kernel, self.choice = size, kernel, choice
        self.temperature, self.prior_precision = float(temperature), float(prior_precision)
        self.jitter = float(jitter)
        self.curvature: Vector = torch.zeros(model.random.size).to(model.like)
        """F, (P,)."""
        self.memory: list[Inputs] = []
        """X_t of the tasks so far."""

    @property
    def name(self) -> str:
        """With what departs from the paper."""
        changes = {"L2": self.kernel == "identity", self.choice: self.choice != "relevance"}
        return " ".join(["FROMP", *(name for name, changed in changes.items() if changed)])

    @property
    def variance(self) -> Vector:
        """v = 1/(F + δ), (P,)."""
        return (self.curvature + self.prior_precision).reciprocal()

    def regulariser(self, task: Task) -> Regulariser:
        """The old predictions and their kernels, at the weights as they are."""
        if not self.memory:
            return Regulariser()
        anchors = [Anchor.at(self.model, x, self._whiteners(x)) for x in self.memory]
        return FunctionalRegulariser(FunctionalPenalty(anchors), self.temperature)

    def consolidate(self, task: Task, regulariser: Regulariser) -> None:
        """Add the task's curvature to F, and remember some of its inputs."""
        data = task.train_data
        if self.kernel == "posterior":
            self.curvature += data_curvature(self.model, data)
        generator = torch.Generator().manual_seed(key_to_seed(self.seed, 3))
        rows = choose(self.choice, self.model, data, self.size, generator)
        self.memory.append(divided(data, rows)[0][0])

    def carried(self) -> dict[str, Tensor]:
        """F, and the remembered inputs with their heads."""
        curvature = {"curvature": self.curvature} if self.kernel == "posterior" else {}
        return {**curvature, **pack_inputs(self.memory)}

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``carried``."""
        device = self.model.like.device
        if self.kernel == "posterior":
            self.curvature = tensors["curvature"].to(device)
        self.memory = unpack_inputs(tensors, device)

    def _whiteners(self, inputs: Inputs) -> Tensor | None:
        if self.kernel == "identity":
            return None
        return whiteners(prediction_kernels(self.model, inputs, self.variance, self.jitter))


class FunctionalRegulariser(Regulariser):
    """R = ½ Σ dᵀK⁻¹d beside 1/τ times the loss."""

    def __init__(self, penalty: FunctionalPenalty, temperature: float) -> None:
        self.penalty, self.loss_weight = penalty, 1.0 / temperature

    def term(self, state: MAPState) -> Tensor:
        """R, from one pass over all that is remembered."""
        model = state.model
        with evaluating(model.net):
            outputs = model.outputs(self.penalty.inputs)
        return self.penalty.value(outputs, model.likelihood)

    def value(self, state: MAPState) -> float:
        """R at the present weights."""
        with torch.no_grad():
            return float(self.term(state))

    def config(self) -> Json:
        """Its settings."""
        return {"type": type(self).__name__, "loss_weight": self.loss_weight}


def data_curvature(model: Model, data: Batch) -> Vector:
    """Σ_i diag(J_iᵀΛ_iJ_i) over a data set at the present weights, (P,)."""
    curvature = DiagonalCurvature(model.random.segments, model.like)
    generator = torch.Generator(model.like.device).manual_seed(0)
    DataPass(model, curvature, "ggn", generator, samples=1, max_memory=math.inf).take([data])
    return curvature.diagonal
