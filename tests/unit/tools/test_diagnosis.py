"""`credo.diagnose`: its three verdicts on trained networks, and its numbers where known."""

import io
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.errors import DataError, NonFiniteError
from credo.families import Delta, DiagGaussian, Empirical
from credo.posterior.posterior import Posterior
from credo.rule.families import SignBernoulli
from credo.tools import Diagnosis, diagnose
from credo.tools.diagnosis import NEAR_PRIOR, POINT_SHARE

pytestmark = [
    pytest.mark.filterwarnings("ignore:the posterior's scales:UserWarning"),
    pytest.mark.filterwarnings("ignore:the network does not look trained:UserWarning"),
]

NOISE = 0.1
LIKELIHOODS = {
    "classification": credo.likelihoods.Categorical(),
    "regression": credo.likelihoods.Gaussian(scale=NOISE),
}
KINDS = pytest.mark.parametrize("kind", LIKELIHOODS)


class WideNet(nn.Module):
    """The network of Huix et al. (2022): an average over neurons."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, width), nn.Linear(width, outputs, bias=False)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x))) / self.hidden.out_features


def data(kind: str):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    if kind == "classification":
        return x, (x[:, 0] + x[:, 1] ** 2 > 0.5).long() + (x[:, 1] > 1).long()
    return x, torch.sin(2 * x[:, :1]) + NOISE * torch.randn(80, 1, generator=generator)


def fitted(kind: str, method, net=None, prior=None, epochs: int = 250) -> Posterior:
    torch.manual_seed(0)
    outputs = 3 if kind == "classification" else 1
    net = net(outputs) if net else nn.Sequential(
        nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, outputs)
    )  # fmt: skip
    model = credo.Model(net, LIKELIHOODS[kind], prior)
    return credo.fit(model, method, data(kind), epochs=epochs, batch_size=80, progress=False)


def line(q, scale: float = 0.5) -> Posterior:
    """y = wx + noise: every number of a diagnosis is a formula."""
    net = nn.Linear(1, 1, bias=False).double()
    model = credo.Model(net, credo.likelihoods.Gaussian(scale=scale), credo.priors.Normal(2.0))
    return Posterior.at_network(model, q)


def gaussian(mean: float, scale: float) -> DiagGaussian:
    return DiagGaussian(*(torch.tensor([v], dtype=torch.float64) for v in (mean, scale)))


# --- verdicts -------------------------------------------------------------------------------------


@KINDS
def test_a_wide_network_at_temperature_one_ignores_the_data(kind: str) -> None:
    width = 1000
    method = credo.VI(temperature=1.0, lr=0.01)
    prior = credo.priors.Normal(scale=math.sqrt(0.2))
    with pytest.warns(UserWarning, match="still that of a constant prediction"):
        posterior = fitted(kind, method, lambda k: WideNet(width, k), prior, epochs=120)
    found = diagnose(posterior, data(kind))
    assert found.verdict == "ignoring the data"
    assert found.temperature == 1.0
    assert "credo.Balanced(tau=" in found.advice
    assert found.num_units == width
    assert found.kl_per_unit == pytest.approx(found.kl / width)
    assert found.kl_per_weight < 0.01
    assert found.predictions.mean_output < 0.02
    assert diagnose(posterior).verdict == "ignoring the data"


def test_its_advice_cures_the_wide_network() -> None:
    method = credo.VI(temperature=credo.Balanced(tau=0.1), lr=0.03)
    prior = credo.priors.Normal(scale=math.sqrt(0.2))
    found = diagnose(
        fitted("regression", method, lambda k: WideNet(500, k), prior, epochs=150),
        data("regression"),
    )
    assert found.verdict == "balanced"
    assert found.temperature == pytest.approx(0.1 * 80 / found.num_weights)


def test_an_average_over_many_units_has_no_spread_to_raise() -> None:
    """Huix et al. (2022): Var f = O(1/N) under the prior as well, and no η changes that."""
    net = WideNet(2000, 3)
    model = credo.Model(net, LIKELIHOODS["classification"], credo.priors.Normal(scale=0.5))
    prior = model.prior_over_weights()
    mean = torch.zeros(prior.mean.shape[0])
    # Units that fire everywhere, and count for the first class
    mean[net.hidden.weight.numel() : net.hidden.weight.numel() + 2000] = 1.0
    mean[-3 * 2000 : -2 * 2000] = 1.0
    q = DiagGaussian(mean, prior.scale.clone())
    found = diagnose(Posterior.at_network(model, q), data("classification"))
    assert found.verdict == "nearly a point estimate"
    assert "But so do the prior's" in found.advice


@KINDS
def test_a_point_estimate_is_told_what_it_is(kind: str) -> None:
    posterior = fitted(kind, credo.MAP(lr=0.01))
    for found in (diagnose(posterior, data(kind)), diagnose(posterior)):
        assert found.verdict == "nearly a point estimate"
        assert found.kl == found.kl_per_weight == math.inf
        assert "credo.Laplace()" in found.advice
    assert diagnose(posterior, data(kind)).predictions.spread_ratio == 0


@KINDS
def test_a_cold_posterior_is_nearly_a_point_estimate(kind: str) -> None:
    method = credo.VI(temperature=1e-8, lr=0.01, init_scale=1e-3)
    posterior = fitted(kind, method)
    found = diagnose(posterior, data(kind))
    assert found.verdict == "nearly a point estimate"
    assert "Raise the temperature (η was 1e-08)" in found.advice
    assert math.isfinite(found.kl)
    assert found.predictions.epistemic_share < POINT_SHARE
    assert diagnose(posterior).verdict == "nearly a point estimate"


@KINDS
@pytest.mark.parametrize("name", ["VI", "Laplace"])
def test_a_good_posterior_is_balanced(kind: str, name: str) -> None:
    if name == "VI":
        posterior = fitted(kind, credo.VI(temperature=credo.Balanced(tau=0.1), lr=0.01))
    else:
        posterior = fitted(kind, credo.Laplace(train=credo.MAP(lr=0.01)))
    found = diagnose(posterior, data(kind))
    assert found.verdict == "balanced"
    assert found.predictions.distance > 2 * (NEAR_PRIOR + found.predictions.noise)
    assert found.predictions.epistemic_share > 2 * POINT_SHARE
    assert diagnose(posterior).verdict == "balanced"


def test_the_thresholds_are_where_they_say() -> None:
    """A mean that moves away from the prior by more and more of the predictive's spread."""
    x = torch.ones(3, 1, dtype=torch.float64)
    predictive = math.hypot(2.0, 0.5)
    for share, verdict in ((0.5, "ignoring the data"), (1.1, "balanced")):
        noise = diagnose(line(gaussian(0.0, 2.0)), x, samples=1024).predictions.noise
        mean = share * (NEAR_PRIOR + noise) * predictive
        assert diagnose(line(gaussian(mean, 2.0)), x, samples=1024).verdict == verdict
    for share, verdict in ((0.7, "nearly a point estimate"), (1.4, "balanced")):
        scale = 0.5 * math.sqrt(share * POINT_SHARE)
        assert diagnose(line(gaussian(1.0, scale)), x, samples=1024).verdict == verdict


