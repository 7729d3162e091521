"""AdaBound, AMSBound, AMSGrad, RAdam and YellowFin as torch optimizers, and by name in methods."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.errors import DataError, NonFiniteError, UnsupportedError
from credo.optim import AdaBound, AMSBound, AMSGrad, Descent, RAdam, YellowFin, adabound
from credo.optim import by_name as optimizers
from credo.optim.rectified_adam import rectification

KINDS: dict[str, Callable[..., Descent]] = {
    "AdaBound": AdaBound,
    "AMSBound": AMSBound,
    "AMSGrad": AMSGrad,
    "RAdam": RAdam,
    "RAdam, momentum": lambda p, **o: RAdam(p, early="momentum", **o),
    "YellowFin": YellowFin,
    "YellowFin, closed loop": lambda p, **o: YellowFin(p, feedback=0.1, staleness=1, **o),
}
every = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
elementwise = pytest.mark.parametrize("kind", [AdaBound, AMSBound, AMSGrad, RAdam])


def gradients(steps: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of very different sizes, so that bounds, roots and eps all matter for some coordinate."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 2, math.prod(shape), dtype=dtype).view(shape)
    return torch.randn(steps, *shape, generator=generator, dtype=dtype) * sizes


def run(optimizer: torch.optim.Optimizer, parameter: Tensor, given: Tensor) -> Tensor:
    for gradient in given:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def start(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, math.prod(shape), dtype=dtype).view(shape))


# --- each against its definition ------------------------------------------------------------------


def adabound_by_hand(
    w: list[float], given: list[list[float]], largest: bool, lr: float, decay: float
) -> list[float]:
    """The published update in plain floats."""
    beta1, beta2, eps, gamma, final = 0.9, 0.999, 1e-8, 1e-3, 0.1
    w, n = list(w), len(w)
    m, v, top = [0.0] * n, [0.0] * n, [0.0] * n
    for t, gradient in enumerate(given, start=1):
        lower, upper = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
        for i in range(n):
            g = gradient[i] + decay * w[i]
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            top[i] = max(top[i], v[i])
            used = top[i] if largest else v[i]
            rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) / (math.sqrt(used) + eps)
            w[i] -= min(max(rate, lower), upper) * m[i]
    return w


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "largest"), [(AdaBound, False), (AMSBound, True)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_bounded_steps_are_the_published_ones(
    kind: type[AdaBound], largest: bool, decay: float, dtype: torch.dtype, tolerance: float
) -> None:
    given, w = gradients(100, 17), start(17)
    expected = adabound_by_hand(w.tolist(), given.tolist(), largest, 1e-3, decay)
    w = start(17, dtype=dtype)
    found = run(kind([w], weight_decay=decay), w, given.to(dtype)).double()
    # Rounding adds up over the steps, relative to the largest weight on the way.
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=tolerance * 100, atol=tolerance
    )


def test_bounds_at_the_first_step() -> None:
    lower, upper = adabound.bounds(0.1, 1e-3, 1)
    assert lower == pytest.approx(1e-4, rel=2e-3)
    assert upper == pytest.approx(100.1)


def test_closed_bounds_are_momentum_descent() -> None:
    """γ → ∞: the rate α* on an average of gradients, whatever α is."""
    given = gradients(30, 9)
    one, two = start(9), start(9)
    found = run(AdaBound([one], lr=0.7, final_lr=0.05, gamma=math.inf), one, given)
    expected = run(torch.optim.SGD([two], lr=0.05 * 0.1, momentum=0.9), two, given)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("kind", "amsgrad"), [(AdaBound, False), (AMSBound, True)])
def test_open_bounds_are_adam(kind: type[AdaBound], amsgrad: bool) -> None:
    """γ = 0, and no eps, which AdaBound adds before and Adam after the bias correction."""
    given = gradients(30, 9)
    one, two = start(9), start(9)
    found = run(kind([one], lr=0.01, gamma=0.0, eps=0.0), one, given)
    reference = torch.optim.Adam([two], lr=0.01, eps=0.0, amsgrad=amsgrad)
    torch.testing.assert_close(found, run(reference, two, given), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("eps", [1e-8, 1e-3, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernel_and_parts_agree(dtype: torch.dtype, eps: float, monkeypatch) -> None:
    """Also where gradients are huge, tiny or gone, and across the borders of blocks."""
    monkeypatch.setattr(adabound, "BLOCK", 7)
    given = gradients(40, 33, dtype=dtype) * 1e3
    given[20:, ::4] = 0.0
    one, two = start(33, dtype=dtype), start(33, dtype=dtype)
    fast = run(AdaBound([one], eps=eps), one, given)
    monkeypatch.setattr(adabound, "_has_kernel", lambda value: False)
    slow = run(AdaBound([two], eps=eps), two, given)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(fast, slow, rtol=100 * unit, atol=100 * unit)


def test_forgetful_squares_do_not_use_the_kernel() -> None:
    """β₂ = 0: v is gone with the gradient while m remains, and only eps is left to divide by."""
    w = nn.Parameter(torch.zeros(1))
    opt = AdaBound([w], lr=1e-3, betas=(0.9, 0.0), gamma=0.0)
    before = run(opt, w, torch.tensor([[100.0]])).clone()
    after = run(opt, w, torch.tensor([[0.0]]))
    move = 1e-3 / (1 - 0.9**2) * (0.9 * 0.1 * 100.0) / 1e-8
    assert (before - after).item() == pytest.approx(move, rel=1e-6)


def test_final_rate_follows_the_scheduler() -> None:
    """Once the bounds have closed a scheduler would do nothing if it moved α alone."""
    w = start(1)
    opt = AdaBound([w], lr=0.01, final_lr=0.1, gamma=math.inf, betas=(0.0, 0.999))
    schedule = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    moves = []
    for _ in range(3):
        before = w.item()
        run(opt, w, torch.ones(1, 1, dtype=torch.float64))
        schedule.step()
        moves.append(before - w.item())
    assert moves == pytest.approx([0.1, 0.05, 0.025], rel=1e-12)


@pytest.mark.parametrize("kind", [AdaBound, YellowFin])
def test_resuming_does_not_take_the_decayed_rate_for_the_first(kind: type[Descent]) -> None:
    w = start(2)
    opt = kind([w], lr=0.01)
    opt.param_groups[0]["lr"] = 0.001
    resumed = kind([start(2)], lr=0.001)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert resumed.param_groups[0]["base_lr"] == 0.01


@pytest.mark.parametrize("kind", [AdaBound, YellowFin, RAdam, AMSGrad])
def test_a_rate_of_zero_leaves_the_weights(kind: type[Descent]) -> None:
    w = start(3)
    found = run(kind([w], lr=0.0), w, gradients(8, 3))
    torch.testing.assert_close(found, start(3).detach(), rtol=0, atol=0)


def test_radam_with_momentum_is_torchs() -> None:
    given = gradients(40, 9)
    one, two = start(9), start(9)
    found = run(RAdam([one], lr=0.01, early="momentum", weight_decay=0.1), one, given)
    expected = run(torch.optim.RAdam([two], lr=0.01, weight_decay=0.1), two, given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_original_radam_skips_five_steps_then_moves_as_torchs() -> None:
    given = gradients(20, 9)
    one, two = start(9), start(9)
    opt, reference = RAdam([one], lr=0.01), torch.optim.RAdam([two], lr=0.01)
    torch.testing.assert_close(run(opt, one, given[:5]), start(9).detach(), rtol=0, atol=0)
    run(reference, two, given[:5])
    moved = run(opt, one, given[5:]) - start(9).detach()
    base = two.detach().clone()
    torch.testing.assert_close(moved, run(reference, two, given[5:]) - base, rtol=1e-10, atol=1e-13)


def test_rectification_begins_where_the_sheet_says() -> None:
    assert [rectification(t, 0.999) > 0 for t in range(1, 8)] == [False] * 5 + [True] * 2
    assert rectification(10**6, 0.999) == pytest.approx(1.0)
    assert rectification(10**6, 0.5) == 0.0  # ρ∞ = 3: never trusted


def test_amsgrad_is_the_published_one() -> None:
    given, w = gradients(50, 9), start(9)
    expected, m = w.detach().clone(), torch.zeros(9, dtype=torch.float64)
    v, top = m.clone(), m.clone()
    for g in given:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        top = torch.maximum(top, v)
        expected -= 1e-3 * m / (top.sqrt() + 1e-8)
    torch.testing.assert_close(run(AMSGrad([w]), w, given), expected, rtol=1e-12, atol=1e-14)


# --- all as torch optimizers ----------------------------------------------------------------------


@elementwise
def test_one_flat_tensor_is_as_good_as_many(kind: type[Descent]) -> None:
    given = gradients(20, 60)
    whole = start(60)
    parts = [nn.Parameter(p.clone().view(shape)) for p, shape in zip(
        start(60).detach().split([10, 1, 24, 25]), [(2, 5), (), (24,), (5, 5)], strict=True
    )]  # fmt: skip
    flat, split = kind([whole], lr=0.01), kind(parts, lr=0.01)
    for gradient in given:
        whole.grad = gradient.clone()
        for part, piece in zip(parts, gradient.split([10, 1, 24, 25]), strict=True):
            part.grad = piece.clone().view_as(part)
        flat.step()
        split.step()
    joined = torch.cat([p.detach().reshape(-1) for p in parts])
    torch.testing.assert_close(joined, whole.detach(), rtol=1e-14, atol=1e-15)


@every
def test_yellowfin_and_the_others_do_not_care_how_tensors_lie_in_memory(kind: Any) -> None:
    """Torch's fused kernels go wrong silently where strides differ."""
    given = gradients(12, 4, 6)
    plain, turned = start(4, 6), nn.Parameter(start(4, 6).detach().t().contiguous().t())
    assert not turned.is_contiguous()
    one, two = run(kind([plain]), plain, given), run(kind([turned]), turned, given)
    assert torch.equal(one, two)
    assert not turned.is_contiguous()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(opt: torch.optim.Optimizer, net: nn.Module, first: int, last: int, schedule=None) -> None:
    for seed in range(first, last):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), (x[:, 0] > 0).long()).backward()
        opt.step()
        if schedule is not None:
            schedule.step()


