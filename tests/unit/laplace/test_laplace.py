"""credo.Laplace as a method: what it refuses, what it says, what it leaves alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError, UnsupportedError
from credo.families import (
    Delta,
    DiagGaussian,
    EigenBlock,
    EigenKroneckerGaussian,
    FullGaussian,
    LowRankGaussian,
)
from credo.laplace import data_pass as over_data
from credo.laplace.checks import needed_bytes
from credo.likelihoods import Categorical, FromLoss, Gaussian
from credo.rule.families import absorb, absorb_positive

F64 = torch.float64
STRUCTURES = {
    "diag": DiagGaussian,
    "kron": EigenKroneckerGaussian,
    "full": FullGaussian,
    "low_rank": LowRankGaussian,
}
quiet = pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning")


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)
        ).double()


def data(n: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=F64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def fit(method, network=None, train=None, likelihood=None, prior=None, **more):
    model = credo.Model(net() if network is None else network, likelihood or Categorical(), prior)
    return credo.fit(model, method, data() if train is None else train, progress=False, **more)


# --- the method --------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_has_its_family_and_predicts(structure: str, tmp_path) -> None:
    x, _ = data()
    posterior = fit(credo.Laplace(structure=structure))
    assert type(posterior.q) is STRUCTURES[structure]
    assert posterior.predict(x, samples=3).probs.shape == (60, 3)
    assert posterior.predict(x, at="linearised", samples=3).probs.shape == (60, 3)
    assert posterior.q.mean.dtype == F64
    posterior.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", net(5))
    assert_close(again.q.variance, posterior.q.variance, rtol=0, atol=0)


@quiet
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_batches_do_not_matter(structure: str, curvature: str, monkeypatch) -> None:
    """Neither those that come in nor the pieces they are cut into."""
    method = credo.Laplace(structure=structure, curvature=curvature)
    whole = fit(method, batch_size=60)
    monkeypatch.setattr(over_data, "MAX_EXAMPLES", 7)
    pieces = fit(method, batch_size=10)
    # Sums in another order; the sketch of low rank magnifies their rounding.
    assert_close(pieces.q.variance, whole.q.variance, rtol=1e-6, atol=1e-10)
    assert_close(pieces.log_marginal_likelihood(), whole.log_marginal_likelihood())


@quiet
def test_the_network_is_left_alone() -> None:
    """Eval mode in the pass, so batch norm uses and keeps its statistics and dropout is off."""
    network = net()
    network.train()
    network[3].eval()
    before = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    first = fit(credo.Laplace(), network)
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    assert all(p.requires_grad for p in network.parameters())
    second = fit(credo.Laplace(), network.eval())
    assert_close(first.q.variance, second.q.variance)


@quiet
def test_a_subset_gets_the_gaussian_and_the_rest_stays() -> None:
    network = net()
    posterior = fit(credo.Laplace("full", subset="last_layer"), network)
    assert posterior.q.size == 21
    assert_close(posterior.mean, torch.cat([p.detach().flatten() for p in network[4].parameters()]))
    assert_close(posterior.point[:24], network[0].weight.detach().flatten())
    assert fit(credo.Laplace("diag", subset=["0.bias", "4"]), network).q.size == 27
    model = credo.Model(network, Categorical(), random="last_layer")
    assert credo.fit(model, credo.Laplace(), data(), progress=False).q.size == 21
    with pytest.raises(DataError, match="no parameter matches"):
        fit(credo.Laplace(subset="head.*"), network)


def test_before_the_pass_it_is_a_point_mass() -> None:
    method = credo.Laplace()
    state = method.init(credo.Model(net(), Categorical()), 60)
    assert isinstance(method.posterior(state).q, Delta)


def test_with_epochs_it_trains_as_map_does_and_then_looks_around() -> None:
    trained, reference = net(), net()
    train = credo.MAP(lr=0.01)
    posterior = fit(credo.Laplace(train=train), trained, epochs=3)
    expected = fit(train, reference, epochs=3)
    assert torch.equal(posterior.mean, expected.mean)
    assert [record["nll"] for record in posterior.history] == [
        record["nll"] for record in expected.history
    ]
    assert credo.Laplace(temperature=0.5)._map.temperature == 0.5


@quiet
def test_examples_that_a_loader_drops_are_made_up_for() -> None:
    x, y = data(60)
    loader = DataLoader(TensorDataset(x[:40], y[:40]), batch_size=20)
    few = fit(credo.Laplace("full"), train=loader, num_data=80)
    twice = fit(credo.Laplace("full"), train=(torch.cat([x[:40]] * 2), torch.cat([y[:40]] * 2)))
    assert_close(few.q.precision, twice.q.precision)
    assert_close(few.log_marginal_likelihood(), twice.log_marginal_likelihood())


@quiet
def test_sampled_labels_follow_the_seed() -> None:
    method = credo.Laplace("diag", curvature="fisher")
    first, again = fit(method, seed=1), fit(method, seed=1)
    assert torch.equal(first.q.variance, again.q.variance)
    assert not torch.equal(first.q.variance, fit(method, seed=2).q.variance)
    exact = fit(credo.Laplace("diag")).q.precision
    many = fit(credo.Laplace("diag", curvature="fisher", mc_samples=400)).q.precision
    # 60 examples × 400 labels: errors of about 1/√24000 of each entry's spread, a few times it.
    assert_close(many, exact, rtol=0.1, atol=0.1)


# --- dense outputs, losses, ignored labels -----------------------------------------------------


def segmentation() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 1))
        x = torch.randn(5, 2, 4, 4, dtype=F64)
    return network.double(), x, (x[:, 0] > 0).long()


@quiet
@pytest.mark.parametrize("curvature", ["ggn", "fisher", "empirical"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_dense_outputs(curvature: str, structure: str) -> None:
    network, x, y = segmentation()
    posterior = fit(credo.Laplace(structure, curvature=curvature), network, (x, y))
    assert bool((posterior.q.variance > 0).all())
    assert posterior.predict(x, samples=2).probs.shape == (5, 3, 4, 4)


@quiet
def test_dense_ggn_is_the_sum_over_pixels_that_have_a_label() -> None:
    """With a 1×1 convolution every pixel is an example."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Conv2d(2, 3, 1).double()
        x = torch.randn(2, 2, 3, 3, dtype=F64)
    y = (x[:, 0] > 0).long()
    y[0, :2] = 7
    posterior = fit(
        credo.Laplace("full"), network, (x, y), Categorical(ignore_index=7), credo.priors.Normal()
    )
    pixels, labels = x.movedim(1, -1)[y != 7], y[y != 7]
    flat = nn.Linear(2, 3).double()
    with torch.no_grad():
        flat.weight.copy_(network.weight[:, :, 0, 0])
        flat.bias.copy_(network.bias)
    expected = fit(credo.Laplace("full"), flat, (pixels, labels), prior=credo.priors.Normal())
    assert_close(posterior.q.precision, expected.q.precision)