def test_a_posterior_as_wide_as_the_prior_hears_of_it() -> None:
    found = diagnose(line(gaussian(3.0, 1.9)), torch.ones(3, 1))
    assert found.verdict == "balanced"
    assert "as much as the prior's" in found.advice
    narrow = diagnose(line(gaussian(3.0, 0.5)), torch.ones(3, 1))
    assert "nothing to change" in narrow.advice


# --- numbers --------------------------------------------------------------------------------------


def test_the_numbers_of_a_line_are_formulas() -> None:
    """f = wx under q = N(1.2, 0.7²), prior N(0, 2²), noise 0.5; 2 % is 3 s.e. of 4096 draws."""
    x = torch.tensor([[0.5], [1.0], [-2.0]], dtype=torch.float64)
    found = diagnose(line(gaussian(1.2, 0.7)), x, samples=4096)
    want = kl_divergence(Normal(1.2, 0.7), Normal(0.0, 2.0))
    assert found.kl == pytest.approx(float(want), rel=1e-6)
    assert found.scale_ratio == pytest.approx(0.35)
    assert found.temperature is None
    square = float(x.square().mean())
    p = found.predictions
    distance = math.sqrt(square * (1.2**2 + 1.3**2) / (4 * square + 0.25))
    assert p.distance == pytest.approx(distance, rel=0.02)
    assert p.spread_ratio == pytest.approx(0.35, rel=0.02)
    assert p.mean_output == pytest.approx(1.2 * float(x.abs().mean()), rel=0.04)
    share = 0.49 * square / (0.49 * square + 0.25)
    assert p.epistemic_share == pytest.approx(share, rel=0.04)
    noise = math.sqrt(1.5 * square * (0.49 + 4) / 4096 / (4 * square + 0.25))
    assert p.noise == pytest.approx(noise, rel=0.04)
    assert (p.confidence, p.entropy, p.num_inputs) == (None, None, 3)


