"""Every kind of network goes through activation noise unchanged, or says what it falls back to."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo import noise
from credo.autodiff.seam import survey
from credo.errors import UnsupportedError
from credo.network import bind, select
from credo.variational.estimators import GaussianStep, activation_noise
from credo.variational.estimators.activation_noise import Flipout, LocalReparameterisation, signs

ESTIMATORS = [LocalReparameterisation, Flipout]


def normal(*shape: int) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=torch.float64
    )


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).tanh(), self.encoder.weight.t())


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x).tanh()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **settings)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x.abs() * 3).long() % 7).mean(1))


def keyworded() -> nn.Module:
    class Keyworded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, bias=self.bias, weight=self.weight)

    return Keyworded(4, 2)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), (6, 4), set()),
    "keywords": (keyworded, (6, 4), set()),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.ReLU(),
            nn.Conv2d(4, 3, 2, dilation=2, padding="same", padding_mode="reflect"), nn.Tanh(),
            nn.Flatten(), nn.Linear(48, 2, bias=False),
        ),
        (3, 2, 8, 8), set(),
    ),
    "grey images": (
        lambda: nn.Conv2d(1, 3, 2, stride=3, padding=1),
        (3, 1, 10, 10), set(),
    ),
    "grey images, dilated": (
        lambda: nn.Conv2d(1, 3, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(3, 2), bias=False),
        (3, 1, 7, 8), set(),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 2), nn.ConvTranspose1d(3, 2, 3, stride=2), nn.Unflatten(2, (3, 5)),
            nn.ConvTranspose2d(2, 4, 2, groups=2, output_padding=0), nn.Unflatten(2, (2, 2)),
            nn.Conv3d(4, 2, 2, padding=1), nn.ConvTranspose3d(2, 1, 1),
        ),
        (3, 2, 8), set(),
    ),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
        ),
        (6, 4), set(),
    ),
    "attention": (lambda: Attention(), (3, 5, 4), set()),
    "attention, batch first": (lambda: Attention(batch_first=True, dropout=0.3), (3, 5, 4), set()),
    "attention, separate": (lambda: Attention(kdim=4, vdim=4, bias=False), (3, 5, 4), set()),
    "attention, unsupported": (
        lambda: Attention(add_bias_kv=True), (3, 5, 4),
        {
            "attention.in_proj_weight", "attention.in_proj_bias", "attention.bias_k",
            "attention.bias_v", "attention.out_proj.weight", "attention.out_proj.bias",
        },
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
        (3, 5, 4), set(),
    ),
    "recurrent": (
        Recurrent, (3, 5, 4),
        {"cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"},
    ),
    "embedding": (Words, (3, 5), {"table.weight"}),
    "tied": (Tied, (6, 4), {"encoder.weight", "encoder.bias"}),
    "reused": (Reused, (6, 4), {"body.weight", "body.bias"}),
}  # fmt: skip


class Case:
    def __init__(self, name: str, selector=None) -> None:
        make, shape, self.sampled = NETWORKS[name]
        torch.manual_seed(0)
        self.net, self.x = make().double().train(), normal(*shape)
        self.flat = bind(self.net)
        self.random = select(self.flat.segments, selector)
        self.mean = self.random.read(self.flat.vector).clone()

    def energy(self) -> Tensor:
        return (self.net(self.x) - 0.3).square().mean()

    def step(self, scale: float, samples: int = 1, key: tuple[int, ...] = (0,)) -> GaussianStep:
        grads = torch.full((2, self.random.size), math.nan, dtype=torch.float64)
        return GaussianStep(
            self.flat, self.random, self.mean, torch.full_like(self.mean, scale), self.energy,
            kl_weight=1.0, samples=samples, key=key, grad_mean=grads[0], grad_scale=grads[1],
        )  # fmt: skip


@pytest.fixture(params=ESTIMATORS)
def estimator(request):
    return request.param(noise.source("normal", seed=4))


quiet = pytest.mark.filterwarnings("ignore:activation noise reaches")


@pytest.mark.parametrize("name", NETWORKS)
def test_the_survey_finds_the_segments_without_a_seam(name):
    case = Case(name)
    found = survey(case.flat, case.random, case.energy)
    assert {s.name for s in found.elsewhere} == case.sampled
    assert {*found.through, *found.elsewhere} == set(case.random.segments)


@quiet
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_finite_reach_every_segment_and_leave_the_mean(name, estimator):
    case = Case(name)
    step = case.step(scale=0.1, samples=2)
    nll = estimator.gradients(step)
    assert math.isfinite(nll)
    assert torch.equal(case.random.read(case.flat.vector), case.mean)
    for segment, here in case.random.slices().items():
        for gradient in (step.grad_mean[here], step.grad_scale[here]):
            assert gradient.isfinite().all(), segment
            assert gradient.abs().max() > 1e-9, segment
    assert all(case.flat.parameter_at[s.start].grad is None for s in case.random.segments)


@quiet
@pytest.mark.parametrize("name", NETWORKS)
def test_without_scale_it_is_the_deterministic_step(name, estimator):
    """Loss, gradients, deterministic gradients, buffers and torch's generator: as if never there.

    Up to rounding: attention is computed in another order.
    """
    case, reference = Case(name), Case(name)
    torch.manual_seed(1)
    loss = reference.energy()
    loss.backward()
    expected = reference.flat.gradient(reference.random, out=torch.empty_like(reference.mean))
    left = torch.rand(3)

    torch.manual_seed(1)
    step = case.step(scale=0.0)
    assert estimator.gradients(step) == pytest.approx(float(loss.detach()), rel=1e-12)
    assert torch.equal(torch.rand(3), left)
    torch.testing.assert_close(step.grad_mean, expected, rtol=1e-11, atol=1e-13)
    for ours, theirs in zip(case.net.parameters(), reference.net.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)
    for ours, theirs in zip(case.net.buffers(), reference.net.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["mlp", "batch norm"])
def test_several_samples_are_averaged(name, estimator):
    one, three = Case(name), Case(name)
    steps = [one.step(0.0, samples=1), three.step(0.0, samples=3)]
    nlls = [estimator.gradients(step) for step in steps]
    assert nlls[1] == pytest.approx(nlls[0], rel=1e-12)
    torch.testing.assert_close(steps[1].grad_mean, steps[0].grad_mean, rtol=1e-12, atol=1e-14)
    for ours, theirs in zip(three.net.parameters(), one.net.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


@quiet
@pytest.mark.parametrize("name", ["cnn", "reused"])
def test_noise_is_a_function_of_seed_and_key(name, estimator):
    case = Case(name)
    estimator.gradients(case.step(0.1, key=(0,)))
    torch.manual_seed(5)
    steps = [case.step(0.1, key=key) for key in ((3, 1), (3, 1), (3, 2))]
    nlls = [estimator.gradients(step) for step in steps]
    fresh = type(estimator)(noise.source("normal", seed=4))
    assert nlls[0] == nlls[1] == fresh.gradients(case.step(0.1, key=(3, 1)))
    assert nlls[0] != nlls[2]
    assert torch.equal(steps[0].grad_scale, steps[1].grad_scale)


@pytest.mark.parametrize("name", [name for name, row in NETWORKS.items() if row[2]])
def test_a_fallback_is_told_once_and_by_name(name, estimator):
    case = Case(name)
    with pytest.warns(UserWarning, match="weight noise instead") as told:
        estimator.gradients(case.step(0.1))
    assert all(segment in str(told[0].message) for segment in case.sampled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.gradients(case.step(0.1, key=(1,)))


@quiet
def test_weight_noise_of_the_fallback_is_in_the_network_during_the_pass(estimator):
    case, seen = Case("tied"), []

    def energy() -> Tensor:
        seen.append(case.random.read(case.flat.vector))
        return (case.net(case.x)).square().mean()

    step = case.step(0.5)
    step.energy = energy
    step.mean = case.random.view(case.flat.vector)  # the buffer itself: no copy to restore from
    estimator.gradients(step)
    assert torch.equal(seen[0], case.mean)
    assert (seen[1] != case.mean).all()
    assert torch.equal(case.flat.vector, case.mean)


@quiet
def test_an_exception_leaves_the_mean(estimator):
    case = Case("reused")
    estimator.gradients(case.step(0.1))
    step = case.step(0.1)
    step.energy = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        estimator.gradients(step)
    assert torch.equal(case.random.read(case.flat.vector), case.mean)


def test_a_weight_may_be_random_and_its_bias_not(estimator):
    case = Case("mlp", "*.weight")
    step = case.step(0.1)
    estimator.gradients(step)
    assert step.grad_scale.abs().max() > 0
    assert case.net[0].bias.grad is not None


def test_a_bias_alone_gets_weight_noise(estimator):
    case = Case("mlp", "*.bias")
    with pytest.warns(UserWarning, match=r"0\.bias: the bias of a layer whose weight"):
        estimator.gradients(case.step(0.1))


@pytest.mark.parametrize("change", ["twice", "elsewhere"])
def test_a_network_that_changes_its_graph_is_refused(change, estimator):
    case = Case("mlp")
    estimator.gradients(case.step(0.1))
    step, head = case.step(0.1), case.net[2]

    def energy() -> Tensor:
        if change == "twice":
            return case.energy() + case.energy()
        return (case.net[1](case.net[0](case.x)) @ head.weight.T).mean()

    step.energy = energy
    with pytest.raises(UnsupportedError, match="noise='weight'"):
        estimator.gradients(step)


def test_all_zero_inputs_give_finite_gradients(estimator):
    """√0 has no derivative, and the output's noise none either."""
    case = Case("mlp", "*.weight")
    case.x[:, :] = 0.0
    case.flat.vector.zero_()
    case.mean.zero_()
    step = case.step(0.1)
    estimator.gradients(step)
    assert step.grad_mean.isfinite().all()
    assert step.grad_scale.isfinite().all()


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_autocast_keeps_gradients_finite_and_close(name):
    """bfloat16 has 8 bits: a few per cent of the gradient's size."""
    gradients = []
    for enabled in (False, True):
        case = Case(name)
        case.net.float()
        flat = bind(case.net)
        random = select(flat.segments)
        x, mean = case.x.float(), random.read(flat.vector)
        grads = torch.empty(2, random.size)

        def energy(net: nn.Module = case.net, x: Tensor = x, enabled: bool = enabled) -> Tensor:
            torch.manual_seed(2)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return (net(x).float() - 0.3).square().mean()

        step = GaussianStep(
            flat, random, mean, torch.full_like(mean, 1e-6), energy,
            kl_weight=1.0, samples=1, key=(0,), grad_mean=grads[0], grad_scale=grads[1],
        )  # fmt: skip
        LocalReparameterisation(noise.source("table", seed=0)).gradients(step)
        gradients.append(grads)
    plain, cast = gradients
    assert cast.isfinite().all()
    assert (cast[0] - plain[0]).norm() < 0.1 * plain[0].norm()


