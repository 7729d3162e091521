"""One pass over the data at fixed weights: curvature and log-likelihood.

The network runs in eval mode (batch-norm statistics and dropout as in prediction) and is left as
it was. Batches are split or joined to a size that fits a bounded memory and keeps matrix products
efficient, whatever size they come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Generator, Tensor

from credo.autodiff.jacobians import Jacobians
from credo.autodiff.loss import Loss
from credo.collectives import Ranks
from credo.laplace.structures import DataCurvature
from credo.likelihoods.curvature import curvature_roots, number_of_roots
from credo.model import Model
from credo.network.batches import batch_rows, example_shapes, input_rows, joined, to_device
from credo.network.state import evaluating
from credo.types import Batch, Json

CurvatureKind: TypeAlias = Literal["ggn", "fisher", "empirical", "hessian"]

MAX_NUMBERS = 2**26
"""How many numbers of Jacobians and their cotangents are held at once: 256 MB in float32."""
MAX_EXAMPLES = 1024
"""On a multilayer perceptron the pass took 1.3 times as long with 256, and no less with 2048."""


class DataPass:
    """What is summed over the data: add batches, then read the sums.

    ``log_likelihood`` is Σ log p(y_i | f_i), ``targets`` counts output numbers, ``examples``
    examples; ``first`` keeps some of the data, to look at.
    """

    def __init__(
        self,
        model: Model,
        curvature: DataCurvature,
        kind: CurvatureKind,
        generator: Generator,
        samples: int,
        max_memory: float,
    ) -> None:
        self.model, self.curvature, self.kind = model, curvature, kind
        self._flat, self._random = model.bind(), model.random
        self.generator, self.samples, self.max_memory = generator, samples, max_memory
        self.log_likelihood, self.targets, self.examples = 0.0, 0, 0
        self.first: Batch | None = None
        self._chunk: int | None = None

    def take(self, data: Iterable[Batch]) -> None:
        """All batches, in pieces of the best size."""
        device = self._flat.vector.device
        moved = (to_device(batch, device) for batch in data)
        with evaluating(self.model.net):
            for batch in self._regrouped(moved):
                self.first = self.first or batch
                self._add(batch)

    def add(self, batch: Batch) -> None:
        """One batch."""
        with evaluating(self.model.net):
            for part in self._regrouped([batch]):
                self._add(part)

    def add_up(self, ranks: Ranks) -> None:
        """Make the sums those of all ranks."""
        if not ranks.several:
            return
        self.curvature.add_up(ranks)
        sums = torch.tensor(
            [self.log_likelihood, self.targets, self.examples], dtype=torch.float64,
            device=self._flat.vector.device,
        )  # fmt: skip
        ranks.sum_([sums])
        log_likelihood, targets, examples = sums.tolist()
        self.log_likelihood, self.targets, self.examples = (
            log_likelihood, int(targets), int(examples)
        )  # fmt: skip

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """The sums so far."""
        return self.curvature.pack(), {
            "log_likelihood": self.log_likelihood,
            "targets": self.targets,
            "examples": self.examples,
        }

    def unpack(self, tensors: Mapping[str, Tensor], meta: Json) -> None:
        """The inverse of ``pack``, into a fresh one."""
        self.curvature.unpack(tensors)
        self.log_likelihood = meta["log_likelihood"]
        self.targets, self.examples = meta["targets"], meta["examples"]

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, batch: Batch) -> None:
        inputs, targets = batch
        model, likelihood = self.model, self.model.likelihood
        if self.kind == "hessian":
            with torch.no_grad():
                outputs = model.outputs(inputs)
            loss = Loss.of_model(model, batch, num_data=len(targets))
            self.curvature.add_exact(loss, self._random.read(self._flat.vector))
        else:
            jacobians = Jacobians.at(model.net, self._flat, self._random, inputs)
            outputs = jacobians.outputs
            roots = curvature_roots(
                self.kind,
                likelihood,
                outputs,
                targets,
                self.generator,
                self.samples,
                self.max_memory,
            )
            self.curvature.add(jacobians, roots)
        with torch.no_grad():
            self.log_likelihood += float(likelihood.log_prob(outputs, targets).double().sum())
        self.targets += outputs.numel()
        self.examples += len(targets)

    def _regrouped(self, data: Iterable[Batch]) -> Iterator[Batch]:
        waiting: list[Batch] = []
        count = 0
        for batch in data:
            # Sequences of another length begin another group.
            if waiting and example_shapes(batch) != example_shapes(waiting[0]):
                yield joined(waiting)
                waiting, count = [], 0
            waiting.append(batch)
            count += len(batch[1])
            size = self._examples_at_once(batch)
            while count >= size:
                whole = joined(waiting)
                yield batch_rows(whole, slice(size))
                waiting = [batch_rows(whole, slice(size, count))] if count > size else []
                count -= size
        if count:
            yield joined(waiting)

    def _examples_at_once(self, batch: Batch) -> int:
        """From what one example takes."""
        if self._chunk is None:
            inputs = input_rows(batch[0], slice(1))
            model = self.model
            if self.kind == "hessian":
                numbers = 1
            else:
                jacobians = Jacobians.at(model.net, self._flat, self._random, inputs)
                roots = number_of_roots(self.kind, jacobians.outputs, self.samples)
                numbers = jacobians.numbers(roots)
                if self.kind == "ggn":
                    numbers += roots**2
                if self.curvature.forms_rows:
                    numbers += roots * model.random.size
            self._chunk = max(1, min(MAX_EXAMPLES, MAX_NUMBERS // numbers))
        return self._chunk