def test_the_noise_is_what_independent_samples_differ_by() -> None:
    """An empirical copy of the prior shares no draws with it: its distance is the noise."""
    generator = torch.Generator().manual_seed(5)
    x = torch.ones(1, 1, dtype=torch.float64)
    ratios = []
    for _ in range(40):
        drawn = Empirical(gaussian(0.0, 2.0).sample(64, generator))
        p = diagnose(line(drawn), x, generator=generator).predictions
        ratios.append((p.distance / p.noise) ** 2)
    # (2χ₁² + χ₁²)/3 has mean 1 and standard deviation 1.05, that of 40 then 0.17.
    assert np.mean(ratios) == pytest.approx(1, abs=5 * 0.17)


def test_classification_has_confidence_and_entropy() -> None:
    posterior = fitted("classification", credo.VI(lr=0.01), epochs=60)
    x, _ = data("classification")
    p = diagnose(posterior, x, samples=32).predictions
    generator = torch.Generator().manual_seed(0)
    pred = posterior.predict(x, samples=32, generator=generator)
    assert p.confidence == pytest.approx(float(pred.confidence.mean()))
    assert p.entropy == pytest.approx(float(pred.entropy.mean()))
    share = float(pred.mutual_information.mean() / pred.entropy.mean())
    assert p.epistemic_share == pytest.approx(share, rel=1e-5)
    assert p.mean_output == pytest.approx(float(pred.outputs.mean(0).abs().mean()), rel=1e-5)


def test_two_classes_are_one_thing_to_bernoulli_and_categorical() -> None:
    """f and (0, f) have the same probabilities, so the same distance, share and entropy."""
    x = torch.linspace(-2, 2, 7)[:, None]
    one = nn.Linear(1, 1, bias=False)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(1, 1, bias=False)

        def forward(self, x):
            f = self.line(x)
            return torch.cat([torch.zeros_like(f), f], 1)

    q = DiagGaussian(torch.tensor([1.0]), torch.tensor([0.5]))
    prior = credo.priors.Normal(scale=1.0)
    found = [
        diagnose(Posterior.at_network(credo.Model(net, likelihood, prior), q), x).predictions
        for net, likelihood in (
            (one, credo.likelihoods.Bernoulli()),
            (Two(), credo.likelihoods.Categorical()),
        )
    ]
    for name in ("distance", "noise", "spread_ratio", "epistemic_share", "confidence", "entropy"):
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name), rel=1e-4)