def make(kind: Any, net: nn.Sequential, lr: float = 0.01) -> Any:
    groups = [
        {"params": list(net[0].parameters())},
        {"params": list(net[2].parameters()), "lr": lr / 3},
    ]
    opt = kind(groups, lr=lr)
    return opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every
@pytest.mark.parametrize("trip", [copy.deepcopy, through_file])
def test_resume_is_bitwise(kind: Any, trip: Callable[..., Any]) -> None:
    whole = network()
    opt, schedule = make(kind, whole)
    train(opt, whole, 0, 7, schedule)
    saved = [trip(thing.state_dict()) for thing in (opt, whole, schedule)]
    train(opt, whole, 7, 30, schedule)

    resumed = network(seed=9)
    other, other_schedule = make(kind, resumed, lr=0.5)
    for thing, state in zip((other, resumed, other_schedule), saved, strict=True):
        thing.load_state_dict(state)
    train(other, resumed, 7, 30, other_schedule)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


@every
def test_groups_do_not_hear_of_each_other(kind: Any) -> None:
    """Two groups move as two optimizers would."""
    given, other = gradients(30, 5), gradients(30, 4, seed=1)
    a, b, c, d = start(5), start(4), start(5), start(4)
    both = kind([{"params": [a], "lr": 0.02}, {"params": [b]}], lr=0.01)
    for one, two in zip(given, other, strict=True):
        a.grad, b.grad = one.clone(), two.clone()
        both.step()
    assert torch.equal(a, run(kind([c], lr=0.02), c, given))
    assert torch.equal(b, run(kind([d], lr=0.01), d, other))


