r"""Units that a penalty has emptied, taken out of the network for good.

A unit whose incoming weights are zero outputs the same whatever the input: act(bias), after batch
norm and pooling some other constant c. It is removed, and c times the weights it had in the next
layer goes to that layer's bias. An input of a layer with zero outgoing weights is not used at all;
the unit that made it is removed, and nothing need be added.

What is done is exact for groups that are zero: in evaluation mode the smaller network has the same
outputs. Groups of a norm up to the threshold are first set to zero, and that is all the error.

Zero padding makes a constant map one that ends at the border, which no bias can replace. Units
whose constant is not zero stay where such padding follows, and a warning says how many: a
convolution with ``padding`` and padding mode "zeros", or average pooling that counts padding.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.checks import NotNegative, check
from credo.errors import DataError, UnsupportedError
from credo.priors.group import Side

ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.Tanh, nn.Hardtanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Threshold,
)  # fmt: skip
SILENT = (nn.Identity, nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Modules that do nothing in evaluation mode."""
POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
Layer = nn.Linear | nn.Conv2d


def prune(net: nn.Sequential, threshold: float = 0.0, groups: Side = "incoming") -> nn.Sequential:
    """A smaller copy of the network, without units whose group of weights has a norm ≤ threshold.

    ``groups="incoming"`` looks at the weights into a unit, what "group_lasso" penalises, and
    ``"outgoing"`` at those out of it, as "group_lasso_transposed". One may be called after the
    other. ``net`` is a chain, an `nn.Sequential` that may contain others, of Linear and Conv2d
    layers, elementwise activations, dropout, pooling, batch norm and Flatten; anything else is
    refused by name. Inputs and outputs of the network stay, and of every layer at least one unit.

    Args:
        net: The chain of layers; it is left as it is.
        threshold: The largest norm of a group that counts as empty.
        groups: "incoming" for the weights into a unit, "outgoing" for those out of it.

    >>> net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    >>> with torch.no_grad():
    ...     _ = net[0].weight[1:4].zero_()
    >>> small = prune(net)
    >>> small[0]
    Linear(in_features=3, out_features=2, bias=True)
    >>> x = torch.randn(7, 3)
    >>> torch.allclose(small(x), net(x), atol=1e-6)
    True
    """
    check("threshold", threshold, NotNegative)
    check("groups", groups, Side)
    smaller = copy.deepcopy(net)
    pairs = _pairs(smaller)
    with torch.no_grad():
        # Each removal can empty groups further along: incoming ones onwards, outgoing ones back.
        for pair in pairs if groups == "incoming" else reversed(pairs):
            if groups == "incoming":
                pair.remove_constant(threshold)
            else:
                pair.remove_unused(threshold)
    return smaller


@dataclass
class _Step:
    """A module of the chain and its name."""

    name: str
    module: nn.Module

    def refuse(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"prune can't pass {self.name or 'the network'!r}, a {type(self.module).__name__}: "
            f"{why}. It takes chains (nn.Sequential) of Linear, Conv2d with groups=1, elementwise "
            "activations, dropout, pooling, batch norm and Flatten"
        )


