"""What an optimizer is given: a module, parameters or groups, with options that are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from torch import Tensor, nn

from credo.checks import (
    Count,
    Index,
    NotNegative,
    Positive,
    check,
    constraints_of,
    nearest,
    positive,
)
from credo.errors import DataError
from credo.network import parameters_of
from credo.network.selection import is_norm
from credo.noise import Draws
from credo.optim.by_layer import layer_precisions
from credo.temperature import Balanced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
else:
    ProcessGroup = Any  # there are builds of torch without it

Group: TypeAlias = dict[str, Any]
Params: TypeAlias = nn.Module | Iterable[Tensor] | Iterable[Group] | Iterable[tuple[str, Tensor]]
"""A module, its parameters (with names or without), or groups of them."""


Accumulation: TypeAlias = Literal["mean", "sum"]
"""What becomes of several blocks of one step."""


class Shared(TypedDict, total=False):
    """The options of every optimizer that have the same default in each of them."""

    debias: bool
    temperature: Positive | Balanced | None
    augmentation: Positive
    kl_warmup: Index
    samples: Count
    draws: Draws
    seed: Index
    accumulation: Accumulation
    process_group: ProcessGroup | None
    shared_noise: bool
    module: nn.Module | None


LAYER = "layer_precision"
"""Where a group keeps its layers' own precision until the first curvature follows from it."""

_RESERVED = ("params", "param_names", "name", "prior_precision", "weight_decay")


def groups_of(params: Params, options: Group, module: nn.Module | None) -> list[Group]:
    """One dictionary for each group, with every option set.

    A module's norm layers become a deterministic group. Deterministic groups have no prior unless
    they say so. Frozen parameters are left out. Where prior or first curvature have to know their
    layer, a group is parted by fan-in.
    """
    settled = [_settled(group, options) for group in _raw_groups(params)]
    groups = [part for group in settled for part in _by_layer(group, module)]
    if not any(group["params"] for group in groups):
        raise DataError(
            "there are no floating parameters with requires_grad=True to optimise: unfreeze some, "
            "and note that a generator such as net.parameters() can be used up only once"
        )
    return groups


def check_options(group: Mapping[str, Any], constructor: Callable[..., Any]) -> None:
    """Raise `DataError` for the first option that is not what the constructor declares it to be."""
    check_data(group)
    declared = constraints_of(constructor)
    for name, value in group.items():
        if name in declared and name != "params":
            check(name, value, declared[name])
    check("deterministic", group["deterministic"], bool)
    if not group["deterministic"] and not group["prior_precision"] > 0:
        raise DataError(
            "prior_precision (or weight_decay) must be positive where weights are random: with 0 "
            "there is no prior and the posterior may not exist. Point estimates: deterministic=True"
        )


def check_data(group: Mapping[str, Any]) -> None:
    """Raise `DataError` unless the number of examples is known."""
    if group["num_data"] is None:
        raise DataError(
            "num_data is missing: the number of training examples says how much the data weigh "
            "against the prior and how wide the posterior is, and a batch can't tell it. Pass "
            "num_data=len(train_set)"
        )
    for name in ("num_data", "augmentation"):
        positive(name, group[name])


def _raw_groups(params: Params) -> list[Group]:
    if isinstance(params, nn.Module):
        parts: dict[bool, list[Tensor]] = {False: [], True: []}
        for segment, parameter in parameters_of(params):
            parts[is_norm(segment)].append(parameter)
        return [
            {"params": some, **({"deterministic": True} if norm else {})}
            for norm, some in parts.items()
            if some
        ]
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise DataError(
            "params must be a module, an iterable of parameters or a list of groups, not a "
            f"{type(params).__name__}"
        )
    given: list[Any] = list(params)
    if given and all(isinstance(item, Mapping) for item in given):
        return [dict(item) for item in given]
    return [{"params": given}]


def _settled(group: Group, options: Group) -> Group:
    """The group with names apart, frozen parameters left out, defaults and its prior filled in."""
    unknown = [key for key in group if key not in options and key not in _RESERVED]
    if unknown:
        hint = nearest(unknown[0], [*options, *_RESERVED]) or f" Known are {sorted(options)}."
        raise DataError(f"a parameter group has the unknown option {unknown[0]!r}.{hint}")
    if "params" not in group:
        raise DataError('a parameter group needs "params"')
    items = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    named = [item if isinstance(item, tuple) else (None, item) for item in items]
    for _, parameter in named:
        if not isinstance(parameter, Tensor):
            raise DataError(f"params must hold tensors, not {type(parameter).__name__}")
    kept = [(name, p) for name, p in named if p.requires_grad and p.is_floating_point()]
    settled = {**options, **group, "params": [p for _, p in kept]}
    if kept and all(name is not None for name, _ in kept):
        settled["param_names"] = [name for name, _ in kept]
    _settle_prior(settled, group)
    return settled


def _by_layer(group: Group, module: nn.Module | None) -> list[Group]:
    """Parts of the group whose layers are alike, unless prior and first curvature are given."""
    told = group["prior_precision"] is not None and group["hess_init"] is not None
    if told or group["deterministic"] is True:
        return [group]
    parts: dict[float, list[int]] = {}
    for index, precision in enumerate(layer_precisions(group["params"], module)):
        parts.setdefault(precision, []).append(index)
    prior = group["prior_precision"]
    return [
        {**group, LAYER: layer, "prior_precision": layer if prior is None else prior}
        | {key: [group[key][i] for i in some] for key in ("params", "param_names") if key in group}
        for layer, some in parts.items()
    ]


def _settle_prior(settled: Group, group: Group) -> None:
    """Leave ``prior_precision`` of it and ``weight_decay`` = p/n; None if neither is said."""
    given = _prior_in(group)
    if len(given) > 1:
        _refuse_both(**given)
    if not given:
        given = {"prior_precision": 0.0} if settled["deterministic"] is True else _prior_in(settled)
    settled.pop("weight_decay", None)
    precision = given.get("prior_precision")
    if "weight_decay" in given:
        check("weight_decay", given["weight_decay"], NotNegative)
        check_data(settled)
        precision = given["weight_decay"] * settled["num_data"] * settled["augmentation"]
    settled["prior_precision"] = precision


def _prior_in(group: Group) -> Group:
    names = ("prior_precision", "weight_decay")
    return {name: group[name] for name in names if group.get(name) is not None}


def prior_options(
    prior_precision: float | None, weight_decay: float | None, otherwise: Group | None = None
) -> Group:
    """The prior as options of an optimizer: what was given of the two, or ``otherwise``."""
    options: Group = {"prior_precision": prior_precision, "weight_decay": weight_decay}
    given = _prior_in(options)
    if len(given) > 1:
        _refuse_both(**given)
    return options if given else {**options, **(otherwise or {})}


def _refuse_both(prior_precision: object, weight_decay: object) -> None:
    """The error for a prior that is given twice."""
    raise DataError(
        "prior_precision and weight_decay = prior_precision/num_data say the same thing: give one "
        f"of them, not both {prior_precision!r} and {weight_decay!r}"
    )