# --- every posterior ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "kl"),
    [
        (Delta(torch.tensor([1.0]).double()), math.inf),
        (Empirical(torch.tensor([[1.0], [1.5]]).double()), None),
        (SignBernoulli(torch.tensor([0.3]).double()), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_there_is_no_kl_it_says_so(q, kl) -> None:
    found = diagnose(line(q), torch.ones(3, 1))
    assert found.kl == kl
    assert found.kl_per_unit == kl
    assert ("unknown" if kl is None else "inf") in str(found)
    assert diagnose(line(q)).predictions is None


@pytest.mark.parametrize(
    "prior", [credo.priors.Laplace(scale=1.0), credo.priors.ScaleMixture()], ids=["Laplace", "mix"]
)
def test_priors_that_are_no_gaussians(prior) -> None:
    """The prior's predictions come from samples of it; the KL is estimated if it must be."""
    posterior = fitted("classification", credo.VI(lr=0.01), prior=prior, epochs=40)
    found = diagnose(posterior, data("classification"))
    assert found.verdict == "balanced"
    assert 0 < found.kl < math.inf


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "low_rank"])
def test_every_structure_of_laplace(structure: str) -> None:
    posterior = fitted("regression", credo.Laplace(structure=structure), epochs=0)
    found = diagnose(posterior, data("regression"), samples=8)
    assert 0 < found.kl < math.inf
    assert found.predictions.epistemic_share is not None


def test_a_bare_loss_is_judged_by_its_spread() -> None:
    loss = credo.likelihoods.FromLoss(lambda f, y: (f - y).abs().sum(1))
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    for scale, verdict in ((0.3, "balanced"), (1e-3, "nearly a point estimate")):
        model = credo.Model(nn.Linear(2, 1), loss, credo.priors.Normal(1.0))
        q = DiagGaussian(torch.ones(3), torch.full((3,), scale))
        found = diagnose(Posterior.at_network(model, q), x)
        assert found.verdict == verdict
        assert found.predictions.epistemic_share is None


def test_inputs_in_every_form_and_the_network_left_alone() -> None:
    posterior = fitted("classification", credo.VI(lr=0.01), epochs=20)
    x, y = data("classification")
    net = posterior.model.net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    whole = diagnose(posterior, x, samples=8).predictions
    assert diagnose(posterior, x.numpy(), samples=8).predictions == whole
    dataset = TensorDataset(x, y)
    for form in ((x, y), dataset, DataLoader(dataset, batch_size=80)):
        p = diagnose(posterior, form, samples=8).predictions
        assert p.num_inputs == 80
        assert p.distance == pytest.approx(whole.distance, rel=1e-4)
    many = diagnose(posterior, x.repeat(50, 1), samples=2)
    assert many.predictions.num_inputs == 1024
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_generator_draws_other_networks() -> None:
    posterior, x = line(gaussian(1.2, 0.7)), torch.ones(3, 1)
    assert diagnose(posterior, x) == diagnose(posterior, x)
    other = diagnose(posterior, x, generator=torch.Generator().manual_seed(9))
    assert other.predictions.distance != diagnose(posterior, x).predictions.distance


# --- what it says ---------------------------------------------------------------------------------


def test_it_reads_as_text_and_as_a_table() -> None:
    found = diagnose(line(gaussian(1.2, 0.7)), torch.ones(3, 1))
    text = str(found)
    assert text.splitlines()[0] == "This posterior is balanced."
    assert "KL(q‖prior)" in text
    assert max(len(row) for row in text.splitlines()[4:]) < 80
    out = io.StringIO()
    Console(file=out, width=100).print(found)
    for words in ("This posterior is balanced", "epistemic share", "nothing to change"):
        assert words in out.getvalue()
    assert isinstance(found, Diagnosis)
    assert text.splitlines()[8].split()[:3] == ["temperature", "η", "unknown"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (nn.Linear(1, 1),),
            DataError,
            "must be a Posterior, but it is Linear.*Give what credo.fit returns",
        ),
        ((line(gaussian(1.0, 1.0)), torch.ones(0, 1)), DataError, "no inputs"),
        ((line(gaussian(1.0, 1.0)), torch.tensor(1.0)), DataError, "no inputs"),
        ((line(gaussian(1.0, 1.0)), torch.tensor([[math.nan]])), NonFiniteError, "not finite"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(arguments, error, message: str) -> None:
    with pytest.raises(error, match=message):
        diagnose(*arguments)


def test_one_sample_cannot_disagree() -> None:
    with pytest.raises(DataError, match="at least 2"):
        credo.diagnose(line(gaussian(1.0, 1.0)), torch.ones(1, 1), samples=1)
