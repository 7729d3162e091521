"""What EVON does beside its theorems: which weights have bases, memory, options, checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.errors import CheckpointError, DataError
from credo.families import EigenKroneckerGaussian
from credo.kl import kl, kl_monte_carlo, kl_per_segment
from credo.likelihoods import Categorical
from credo.optim import EVON, evon


class Reader(nn.Module):
    """An embedding, a convolution, a norm and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.dense = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(self.norm(self.conv(self.words(x).mT).mean(-1)).tanh())
        return y


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randint(7, (16, 5), generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 3).long()


def train(opt: EVON, net: nn.Module, steps: int) -> None:
    x, y = batch()
    for _ in range(steps):
        with opt.sampled():
            F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()


def bases(opt: EVON, net: nn.Module) -> dict[str, set[str]]:
    return {
        name: {side for side in ("left", "right") if f"{side}_basis" in opt.state[p]}
        for name, p in net.named_parameters()
    }


@pytest.mark.parametrize(
    ("options", "conv", "dense"),
    [
        ({}, {"left", "right"}, {"left", "right"}),
        ({"max_size": 6}, {"left"}, {"left", "right"}),
        ({"one_sided": True}, {"left"}, {"left"}),
        ({"max_size": 5}, set(), {"left"}),
        ({"refresh": None}, set(), set()),
    ],
    ids=["both", "limited", "one-sided", "more limited", "none"],  # a set's own order is not fixed
)
def test_which_weights_have_bases(options: dict[str, Any], conv: set[str], dense: set[str]) -> None:
    """Never vectors, embeddings and the deterministic norm; a convolution is (6, 4·3)."""
    net = Reader()
    opt = EVON(net, num_data=16, **options)
    found = bases(opt, net)
    assert found.pop("conv.weight") == conv
    assert found.pop("dense.weight") == dense
    assert not any(found.values())


def test_groups_choose_for_themselves() -> None:
    net = Reader()
    groups = [
        {"params": net.conv.parameters(), "one_sided": True},
        {"params": net.dense.parameters(), "refresh": None},
    ]
    opt = EVON(groups, num_data=16)
    found = bases(opt, net.conv), bases(opt, net.dense)
    assert found == ({"weight": {"left"}, "bias": set()}, {"weight": set(), "bias": set()})


def test_much_memory_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evon, "_MUCH_MEMORY", 1000)
    with pytest.warns(UserWarning, match=r"EVON's bases of 2 .* of which conv\.weight .*max_size"):
        EVON(Reader(), num_data=16)


def test_posterior_predicts_saves_and_knows_its_kl(tmp_path: Path) -> None:
    net = Reader()
    opt = EVON(net, num_data=16, refresh=3, betas=(0.9, 0.9))
    train(opt, net, 8)
    posterior = opt.posterior(net, Categorical())
    q, prior = posterior.q, posterior.model.prior_over_weights()
    assert isinstance(q, EigenKroneckerGaussian)
    segments = posterior.model.random.segments
    assert [a * b for a, b in q.shapes] == [s.size for s in segments]
    parts = kl_per_segment(q, prior, [s.size for s in segments])
    torch.testing.assert_close(parts.sum(), kl(q, prior))
    estimate, error = kl_monte_carlo(q, prior, 2000, torch.Generator().manual_seed(0))
    assert abs(float(estimate - kl(q, prior))) < 5 * float(error)
    x, _ = batch()
    posterior.save(tmp_path / "q.safetensors")
    loaded = credo.load(tmp_path / "q.safetensors", Reader())
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    one, two = (
        p.predict(x, samples=4, generator=g).probs
        for p, g in zip((posterior, loaded), generators, strict=True)
    )
    assert torch.equal(one, two)


def test_linearised_predictions_have_its_covariance() -> None:
    """JΣJᵀ of a linear network, which is its own linearisation, by the dense Σ."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    opt = EVON(net, num_data=20, refresh=2, betas=(0.9, 0.5))
    x = torch.randn(10, 3)
    for _ in range(6):
        with opt.sampled():
            F.mse_loss(net(x), x[:, :2]).backward()
        opt.step()
    posterior = opt.posterior(net, credo.likelihoods.Gaussian(0.1))
    q = posterior.q
    assert isinstance(q, EigenKroneckerGaussian)
    found = posterior.predict(x, at="linearised")
    rows = torch.stack([torch.kron(torch.eye(2), row[None]) for row in x])
    jacobian = torch.cat([rows, torch.eye(2).expand(len(x), 2, 2)], -1)
    covariance = jacobian @ q.dense_covariance() @ jacobian.mT
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found.epistemic_std.square(), variance, rtol=1e-4, atol=1e-7)


def test_a_state_with_other_bases_is_refused_by_name() -> None:
    net = Reader()
    two_sided, one_sided = EVON(net, num_data=16), EVON(net, num_data=16, one_sided=True)
    state = copy.deepcopy(two_sided.state_dict())
    with pytest.raises(CheckpointError, match=r"right_basis.*belongs to another network"):
        one_sided.load_state_dict(state)
    plain = credo.optim.IVON(net, num_data=16)
    with pytest.raises(CheckpointError, match="left_basis"):
        two_sided.load_state_dict(plain.state_dict())


def test_the_curvatures_clip_holds_a_steps_curvature() -> None:
    """Gradients a thousand times too large: h + δ grows by at most (1 − β₂)γ(1 + (1 − β₂)γ/2)."""
    net = Reader()
    opt = EVON(net, num_data=16, betas=(0.9, 0.9), hess_clip=2.0, weight_decay=0.5)
    before = opt.state[net.dense.weight]["curvature"].clone() + 0.5
    x, y = batch()
    with opt.sampled():
        (1000 * F.cross_entropy(net(x), y)).backward()
    opt.step()
    after = opt.state[net.dense.weight]["curvature"] + 0.5
    # ĥ − h is between −γ(h + δ) − h and γ(h + δ) − h.
    u = 0.1 * 2.0
    assert float((after / before).max()) <= 1 + u + u**2 / 2 + 1e-6


def test_weights_that_were_changed_after_it_was_built_count_from_the_first_step() -> None:
    """Loading a checkpoint after building the optimizer is usual: the prior pulls the new ones."""
    early, late = Reader(), Reader()
    weights = {name: 3 * value for name, value in early.state_dict().items()}
    opt = EVON(early, num_data=16)
    for net in (early, late):
        net.load_state_dict(weights)
    other = EVON(late, num_data=16)
    train(opt, early, 3)
    train(other, late, 3)
    for one, two in zip(early.parameters(), late.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh": 0}, "refresh must be"),
        ({"basis_beta": 1.0}, "basis_beta must be"),
        ({"max_size": 0}, "max_size must be"),
        ({"one_sided": "left"}, "one_sided must be True or False"),
        ({"hess_clip": -1.0}, "hess_clip must be"),
    ],
)
def test_bad_options_name_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        EVON(Reader(), num_data=16, **options)
