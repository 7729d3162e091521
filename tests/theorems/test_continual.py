"""Continual learning: sequential Bayes, Fisher forms, path integrals, and one task alone."""

import numpy as np
import pytest
import torch
from torch import nn

import credo
from credo.autodiff.layer_jacobians import DiagonalFactors, KronFactors
from credo.continual import (
    EWC,
    SI,
    Joint,
    KroneckerLaplace,
    MultiHead,
    Naive,
    OnlineEWC,
    RegularisedMAP,
    Replay,
    Task,
    Training,
)
from credo.continual.quadratic import Quadratic, QuadraticPull, times
from credo.continual.si import PathIntegral
from credo.laplace.structures import DiagonalCurvature, KronCurvature

NOISE, PRIOR_SCALE, INPUTS = 0.7, 0.9, 4
PRIOR = 1 / PRIOR_SCALE**2

# Full batches and plain gradient descent on forms whose eigenvalues lie between 1 and 12: each step
# takes at least a tenth of what is left, and 250 leave nothing but rounding.
TO_REST = Training(epochs=250, batch_size=10_000, lr=0.12, optimizer="sgd-plain", temperature=1.0)


def linear_model(bias=False):
    net = nn.Linear(INPUTS, 1, bias=bias).double()
    return credo.Model(
        net, credo.likelihoods.Gaussian(scale=NOISE), credo.priors.Normal(scale=PRIOR_SCALE)
    )


def linear_tasks(count=3, orthogonal=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for index in range(count):
        x = torch.randn(30 + 10 * index, INPUTS, generator=generator, dtype=torch.float64)
        if orthogonal:
            x = torch.linalg.qr(x)[0] * torch.tensor([5.0, 6.0, 7.0, 8.0])
        y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]).double()
        y = y + torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
        tasks.append(Task(f"task {index}", (x, y), (x, y)))
    return tasks


def batch_bayes(tasks, prior=PRIOR):
    """Mean and precision of the posterior given all data at once."""
    x, y = (torch.cat([task.train[part] for task in tasks]) for part in (0, 1))
    precision = x.mT @ x / NOISE**2 + prior * torch.eye(INPUTS).double()
    return torch.linalg.solve(precision, x.mT @ y / NOISE**2).flatten(), precision


def dense(form):
    eye = torch.eye(len(form.anchor)).double()
    return torch.stack([form.times(row) for row in eye])


@pytest.mark.parametrize(
    ("make", "orthogonal"),
    [
        (lambda model: OnlineEWC(model, TO_REST, structure="full"), False),
        # One output: G is a number and A = XᵀX/n, so that factors lose nothing.
        (lambda model: KroneckerLaplace(model, TO_REST), False),
        # Orthogonal columns: XᵀX is diagonal.
        (lambda model: OnlineEWC(model, TO_REST, structure="diag"), True),
    ],
    ids=["full", "kron", "diag"],
)
def test_sequential_bayes_is_batch_bayes_on_linear_models(make, orthogonal):
    tasks, model = linear_tasks(orthogonal=orthogonal), linear_model()
    learner = make(model)
    for done, task in enumerate(tasks, start=1):
        learner.learn(task, progress=False)
        mean, precision = batch_bayes(tasks[:done])
        torch.testing.assert_close(model.bind().vector, mean, rtol=0, atol=1e-10)
        (form,) = learner.forms
        torch.testing.assert_close(dense(form), precision, rtol=1e-12, atol=1e-10)


