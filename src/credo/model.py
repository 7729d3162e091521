"""A network with its likelihood and prior: what there is to be Bayesian about."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from credo.display import Display, Displayed
from credo.errors import DataError
from credo.likelihoods.base import missing_members
from credo.network import FlatParams, Selection, Selector, bind, select
from credo.priors import Normal
from credo.types import Batch, FlatDistribution, Inputs, Likelihood, Prior


class Model(Displayed):
    """A network, how targets follow from its outputs, and what was believed of its weights.

    ``random`` chooses the weights that get a distribution: None for all but normalisation layers,
    ``"last_layer"``, ``"all"``, a name or glob or several, or a predicate on `Segment`. The other
    trainable parameters become point estimates without a prior.

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

    @property
    def flat(self) -> FlatParams:
        """The network's parameters as one vector."""
        return bind(self.net)

    @property
    def random(self) -> Selection:
        """The weights that have a distribution; its size is P."""
        return select(self.flat.segments, self.selector)

    @property
    def deterministic(self) -> Selection:
        """The trainable parameters that are point estimates."""
        flat = self.flat
        chosen = {s.name for s in select(flat.segments, self.selector).segments}
        return Selection.of(s for s in flat.segments if s.name not in chosen)

    def prior_over_weights(self) -> FlatDistribution:
        """The prior of the random weights, as a distribution over flat vectors (P,)."""
        flat = self.flat
        return self.prior.on(select(flat.segments, self.selector).segments, flat.vector)

    def outputs(self, inputs: Inputs) -> Tensor:
        """The network's outputs with the weights it has now."""
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
        """Mean negative log-likelihood of a batch: a scalar that can be differentiated."""
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
