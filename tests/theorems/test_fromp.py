"""FROMP: its gradient, its kernel, its memory, and what they are for linear models.

Float64 throughout. Sums over some hundred terms of order one round to about 1e-13; where a kernel
is inverted the tolerance is that times its condition number, stated there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import credo
from credo.continual import MultiHead, Stream, Task, Training
from credo.continual.coreset import choose
from credo.continual.fromp import FROMP, FunctionalRegulariser, data_curvature
from credo.continual.functional_penalty import (
    Anchor,
    FunctionalPenalty,
    prediction_kernels,
    whiteners,
)
from credo.continual.regularised import RegularisedMAP
from credo.likelihoods import Bernoulli, Categorical, Gaussian
from credo.model import Model


def tanh_net(seed: int = 0, outputs: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def two_heads(seed: int = 0) -> MultiHead:
    torch.manual_seed(seed)
    return MultiHead(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), 5, (2, 3)).double()


def normals(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prediction_jacobian(model: Model, inputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """∂p/∂w by brute force, (M, C, P)."""
    named = dict(model.net.named_parameters())
    args = inputs if isinstance(inputs, tuple) else (inputs,)

    def said(weights: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(model.net, weights, args)
        likelihood = model.likelihood
        found = likelihood.probs(outputs) if hasattr(likelihood, "probs") else outputs
        return found.reshape(len(outputs), -1)

    parts = jacrev(said)({name: p.detach() for name, p in named.items()})
    return torch.cat([parts[s.name].flatten(2) for s in model.random.segments], dim=2)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5), Bernoulli()])
def test_kernels_are_those_of_brute_force_jacobians(likelihood: object) -> None:
    model = Model(tanh_net(), likelihood)
    x, variance = normals(6, 4), normals(model.random.size, seed=2).exp()
    rows = prediction_jacobian(model, x)
    expected = torch.einsum("mcp,p,ncp->cmn", rows, variance, rows) + 1e-6 * torch.eye(6)
    found = prediction_kernels(model, x, variance, jitter=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_kernels_of_a_head_and_kernels_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(two_heads(), Categorical())
    inputs = (normals(6, 4), torch.ones(6, dtype=torch.long))
    variance = normals(model.random.size, seed=2).exp()
    rows = prediction_jacobian(model, inputs)
    expected = torch.einsum("mcp,p,ncp->cmn", rows, variance, rows) + 1e-6 * torch.eye(6)
    torch.testing.assert_close(
        prediction_kernels(model, inputs, variance), expected, rtol=1e-12, atol=1e-13
    )
    for part in ("MAX_NUMBERS", "COLUMNS"):
        monkeypatch.setattr(f"credo.continual.functional_penalty.{part}", 7)
        torch.testing.assert_close(
            prediction_kernels(model, inputs, variance), expected, rtol=1e-12, atol=1e-13
        )


def test_the_step_follows_the_written_loss_with_its_kernels_frozen() -> None:
    """One step of plain gradient descent against autodiff of

        (1/τ)·mean CE + ½ Σ_t Σ_c (p − p_old)ᵀK⁻¹(p − p_old)

    with dense inverses. Two old tasks of different heads and sizes; ε = 1e-3 keeps the condition
    number of K below 1e5, and 1e5·1e-16 is far below the tolerance.
    """
    model = Model(two_heads(), Categorical())
    memory = [
        (normals(5, 4, seed=3), torch.zeros(5, dtype=torch.long)),
        (normals(4, 4, seed=4), torch.ones(4, dtype=torch.long)),
    ]
    variance = normals(model.random.size, seed=2).exp()
    kernels = [prediction_kernels(model, x, variance, jitter=1e-3) for x in memory]
    with torch.no_grad():
        old = [model.outputs(x).softmax(1) for x in memory]
    anchors = [Anchor.at(model, x, whiteners(k)) for x, k in zip(memory, kernels, strict=True)]
    with model.bind().writing() as vector:
        vector += 0.3 * normals(vector.numel(), seed=5)
    before = model.weights()
    batch = ((normals(7, 4, seed=6), torch.ones(7, dtype=torch.long)), torch.arange(7) % 3)

    loss = 0.1 * torch.nn.functional.cross_entropy(model.outputs(batch[0]), batch[1])
    for x, p, kernel in zip(memory, old, kernels, strict=True):
        change = model.outputs(x).softmax(1) - p
        for c in range(3):
            loss = loss + 0.5 * change[:, c] @ kernel[c].inverse() @ change[:, c]
    grads = torch.autograd.grad(loss, model.bind().parameters)
    gradient = torch.cat([g.flatten() for g in grads])

    regulariser = FunctionalRegulariser(FunctionalPenalty(anchors), temperature=10.0)
    method = RegularisedMAP(optimizer="sgd-plain", lr=0.01, regulariser=regulariser)
    state = method.init(model, num_data=7)
    method.update(state, batch)
    taken = (before - model.bind().vector) / 0.01
    torch.testing.assert_close(taken, gradient, rtol=1e-9, atol=1e-9)
    assert float(gradient.norm()) > 1.0  # the memory's part, not the loss's alone


def test_an_identity_kernel_is_the_l2_variant() -> None:
    """K = I through factors, and no factors at all: the same number, Σ of squared differences."""
    model = Model(tanh_net(), Categorical())
    x = normals(6, 4)
    identity = torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    anchors = [Anchor.at(model, x, whiteners(identity)), Anchor.at(model, x)]
    with model.bind().writing() as vector:
        vector += 0.3 * normals(vector.numel(), seed=5)
    outputs = model.outputs(x)
    found = [FunctionalPenalty([a]).value(outputs, model.likelihood) for a in anchors]
    expected = 0.5 * (outputs.softmax(1) - anchors[0].predictions).square().sum()
    torch.testing.assert_close(found[0], expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(found[1], expected, rtol=1e-13, atol=0)


def test_a_large_jitter_leaves_the_l2_variant_divided_by_it() -> None:
    """ε·R → ½Σd² as ε → ∞, with an error of the order of K/ε."""
    model = Model(tanh_net(), Categorical())
    x, variance = normals(6, 4), torch.ones(model.random.size, dtype=torch.float64)
    anchor = Anchor.at(model, x, whiteners(prediction_kernels(model, x, variance, jitter=1e8)))
    with model.bind().writing() as vector:
        vector += 0.3 * normals(vector.numel(), seed=5)
    found = 1e8 * FunctionalPenalty([anchor]).value(model.outputs(x), model.likelihood)
    expected = 0.5 * (model.outputs(x).softmax(1) - anchor.predictions).square().sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_memory_is_the_argsort_of_the_relevance() -> None:
    model = Model(tanh_net(), Categorical())
    x, y = normals(60, 4), torch.arange(60) % 3
    with torch.no_grad():
        p = model.outputs(x).softmax(1)
    trace = 1 - p.square().sum(1)
    rows = choose("relevance", model, (x, y), 12)
    expected = [int(i) for i in trace.argsort(descending=True)]
    for label in range(3):
        kept = [i for i in expected if int(y[i]) == label][:4]
        assert [int(r) for r in rows if int(y[r]) == label] == kept


def linear_model(features: int, scale: float = 0.7) -> Model:
    torch.manual_seed(0)
    net = nn.Linear(features, 1, bias=False).double()
    return Model(net, Gaussian(scale), credo.priors.Normal(scale=2.0))


@pytest.mark.parametrize("jitter", [1e-6, 1e-2, 1.0])
def test_on_linear_models_the_penalty_is_quadratic_in_the_weights(jitter: float) -> None:
    """For memory X of full column rank, Xᵀ(XΣXᵀ + ε)⁻¹X = (Σ + εG⁻¹)⁻¹ with G = XᵀX.

    So FROMP is elastic weight consolidation with the precision Σ⁻¹ = F + δ as ε → 0, and a weaker
    one where there is jitter. XΣXᵀ + ε has a condition number of up to 1e7 here.
    """
    model = linear_model(4)
    x, variance = normals(9, 4), normals(4, seed=2).exp()
    anchor = Anchor.at(model, x, whiteners(prediction_kernels(model, x, variance, jitter)))
    change = normals(4, seed=3)
    with model.bind().writing() as vector:
        vector += change
    found = FunctionalPenalty([anchor]).value(model.outputs(x), model.likelihood)
    precision = (torch.diag(variance) + jitter * (x.mT @ x).inverse()).inverse()
    torch.testing.assert_close(found, 0.5 * change @ precision @ change, rtol=1e-8, atol=0)


def test_with_all_data_remembered_a_linear_model_keeps_to_bayes_rule() -> None:
    """Orthogonal features, τ = 1/n and ε → 0: the second task's minimum is the mean of the
    posterior of both tasks' data, because Σ = 1/(F + δ) is then the first one's covariance.

    The gradient vanishes there to ε/λ_min(XΣXᵀ) ~ 1e-9 of its parts, which are of order 10.
    """
    model, noise, delta = linear_model(3), 0.7, 0.25
    first = torch.linalg.qr(normals(8, 3, seed=1))[0] * torch.tensor([1.0, 2.0, 3.0])
    second = torch.linalg.qr(normals(8, 3, seed=2))[0] * torch.tensor([2.0, 1.0, 0.5])
    y1, y2 = normals(8, seed=3), normals(8, seed=4)
    grams = [x.mT @ x / noise**2 for x in (first, second)]
    prior = delta * torch.eye(3)
    one = torch.linalg.solve(grams[0] + prior, first.mT @ y1 / noise**2)
    both = torch.linalg.solve(
        grams[0] + grams[1] + prior, (first.mT @ y1 + second.mT @ y2) / noise**2
    )
    with model.bind().writing() as vector:
        vector.copy_(one)
    learner = FROMP(
        model, size=8, temperature=1 / 8, prior_precision=delta, jitter=1e-10, choice="random"
    )
    task = Task("first", (first, y1[:, None]), (first, y1[:, None]))
    learner.consolidate(task, learner.regulariser(task))
    torch.testing.assert_close(learner.curvature, grams[0].diagonal(), rtol=1e-12, atol=1e-12)

    regulariser = learner.regulariser(task)
    method = RegularisedMAP(optimizer="sgd-plain", lr=1.0, regulariser=regulariser)
    with model.bind().writing() as vector:
        vector.copy_(both)
    state = method.init(model, num_data=8)
    method.update(state, (second, y2[:, None]))
    torch.testing.assert_close(model.bind().vector, both, rtol=0, atol=1e-6)


def test_curvature_adds_up_over_tasks_and_is_never_reset() -> None:
    torch.manual_seed(0)
    model = Model(tanh_net(), Categorical())
    tasks = [
        Task(name, (x, torch.arange(12) % 3), (x, torch.arange(12) % 3))
        for name, x in (("a", normals(12, 4)), ("b", normals(12, 4, seed=2)))
    ]
    stream = Stream("two", tuple(tasks))
    learner, total = FROMP(model, Training(epochs=1), size=3), torch.zeros(model.random.size)
    for task in stream:
        learner.learn(task, progress=False)
        rows = prediction_jacobian(Model(model.net, Gaussian()), task.train[0])
        with torch.no_grad():
            hessian = Categorical().hessian(model.outputs(task.train[0]))
        total = total + torch.einsum("bkp,bkl,blp->p", rows, hessian, rows)
    torch.testing.assert_close(learner.curvature, total, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(
        data_curvature(model, tasks[1].train_data),
        torch.einsum("bkp,bkl,blp->p", rows, hessian, rows),
        rtol=1e-11,
        atol=1e-12,
    )
