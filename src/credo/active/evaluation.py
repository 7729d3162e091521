"""How good a posterior is on test data: the numbers of a learning curve."""

from __future__ import annotations

from typing import Any

import torch

from credo.families import Delta
from credo.likelihoods.base import match_shape
from credo.metrics import accuracy, ece, rmse
from credo.posterior.posterior import Posterior
from credo.train.feed import make_feed

BATCH = 1024


def evaluate(posterior: Posterior, data: Any, samples: int) -> dict[str, float]:
    """Accuracy, NLL and ECE of a classifier, RMSE and NLL of a regression; nothing without data.

    NLL is −log p(y) of the predictive distribution, averaged over examples.

    Args:
        posterior: What predicts.
        data: What `credo.fit` takes, or None.
        samples: Draws of the weights for each prediction.
    """
    if data is None:
        return {}
    model = posterior.model
    draws = 1 if isinstance(posterior.q, Delta) else samples
    log_probs, predicted, targets = [], [], []
    for inputs, y in make_feed(data, BATCH, model).batches(0, 0):
        pred = posterior.predict(inputs, samples=draws)
        y = y.to(model.like.device)
        log_probs.append(pred.log_prob(y))
        classes = model.likelihood.kind == "classification"
        predicted.append(pred.probs if classes else pred.mean)
        targets.append(y)
    values, y = torch.cat(predicted), torch.cat(targets)
    scores = {"nll": -float(torch.cat(log_probs).mean())}
    if model.likelihood.kind == "regression":
        return {"rmse": rmse(values, match_shape(values, y)), **scores}
    if model.likelihood.kind == "classification":
        ignored = model.likelihood.ignore_index
        return {
            "accuracy": accuracy(values, y, ignored),
            **scores,
            "ece": ece(values, y, ignore_index=ignored),
        }
    return scores
