r"""Stochastic variational inference, on topics: the rule with a minibatch's gradient.

In a conjugate model with global parameters β and local ones for each example, ∇_μE_q[ℓ] with
respect to q(β) is −(λ₀ + Σ_i E T_i): the prior's natural parameter, and the expected statistics of
every example under its best local factors. A minibatch of S among n examples estimates the sum
without bias, and the rule is

    λ ← (1 − ρ_t)λ + ρ_t(λ₀ + (n/S) Σ_{i∈batch} E T_i),      ρ_t = (t + 1)^−κ,  κ ∈ (½, 1]

Σρ_t = ∞ lets it reach the optimum from anywhere and Σρ_t² < ∞ lets the noise die (Robbins & Monro).
On the full batch ρ = 1 is coordinate ascent.

The model is latent Dirichlet allocation. Topic k is a distribution β_k over V words, document d has
its shares θ_d of K topics, and each of its words first draws a topic z. The local factors q(θ_d),
Dirichlet, and q(z), categorical, alternate at ρ = 1 until they agree.

    >>> counts = torch.tensor([[9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 9.0, 8.0], [5.0, 4.0, 4.0, 5.0]])
    >>> method = TopicModel(Dirichlet(torch.full((2, 4), 0.1)), Dirichlet(torch.full((2,), 0.1)))
    >>> topics = method.init(torch.Generator().manual_seed(0))
    >>> for t in range(30):
    ...     batch = counts[[t % 3]]
    ...     topics = method.update(topics, batch, robbins_monro(t, 0.7), num_documents=3)
    >>> topics.mean.round(decimals=1)
    tensor([[0.0000, 0.0000, 0.5000, 0.5000],
            [0.5000, 0.5000, 0.0000, 0.0000]])

What is given up: dependence between factors, and the sum over all data.

Reference: Hoffman, Blei, Wang & Paisley, "Stochastic variational inference", 2013
(arXiv:1206.7051).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor

from credo.checks import Count, Index, NotNegative, Range, checked
from credo.errors import DataError
from credo.families.base import refuse_unless
from credo.rule.families import Categorical, Dirichlet, Gamma
from credo.rule.gallery.entry import Entry
from credo.rule.gallery.message_passing import check_rows
from credo.rule.rule import step

ENTRY = Entry(
    algorithm="stochastic variational inference",
    family="Dirichlet topics; Dirichlet × categorical in each document",
    expectation="of a minibatch",
    curvature="none",
    step="local ρ = 1, global ρ_t = (t + 1)^−κ",
    approximates="dependence between factors; all data by a minibatch",
    test="tests/theorems/test_gallery_conjugate.py::test_topics_on_minibatches_are_scikit_learns",
)


@checked
def robbins_monro(t: Index, decay: Annotated[float, Range(0.5, 1, open_low=True)]) -> float:
    """ρ_t = (t + 1)^−κ for steps t = 0, 1, …; ``decay`` is κ ∈ (½, 1].

    With less the noise never dies, with more the steps end before the optimum.
    """
    return float((t + 1) ** -decay)


def scale_of_batch(batch: Tensor, total: int | None, name: str) -> float:
    """n/S: how many examples each of the batch stands for; ``total`` None is the batch's own."""
    if total is None:
        return 1.0
    if total < len(batch):
        raise DataError(f"{name} is {total}, but the batch alone has {len(batch)}")
    return total / len(batch)


@checked
@dataclass(frozen=True)
class TopicModel:
    """Latent Dirichlet allocation: β_k ~ ``topic_prior`` (K, V), θ_d ~ ``document_prior`` (K,).

    A document is a row of word counts (V,); one without words says nothing and does no harm. Local
    steps end when no parameter of q(θ_d) moves by more than ``tolerance``, or after ``sweeps``.
    """

    topic_prior: Dirichlet
    document_prior: Dirichlet
    tolerance: NotNegative = 1e-3
    sweeps: Count = 100

    def __post_init__(self) -> None:
        topics, shares = self.topic_prior.concentration, self.document_prior.concentration
        if topics.dim() != 2 or shares.shape != topics.shape[:1]:
            raise DataError(
                "topic_prior must be over (K, V) and document_prior over (K,), got "
                f"{tuple(topics.shape)} and {tuple(shares.shape)}"
            )

    def init(self, generator: Generator | None = None) -> Dirichlet:
        """Topics near Dirichlet(1, …, 1) but different: equal topics would stay equal."""
        hundred = torch.full_like(self.topic_prior.concentration, 100.0)
        return Dirichlet(Gamma(hundred, hundred).sample(1, generator)[0])

    def update(
        self,
        topics: Dirichlet,
        counts: Tensor,
        rate: float = 1.0,
        num_documents: int | None = None,
    ) -> Dirichlet:
        """One step on some of ``num_documents`` documents, or all: counts (D, V)."""
        scale = scale_of_batch(counts, num_documents, "num_documents")
        _, words = self.local_factors(topics, counts)
        statistics = torch.einsum("dv,dvk->kv", counts, words.probs)
        return step(topics, (-(self.topic_prior.natural[0] + scale * statistics),), rate)

    def local_factors(self, topics: Dirichlet, counts: Tensor) -> tuple[Dirichlet, Categorical]:
        """q(θ_d), over (D, K), and q(z) of each word in each document, over (D, V, K)."""
        self._check(topics, counts)
        prior = self._document_priors(counts)
        log_topics = topics.expectation[0]
        documents = Dirichlet(torch.ones_like(prior.concentration))
        for _ in range(self.sweeps):
            words = _best_words(log_topics, documents)
            statistics = torch.einsum("dv,dvk->dk", counts, words.probs)
            before, documents = documents, step(documents, (-(prior.natural[0] + statistics),), 1.0)
            if (documents.concentration - before.concentration).abs().max() <= self.tolerance:
                break
        return documents, _best_words(log_topics, documents)

    def elbo(self, topics: Dirichlet, counts: Tensor) -> Tensor:
        """The bound of log p(words) with the best local factors; 0-dim."""
        documents, _ = self.local_factors(topics, counts)
        data = (counts * _scores(topics.expectation[0], documents).logsumexp(-1)).sum()
        local = documents.kl(self._document_priors(counts))
        return data - local - topics.kl(self.topic_prior)

    def _document_priors(self, counts: Tensor) -> Dirichlet:
        return Dirichlet(self.document_prior.concentration.expand(len(counts), -1))

    def _check(self, topics: Dirichlet, counts: Tensor) -> None:
        self.topic_prior.check_same_family(topics)
        check_rows("counts", counts, topics.concentration[0])
        refuse_unless(counts >= 0, counts, "a document", "counts", "zero or more")


def _best_words(log_topics: Tensor, documents: Dirichlet) -> Categorical:
    scores = _scores(log_topics, documents)
    odds = scores[..., :-1] - scores[..., -1:]
    return step(Categorical(torch.zeros_like(odds)), (-odds,), 1.0)


def _scores(log_topics: Tensor, documents: Dirichlet) -> Tensor:
    """E ln θ_dk + E ln β_kv, (D, V, K)."""
    return documents.expectation[0].unsqueeze(1) + log_topics.T
