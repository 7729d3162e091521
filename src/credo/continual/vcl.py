r"""Variational continual learning: yesterday's posterior is today's prior.

    q_t = argmin_q  E_q[Σ NLL(task t)] + temperature·KL(q ‖ q_{t−1}),      q_0 the model's prior

over Gaussians q with independent weights, by `credo.VI`. Bayes' rule itself would do no other: for
linear models with orthogonal features the q_t are the posteriors of all data so far.

========== ==================== ====================================================================
symbol     argument             meaning
========== ==================== ====================================================================
q_0        ``model.prior``      a Gaussian; the paper has N(0, 1)
|C_t|      ``coreset_size``     examples of each task that are held out of its training, 0 for none
C_t        ``coreset``          how they are chosen: "random", "balanced", "k-centre"
σ²         ``log_variance``     ln of the first variances: of all weights, later of each new head
S          ``samples``          draws of the weights in a step; ``predict_samples`` in a prediction
—          ``noise``, …         those of `credo.VI`; ``scale_ratio``: rate of ln σ over that of μ
========== ==================== ====================================================================

**Coresets.** q_t is trained without the held-out examples of all tasks; only to predict it is
refined on them, q_t ← argmin E_q[Σ NLL(C_1 … C_t)] + KL(q ‖ q_t), for as many epochs as a task has.
What is passed on to the next task is the unrefined q_t, so that no example counts twice.

**A good start.** Variances begin at e^−6, and the first means at a maximum-likelihood fit of the
same length (``likelihood_start``). Without it training hardly gets away from the prior. Later tasks
begin at q_{t−1}; a new head (of `MultiHead`) with the weights the network has there and variances
e^−6, and q_0 for its prior. Heads that a task does not use keep their q.

    >>> import credo
    >>> from credo.continual import MultiHead, Training, split
    >>> stream = split("digits", num_data=100)
    >>> body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU())
    >>> net = MultiHead(body, 32, stream.head_sizes)
    >>> model = credo.Model(net, credo.likelihoods.Categorical(), credo.priors.Normal(scale=1.0))
    >>> learner = VCL(model, Training(epochs=2), coreset_size=10)
    >>> for task in stream[:2]:
    ...     learner.learn(task, progress=False)
    >>> learner.predict(stream[0].test[0], stream[0]).outputs.shape
    torch.Size([100, 88, 2])

References: Nguyen, Li, Bui & Turner, "Variational continual learning", 2018 (arXiv:1710.10628), for
the method, its coresets and its start; Swaroop et al., "Improving and understanding variational
continual learning", 2019 (arXiv:1905.02099), for longer training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from credo.checks import Count, Finite, Index, Positive, checked
from credo.continual.coreset import Choice, choose, divided
from credo.continual.heads import MultiHead
from credo.continual.learner import Learner, Training
from credo.continual.memory import pack_batches, unpack_batches
from credo.continual.tasks import Task
from credo.errors import UnsupportedError
from credo.families import DiagGaussian
from credo.map import MLE
from credo.method import Method
from credo.model import Model
from credo.network.batches import joined
from credo.network.state import evaluating
from credo.noise import key_to_seed
from credo.posterior.posterior import Posterior
from credo.posterior.predictive import Predictive
from credo.train import fit
from credo.train.progress import Reporter
from credo.types import Batch, Json
from credo.variational.vi import VI


@checked
class VCL(Learner):
    """Mean-field variational inference, task after task.

    Args:
        model: What learns.
        training: How each task is trained.
        coreset_size: Examples of each task that are held out of its training, 0 for none.
        coreset: How they are chosen: "random", "balanced", "relevance" or "k-centre".
        likelihood_start: Whether the first means are those of a maximum-likelihood fit of the same
            length.
        log_variance: ln of the first variances: of all weights, later of each new head.
        temperature: Weight of the KL.
        samples: Draws of the weights in a step.
        noise: That of `credo.VI`.
        estimator: That of `credo.VI`.
        scale_ratio: Rate of ln σ over that of μ.
        predict_samples: Draws of the weights in a prediction.
    """

    def __init__(
        self,
        model: Model,
        training: Training | None = None,
        *,
        coreset_size: Index = 0,
        coreset: Choice = "random",
        likelihood_start: bool = True,
        log_variance: Finite = -6.0,
        temperature: Positive = 1.0,
        samples: Count = 1,
        noise: Literal["weight", "local", "flipout"] = "local",
        estimator: Literal["reparam", "total", "path"] = "reparam",
        scale_ratio: Positive = 1.0,
        predict_samples: Count = 100,
    ) -> None:
        super().__init__(model, training)
        prior = model.prior_over_weights()
        if not isinstance(prior, DiagGaussian):
            raise UnsupportedError(
                f"variational continual learning begins with a Gaussian prior, not with a "
                f"{type(prior).__name__}: use credo.priors.Normal(scale=1.0)"
            )
        self.coreset_size, self.coreset = coreset_size, coreset
        self.likelihood_start, self.log_variance = likelihood_start, float(log_variance)
        self.temperature = float(temperature)
        self.samples, self.noise, self.estimator = samples, noise, estimator
        self.scale_ratio = scale_ratio
        self.predict_samples = predict_samples
        self.first_prior = prior
        self.q: DiagGaussian | None = None
        """q_t, before any refinement."""
        self.heads: list[int] = []
        """The heads that were trained so far."""
        self._coresets: list[Batch] = []
        self._refined: DiagGaussian | None = None

    @property
    def name(self) -> str:
        """With its coreset, if it has one."""
        return f"VCL {self.coreset} coreset" if self.coreset_size else "VCL"

    def predict(self, x: Tensor, task: Task) -> Predictive:
        """By draws from the posterior, refined on the coreset."""
        return self.posterior().predict(
            task.inputs(x), samples=self.predict_samples, keep_samples=True
        )

    def posterior(self) -> Posterior:
        """q_t, refined on the coreset; before the first task a point."""
        if self.q is None:
            return super().posterior()
        if not self._coresets:
            return Posterior.at_network(self.model, self.q)
        if self._refined is None:
            self._refined = self._refine(self.q)
        return Posterior.at_network(self.model, self._refined)

    # --- one task ---------------------------------------------------------------------------------

    def _train(self, task: Task, folder: Path | None, progress: bool | Reporter) -> None:
        data = task.train_data
        if self.coreset_size:
            generator = torch.Generator().manual_seed(key_to_seed(self.seed, 3))
            rows = choose(self.coreset, self.model, data, self.coreset_size, generator)
            held_out, data = divided(data, rows)
        if self.q is None and self.likelihood_start:
            method = self._likelihood_method()
            self._fit(self.model, method, data, _inside(folder, "likelihood"), progress)
        start, prior = self._begin(task.head)
        reached = set() if task.head is None else {task.head}
        self.q = self._infer(start, prior, data, reached, _inside(folder, "posterior"), progress)
        self.heads = sorted(reached.union(self.heads))
        if self.coreset_size:
            self._coresets.append(held_out)
        self._refined = None

    def _begin(self, head: int | None) -> tuple[DiagGaussian, DiagGaussian]:
        """Where q starts, and its prior: q_{t−1}, but for a new head."""
        fresh = self.model.weights(self.model.random)
        small = torch.full_like(fresh, math.exp(0.5 * self.log_variance))
        if self.q is None:
            return DiagGaussian(fresh, small), self.first_prior
        if head is None or head in self.heads:
            return self.q, self.q
        new = self._of_heads({head})
        start = _mixed(new, DiagGaussian(fresh, small), self.q)
        return start, _mixed(new, self.first_prior, self.q)

    def _infer(
        self,
        start: DiagGaussian,
        prior: DiagGaussian,
        data: Batch,
        heads: set[int],
        folder: Path | None,
        progress: bool | Reporter,
    ) -> DiagGaussian:
        """argmin E_q[NLL] + KL(q‖prior) over all weights but those of other heads."""
        net = self.model.net
        others = set(range(len(net.sizes))) - heads if isinstance(net, MultiHead) else set()
        used = ~self._of_heads(others)
        names = {s.name for s in self.model.random.segments} - set(self._names(others))
        part = DiagGaussian(prior.mean[used], prior.scale[used])
        model = Model(net, self.model.likelihood, part, lambda segment: segment.name in names)
        method = self._method(DiagGaussian(start.mean[used], start.scale[used]))
        fitted = self._fit(model, method, data, folder, progress).q
        mean, scale = start.mean.clone(), start.scale.clone()
        mean[used], scale[used] = fitted.mean, fitted.scale
        return DiagGaussian(mean, scale)

    def _refine(self, q: DiagGaussian) -> DiagGaussian:
        """Train on the coresets; the network and its buffers are left as they were."""
        with _left_as_it_was(self.model):
            return self._infer(q, q, joined(self._coresets), set(self.heads), None, False)

    def _likelihood_method(self) -> Method[Any]:
        return MLE(lr=self.training.lr, optimizer=self.training.optimizer)

    def _method(self, start: DiagGaussian) -> Method[Any]:
        return VI(
            samples=self.samples,
            noise=self.noise,
            estimator=self.estimator,
            temperature=self.temperature,
            optimizer=self.training.optimizer,
            lr=self.training.lr,
            scale_ratio=self.scale_ratio,
            start=start,
        )

    def _fit(
        self,
        model: Model,
        method: Method[Any],
        data: Batch,
        folder: Path | None,
        progress: bool | Reporter,
    ) -> Posterior:
        settings = self.training
        return fit(
            model,
            method,
            data,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            seed=self.seed,
            folder=folder,
            progress=progress,
        )

    def _names(self, heads: set[int]) -> list[str]:
        """The random parameters of these heads of a `MultiHead`."""
        prefixes = tuple(f"heads.{head}." for head in heads)
        named = (s.name for s in self.model.random.segments)
        return [n for n in named if n.startswith(prefixes)] if prefixes else []

    def _of_heads(self, heads: set[int]) -> Tensor:
        """Which of the random weights belong to these heads, (P,)."""
        names = set(self._names(heads)) if isinstance(self.model.net, MultiHead) else set()
        mine = [torch.full((s.size,), s.name in names) for s in self.model.random.segments]
        return torch.cat(mine).to(self.model.like.device)

    # --- between tasks ----------------------------------------------------------------------------

    def carried(self) -> dict[str, Tensor]:
        """q_t and the coresets; its mean is in the network, too, and counted twice."""
        q = {} if self.q is None else {"mean": self.q.mean, "scale": self.q.scale}
        return {**q, **pack_batches(self._coresets)}

    def receive(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``carried``."""
        device = self.model.like.device
        if "mean" in tensors:
            self.q = DiagGaussian(tensors["mean"].to(device), tensors["scale"].to(device))
        self.heads, self._refined = list(meta["heads"]), None
        self._coresets = unpack_batches(tensors, device)

    def facts(self) -> Json:
        """Which heads were trained."""
        return {"heads": self.heads}

    def config(self) -> Json:
        """The settings but ``predict_samples``: a state serves any number of draws."""
        settings = super().config()
        del settings["predict_samples"]
        return settings


def _mixed(where: Tensor, inside: DiagGaussian, outside: DiagGaussian) -> DiagGaussian:
    """One Gaussian for some of the weights, another for the rest."""
    return DiagGaussian(
        torch.where(where, inside.mean, outside.mean),
        torch.where(where, inside.scale, outside.scale),
    )


@contextmanager
def _left_as_it_was(model: Model) -> Iterator[None]:
    """The network's weights, buffers and modes, whoever binds them meanwhile."""
    weights, buffers = model.weights(), {n: b.clone() for n, b in model.buffers().items()}
    with evaluating(model.net):
        try:
            yield
        finally:
            with model.bind().writing() as vector:
                vector.copy_(weights)
            with torch.no_grad():
                for name, buffer in model.buffers().items():
                    buffer.copy_(buffers[name])


def _inside(folder: Path | None, name: str) -> Path | None:
    return None if folder is None else folder / name
