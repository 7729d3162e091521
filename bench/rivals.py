"""The same training step by other libraries; one that is missing or fails is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bench.timing import at_most

NUM_DATA = 60_000
Step = Callable[[], object]


def replace_layers(
    net: nn.Module, linear: Callable[[nn.Linear], nn.Module], conv: Callable[[nn.Conv2d], nn.Module]
) -> nn.Module:
    """Swap layers in place, as these libraries ask their users to do."""
    for name, child in list(net.named_children()):
        if isinstance(child, nn.Linear):
            setattr(net, name, linear(child))
        elif isinstance(child, nn.Conv2d):
            setattr(net, name, conv(child))
        else:
            replace_layers(child, linear, conv)
    return net


def _adam_step(net: nn.Module, kl: Callable[[], Tensor], x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.Adam(list(dict.fromkeys(net.parameters())), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        (F.cross_entropy(net(x), y) + kl() / NUM_DATA).backward()
        optimizer.step()

    return step


def torchbnn(net: nn.Module) -> tuple[nn.Module, Callable[[], Tensor]]:
    import torchbnn as bnn

    net = replace_layers(
        net,
        lambda m: bnn.BayesLinear(0.0, 0.1, m.in_features, m.out_features),
        lambda m: bnn.BayesConv2d(
            0.0, 0.1, m.in_channels, m.out_channels, m.kernel_size, m.stride, m.padding,
            bias=m.bias is not None,
        ),
    )  # fmt: skip
    kl = bnn.BKLLoss("sum")
    return net, lambda: kl(net)[0]


def bayesian_torch(
    net: nn.Module, kind: str = "Reparameterization"
) -> tuple[nn.Module, Callable[[], Tensor]]:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    settings = {
        "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
        "type": kind, "moped_enable": False, "moped_delta": 0.5,
    }  # fmt: skip
    dnn_to_bnn(net, settings)
    return net, lambda: get_kl_loss(net)


def bayesian_torch_flipout(net: nn.Module) -> tuple[nn.Module, Callable[[], Tensor]]:
    return bayesian_torch(net, "Flipout")


def blitz(net: nn.Module) -> tuple[nn.Module, Callable[[], Tensor]]:
    from blitz.losses import kl_divergence_from_nn
    from blitz.modules import BayesianConv2d, BayesianLinear

    net = replace_layers(
        net,
        lambda m: BayesianLinear(m.in_features, m.out_features, posterior_rho_init=-3.0),
        lambda m: BayesianConv2d(
            m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, padding=m.padding,
            bias=m.bias is not None, posterior_rho_init=-3.0,
        ),
    )  # fmt: skip
    return net, lambda: kl_divergence_from_nn(net)


LAYER_LIBRARIES = {
    "torchbnn": torchbnn,
    "bayesian-torch": bayesian_torch,
    "bayesian-torch flipout": bayesian_torch_flipout,
    "blitz": blitz,
}


def posteriors_step(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    import posteriors
    import torchopt

    parameters = {k: v.detach().clone() for k, v in net.named_parameters()}
    buffers = {k: v.clone() for k, v in net.named_buffers()}

    def log_posterior(p: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(net, (p, buffers), (data[0],))
        prior = posteriors.diag_normal_log_prob(p) / NUM_DATA
        return -F.cross_entropy(output, data[1]) + prior, output

    transform = posteriors.vi.diag.build(
        log_posterior, torchopt.adam(lr=1e-3), temperature=1 / NUM_DATA, init_log_sds=-3.0
    )
    state = transform.init(parameters)

    def step() -> None:
        nonlocal state
        state = transform.update(state, (x, y), inplace=True)[0]

    return step


def ivon_step(net: nn.Module, x: Tensor, y: Tensor) -> Step:
    import ivon

    optimizer = ivon.IVON(net.parameters(), lr=0.1, ess=NUM_DATA)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def backpack_squares(
    net: nn.Module, x: Tensor, y: Tensor, parameters: list[nn.Parameter]
) -> Callable[[], list[Tensor]]:
    """Run forward and backward; the mean over examples of squared gradients, by parameter."""
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    net, loss = extend(net), extend(nn.CrossEntropyLoss())

    def run() -> list[Tensor]:
        with backpack(SumGradSquared()):
            loss(net(x), y).backward()
        # Its examples' losses are divided by the batch's size, as the mean loss does.
        return [p.sum_grad_squared * len(x) for p in parameters]  # type: ignore[attr-defined]

    return run


def opacus_squares(
    net: nn.Module, x: Tensor, y: Tensor, parameters: list[nn.Parameter]
) -> Callable[[], list[Tensor]]:
    """The same by Opacus, which keeps every example's gradient."""
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(net)

    def run() -> list[Tensor]:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        return [p.grad_sample.square_().mean(0) for p in parameters]  # type: ignore[attr-defined]

    return run


SQUARES = {"BackPACK": backpack_squares, "Opacus": opacus_squares}


def laplace_torch(
    net: nn.Module, x: Tensor, y: Tensor, subset: str, structure: str, backend: str
) -> Any:
    """Fitted by one pass in batches of 128, with its own curvature backend of that name."""
    import laplace
    from laplace import curvature

    fitted = laplace.Laplace(
        net, "classification", subset_of_weights=subset, hessian_structure=structure,
        prior_precision=1.0, backend=getattr(curvature, backend),
    )  # fmt: skip
    fitted.fit(DataLoader(TensorDataset(x, y), batch_size=128))
    return fitted


LAPLACE_TORCH = {
    "laplace-torch diag, BackPACK": ("all", "diag", "BackPackGGN"),
    "laplace-torch kron, BackPACK": ("all", "kron", "BackPackGGN"),
    "laplace-torch kron, Curvlinops": ("all", "kron", "CurvlinopsGGN"),
    "laplace-torch last layer kron, Curvlinops": ("last_layer", "kron", "CurvlinopsGGN"),
}


def training_steps(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> dict[str, Step]:
    """A step of every rival that is installed and runs on this network."""
    builders: dict[str, Callable[[], Step]] = {
        name: (lambda convert=convert: _adam_step(*convert(make()), x, y))
        for name, convert in LAYER_LIBRARIES.items()
    }
    builders["posteriors"] = lambda: posteriors_step(make(), x, y)
    builders["ivon-opt"] = lambda: ivon_step(make(), x, y)
    return working(builders)


def forward_networks(make: Callable[[], nn.Module]) -> dict[str, Callable[[], nn.Module]]:
    """Networks of the layer libraries, whose every forward pass draws new weights."""
    return {
        name: (lambda convert=convert: convert(make())[0].eval())
        for name, convert in LAYER_LIBRARIES.items()
        if "flipout" not in name
    }


def working(builders: dict[str, Callable[[], Step]], seconds: float = math.inf) -> dict[str, Step]:
    """Those that can be built and run once in the given time; the others are named with reason."""
    found = {}
    for name, build in builders.items():
        try:
            with at_most(seconds):
                step = build()
                step()
        except Exception as error:  # a rival may fail in any way; it must not end the benchmark
            print(f"  {name}: left out ({type(error).__name__}: {str(error)[:90]})")
            continue
        found[name] = step
    return found