def test_separate_forms_are_exact_for_two_tasks_and_count_the_oldest_too_often_from_three():
    settings = Training(**{**vars(TO_REST), "temperature": 0.0})
    tasks = linear_tasks()
    separate, online = (linear_model() for _ in range(2))
    learners = (
        EWC(separate, settings, structure="full"),
        OnlineEWC(online, settings, structure="full"),
    )
    for done, task in enumerate(tasks, start=1):
        for learner in learners:
            learner.learn(task, progress=False)
        mean, _ = batch_bayes(tasks[:done], prior=0.0)
        torch.testing.assert_close(online.bind().vector, mean, rtol=0, atol=1e-10)
        if done < 3:
            torch.testing.assert_close(separate.bind().vector, mean, rtol=0, atol=1e-10)
    # By how much: at rest Σ_t F_t(θ − θ_t) + F_3(θ − m_3) = 0, and θ_2 is the mean of two tasks.
    forms = [x.mT @ x for x, _ in (task.train for task in tasks)]
    anchors = [batch_bayes(tasks[:1], 0.0)[0], batch_bayes(tasks[:2], 0.0)[0],
               batch_bayes(tasks[2:], 0.0)[0]]  # fmt: skip
    pulls = sum(form @ anchor for form, anchor in zip(forms, anchors, strict=True))
    expected = torch.linalg.solve(sum(forms), pulls)
    torch.testing.assert_close(separate.bind().vector, expected, rtol=0, atol=1e-10)
    assert (expected - mean).abs().max() > 1e-3


def small_net(classes=3, seed=0, heads=None):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = nn.Sequential(nn.Linear(5, 6), nn.Tanh())
        net = nn.Sequential(*body, nn.Linear(6, classes)) if heads is None else MultiHead(
            body, 6, heads
        )  # fmt: skip
    return credo.Model(net.double(), credo.likelihoods.Categorical(), random="all")


def class_task(name="a", seed=0, count=40, classes=3, head=None):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (count,), generator=generator)
    return Task(name, (x, y), (x, y), tuple(range(classes)), head)


def label_gradients(model, task):
    """p_c and ∇ log p_c(x_i) for each class of each example, by one backward pass for each."""
    for row in range(task.num_data):
        inputs = task.inputs(task.train[0][row : row + 1])
        for log_prob in model.outputs(inputs).log_softmax(1)[0]:
            grads = torch.autograd.grad(
                log_prob, model.bind().parameters, retain_graph=True, allow_unused=True
            )
            g = torch.cat(
                [
                    torch.zeros(p.numel()).double() if each is None else each.flatten()
                    for each, p in zip(grads, model.bind().parameters, strict=True)
                ]
            )
            yield log_prob.exp().item(), g


def brute_force_fisher(model, task):
    """Σ_i Σ_c p_c g_ic g_icᵀ."""
    return sum(p * torch.outer(g, g) for p, g in label_gradients(model, task))


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_ewcs_penalty_is_the_fisher_quadratic_form_and_not_zero(structure):
    model, task = small_net(), class_task()
    learner = EWC(model, Training(epochs=3, lr=0.01), structure=structure, strength=5.0)
    learner.learn(task, progress=False)
    anchor = model.weights()
    fisher = brute_force_fisher(model, task)
    if structure == "diag":
        fisher = fisher.diagonal().diag()
    assert fisher.diagonal().sum() > 1
    method = RegularisedMAP(regulariser=learner.regulariser(class_task("b", count=20)))
    state = method.init(model, 20)
    away = torch.randn(len(anchor), generator=torch.Generator().manual_seed(1)).double()
    with model.bind().writing() as vector:
        vector.add_(away)
    state.gradient.zero_()
    method.regulariser.add_gradient(state)
    # Rounding of sums over 40 examples.
    expected = 5.0 / 20 * fisher @ away
    torch.testing.assert_close(state.gradient, expected, rtol=1e-10, atol=1e-12)
    value = method.regulariser.value(state)
    assert value == pytest.approx(float(0.5 * 5.0 / 20 * away @ fisher @ away), rel=1e-10)
    assert value > 1


