"""Several networks of one architecture as one: their outputs in one pass.

Layers that hold most small networks, linear ones and activations in a `torch.nn.Sequential`, become
one batched product each:

    h_k ← W_k h_k + b_k    for all members k at once,   W (M, out, in), h (M, in, B)

Examples are the columns, so that the gradient of W comes in the order in which W is stored.

Any other network is mapped over the members by `torch.func.vmap`, which runs its ``forward`` once
on tensors that stand for all members. What that can't do (random layers, running statistics,
recurrent layers, choices that depend on the data) is refused by `StackedNetwork`, and so is a
network whose outputs are not those of the members one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from credo.errors import UnsupportedError
from credo.model import Model
from credo.network.batches import map_inputs
from credo.network.dropout import ACTIVATIONS, dropout_layers
from credo.types import Inputs, Segment, Vector

ELEMENTWISE = tuple(kind for kind in ACTIVATIONS if kind not in (nn.GLU, nn.PReLU, nn.RReLU))
"""Activations without weights and without randomness, of one number each."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Step = Callable[[Tensor], Tensor]


def why_not(net: nn.Module) -> str | None:
    """What keeps networks like this one from running as one, as far as its layers tell."""
    dropping = dropout_layers(net)
    if dropping:
        return f"its layer {dropping[0]!r} drops at random"
    for name, module in net.named_modules():
        kind = type(module).__name__
        if isinstance(module, _NormBase) and module.track_running_stats:
            return f"its layer {name!r} ({kind}) keeps running statistics"
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return f"its layer {name!r} ({kind}) is recurrent"
        if isinstance(module, nn.RReLU):
            return f"its layer {name!r} (RReLU) is random"
        if any(getattr(module, hooks, None) for hooks in HOOKS):
            return f"its layer {name!r} ({kind}) has hooks, which would see all members at once"
    return None


def is_layers(net: nn.Module) -> bool:
    """Whether the network is a sequence of linear layers and activations."""
    return _layers_of(net) is not None


