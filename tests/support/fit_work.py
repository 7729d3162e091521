"""What the ranks of ``tests/contract/test_fit_on_ranks.py`` do; importable by their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import credo
from credo.method import Method
from credo.train import loop

METHODS: dict[str, Callable[[], Method[Any]]] = {
    "MAP": lambda: credo.MAP(lr=0.01),
    "MAP, penalty": lambda: credo.MAP(lr=0.01, penalty="group_lasso"),
    "VI": lambda: credo.VI(lr=0.01, shared_noise=True),
    "VI, two samples": lambda: credo.VI(lr=0.01, samples=2, warmup=1.0, shared_noise=True),
    "VI, path": lambda: credo.VI(lr=0.01, estimator="path", shared_noise=True),
    "IVON": lambda: credo.IVON(shared_noise=True),
    "IVON, two samples": lambda: credo.IVON(samples=2, shared_noise=True),
    "VOGN": lambda: credo.VOGN(shared_noise=True),
    "Vadam": lambda: credo.Vadam(shared_noise=True),
    "Laplace": lambda: credo.Laplace(train=credo.MAP(lr=0.01)),
    "Laplace, diag": lambda: credo.Laplace(structure="diag", train=credo.MAP(lr=0.01)),
    "Laplace, full": lambda: credo.Laplace(structure="full", optimise_prior="per_layer"),
    "Laplace, low rank": lambda: credo.Laplace(structure="low_rank", rank=5),
    "SWAG": lambda: credo.SWAG(train=credo.MAP(lr=0.01), start=0.5, rank=5),
}
"""Methods that spread, all of whose noise is the same on every rank."""

BATCH = 8
NUM_DATA = 45
"""Five minibatches of eight, and five examples: three for one of two ranks, two for the other."""


def network(seed: int = 0, norm: bool = False) -> nn.Module:
    """Layer norm is a point estimate; batch norm and dropout are each rank's own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inside = [nn.BatchNorm1d(6), nn.Dropout(0.2)] if norm else [nn.LayerNorm(6)]
        return nn.Sequential(nn.Linear(3, 6), *inside, nn.Tanh(), nn.Linear(6, 2)).double()


def data(n: int = NUM_DATA, kind: str = "classes") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    if kind == "classes":
        return x, (x[:, 0] > 0).long()
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2]], 1)


