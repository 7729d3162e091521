"""A network with its likelihood and prior: what there is to be Bayesian about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from credo.display import Display, Displayed
from credo.errors import BindingError, DataError
from credo.likelihoods.base import missing_members
from credo.network import (
    FlatParams,
    Selection,
    Selector,
    bind,
    parameters_of,
    segments_of,
    select,
)
from credo.network.execution import UNKNOWN, Execution, LastLayer, by_structure
from credo.priors import Normal
from credo.types import Batch, FlatDistribution, Inputs, Likelihood, Prior, Segment, Vector


class Model(Displayed):
    """A network, how targets follow from its outputs, and what was believed of its weights.

    The network stays as it is: a model reads it, and only fitting moves its weights.

    Args:
        net: The network; parameters with ``requires_grad=False`` stay fixed.
        likelihood: How targets follow from its outputs.
        prior: What was believed of its weights; by default `credo.priors.Normal.kaiming`.
        random: The weights that get a distribution: None for all but normalisation layers,
            ``"last_layer"`` (the one that runs last), ``"all"``, a name or glob or several, or a
            predicate on `Segment`. The other trainable parameters become point estimates without a
            prior.

    >>> import torch, credo
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> model = credo.Model(net, credo.likelihoods.Categorical(), random="last_layer")
    >>> model.random.size, model.deterministic.size
    (27, 40)
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | None = None,
        random: Selector = None,
    ) -> None:
        if not isinstance(net, nn.Module):
            raise DataError(f"net must be a torch.nn.Module, not {type(net).__name__}")
        missing = missing_members(likelihood)
        if isinstance(likelihood, type) or "log_prob" in missing:
            raise DataError(
                f"likelihood must be an object such as credo.likelihoods.Categorical(), "
                f"not {likelihood!r}; wrap a loss function as credo.likelihoods.FromLoss(fn)"
            )
        if missing:
            raise DataError(
                f"the likelihood {type(likelihood).__name__} has no {', '.join(missing)}; "
                "derive it from credo.likelihoods.BaseLikelihood, which says what to write"
            )
        self.net = net
        self.likelihood = likelihood
        self.prior: Prior = Normal.kaiming() if prior is None else prior
        self.selector: Selector = random if isinstance(random, str) or callable(random) else (
            None if random is None else list(random)
        )  # fmt: skip

        self._last_layer: LastLayer | None = None

    def bind(self) -> FlatParams:
        """Move the network's parameters into one vector, of which they become views.

        Every method does so when it begins; what a model says of its weights needs no binding.

        Returns:
            The network's one binding; see `credo.network.bind`.
        """
        return bind(self.net)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All trainable parameters, in the order of the flat vector."""
        return segments_of(self.net)

    @property
    def like(self) -> Vector:
        """An empty tensor with the trainable parameters' dtype and device."""
        for _, parameter in parameters_of(self.net):
            return parameter.detach().new_empty(0)
        raise BindingError(
            f"{type(self.net).__name__} has no floating parameters with requires_grad=True: there "
            "is nothing to be Bayesian about. Unfreeze the layers that should be random."
        )

    @property
    def random(self) -> Selection:
        """The weights that have a distribution; its size is P."""
        return self.split(self.segments)[0]

    @property
    def deterministic(self) -> Selection:
        """The trainable parameters that are point estimates."""
        return self.split(self.segments)[1]

    def split(self, segments: Sequence[Segment]) -> tuple[Selection, Selection]:
        """The random segments and the others.

        Args:
            segments: All those of the network.
        """
        last = self.last_layer if self.selector == "last_layer" else None
        random = select(segments, self.selector, last)
        chosen = {s.name for s in random.segments}
        return random, Selection.of(s for s in segments if s.name not in chosen)

    @property
    def last_layer(self) -> str:
        """The path of the layer that runs last.

        Raises:
            DataError: If that is ambiguous, or takes a forward pass that was not made yet.
        """
        return (by_structure(self.net) or self._last_layer or UNKNOWN).name()

    def weights(self, selection: Selection | None = None) -> Vector:
        """A copy of the trainable parameters' present values as one vector.

        Args:
            selection: Which of them, (P,); by default all, (T,).
        """
        chosen = None if selection is None else {s.name for s in selection.segments}
        values = [
            parameter.detach().reshape(-1)
            for segment, parameter in parameters_of(self.net)
            if chosen is None or segment.name in chosen
        ]
        return torch.cat(values) if values else self.like

    def prior_over_weights(self) -> FlatDistribution:
        """The prior of the random weights, as a distribution over flat vectors (P,)."""
        return self.prior.on(self.random.segments, self.like)

    def replace(
        self,
        *,
        net: nn.Module | None = None,
        likelihood: Likelihood | None = None,
        prior: Prior | None = None,
        random: Selector | EllipsisType = ...,
    ) -> Model:
        """The same model but for what is given; what is known of the network goes along.

        Args:
            net: Another network of the same architecture.
            likelihood: Another likelihood.
            prior: Another prior.
            random: Another selector.
        """
        other = Model(
            net or self.net,
            likelihood or self.likelihood,
            prior or self.prior,
            self.selector if isinstance(random, EllipsisType) else random,
        )
        other._last_layer = self._last_layer
        return other

    def observe(self, inputs: Inputs) -> Tensor:
        """The network's outputs for some examples, and from then on which layer runs last.

        Args:
            inputs: A few examples.
        """
        with Execution(self.net) as execution:
            outputs = self.outputs(inputs)
        self._last_layer = execution.last_layer()
        return outputs

    def outputs(self, inputs: Inputs) -> Tensor:
        """The network's outputs with the weights it has now.

        Args:
            inputs: A tensor for ``net(x)``, several for ``net(*x)``, a mapping for ``net(**x)``.
        """
        if isinstance(inputs, Tensor):
            outputs = self.net(inputs)
        elif isinstance(inputs, Mapping):
            outputs = self.net(**inputs)
        else:
            outputs = self.net(*inputs)
        if not isinstance(outputs, Tensor):
            raise DataError(
                f"the network returned {type(outputs).__name__}, not a tensor; wrap it in a module "
                "whose forward returns the outputs that the likelihood needs"
            )
        return outputs

    def mean_nll(self, batch: Batch) -> Tensor:
        """Mean negative log-likelihood of a batch: a scalar that can be differentiated.

        Args:
            batch: Inputs and targets.
        """
        inputs, targets = batch
        return self.likelihood.mean_nll(self.outputs(inputs), targets)

    def buffers(self) -> dict[str, Tensor]:
        """The network's buffers (batch-norm statistics and the like) by name."""
        return dict(self.net.named_buffers())

    def noise_parameters(self) -> list[nn.Parameter]:
        """Learned parameters of the likelihood."""
        return [p for p in self.likelihood.parameters() if p.requires_grad]

    def _display(self) -> Display:
        # Counted without binding: to look at a model changes nothing.
        trainable = [p for p in self.net.parameters() if p.requires_grad]
        lazy = any(is_lazy(p) for p in trainable)
        count = "lazy" if lazy else f"{sum(p.numel() for p in trainable):,} trainable"
        net, likelihood = type(self.net).__name__, type(self.likelihood).__name__
        return Display(
            f"Model: {net} with {count} weights, {likelihood} likelihood, "
            f"{type(self.prior).__name__} prior",
            "posterior = credo.fit(model, credo.VI(), data)",
            rows=[
                ("network", net, f"{count} weights"),
                ("random", _selector_words(self.selector), "the weights with a distribution"),
                ("likelihood", likelihood, "how targets follow from outputs"),
                ("prior", type(self.prior).__name__, "what was believed of the weights"),
            ],
        )


def _selector_words(selector: Selector) -> str:
    if selector is None:
        return "all but normalisation layers"
    if isinstance(selector, str):
        return selector
    return "by a function" if callable(selector) else ", ".join(selector)