@every
def test_a_parameter_without_gradient_waits(kind: Any) -> None:
    a, b, c = start(5), start(5), start(5)
    opt = kind([{"params": [a]}, {"params": [b]}])
    for index, gradient in enumerate(gradients(12, 5)):
        a.grad, b.grad = gradient.clone(), (gradient.clone() if index >= 4 else None)
        opt.step()
    assert torch.equal(b, run(kind([c]), c, gradients(12, 5)[4:]))


@every
def test_a_closure_gives_its_loss(kind: Any) -> None:
    w = start(2)
    opt = kind([w])

    def closure() -> Tensor:
        opt.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    assert opt.step() is None


@every
def test_a_late_backward_is_noticed(kind: Any) -> None:
    """The fused kernels leave the version counters alone; the optimizers do not."""
    w = start(2)
    opt = kind([w], lr=0.1)
    for _ in range(7):
        loss = w.square().sum()
        loss.backward(retain_graph=True)
        opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every
def test_sparse_and_complex_are_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match="view_as_real"):
        kind([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = kind(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        opt.step()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (AdaBound, {"lr": -1.0}, "lr must be 0 or a positive"),
        (AdaBound, {"lr": math.nan}, "lr must be 0 or a positive finite number"),
        (AdaBound, {"final_lr": 0.0}, "final_lr must be a positive"),
        (AdaBound, {"gamma": -1e-3}, "gamma must be"),
        (AdaBound, {"betas": (0.9, 1.0)}, r"betas\[1\] must be a number from 0 to 1, less than 1"),
        (AMSBound, {"betas": 0.9}, "betas must be a tuple of 2"),
        (AMSGrad, {"eps": -1.0}, "eps must be 0 or a positive"),
        (RAdam, {"early": "later"}, "early must be one of 'skip', 'momentum'"),
        (RAdam, {"weight_decay": -1.0}, "weight_decay must be 0 or a positive"),
        (YellowFin, {"beta": 1.0}, "beta must be a number from 0 to 1, less than 1"),
        (YellowFin, {"window": 0}, "window must be a whole number"),
        (YellowFin, {"staleness": -1}, "staleness must be 0 or a positive whole number"),
        (YellowFin, {"feedback": -0.1}, "feedback must be 0 or a positive"),
        (YellowFin, {"eps": 0.0}, "eps must be a positive"),
    ],
)
def test_nonsense_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        kind([start(2)], **options)
    opt = kind([start(2)])
    with pytest.raises(DataError, match=message):
        opt.add_param_group({"params": [start(2)], **options})
    assert len(opt.param_groups) == 1


def test_yellowfin_refuses_an_infinite_gradient_and_loses_nothing() -> None:
    a, b = start(3), start(3)
    opt = YellowFin([{"params": [a]}, {"params": [b]}])
    for gradient in gradients(5, 3):
        a.grad, b.grad = gradient.clone(), gradient.clone()
        opt.step()
    before = copy.deepcopy((a, b, opt.state_dict()))
    a.grad, b.grad = torch.ones_like(a), torch.full_like(b, math.inf)
    with pytest.raises(NonFiniteError, match="step 6"):
        opt.step()
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    assert opt.state_dict()["param_groups"] == before[2]["param_groups"]


# --- by name --------------------------------------------------------------------------------------


NAMES = sorted(optimizers.BY_NAME)


# Six scales: their squared gradient is no measure of their curvature, and YellowFin overshoots.
@pytest.mark.filterwarnings("ignore:the posterior's scales collapsed")
@pytest.mark.parametrize("method", [credo.VI, credo.MAP])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_and_resumes(name: str, method: Any, tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 2, generator=generator)
    y = (x[:, 0] > 0).long()
    lr = {"adadelta": 1.0, "yellowfin": 1e-4}.get(name, 0.02)
    options = {"scale_lr": lr, "temperature": 0.1} if method is credo.VI else {}

    def fit(epochs: int, folder: str) -> credo.Posterior:
        torch.manual_seed(0)
        model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
        return credo.fit(
            model, method(optimizer=name, lr=lr, **options), (x, y), epochs=epochs, batch_size=8,
            folder=tmp_path / folder, progress=False,
        )  # fmt: skip

    whole = fit(6, "whole")
    assert whole.history[-1]["nll"] < whole.history[0]["nll"]
    fit(3, "resumed")
    assert torch.equal(fit(6, "resumed").mean, whole.mean)


def test_an_unknown_name_is_told_the_nearest() -> None:
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    with pytest.raises(DataError, match="Did you mean 'yellowfin'"):
        credo.VI(optimizer="yelowfin").init(model, 10)


def test_yellowfin_tunes_means_and_scales_apart() -> None:
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    model = credo.Model(nn.Linear(2, 2), credo.likelihoods.Categorical())
    method = credo.VI(optimizer="yellowfin", lr=1e-4)
    state = method.init(model, 64)
    for _ in range(5):
        method.update(state, (x, (x[:, 0] > 0).long()))
    assert isinstance(state.optimizer, YellowFin)
    means, scales = state.optimizer.tuned()
    assert means != scales