@dataclass
class _Pair:
    """Two layers that follow each other, and what is between them."""

    name: str
    first: Layer
    between: list[_Step]
    second: Layer

    def remove_constant(self, threshold: float) -> None:
        """Take out units whose incoming weights are as good as zero."""
        weight = self.first.weight
        norms = torch.linalg.vector_norm(weight.flatten(1), dim=1)
        constants, bordered = self._constants()
        empty = norms <= threshold
        stuck = empty & bordered
        if bool(stuck.any()):
            warnings.warn(
                f"{int(stuck.sum())} units of {self.name!r} have no incoming weights but stay: "
                "they output a constant that is not zero, and zero padding follows",
                stacklevel=4,
            )
        keep = self._keep(empty & ~bordered, norms)
        gone = ~keep & (constants != 0).view(len(keep), -1).any(1)
        if bool(gone.any()):
            _add_to_bias(self.second, self._spread(gone), constants)
        self._shrink(keep)

    def remove_unused(self, threshold: float) -> None:
        """Take out units that the next layer does not listen to."""
        other = tuple(d for d in range(self.second.weight.dim()) if d != 1)
        norms = torch.linalg.vector_norm(self.second.weight, dim=other)
        loudest = norms.view(self.first.weight.shape[0], -1).amax(1)
        self._shrink(self._keep(loudest <= threshold, loudest))

    def _constants(self) -> tuple[Tensor, Tensor]:
        """What each input of the second layer is if the first one's weights are zero.

        And for each unit of the first layer, whether that is more than a bias can stand for.
        """
        units = self.first.weight.shape[0]
        bias = self.first.bias
        constants = self.first.weight.new_zeros(units) if bias is None else bias.detach().clone()
        bordered = torch.zeros(units, dtype=torch.bool, device=constants.device)
        for step in self.between:
            module = step.module
            if isinstance(module, ELEMENTWISE):
                constants = module(constants.clone())
            elif isinstance(module, NORMS):
                constants = _normalised(module, _repeated(constants, module.num_features))
            elif isinstance(module, nn.AvgPool2d) and _counts_padding(module):
                bordered |= constants != 0
        if isinstance(self.second, nn.Conv2d):
            if _pads_zeros(self.second):
                bordered |= constants != 0
        else:
            constants = _repeated(constants, self.second.in_features)
        return constants, bordered

    def _keep(self, empty: Tensor, norms: Tensor) -> Tensor:
        keep = ~empty
        if not bool(keep.any()):
            keep[norms.argmax()] = True
        return keep

    def _spread(self, units: Tensor) -> Tensor:
        """Units of the first layer as inputs of the second, which Flatten multiplies."""
        return units.repeat_interleave(self.second.weight.shape[1] // len(units))

    def _shrink(self, keep: Tensor) -> None:
        if bool(keep.all()):
            return
        _take(self.first, "weight", keep, 0)
        _take(self.first, "bias", keep, 0)
        for step in self.between:
            if isinstance(step.module, NORMS):
                inside = keep.repeat_interleave(step.module.num_features // len(keep))
                for name in ("weight", "bias", "running_mean", "running_var"):
                    _take(step.module, name, inside, 0)
                step.module.num_features = int(inside.sum())
        _take(self.second, "weight", self._spread(keep), 1)
        for layer in (self.first, self.second):
            if isinstance(layer, nn.Linear):
                layer.out_features, layer.in_features = layer.weight.shape
            else:
                layer.out_channels, layer.in_channels = layer.weight.shape[:2]


def _pairs(net: nn.Module) -> list[_Pair]:
    """All neighbouring layers of the chain, after a check that it is one."""
    steps = list(_steps("", net))
    seen: set[int] = set()
    for step in steps:
        if id(step.module) in seen and any(True for _ in step.module.parameters()):
            raise step.refuse("it is used twice, and both uses share its weights")
        seen.add(id(step.module))
    pairs: list[_Pair] = []
    between: list[_Step] = []
    last: _Step | None = None
    for step in steps:
        _check(step, last, between)
        if not isinstance(step.module, Layer):
            between.append(step)
            continue
        if last is not None:
            assert isinstance(last.module, Layer)
            pairs.append(_Pair(last.name, last.module, between, step.module))
        last, between = step, []
    return pairs


def _steps(name: str, module: nn.Module) -> Iterator[_Step]:
    if type(module) is not nn.Sequential:
        yield _Step(name, module)
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _steps(f"{name}.{key}" if name else key, child)


def _check(step: _Step, last: _Step | None, between: list[_Step]) -> None:
    """Raise `UnsupportedError` if units can't be followed through this module."""
    module = step.module
    known = (nn.Linear, nn.Conv2d, nn.Flatten, *ELEMENTWISE, *SILENT, *POOLING, *NORMS)
    if not isinstance(module, known):
        raise step.refuse("what it does to a single unit is not known")
    if "forward" in vars(type(module)) and type(module).__module__.split(".")[0] != "torch":
        raise step.refuse("it has a forward of its own")
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        raise step.refuse("hooks or parametrizations may change what it computes")
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        raise step.refuse(f"its groups={module.groups} tie channels to each other")
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        raise step.refuse("only Flatten(1, -1) keeps a unit's values together")
    if isinstance(module, NORMS) and module.running_mean is None:
        raise step.refuse("without running statistics a constant depends on the batch")
    if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
        raise step.refuse("its divisor_override changes constants")
    if isinstance(module, Layer) and not bool(torch.isfinite(module.weight.detach()).all()):
        raise DataError(f"{step.name!r} holds weights that are not finite: its training diverged")
    if last is None:
        return
    flat = any(isinstance(s.module, nn.Flatten) for s in between)
    images = isinstance(last.module, nn.Conv2d) and not flat
    if isinstance(module, nn.Conv2d) and not images:
        raise step.refuse("it follows a layer whose outputs are not images")
    if isinstance(module, nn.Linear) and images:
        raise step.refuse("it follows a convolution without Flatten, so its inputs are columns")


def _repeated(constants: Tensor, features: int) -> Tensor:
    """A channel's constant for every pixel of it that Flatten made a feature."""
    return constants.repeat_interleave(features // len(constants))


def _normalised(norm: nn.BatchNorm1d | nn.BatchNorm2d, constants: Tensor) -> Tensor:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    normalised = (constants - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
    return normalised * norm.weight + norm.bias if norm.affine else normalised


def _counts_padding(pool: nn.AvgPool2d) -> bool:
    padding = pool.padding if isinstance(pool.padding, tuple) else (pool.padding,)
    return bool(pool.count_include_pad) and any(padding)


def _pads_zeros(layer: nn.Conv2d) -> bool:
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return False
    return layer.padding == "same" or any(layer.padding)


def _add_to_bias(layer: Layer, inputs: Tensor, constants: Tensor) -> None:
    """Σ over these inputs of weight × constant, the same at every pixel."""
    weights = layer.weight[:, inputs]
    total = (weights.flatten(2).sum(2) if weights.dim() > 2 else weights) @ constants[inputs]
    if layer.bias is None:
        layer.bias = nn.Parameter(total)
    else:
        layer.bias.add_(total)


def _take(module: nn.Module, name: str, keep: Tensor, dim: int) -> None:
    """Only these entries of a parameter or buffer, if it has it."""
    tensor = getattr(module, name)
    if tensor is None:
        return
    taken = tensor.detach()[keep] if dim == 0 else tensor.detach()[:, keep]
    if isinstance(tensor, nn.Parameter):
        taken = nn.Parameter(taken, tensor.requires_grad)
    setattr(module, name, taken)