def test_sampled_labels_estimate_the_same_fisher_information():
    model, task, samples = small_net(), class_task(count=20), 100
    exact = EWC(model).fisher(task).diagonal
    sampled = EWC(model, curvature="fisher", samples=samples).fisher(task).diagonal
    norms = [(p, float(g @ g)) for p, g in label_gradients(model, task)]
    examples = [norms[i : i + 3] for i in range(0, len(norms), 3)]
    means = [sum(p * norm for p, norm in each) for each in examples]
    assert float(exact.sum()) == pytest.approx(sum(means), rel=1e-10)
    # The variance of one drawn label's squared norm, summed over examples.
    variance = sum(
        sum(p * (norm - mean) ** 2 for p, norm in each)
        for each, mean in zip(examples, means, strict=True)
    )
    error = np.sqrt(variance / samples)
    assert abs(float(sampled.sum()) - sum(means)) < 4 * error < 0.2 * sum(means)
    assert not torch.equal(sampled, exact)


def test_several_diagonal_forms_merge_into_one():
    generator = torch.Generator().manual_seed(0)
    model = small_net()
    size = model.bind().size
    forms = []
    for _ in range(3):
        curvature = DiagonalCurvature(model.random.segments, model.like)
        curvature.diagonal += torch.rand(size, generator=generator).double()
        curvature.diagonal[:7] = 0  # weights that no task used
        anchor = torch.randn(size, generator=generator).double()
        forms.append(Quadratic(anchor, [curvature], [0.3]))
    pull = QuadraticPull(forms, 2.0)
    assert len(pull.forms) == 1
    state = RegularisedMAP(regulariser=pull).init(model, 10)
    state.gradient.zero_()
    pull.add_gradient(state)
    theta = model.bind().vector
    separate = sum(form.gradient(theta) for form in forms)
    torch.testing.assert_close(state.gradient, 2.0 * separate, rtol=1e-12, atol=1e-12)
    assert pull.value(state) == pytest.approx(2.0 * sum(form.value(theta) for form in forms))


def test_kronecker_products_are_those_of_the_matrices():
    model = small_net()
    curvature = EWC(model, structure="kron").fisher(class_task())
    assert isinstance(curvature, KronCurvature)
    blocks = [
        f.diagonal.diag() if isinstance(f, DiagonalFactors) else torch.kron(f.left, f.right)
        for f in curvature.factors
    ]
    assert any(isinstance(f, KronFactors) for f in curvature.factors)
    vector = torch.randn(model.bind().size, generator=torch.Generator().manual_seed(2)).double()
    expected = torch.block_diag(*blocks) @ vector
    torch.testing.assert_close(times(curvature, vector), expected, rtol=1e-11, atol=1e-12)


def test_a_head_that_a_task_does_not_use_is_free_and_stays():
    model = small_net(heads=(3, 3))
    first, second = class_task("a", head=0), class_task("b", seed=1, head=1)
    before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    learner = EWC(model, Training(epochs=3, lr=0.01), strength=3.0)
    learner.learn(first, progress=False)
    expected = brute_force_fisher(model, first).diagonal()
    fisher = learner.forms[0].curvatures[0].diagonal
    torch.testing.assert_close(fisher, expected, rtol=1e-10, atol=1e-12)
    places = {s.name: s.slice for s in model.segments}
    assert not fisher[places["heads.1.weight"]].any()
    assert fisher[places["heads.0.weight"]].any()
    assert torch.equal(model.net.heads[1].weight, before["heads.1.weight"])
    after_first = model.net.heads[0].weight.detach().clone()
    assert not torch.equal(after_first, before["heads.0.weight"])
    learner.learn(second, progress=False)
    # The first head gets no gradient from the second task, and its pull is zero at the anchor.
    assert torch.equal(model.net.heads[0].weight, after_first)


def quadratic_descent(lr, steps):
    """SI's path on ½ mean‖xθ − y‖² by full-batch gradient descent, and the loss on the way."""
    (task,), model = linear_tasks(1), linear_model()
    with torch.no_grad():
        model.net.weight.copy_(torch.tensor([[2.0, 1.0, -1.0, 0.5]]))
    path = PathIntegral(None, None, 1.0)
    method = RegularisedMAP(optimizer="sgd-plain", lr=lr, regulariser=path)
    start = model.mean_nll(task.train_data).item()
    state = method.init(model, task.num_data)
    curvature = task.train[0].mT @ task.train[0] / NOISE**2 / task.num_data
    excess = 0.0
    for _ in range(steps):
        before = model.weights()
        method.update(state, task.train_data)
        step = model.bind().vector - before
        excess += 0.5 * float(step @ curvature @ step)
    drop = start - model.mean_nll(task.train_data).item()
    return float(path.path.sum()), drop, excess


