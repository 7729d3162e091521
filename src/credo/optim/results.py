"""What leaves an optimizer and comes back: the posterior it found, the state it goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from credo.errors import BindingError, CheckpointError, NonFiniteError, UnsupportedError
from credo.families import Gaussian
from credo.model import Model
from credo.network import parameters_of
from credo.optim.groups import Group
from credo.optim.layout import Layout
from credo.posterior.posterior import Posterior
from credo.priors import Normal
from credo.types import Likelihood, Vector


def posterior_of(
    net: nn.Module,
    likelihood: Likelihood,
    groups: Sequence[Group],
    q_of: Callable[[Vector, Sequence[Tensor]], Gaussian],
) -> Posterior:
    """q over the groups' random weights; ``q_of`` makes it of a mean and parameters in order."""
    here = {segment.name: parameter for segment, parameter in parameters_of(net)}
    precisions = {
        id(parameter): float(group["prior_precision"])
        for group in groups
        if not group["deterministic"]
        for parameter in group["params"]
    }
    if not precisions:
        raise UnsupportedError(
            "every group is deterministic: there is no distribution to give. The trained "
            "network itself is the result"
        )
    missing = len(precisions.keys() - {id(parameter) for parameter in here.values()})
    if missing:
        raise BindingError(
            f"{missing} of the {len(precisions)} random parameters of this optimizer are not in "
            f"the {type(net).__name__} given: pass the network that was trained"
        )
    prior_scales = {n: precisions[id(p)] ** -0.5 for n, p in here.items() if id(p) in precisions}
    values = set(prior_scales.values())
    prior = Normal(values.pop()) if len(values) == 1 else Normal.per_layer(prior_scales)
    model = Model(net, likelihood, prior, random=lambda s: s.name in prior_scales)
    random = model.random
    q = q_of(model.weights(random), [here[segment.name] for segment in random.segments])
    return Posterior.at_network(model, q, draws=groups[0]["draws"])


def refuse_nonfinite(named: Mapping[str, Vector], layout: Layout, step: int) -> None:
    """Raise `NonFiniteError` for the first parameter that has such a number in a vector."""
    for name, vector in named.items():
        where = layout.first_nonfinite(vector)
        if where is not None:
            raise NonFiniteError(
                f"the {name} of {where} is not finite at step {step}; weights and state are "
                "those of the step before. Lower lr, or raise prior_precision or hess_init, "
                "which makes the draws smaller"
            )


def refuse_strange_state(
    state_dict: dict[str, Any],
    own_groups: Sequence[Group],
    remembered_of: Callable[[Tensor], Mapping[str, Tensor]],
    kind: str,
) -> None:
    """Raise `CheckpointError` unless all that is remembered of a parameter is there, in shape."""
    groups = state_dict.get("param_groups", [])
    sizes, expected = ([len(group["params"]) for group in some] for some in (groups, own_groups))
    if sizes != expected:
        raise CheckpointError(
            f"the state has groups of {sizes} parameters, this optimizer of {expected}"
        )
    indices = [index for group in groups for index in group["params"]]
    parameters = [p for group in own_groups for p in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        stored = state_dict["state"].get(index, {})
        shapes = {name: tuple(t.shape) for name, t in stored.items() if isinstance(t, Tensor)}
        wanted = {name: tuple(t.shape) for name, t in remembered_of(parameter).items()}
        if shapes != wanted:
            raise CheckpointError(
                f"parameter {index} needs state {wanted}, but the stored one has {shapes}: it "
                f"belongs to another network or is not of {kind}"
            )