def fit(method: Method[Any], net: nn.Module | None = None, **options: Any) -> credo.Posterior:
    """On ranks and alone the same call, of minibatches of eight."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    defaults = {"epochs": 9, "batch_size": BATCH // size, "seed": 3, "progress": False}
    likelihood = options.pop("likelihood", None) or credo.likelihoods.Categorical()
    train = options.pop("train", None) or data()
    model = credo.Model(network() if net is None else net, likelihood)
    return credo.fit(model, method, train, **{**defaults, **options})


def told(posterior: credo.Posterior) -> dict[str, Tensor]:
    """Everything a posterior holds."""
    tensors = {f"q.{name}": tensor for name, tensor in posterior.q.pack()[0].items()}
    tensors |= {f"buffer.{name}": tensor for name, tensor in posterior.buffers.items()}
    return tensors | {"point": posterior.point, "weights": posterior.model.weights()}


def records(posterior: credo.Posterior) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in posterior.history]


# --- runs -----------------------------------------------------------------------------------------


def fitted(name: str) -> Any:
    posterior = fit(METHODS[name](), val_data=data(30), schedule="cosine")
    return told(posterior), records(posterior)


def fitted_by_three(name: str) -> Any:
    """Six examples in a minibatch; for the last two of an epoch there are three ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    options: Any = {"epochs": 3, "batch_size": 6 // size, "train": data(20), "val_data": data(31)}
    posterior = fit(METHODS[name](), schedule="cosine", **options)
    return told(posterior), records(posterior)


def with_learned_noise() -> Any:
    answers = []
    for name in ("MAP", "VI", "IVON"):
        likelihood = credo.likelihoods.Gaussian(scale=0.5, learned=True).double()
        posterior = fit(METHODS[name](), likelihood=likelihood, train=data(kind="numbers"))
        noise = [parameter.detach().clone() for parameter in likelihood.parameters()]
        answers.append((told(posterior), noise))
    return answers


def one_batch_for_all(samples: int) -> Tensor:
    """Every rank sees the same batch and draws for itself, in a loop without `fit`."""
    method = credo.VI(lr=0.01, samples=samples)
    model = credo.Model(network(), credo.likelihoods.Categorical())
    state = method.init(model, NUM_DATA, torch.Generator().manual_seed(0))
    for _ in range(5):
        state, _ = method.update(state, data(8))
    return torch.cat([state.mean, state.rho, state.point])


def each_with_its_own(name: str, folder: Path | None = None, epochs: int = 4) -> Any:
    """Own draws, own dropout, own statistics, and first weights that differ."""
    rank = dist.get_rank()
    method = {"MAP": credo.MAP, "VI": credo.VI, "IVON": credo.IVON, "VOGN": credo.VOGN}[name]()
    net = network(seed=rank, norm=name != "VOGN")
    options: Any = {"schedule": "cosine", "train": data(), "val_data": data(30)}
    posterior = fit(method, net, epochs=epochs, folder=folder, **options)
    return told(posterior), records(posterior)


def killed_and_resumed(name: str, folder: Path) -> Any:
    """After 9 steps, in the second epoch; checkpoints after every step."""
    method = {"MAP": credo.MAP, "VI": credo.VI, "IVON": credo.IVON, "VOGN": credo.VOGN}[name]()
    kept, loop.SECONDS_BETWEEN_CHECKPOINTS = loop.SECONDS_BETWEEN_CHECKPOINTS, -1.0
    try:
        net = network(dist.get_rank(), name != "VOGN")
        _interrupted_after(9, method, folder, net=net, schedule="cosine", train=data())
        return each_with_its_own(name, folder)
    finally:
        loop.SECONDS_BETWEEN_CHECKPOINTS = kept


class Killed(Exception):
    """Stands for the end of the process."""


def _interrupted_after(steps: int, method: Any, folder: Path, **options: Any) -> None:
    update, calls = type(method).update, iter(range(steps))

    def dying(self: Any, state: Any, batch: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return update(self, state, batch)

    type(method).update = dying
    try:
        fit(method, epochs=4, folder=folder, val_data=data(30), **options)
        raise AssertionError("it was to be killed")
    except Killed:
        pass
    finally:
        type(method).update = update


def begun(name: str, folder: Path) -> None:
    """The first nine steps of `fitted`'s run."""
    kept, loop.SECONDS_BETWEEN_CHECKPOINTS = loop.SECONDS_BETWEEN_CHECKPOINTS, -1.0
    try:
        _interrupted_after(9, METHODS[name](), folder, batch_size=4)
    finally:
        loop.SECONDS_BETWEEN_CHECKPOINTS = kept


def continued(name: str, folder: Path) -> Any:
    """The rest of it, by the very same call."""
    posterior = fit(METHODS[name](), epochs=4, folder=folder, val_data=data(30), batch_size=4)
    return told(posterior), records(posterior)


def through_loaders(kind: str) -> Any:
    dataset = TensorDataset(*data(40))
    rank = dist.get_rank()
    if kind == "distributed":
        sampler: Any = DistributedSampler(dataset, seed=5)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    elif kind == "another number":
        sampler = DistributedSampler(dataset, num_replicas=3, rank=rank)
        loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    elif kind == "uneven":
        shares = [list(range(12)), list(range(12, 40))][rank]
        loader = DataLoader(dataset, batch_sampler=_Shares(shares))
    else:
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
    posterior = fit(credo.MAP(), train=loader, epochs=2, num_data=40)
    return told(posterior), records(posterior)


class _Shares:
    """Batches of four of some examples, of which a rank has more than the other."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter([self.rows[i : i + 4] for i in range(0, len(self.rows), 4)])

    def __len__(self) -> int:
        return 5


def datasets() -> Any:
    """A dataset and its tensors are the same data."""
    answers = []
    for train in (data(), _Pairs(*data())):
        answers.append(told(fit(credo.MAP(), train=train, epochs=2)))
    return answers


class _Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


# --- mistakes and mishaps -------------------------------------------------------------------------


def refused(method: Method[Any], n: int = NUM_DATA) -> None:
    fit(method, train=data(n), epochs=1)


def other_settings(folder: Path) -> None:
    fit(credo.MAP(lr=0.01 * (1 + dist.get_rank())), folder=folder)


def other_networks() -> None:
    width = 3 + dist.get_rank()
    net = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2)).double()
    fit(credo.MAP(), net)


def other_folders(folders: list[Path]) -> None:
    fit(credo.MAP(), folder=folders[dist.get_rank()], epochs=1)


def nan_on_one_rank() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 2).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            out: Tensor = self.layer(x)
            return out * float("nan") if self.calls > 3 and dist.get_rank() else out

    fit(credo.MAP(), Bad())


def weights_written_on_one_rank() -> None:
    net = network()

    class Meddler(credo.train.Reporter):
        def step(self, epoch: int, batch: int, nll: float) -> None:
            with torch.no_grad():
                next(net.parameters()).add_(1.0)

    fit(credo.MAP(), net, progress=Meddler())


def one_is_interrupted(folder: Path) -> Any:
    """Ctrl-C reaches one rank only, and yet all end after the same step."""
    update, calls = credo.MAP.update, iter(range(9))

    def interrupting(self: Any, state: Any, batch: Any) -> Any:
        if next(calls, None) is None and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, state, batch)

    credo.MAP.update = interrupting  # type: ignore[method-assign]
    try:
        fit(METHODS["MAP"](), epochs=4, folder=folder, val_data=data(30))
        return "went on"
    except KeyboardInterrupt as stop:
        text = str(stop)
    finally:
        credo.MAP.update = update  # type: ignore[method-assign]
    dist.barrier()
    posterior = fit(METHODS["MAP"](), epochs=4, folder=folder, val_data=data(30))
    return text, told(posterior)


def one_dies(folder: Path) -> None:
    update, calls = credo.MAP.update, iter(range(9))

    def dying(self: Any, state: Any, batch: Any) -> Any:
        if next(calls, None) is None and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, state, batch)

    credo.MAP.update = dying  # type: ignore[method-assign]
    fit(METHODS["MAP"](), folder=folder)


def ensemble(
    members: int, folder: Path | None = None, epochs: int = 4, laplace: bool = False
) -> Any:
    """Members of each rank's own, on whole minibatches; the first weights differ by rank."""
    inner = credo.Laplace(structure="diag") if laplace else credo.VI(lr=0.01)
    method = credo.Ensemble(inner, members=members)
    net = network(seed=dist.get_rank() if dist.is_initialized() else 0)
    options: Any = {"val_data": data(30), "batch_size": BATCH, "folder": folder}
    posterior = fit(method, net, epochs=epochs, **options)
    return posterior.pack()[0], records(posterior)
