r"""Khan (2019), "Learning-algorithms from Bayesian principles": reinforcement learning.

The tutorial lists parameter-space exploration and natural policy search among the algorithms that
the learning rule recovers, without an experiment. That exploring by parameters drawn once an
episode learns faster than noise on every action is said by a paper it cites (Rückstieß et al.,
2010, who also balance poles). Here both explore CartPole-v1 for the same number of episodes:

* parameters: `PolicySearch`, θ ~ q once an episode, the action is the sign of f_θ(state);
* actions: REINFORCE, the action is drawn with log-odds f_θ(state), returns to go discounted and
  standardised over a batch of episodes, steps by Adam.

f is linear (4 weights) or has a hidden layer of 8 units (49 weights): the variance of what a search
learns from a return grows with the number of weights, that of REINFORCE with that of actions.
The settings of each are the best of as many trials (8 linear, 9 hidden) on other seeds. The score
is the mean return of all training episodes, exploration included; ``final`` is that of the learned
policy without exploration, on 20 new episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from credo.checks import import_extra
from credo.families import DiagGaussian
from credo.noise import key_to_seed
from credo.report.style import BLUE, VERMILLION, blank_figure, faint_grid, house_style, save
from credo.rule.gallery.policy_search import PolicySearch
from credo.rule.learner import Step
from credo.types import Json, Vector
from credo_papers.experiment import (
    Experiment,
    Settings,
    Verdict,
    judgement,
    sign_of_mean,
    summarise,
)

Policy = Literal["linear", "mlp"]
POLICIES: tuple[Policy, ...] = ("linear", "mlp")
HIDDEN = 8
SIZES: dict[str, int] = {"linear": 4, "mlp": 6 * HIDDEN + 1}
FINAL_EPISODES = 20


@dataclass(frozen=True, kw_only=True)
class ControlSettings(Settings):
    """``num_data`` counts the training episodes of each learner; there is one pass over them.

    Numbers in pairs are for the linear policy and for the one with a hidden layer.
    """

    net: str = "linear and 4-8-1 policies on CartPole-v1"
    num_data: int
    epochs: int = 1
    draws: tuple[int, int] = (5, 10)
    rate: tuple[float, float] = (0.3, 0.1)
    mean_rate: tuple[float, float] = (3.0, 3.0)
    temperature: float = 0.1
    batch: tuple[int, int] = (1, 2)
    lr: tuple[float, float] = (0.3, 0.05)
    start_scale: tuple[float, float] = (0.1, 0.3)
    discount: float = 0.99


def run_one(settings: ControlSettings, seed: int, folder: Path) -> Json:
    """Learn both policies in both ways; keep the return of every training episode."""
    track = _Track()
    result: Json = {}
    for index, policy in enumerate(POLICIES):
        learned = {
            "parameters": _search_parameters(settings, index, track, seed),
            "actions": _reinforce(settings, index, track, seed),
        }
        for way, (theta, curve) in learned.items():
            final = [
                track.play(policy, theta, key_to_seed(seed, i, 9)) for i in range(FINAL_EPISODES)
            ]
            result |= {
                f"{policy}_{way}_return": float(np.mean(curve)),
                f"{policy}_{way}_final": float(np.mean([episode.length for episode in final])),
                f"{policy}_{way}_curve": curve,
            }
    return result


def check(results: list[Json]) -> Verdict:
    """Whether exploring by parameters earned more, for the linear policy and for the other one."""
    signs = [
        sign_of_mean([r[f"{p}_parameters_return"] - r[f"{p}_actions_return"] for r in results])
        for p in POLICIES
    ]
    numbers = summarise(results)
    return Verdict(judgement(signs), numbers)


def figures(results: list[Json], folder: Path) -> list[Path]:
    """Returns over training, in moving averages of 20 episodes; each thin line is a seed."""
    with house_style():
        figure = blank_figure(7.2, 3.2)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, policy in zip(panels, POLICIES, strict=True):
            for way, colour in (("parameters", BLUE), ("actions", VERMILLION)):
                window = min(20, len(results[0][f"{policy}_{way}_curve"]))
                runs = np.stack([_smooth(r[f"{policy}_{way}_curve"], window) for r in results])
                episodes = np.arange(runs.shape[1]) + window
                axes.plot(episodes, runs.T, color=colour, linewidth=0.6, alpha=0.5)
                axes.plot(episodes, runs.mean(0), color=colour, label=f"noise on {way}")
            axes.set_title(f"{policy} policy, {SIZES[policy]} weights")
            axes.set(xlabel="episodes", ylim=(0, 510))
            faint_grid(axes)
        panels[0].set_ylabel("return")
        panels[0].legend()
        return [save(figure, folder / "policy-search.png")]


def _smooth(curve: list[float], window: int) -> NDArray[np.float64]:
    return np.convolve(curve, np.full(window, 1 / window), mode="valid")


@dataclass(frozen=True)
class _Episode:
    states: NDArray[np.float64]
    actions: NDArray[np.float64]

    @property
    def length(self) -> float:
        """The return: every step that the pole stands earns one."""
        return float(len(self.actions))


class _Track:
    """CartPole-v1, with policies as flat vectors."""

    def __init__(self) -> None:
        gymnasium = import_extra("gymnasium", extra="rl", purpose="playing CartPole-v1")
        self._environment = gymnasium.make("CartPole-v1")

    def play(
        self, policy: Policy, theta: Vector, seed: int, dice: np.random.Generator | None = None
    ) -> _Episode:
        """One episode; with ``dice`` actions are drawn, without them the likelier one is taken."""
        weights: NDArray[np.float64] = theta.detach().numpy()
        inner = weights[: 5 * HIDDEN].reshape(-1, 5) if policy == "mlp" else weights
        state, _ = self._environment.reset(seed=seed)
        states, actions, over = [], [], False
        while not over:
            if policy == "mlp":
                hidden = np.tanh(inner[:, :4] @ state + inner[:, 4])
                log_odds = weights[5 * HIDDEN : -1] @ hidden + weights[-1]
            else:
                log_odds = inner @ state
            threshold = 0.0 if dice is None else dice.logistic()
            actions.append(int(log_odds > threshold))
            states.append(state)
            state, _, fallen, out_of_time, _ = self._environment.step(actions[-1])
            over = fallen or out_of_time
        return _Episode(np.array(states, dtype=np.float64), np.array(actions, dtype=np.float64))


def _log_odds(policy: Policy, theta: Vector, states: Vector) -> Vector:
    """f_θ of all states (T, 4), differentiable: what `_Track.play` computes one by one."""
    if policy == "linear":
        return states @ theta
    inner = theta[: 5 * HIDDEN].view(HIDDEN, 5)
    hidden = torch.tanh(states @ inner[:, :4].mT + inner[:, 4])
    return hidden @ theta[5 * HIDDEN : -1] + theta[-1]


def _search_parameters(
    settings: ControlSettings, index: int, track: _Track, seed: int
) -> tuple[Vector, list[float]]:
    policy = POLICIES[index]
    curve: list[float] = []

    def episode_return(theta: Vector, episode: int) -> float:
        curve.append(track.play(policy, theta, episode).length)
        return curve[-1]

    step = Step(
        rate=settings.rate[index], mean_rate=settings.mean_rate[index],
        temperature=settings.temperature, keep_positive=True,
    )  # fmt: skip
    search = PolicySearch(settings.draws[index], step, shaping="ranks", seed=seed)
    start = torch.zeros(SIZES[policy], dtype=torch.float64)
    state = search.init(DiagGaussian(start, torch.ones_like(start)))
    while len(curve) + search.draws <= settings.num_data:
        state = search.update(state, episode_return)
    return state.q.mean, curve


def _reinforce(
    settings: ControlSettings, index: int, track: _Track, seed: int
) -> tuple[Vector, list[float]]:
    policy = POLICIES[index]
    curve: list[float] = []
    dice = np.random.default_rng(seed)
    start = settings.start_scale[index] * dice.standard_normal(SIZES[policy])
    theta = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adam([theta], lr=settings.lr[index])
    while len(curve) + settings.batch[index] <= settings.num_data:
        played = [
            track.play(policy, theta, key_to_seed(seed, len(curve), i), dice)
            for i in range(settings.batch[index])
        ]
        curve += [episode.length for episode in played]
        to_go = np.concatenate(
            [_returns_to_go(len(episode.actions), settings.discount) for episode in played]
        )
        advantage = torch.from_numpy((to_go - to_go.mean()) / (to_go.std() + 1e-8))
        states, actions = (
            torch.from_numpy(np.concatenate([getattr(episode, name) for episode in played]))
            for name in ("states", "actions")
        )
        surprise = F.binary_cross_entropy_with_logits(
            _log_odds(policy, theta, states), actions, reduction="none"
        )
        optimizer.zero_grad()
        (advantage * surprise).mean().backward()
        optimizer.step()
    return theta.detach(), curve


def _returns_to_go(steps: int, discount: float) -> NDArray[np.float64]:
    """Σ_{k≥0} γᵏ over the steps that are left, at every step of an episode of ones."""
    left = np.arange(steps, 0, -1, dtype=np.float64)
    return np.asarray((1 - discount**left) / (1 - discount))


EXPERIMENT = Experiment(
    id="004-policy-search",
    paper="004",
    claim="Khan (2019), learning-algorithms from Bayesian principles: the rule recovers "
    "parameter-space exploration for reinforcement learning. That it learns faster than noise on "
    "actions is said by Rückstieß et al. (2010); tested on CartPole-v1.",
    theorem=False,
    needs=("gymnasium",),
    minutes=1,
    presets={
        "quick": ControlSettings(num_data=400),
        # Neither work gives a setting; this one is longer.
        "paper": ControlSettings(num_data=2000),
    },
    run_one=run_one,
    check=check,
    figures=figures,
)