def test_too_many_dense_outputs_are_refused_with_the_remedy() -> None:
    network, x, y = segmentation()
    with pytest.raises(UnsupportedError, match=r"48 × 48 .*curvature=\"fisher\""):
        fit(credo.Laplace("diag", max_memory=1e4), network, (x, y))


@quiet
def test_any_loss_has_empirical_curvature() -> None:
    x, _ = data()
    y = x.sum(1, keepdim=True)

    def huber(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs, targets, reduction="none").sum(1)

    network = nn.Linear(4, 1).double()
    posterior = fit(credo.Laplace("diag", curvature="empirical"), network, (x, y), FromLoss(huber))
    assert bool((posterior.q.variance > 0).all())
    for curvature in ("ggn", "fisher"):
        with pytest.raises(UnsupportedError, match="huber"):
            fit(credo.Laplace(curvature=curvature), network, (x, y), FromLoss(huber))


# --- what is said and refused ------------------------------------------------------------------


def test_an_untrained_network_is_told() -> None:
    network = net()
    with pytest.warns(UserWarning, match=r"norm 0\.\d+.*nats per example.*filterwarnings"):
        fit(credo.Laplace(), network)
    fit(credo.MAP(lr=0.02), network, epochs=150)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(credo.Laplace(), network)
        fit(credo.Laplace("full", subset="last_layer"), network)


@pytest.mark.parametrize("train", [credo.MAP(lr=0.02), credo.MLE(lr=0.02)], ids=["map", "mle"])
def test_trained_with_or_without_the_prior_is_trained(train) -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    tight = credo.priors.Normal(0.3)
    fit(train, network, prior=tight, epochs=300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(credo.Laplace(), network, prior=tight)


def test_memory_is_said_before_it_is_taken() -> None:
    big = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10))
    x, y = torch.rand(3, 784), torch.arange(3)
    with pytest.raises(UnsupportedError) as refusal:
        fit(credo.Laplace("full"), big, (x, y))
    message = str(refusal.value)
    size = sum(p.numel() for p in big.parameters())
    assert f"over {size} weights needs {3 * 4 * size**2 / 1e9:.3g} GB" in message
    for fitting in ('structure="kron"', 'structure="diag"', 'subset="last_layer"'):
        assert fitting in message
    with pytest.raises(UnsupportedError, match=r"kron.*diag"):
        fit(credo.Laplace("kron", max_memory=5e6), big, (x, y))