def _layers_of(net: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of nested sequences with their paths, if all are of the kinds that we know.

    By their very class: what inherits from a layer may do anything.
    """
    found: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, path: str) -> bool:
        kind = type(module)
        if kind is nn.Sequential:
            return all(walk(child, f"{path}{name}.") for name, child in module.named_children())
        if isinstance(module, nn.Flatten):
            known = kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
        else:
            known = kind in (nn.Linear, nn.Identity, *ELEMENTWISE)
        found.append((path, module))
        return known

    return found if walk(net, "") and found else None


@final
class StackedNetwork:
    """The outputs of several networks of one architecture, from the rows of one matrix.

    ``leaves`` are views of the matrix, one for every segment, which autograd differentiates by, and
    ``gradients`` the same views of the gradient.

    Args:
        models: The members'.
        weights: Their flat vectors, (M, T); it is read whenever the networks run.
        gradient: Where their gradient belongs, (M, T).
        inputs: Those of a minibatch, as `outputs` takes them.
        common: Whether all members see the same examples.

    Raises:
        UnsupportedError: The networks can't run as one on these inputs, or give other outputs.
    """

    def __init__(
        self,
        models: Sequence[Model],
        weights: Tensor,
        gradient: Tensor,
        inputs: Inputs,
        common: bool,
    ) -> None:
        refused = why_not(models[0].net)
        if refused is not None:
            raise UnsupportedError(refused)
        self._models, self._count = models, len(models)
        segments = models[0].segments
        layers = _layers_of(models[0].net)
        if layers is not None and not isinstance(layers[0][1], nn.Flatten):
            # A linear layer may also take examples that are sequences of vectors.
            vectors = isinstance(inputs, Tensor) and inputs.dim() == (2 if common else 3)
            layers = layers if vectors else None
        forms = {} if layers is None else _forms(layers)
        self.leaves = _views(weights.detach(), segments, forms)
        self.gradients = _views(gradient, segments, forms)
        for leaf in self.leaves:
            leaf.requires_grad_()
        fixed = {n: forms.get(n, _as_it_is)(part) for n, part in _fixed_parts(models).items()}
        names = [segment.name for segment in segments]
        self._tensors = {**fixed, **dict(zip(names, self.leaves, strict=True))}
        self._steps = None if layers is None else _steps(layers, self._tensors)
        if layers is None:
            # A copy, because other threads may use the network; its own weights are never read.
            self._base = copy.deepcopy(models[0].net)
        self._check(inputs, common)

    def outputs(self, inputs: Inputs, common: bool) -> Tensor:
        """The members' outputs, (M, B, ...).

        Args:
            inputs: As one network takes them if ``common``, else (M, B, ...).
            common: Whether all members see the same examples.
        """
        if self._steps is None:
            return self._mapped(inputs, common)
        h = inputs
        assert isinstance(h, Tensor)
        if common:
            h = h.expand(self._count, *h.shape)
        for step in self._steps:
            h = step(h)
        return h.transpose(1, 2)

    def _check(self, inputs: Inputs, common: bool) -> None:
        """Run all members on these inputs in both ways; leaves no trace."""
        before, states = torch.get_rng_state(), []
        with torch.no_grad():
            for model in self._models:
                states.append({n: b.clone() for n, b in model.buffers().items()})
            own = [inputs if common else map_inputs(lambda x, k=k: x[k], inputs)  # type: ignore[misc]
                   for k in range(self._count)]  # fmt: skip
            apart = [model.outputs(x) for model, x in zip(self._models, own, strict=True)]
            drew = not torch.equal(torch.get_rng_state(), before)
            torch.set_rng_state(before)
            for model, state in zip(self._models, states, strict=True):
                now = model.buffers()
                if any(not torch.equal(now[name], value) for name, value in state.items()):
                    for name, value in state.items():
                        now[name].copy_(value)
                    raise UnsupportedError("a pass through it changes its buffers")
            if drew:
                raise UnsupportedError("a pass through it draws random numbers")
            together = self.outputs(inputs, common)
            expected = torch.stack(apart)
        scale = expected.nan_to_num().abs().max()
        error = (together - expected).nan_to_num().abs().max()
        if together.shape != expected.shape or error > scale * torch.finfo(scale.dtype).eps ** 0.5:
            raise UnsupportedError("the members' outputs are others when they run as one")

    def _mapped(self, inputs: Inputs, common: bool) -> Tensor:
        net = self._models[0].net
        if self._base.training != net.training:
            self._base.train(net.training)
        try:
            found = torch.func.vmap(self._run, in_dims=(0, None if common else 0))(
                self._tensors, inputs
            )
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UnsupportedError(f"torch.func.vmap can't run it ({first})") from error
        assert isinstance(found, Tensor)
        return found

    def _run(self, tensors: dict[str, Tensor], inputs: Any) -> Tensor:
        if isinstance(inputs, Tensor):
            inputs = (inputs,)
        if isinstance(inputs, Mapping):
            outputs = functional_call(self._base, tensors, (), dict(inputs))
        else:
            outputs = functional_call(self._base, tensors, tuple(inputs))
        if not isinstance(outputs, Tensor):
            raise TypeError(f"it returns {type(outputs).__name__}")
        return outputs


def _as_it_is(values: Tensor) -> Tensor:
    return values


def _forms(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, Step]:
    """The views that a product takes of stacked parameters, by name: biases are (M, out, 1).

    The leaves themselves have this form: a view of a leaf, kept from step to step, would lose its
    way back to it when the optimizer writes the weights.
    """
    return {
        f"{path}bias": lambda values: values.unsqueeze(2)
        for path, module in layers
        if isinstance(module, nn.Linear)
    }


def _steps(layers: Sequence[tuple[str, nn.Module]], parts: Mapping[str, Tensor]) -> list[Step]:
    """From inputs (M, B, ...) to outputs (M, out, B)."""
    steps: list[Step] = [lambda h: h.flatten(2).transpose(1, 2)]
    for path, module in layers:
        if isinstance(module, nn.Linear):
            steps.append(_product(parts[f"{path}weight"], parts.get(f"{path}bias")))
        elif not isinstance(module, nn.Flatten | nn.Identity):
            steps.append(module)
    return steps


def _product(weight: Tensor, bias: Tensor | None) -> Step:
    """W h + b of every member, for weights (M, out, in) and biases (M, out, 1)."""
    if bias is None:
        return lambda h: torch.bmm(weight, h)
    return lambda h: torch.baddbmm(bias, weight, h)


def _views(matrix: Vector, segments: Sequence[Segment], forms: Mapping[str, Step]) -> list[Tensor]:
    """For every segment its values in all rows, without a copy."""
    members = len(matrix)
    return [
        forms.get(s.name, _as_it_is)(matrix[:, s.slice].view(members, *s.shape)) for s in segments
    ]


def _fixed_parts(models: Sequence[Model]) -> dict[str, Tensor]:
    """Frozen parameters and buffers of all members, by name."""
    each = []
    for model in models:
        frozen = {n: p for n, p in model.net.named_parameters() if not p.requires_grad}
        each.append({**frozen, **model.buffers()})
    return {name: torch.stack([parts[name].detach() for parts in each]) for name in each[0]}
