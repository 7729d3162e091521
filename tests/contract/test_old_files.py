"""Posteriors that an earlier version wrote are read, and predict what they predicted then.

The files in ``tests/data/posteriors_before_the_move`` were written before families moved between
modules (commit bac2c75): files name families, not modules. ``predictions.json`` holds the inputs
and what that version predicted from eight draws of each file. Only of a bag of samples it drew
with replacement, where now each sample counts once: there plain forward passes are the truth.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import credo
import credo.rule  # which registers KroneckerGaussian

FILES = Path(__file__).parents[1] / "data" / "posteriors_before_the_move"
THEN = json.loads((FILES / "predictions.json").read_text(encoding="utf-8"))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def each_once(samples: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Probabilities averaged over the rows of ``samples``, set into the network by torch alone."""
    net, every = network(), []
    for row in samples:
        nn.utils.vector_to_parameters(row, net.parameters())
        every.append(net(x).softmax(-1).detach())
    return torch.stack(every).mean(0)


@pytest.mark.parametrize("family", THEN["probs"])
def test_a_posterior_from_before_the_move_predicts_as_it_did(family: str) -> None:
    posterior = credo.load(FILES / f"{family}.safetensors", network())
    assert type(posterior.q).__name__ == family
    x = torch.tensor(THEN["x"], dtype=torch.float64)
    # The order of sums in a matrix product is the machine's: a few roundings of float64.
    expected = torch.tensor(THEN["probs"][family], dtype=torch.float64)
    if isinstance(posterior.q, credo.families.Empirical):
        assert len(posterior.q) <= 8
        expected = each_once(posterior.q.samples, x)
    torch.testing.assert_close(posterior.predict(x, samples=8).probs, expected, rtol=0, atol=1e-12)


def test_a_family_of_the_rule_says_what_to_import() -> None:
    """In a process of its own, where nothing has imported the rule."""
    program = (
        "import sys, credo, credo.errors\n"
        "from torch import nn\n"
        "net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()\n"
        "try:\n"
        "    credo.load(sys.argv[1], net)\n"
        "except credo.errors.FileFormatError as error:\n"
        "    print(error)\n"
        "assert 'credo.rule' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(FILES / "KroneckerGaussian.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "written with the learning rule: import credo.rule first" in done.stdout