@pytest.mark.parametrize("structure", STRUCTURES)
@quiet
def test_what_is_kept_fits_what_was_said(structure: str) -> None:
    posterior = fit(credo.Laplace(structure, rank=3))
    tensors, _ = posterior.q.pack()
    kept = sum(tensor.numel() for tensor in tensors.values()) * 8
    said = needed_bytes(structure, posterior.model.random.segments, 8, 3)
    assert kept <= said + posterior.q.size * 8


@quiet
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_hessians_that_are_not_positive_are_refused(structure: str) -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x, _ = data()
    y = 10 * torch.ones(60, 1, dtype=F64)
    method = credo.Laplace(structure, curvature="hessian")
    with pytest.raises(DataError, match=r"smallest eigenvalue is -.*ggn"):
        fit(method, network, (x, y), Gaussian(0.1), credo.priors.Normal(100.0))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: credo.Laplace("block"), DataError, "structure must be one of"),
        (lambda: credo.Laplace(curvature="gauss"), DataError, "curvature must be one of"),
        (lambda: credo.Laplace(optimise_prior="layer"), DataError, "optimise_prior must be"),
        (lambda: credo.Laplace(curvature="hessian"), UnsupportedError, "structure='kron'"),
        (lambda: credo.Laplace(rank=0), DataError, "rank"),
        (lambda: credo.Laplace(mc_samples=0), DataError, "mc_samples"),
        (lambda: credo.Laplace(evidence_every=0), DataError, "evidence_every"),
        (
            lambda: credo.Laplace(temperature=0.5, optimise_prior="global"),
            UnsupportedError,
            "temperature 1",
        ),
    ],
)
def test_settings_that_can_not_be_meant(build, error, message) -> None:
    with pytest.raises(error, match=message):
        build()


@quiet
def test_priors_and_requests_that_have_no_answer() -> None:
    with pytest.raises(UnsupportedError, match="Gaussian prior around zero"):
        fit(credo.Laplace(), prior=credo.priors.Laplace(1.0))
    with pytest.raises(UnsupportedError, match="Gaussian prior around zero"):
        fit(credo.Laplace(), prior=credo.priors.Normal(1.0, mean=0.5))
    uneven = DiagGaussian(torch.zeros(51, dtype=F64), torch.linspace(1, 2, 51, dtype=F64))
    with pytest.raises(UnsupportedError, match="different scales"):
        fit(credo.Laplace(), prior=uneven)
    posterior = fit(credo.Laplace("diag"))
    with pytest.raises(UnsupportedError, match="Gaussian alone"):
        posterior.optimise(noise=True)
    with pytest.raises(UnsupportedError, match="Gaussian alone"):
        posterior.log_marginal_likelihood(noise_scale=1.0)
    with pytest.raises(DataError, match="'layer'"):
        posterior.optimise("layer")
    with pytest.raises(DataError, match="prior_precision"):
        posterior.log_marginal_likelihood(torch.ones(3))
    with pytest.raises(DataError, match="prior_precision"):
        posterior.log_marginal_likelihood(-1.0)
    with pytest.raises(UnsupportedError, match="temperature 1"):
        fit(credo.Laplace("diag", temperature=0.5)).log_marginal_likelihood()


# --- the evidence in use -----------------------------------------------------------------------


