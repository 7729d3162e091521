"""Ensembles of five: what they cost beside one network, to train and to predict, on one thread.

python -m bench ensembles           the figures that the docs give
python -m bench.ensembles grid      those behind the rule of `credo.ensembles.stacked.is_faster`
python -m bench.ensembles orders    what a common order costs on held-out data
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import credo
from bench.timing import Contestants, Row, interleave

MEMBERS, BATCH = 5, 32

Data = tuple[Tensor, Tensor]


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def examples(*widths: int, number: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, widths[0], generator=generator)
    if widths[-1] == 1:
        return x, 0.5 * x[:, :1] + 0.1 * torch.randn(number, 1, generator=generator)
    return x, torch.randint(widths[-1], (number,), generator=generator)


def likelihood(*widths: int) -> credo.types.Likelihood:
    if widths[-1] == 1:
        return credo.likelihoods.Gaussian()
    return credo.likelihoods.Categorical()


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few epochs are no training
            yield
    finally:
        torch.set_num_threads(threads)


def fit_of(
    method: credo.method.Method, widths: tuple[int, ...], data: Data, epochs: int, batch: int
) -> Callable[[], credo.Posterior]:
    def fit() -> credo.Posterior:
        model = credo.Model(network(*widths), likelihood(*widths))
        return credo.fit(model, method, data, epochs=epochs, batch_size=batch, progress=False)

    return fit


def _ensemble(**settings: object) -> credo.Ensemble:
    return credo.Ensemble(credo.MAP(), members=MEMBERS, **settings)  # type: ignore[arg-type]


def training(widths: tuple[int, ...], number: int, epochs: int, rounds: int = 15) -> list[Row]:
    """All of `credo.fit` with an ensemble, relative to `credo.fit` with one MAP of those steps."""
    data = examples(*widths, number=number)
    methods = {
        "credo.fit MAP": credo.MAP(),
        "credo.fit MAP again (control)": credo.MAP(),
        "ensemble, default": _ensemble(),
        "ensemble, together, own orders": _ensemble(training="together"),
        "ensemble, together, common order": _ensemble(training="together", order="common"),
        "ensemble, in turn": _ensemble(training="in_turn"),
    }
    contestants: Contestants = {
        name: fit_of(method, widths, data, epochs, BATCH) for name, method in methods.items()
    }
    base = {"credo.fit MAP": "credo.fit MAP"}
    with one_thread():
        return interleave(
            "fit of an ensemble of 5", "-".join(map(str, widths)), contestants, base, rounds,
            steps=1, clock=time.process_time,
        )  # fmt: skip


def prediction(widths: tuple[int, ...], number: int, rounds: int = 31) -> list[Row]:
    """`Posterior.predict` of an ensemble, relative to a forward pass of each of five networks."""
    data = examples(*widths, number=number)
    nets = [network(*widths).eval() for _ in range(MEMBERS)]

    def forwards() -> None:
        with torch.inference_mode():
            for net in nets:
                net(data[0])

    with one_thread():
        posterior = fit_of(_ensemble(), widths, data, 1, 1024)()
        contestants: Contestants = {
            "five forwards": forwards,
            "five forwards again (control)": forwards,
            "posterior.predict": lambda: posterior.predict(data[0]),
        }
        return interleave(
            "prediction by an ensemble of 5", f"{'-'.join(map(str, widths))}, {number} inputs",
            contestants, {"five forwards": "five forwards"}, rounds, steps=3,
            clock=time.process_time,
        )  # fmt: skip


GRID = [
    ((10, 50, 1), 32), ((10, 50, 50, 1), 32), ((10, 50, 1), 512), ((64, 200, 10), 32),
    ((64, 200, 10), 256), ((784, 100, 10), 32), ((784, 100, 10), 256), ((100, 1000, 10), 32),
    ((784, 400, 400, 10), 32), ((784, 1200, 10), 32), ((784, 1200, 10), 256),
]  # fmt: skip


def grid(rounds: int = 3) -> None:
    """The time of training together, in units of that of training in turn."""
    print("widths, batch, weights: own orders, common order")
    for widths, batch in GRID:
        weights = sum(p.numel() for p in network(*widths).parameters())
        steps = max(4, min(50, 100_000_000 // (weights * batch)))
        data = examples(*widths, number=batch * steps)
        settings = {
            "in turn, own": _ensemble(training="in_turn"),
            "in turn, common": _ensemble(training="in_turn", order="common"),
            "own": _ensemble(training="together"),
            "common": _ensemble(training="together", order="common"),
        }
        contestants: Contestants = {
            name: fit_of(method, widths, data, 1, batch) for name, method in settings.items()
        }
        base = {"in turn, own": "own", "in turn, common": "common"}
        with one_thread():
            rows = interleave(
                "", "", contestants, base, rounds, 1, long=True, clock=time.process_time
            )
        found = {(row.contestant, row.baseline): row.ratio for row in rows}
        ratios = " ".join(f"{found[name, name]:.2f}" for name in ("own", "common"))
        print("-".join(map(str, widths)), batch, weights, ratios, flush=True)


def orders(seeds: int = 10) -> None:
    """Held-out NLL of ensembles whose members share an order, less that of those that don't."""
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    print("data: NLL with own orders, common minus own, its standard error, pairs")
    for load in (load_diabetes, load_breast_cancer, load_digits):
        x, y = load(return_X_y=True)
        regression, classes = load is load_diabetes, 1 if load is load_diabetes else int(max(y)) + 1
        found: dict[str, list[float]] = {"own": [], "common": []}
        for seed in range(seeds):
            parts = train_test_split(x, y, test_size=0.3, random_state=seed)
            scaler = StandardScaler().fit(parts[0])
            inputs = [torch.tensor(scaler.transform(p)).float() for p in parts[:2]]
            targets = [torch.tensor(p) for p in parts[2:]]
            if regression:
                centre, scale = targets[0].mean(), targets[0].std()
                targets = [((t - centre) / scale).float()[:, None] for t in targets]
            for order in ("own", "common"):
                torch.manual_seed(seed)
                model = credo.Model(
                    network(inputs[0].shape[1], 50, classes),
                    credo.likelihoods.Gaussian(learned=True)
                    if regression
                    else credo.likelihoods.Categorical(),
                )
                posterior = credo.fit(
                    model, _ensemble(order=order), (inputs[0], targets[0]), epochs=20,
                    batch_size=BATCH, seed=seed, progress=False,
                )  # fmt: skip
                log_prob = posterior.predict(inputs[1]).log_prob(targets[1])
                found[order].append(-float(log_prob.mean()))
        own, common = (torch.tensor(found[name]) for name in ("own", "common"))
        error = float((common - own).std() / len(own) ** 0.5)
        mean, difference = float(own.mean()), float((common - own).mean())
        print(f"{load.__name__}: {mean:.4f} {difference:+.4f} {error:.4f} {seeds}", flush=True)


if __name__ == "__main__":
    with one_thread():
        {"grid": grid, "orders": orders}[sys.argv[1]]()