def test_channels_last_is_kept_and_filled_completely():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    flat, x = bind(net), torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    random, grads = select(flat.segments), torch.empty(2, 184 + 2)
    outputs = []

    def energy() -> Tensor:
        outputs.append(net(x))
        return outputs[-1].square().mean()

    step = GaussianStep(
        flat, random, random.read(flat.vector), torch.full((186,), 0.1), energy,
        kl_weight=1.0, samples=1, key=(0,), grad_mean=grads[0], grad_scale=grads[1],
    )  # fmt: skip
    LocalReparameterisation(noise.source("table", seed=0)).gradients(step)
    assert outputs[1].is_contiguous(memory_format=torch.channels_last)
    assert ((outputs[1] - outputs[0]) != 0).all()
    assert grads.isfinite().all()


def test_noise_that_is_a_window_of_a_pool_is_only_read():
    """Outputs of 2¹⁷ numbers: below that the pool is a table, which writes into memory it is given.

    A pool that was written would give another gradient when the same key is drawn again.
    """
    net = nn.Linear(1, 2**10)
    flat = bind(net)
    random, x = select(flat.segments), torch.randn(2**7, 1)
    estimator = LocalReparameterisation(noise.source("pool", seed=0))
    gradients = []
    for _ in range(2):
        gradients.append(torch.empty(2, random.size))
        estimator.gradients(
            GaussianStep(
                flat, random, random.read(flat.vector), torch.full((2**11,), 0.1),
                lambda: net(x).square().mean(), kl_weight=1.0, samples=1, key=(0,),
                grad_mean=gradients[-1][0], grad_scale=gradients[-1][1],
            )
        )  # fmt: skip
    assert torch.equal(*gradients)


def test_a_variance_below_zero_counts_as_none():
    """As fast convolutions round it: no noise there, no slope, and the rest unharmed."""
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    quarter = torch.tensor([-1e-9, 0.0, 0.25], dtype=torch.float64, requires_grad=True)
    noise_drawn = torch.tensor([2.0, -3.0, 4.0], dtype=torch.float64)
    out = activation_noise._WithNoise.apply(mean.clone(), quarter, noise_drawn)
    out.sum().backward()
    assert out.tolist() == [0.0, 0.0, 4.0]
    assert quarter.grad.tolist() == [0.0, 0.0, 8.0]
    assert mean.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("count", [1, 8, 13, 4096])
def test_signs_are_fair(count):
    """Mean of n fair signs: standard deviation 1/√n; all 4096 together, five of them."""
    drawn = signs([count, 2], torch.empty(0), torch.Generator().manual_seed(0))
    assert drawn.shape == (count, 2)
    assert (drawn.abs() == 1).all()
    if count == 4096:
        assert drawn.mean(0).abs().max() < 5 / math.sqrt(count)
        assert (drawn[:, 0] * drawn[:, 1]).mean().abs() < 5 / math.sqrt(count)