@quiet
def test_optimised_priors_travel_with_the_posterior(tmp_path) -> None:
    posterior = fit(credo.Laplace("kron", optimise_prior="per_layer"))
    by_hand = fit(credo.Laplace("kron")).optimise("per_layer")
    assert_close(posterior.q.variance, by_hand.q.variance)
    scales = posterior.model.prior_over_weights().scale
    assert scales[:30].unique().numel() == 1
    assert scales.unique().numel() == 2
    posterior.save(tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", net())
    assert_close(again.model.prior_over_weights().scale, scales)


@quiet
def test_a_layer_of_zeros_gets_the_tightest_prior() -> None:
    network = nn.Linear(4, 3).double()
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    best = fit(credo.Laplace(), network).optimise("global")
    assert float(best.evidence.precision.max()) == pytest.approx(1e10)


def test_noise_is_fitted_where_it_was_to_be_learned() -> None:
    x, _ = data(200)
    noise = torch.randn(200, 1, generator=torch.Generator().manual_seed(2), dtype=F64)
    y = x.sum(1, keepdim=True) + 0.5 * noise
    network, likelihood = nn.Linear(4, 1).double(), Gaussian(2.0, learned=True).double()
    posterior = fit(
        credo.Laplace("full", train=credo.MAP(lr=0.02), evidence_every=5), network, (x, y),
        likelihood, credo.priors.Normal(1.0), epochs=100,
    )  # fmt: skip
    # The standard error of a standard deviation from 200 numbers is 5 % of it.
    assert posterior.model.likelihood.scale == pytest.approx(0.5, rel=0.25)
    fixed = Gaussian(2.0).double()
    posterior = fit(
        credo.Laplace("full", train=credo.MAP(lr=0.02), evidence_every=5), network, (x, y),
        fixed, credo.priors.Normal(1.0), epochs=5,
    )  # fmt: skip
    assert posterior.model.likelihood.scale == 2.0


# --- the family --------------------------------------------------------------------------------


def definite(size: int, seed: int) -> Tensor:
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return root @ root.mT + torch.eye(size, dtype=F64)


def eigen_kronecker() -> EigenKroneckerGaussian:
    blocks = (
        EigenBlock.of_factors(definite(2, 0), definite(3, 1), 0.5),
        EigenBlock(None, None, definite(2, 2).diagonal().unsqueeze(-1)),
    )
    return EigenKroneckerGaussian(torch.arange(8, dtype=F64), blocks)


def test_factors_plus_a_shift_are_exact() -> None:
    q = eigen_kronecker()
    expected = torch.kron(definite(2, 0), definite(3, 1)) + 0.5 * torch.eye(6, dtype=F64)
    assert_close(q.dense_precision()[:6, :6], expected)
    assert_close(q.solve(q.multiply(q.mean)), q.mean)
    assert_close(q.dense_covariance() @ q.dense_precision(), torch.eye(8, dtype=F64))
    assert_close(q.variance, q.dense_covariance().diagonal())


def test_absorbing_keeps_the_diagonal_in_the_basis() -> None:
    """From a dense matrix, its diagonal and its factors alike; exact in the family itself."""
    q = eigen_kronecker()
    doubled = absorb(q, q.dense_precision(), keep=0.5, gain=1.0)
    assert_close(doubled.dense_precision(), 1.5 * q.dense_precision())
    pair = ((definite(2, 5), definite(3, 6)), (definite(2, 7), torch.ones(1, 1, dtype=F64)))
    dense = torch.block_diag(*(torch.kron(a, b) for a, b in pair))
    assert_close(absorb(q, pair, 0.3, 0.7).variance, absorb(q, dense, 0.3, 0.7).variance)
    diagonal = definite(8, 8).diagonal()
    assert_close(
        absorb(q, diagonal, 0.3, 0.7).variance, absorb(q, torch.diag(diagonal), 0.3, 0.7).variance
    )
    indefinite = dense - 5 * torch.eye(8, dtype=F64)
    assert bool((absorb_positive(q, indefinite, 0.9).variance > 0).all())
    first_order = absorb(q, dense, 1 - 1e-6, 1e-6).dense_precision()
    assert_close(
        absorb_positive(q, dense, 1e-6).dense_precision(), first_order, rtol=1e-9, atol=1e-9
    )


def test_bases_that_are_none_are_refused() -> None:
    mean, values = torch.zeros(4, dtype=F64), torch.ones(2, 2, dtype=F64)
    skew = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=F64)
    for block, message in (
        (EigenBlock(skew, None, values), "left basis of block 0 must be orthonormal"),
        (EigenBlock(None, skew[:1], values), r"right basis of block 0 must be \(2, 2\)"),
        (EigenBlock(None, None, -values), "values of block 0 must be positive"),
        (EigenBlock(None, None, values[0]), r"must be \(a, b\)"),
    ):
        with pytest.raises(DataError, match=message):
            EigenKroneckerGaussian(mean, (block,))
    with pytest.raises(DataError, match="in factors must have one pair for each block"):
        absorb(eigen_kronecker(), ((skew, skew),), 1.0, 1.0)
    one = EigenBlock(None, None, torch.ones(8, 1, dtype=F64))
    with pytest.raises(DataError, match="different shapes"):
        eigen_kronecker().kl(EigenKroneckerGaussian(torch.zeros(8, dtype=F64), (one,)))


def test_training_with_a_penalty_instead_of_the_prior_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="penalty"):
        credo.Laplace(train=credo.MAP(penalty="l1"))
