"""Makes ``tests/data/nuts_reference.json``: two posteriors as NumPyro's NUTS samples them.

    python -m pip install numpyro
    python tests/reference/make_nuts_reference.py tests/data/nuts_reference.json

Not run by the tests: it needs NumPyro and some minutes. What it writes are the data of both
problems and, of the network's output at some inputs, mean, standard deviation and quantiles under
the posterior, each with its Monte Carlo standard error; and what a gradient was worth to the
sampler.

* ``network``: regression by a 2-8-1 network with tanh, 33 weights with priors N(0, 1), noise 0.5.
* ``logistic``: three weights and a bias with priors N(0, 2²), labels 0 and 1.

The standard error of a mean is sd/√ESS; of a standard deviation it is that of the mean of the
squared deviation over 2·sd; of a quantile it is √(p(1 − p)/ESS) over the density, by the distance
between neighbouring quantiles, with ESS that of the indicator. ESS is `numpyro.diagnostics`'s.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
    from numpyro.infer import MCMC, NUTS
except ImportError:  # the tests collect this file, and run nothing of it
    jax = None

HIDDEN, NOISE = 8, 0.5
CHAINS, WARMUP, DRAWS = 8, 1000, 8_000
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def network_data():
    """40 points in a square, and a target that bends."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (40, 2)).round(3)
    y = np.sin(1.5 * x[:, 0]) * np.cos(x[:, 1]) * 1.5 + NOISE * rng.normal(size=40)
    probes = np.stack(np.meshgrid([-3.0, -1.0, 1.0, 3.0], [-2.5, -0.5, 1.5]), -1).reshape(-1, 2)
    return x, y.round(3), probes


def logistic_data():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(60, 3)).round(3)
    y = (rng.uniform(size=60) < 1 / (1 + np.exp(-(x @ [1.5, -1.0, 0.5] + 0.3)))).astype(float)
    return x, y, rng.normal(size=(12, 3)).round(3) * 1.5


def network(weights, x):
    """In the order in which torch lists the parameters of Linear(2, 8), Tanh, Linear(8, 1)."""
    first, bias = weights[: 2 * HIDDEN].reshape(HIDDEN, 2), weights[2 * HIDDEN : 3 * HIDDEN]
    second = weights[3 * HIDDEN : 4 * HIDDEN]
    return jnp.tanh(x @ first.T + bias) @ second + weights[4 * HIDDEN]


def network_model(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([4 * HIDDEN + 1]).to_event(1))
    numpyro.sample("y", dist.Normal(network(weights, x), NOISE), obs=y)


def logits(weights, x):
    return x @ weights[:3] + weights[3]


def logistic_model(x, y):
    weights = numpyro.sample("w", dist.Normal(0, 2).expand([4]).to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=logits(weights, x)), obs=y)


def error_of_mean(series):
    """Standard error of the mean of (chains, draws, K) over chains and draws, (K,)."""
    size = np.asarray(effective_sample_size(series)).reshape(-1)
    return series.std((0, 1)) / np.sqrt(size)


def summary(values):
    """What is stored of outputs (chains, draws, K)."""
    mean, sd = values.mean((0, 1)), values.std((0, 1))
    squares = (values - mean) ** 2
    quantiles = np.quantile(values, LEVELS, axis=(0, 1))
    errors = []
    for level, at in zip(LEVELS, quantiles, strict=True):
        low, high = np.quantile(values, [level - 0.02, level + 0.02], axis=(0, 1))
        errors.append(error_of_mean((values < at).astype(float)) * (high - low) / 0.04)
    return {
        "mean": mean, "mean_error": error_of_mean(values),
        "sd": sd, "sd_error": error_of_mean(squares) / (2 * sd),
        "levels": LEVELS, "quantiles": quantiles, "quantile_errors": np.stack(errors),
        "r_hat": float(np.max(split_gelman_rubin(values))),
    }  # fmt: skip


def sampled(model, function, data):
    x, y, probes = data
    sampler = MCMC(
        NUTS(model), num_warmup=WARMUP, num_samples=DRAWS, num_chains=CHAINS,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    sampler.run(
        jax.random.PRNGKey(0), x, y, extra_fields=("num_steps", "diverging", "potential_energy")
    )
    weights = sampler.get_samples(group_by_chain=True)["w"]
    values = np.asarray(jax.vmap(jax.vmap(lambda w: function(w, probes)))(weights))
    extra = sampler.get_extra_fields(group_by_chain=True)
    steps = np.asarray(extra["num_steps"])
    energy = np.asarray(extra["potential_energy"])
    return {
        "x": x.tolist(), "y": y.tolist(), "probes": probes.tolist(),
        **{
            name: np.asarray(value).round(6).tolist() if not isinstance(value, float) else value
            for name, value in summary(values).items()
        },
        "draws": [CHAINS, DRAWS],
        "gradients_per_draw": float(steps.mean()),
        "divergences": int(np.asarray(extra["diverging"]).sum()),
    }, {"values": values, "steps": steps, "energy": energy}  # fmt: skip


def main(path, raw=None) -> None:
    numpyro.enable_x64()
    found = {"made_by": f"NumPyro {numpyro.__version__}, NUTS, float64, its default settings"}
    kept = {}
    for name, model, function, data in (
        ("network", network_model, network, network_data()),
        ("logistic", logistic_model, logits, logistic_data()),
    ):
        found[name], kept[name] = sampled(model, function, data)
        print(name, {k: found[name][k] for k in ("r_hat", "gradients_per_draw", "divergences")})
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
    if raw is not None:
        np.savez(raw, **{f"{n}_{k}": v for n, own in kept.items() for k, v in own.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