def test_sis_path_integral_is_the_loss_drop_up_to_first_order_in_the_rate():
    errors = []
    for lr, steps in ((0.02, 50), (0.01, 100), (0.005, 200)):
        total, drop, excess = quadratic_descent(lr, steps)
        # The identity Σ g·Δ = drop + ½ΣΔᵀAΔ holds to rounding.
        assert total - excess == pytest.approx(drop, rel=1e-12)
        errors.append(total - drop)
    assert errors[0] > errors[1] > errors[2] > 0
    # First order: halving the rate halves the error, up to the next order.
    assert errors[1] / errors[2] == pytest.approx(2.0, rel=0.1)
    assert errors[2] < 0.05 * drop


def test_si_adds_up_importance_and_pulls_to_the_last_weights():
    model, first, second = small_net(), class_task("a"), class_task("b", seed=1)
    start = model.weights()
    learner = SI(model, Training(epochs=2, lr=0.01), strength=0.4, damping=0.2)
    learner.learn(first, progress=False)
    anchor = model.weights()
    assert torch.equal(learner.anchor, anchor)
    # Ω·(Δ² + ξ) is the clamped path, which is positive somewhere.
    path = learner.importance * ((anchor - start).square() + 0.2)
    assert path.sum() > 0.01
    method = RegularisedMAP(regulariser=learner.regulariser(second))
    state = method.init(model, 40)
    away = torch.randn(len(anchor), generator=torch.Generator().manual_seed(1)).double()
    with model.bind().writing() as vector:
        vector.add_(away)
    state.gradient.zero_()
    method.regulariser.add_gradient(state)
    expected = 2 * 0.4 * learner.importance * away
    torch.testing.assert_close(state.gradient, expected, rtol=1e-12, atol=1e-12)
    value = 0.4 * float(learner.importance @ away.square())
    assert method.regulariser.value(state) == pytest.approx(value)


LEARNERS = {
    "naive": Naive,
    "joint": Joint,
    "replay": Replay,
    "ewc": EWC,
    "online ewc": OnlineEWC,
    "kronecker": KroneckerLaplace,
    "si": SI,
}


@pytest.mark.parametrize("name", LEARNERS)
def test_one_task_alone_is_ordinary_training_bit_for_bit(name):
    task = class_task()
    ordinary, model = small_net(), small_net()
    credo.fit(
        ordinary, credo.MAP(temperature=0.0, lr=0.02), task.train_data, epochs=3, batch_size=16,
        seed=7, progress=False,
    )  # fmt: skip
    learner = LEARNERS[name](model, Training(epochs=3, batch_size=16, lr=0.02, seed=7))
    learner.learn(task, progress=False)
    assert torch.equal(model.bind().vector, ordinary.bind().vector)
    expected = torch.softmax(ordinary.net(task.test[0]), 1).detach()
    assert torch.equal(learner.predict(task.test[0], task).probs, expected)


def test_joint_training_is_ordinary_training_on_all_data():
    first, second = class_task("a"), class_task("b", seed=1)
    model, ordinary = small_net(), small_net()
    learner = Joint(model, Training(epochs=3, batch_size=16, lr=0.02))
    learner.learn(first, progress=False)
    seed = learner.seed
    learner.learn(second, progress=False)
    data = tuple(torch.cat([first.train[part], second.train[part]]) for part in (0, 1))
    credo.fit(
        ordinary, credo.MAP(temperature=0.0, lr=0.02), data, epochs=3, batch_size=16,
        seed=seed, progress=False,
    )  # fmt: skip
    assert torch.equal(model.bind().vector, ordinary.bind().vector)
