r"""YellowFin: momentum descent that tunes its own rate and momentum while it runs.

    b ← μb + g,      w ← w − αb

α and μ come from what `credo.optim.yellowfin_tuner` measures: the range of curvatures, the
gradient's variance and the distance to the optimum. Each parameter group has a tuner of its own,
from the norms of its gradients alone, so the means and the scales of a Gaussian, whose gradients
differ by orders of magnitude, do not spoil each other's; one group gives the published algorithm.
(On the digits the scales then move as far as with Adam; with one tuner for both they hardly move.
The squared gradient of very few scales is far below their curvature, and their rate too high.)

Slow start: the rate is multiplied by min(1, t/(10·window)). The first step has ``lr`` and
``momentum``, since one gradient has no range. Guards, off with ``clip=False``, by h_max of the step
before:

- from the third step on a gradient counts, for the measurements too, with ‖g‖² ≤ 100·h_max;
- from the second on the step is made with ‖g‖² ≤ h_max;
- the gradient moves the weights by no more than 100 (``MOVE``): α‖g‖ ≤ 100.

``lr`` after the first step is a factor only: where a scheduler changes it, the tuned rate changes
by the same factor, relative to the ``lr`` that the group began with.

``feedback`` closes the loop: gradients that were computed at weights ``staleness`` steps old (as
where several workers run without waiting) act as additional momentum. The total is measured,

    μ̂ = median over the weights of (b_s − g_s)/b_{s−1},      s the step whose weights g belongs to

and the momentum of the next step is moved by ``feedback``·(μ − μ̂). It costs the memory of
``staleness`` + 2 further vectors. Without staleness μ̂ is the momentum itself.

============= ==================== =================================================================
symbol        argument             meaning
============= ==================== =================================================================
β             ``beta``             share that averages keep
\             ``window``           how many squared norms the range of curvatures is taken over
\             ``eps``              floor of squared norms and of their variance
\             ``smooth``           average α and μ by β as well (in the paper, not in its code)
============= ==================== =================================================================

Reference: Zhang & Mitliagkas, 2017 (arXiv:1706.03471); compared by Book, 2020.

    >>> import torch, credo.optim
    >>> w, g = torch.nn.Parameter(torch.full((1,), 5.0)), torch.Generator().manual_seed(0)
    >>> opt = credo.optim.YellowFin([w])
    >>> for _ in range(500):
    ...     w.grad = w.detach() - torch.randn(1, generator=g)      # of ½(w − y)², y ~ N(0, 1)
    ...     opt.step()
    >>> lr, momentum = opt.tuned()[0]
    >>> bool(w.abs() < 3), credo.tools.robust_region(1.0, 1.0).contains(lr, momentum)
    (True, True)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from credo.checks import Count, Decay, Index, NotNegative, Positive
from credo.errors import NonFiniteError
from credo.optim.descent import Descent, Mover, decayed, rate_factor
from credo.optim.groups import Group
from credo.optim.yellowfin_tuner import Measurements

PROTECT = 100.0
"""By what factor ‖g‖² may exceed h_max without being held back from the measurements."""
MOVE = 100.0
"""How far a gradient may move the weights, by their norm."""
MOST_MOMENTUM = 0.999
"""The feedback keeps the momentum between this and its negative."""


class YellowFin(Descent):
    """Self-tuning momentum descent; see the module's docstring.

    Args:
        params: Parameters, or groups of them; each group is tuned by itself.
        lr: The rate of the first step; a scheduler's changes of it multiply the tuned rate.
        momentum: The momentum of the first step.
        beta: Share that the measurements' averages keep.
        window: How many squared norms the range of curvatures is taken over.
        eps: Floor of squared norms and of their variance.
        weight_decay: Multiple of the weights that is added to the gradient.
        clip: Hold gradients back that are far beyond the measured range.
        smooth: Average the tuned rate and momentum too, as the paper but not its code does.
        feedback: Gain of the loop that keeps the momentum measured equal to the one aimed at.
        staleness: Steps by which gradients are late, for the feedback.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: NotNegative = 1e-4,
        *,
        momentum: Decay = 0.0,
        beta: Decay = 0.999,
        window: Count = 20,
        eps: Positive = 1e-6,
        weight_decay: NotNegative = 0.0,
        clip: bool = True,
        smooth: bool = False,
        feedback: NotNegative = 0.0,
        staleness: Index = 0,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "beta": beta,
            "window": window,
            "eps": eps,
            "weight_decay": weight_decay,
            "clip": clip,
            "smooth": smooth,
            "feedback": feedback,
            "staleness": staleness,
        }
        super().__init__(params, options)

    def tuned(self) -> list[tuple[float, float]]:
        """Rate and momentum of each group's last step; before the first, those it will have."""
        return [(group["tuner"]["lr"], group["tuner"]["momentum"]) for group in self.param_groups]

    def add_param_group(self, param_group: Group) -> None:
        """More parameters, which get a tuner of their own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["tuner"] = {
            "lr": group["lr"],
            "momentum": group["momentum"],
            "smoothed_lr": group["lr"],
            "smoothed_momentum": group["momentum"],
            "correction": 0.0,
            "measured": Measurements().as_json(),
        }

    def _advance(self, work: list[tuple[Group, list[Mover]]]) -> None:
        seen = []
        for group, movers in work:  # all gradients are looked at before any group moves
            values, gradients = [m.value for m in movers], [m.gradient for m in movers]
            gradients = decayed(group, values, gradients)
            square = _squared_norm(gradients)
            if not math.isfinite(square):
                step = group["tuner"]["measured"]["step"] + 1
                raise NonFiniteError(
                    f"the gradient's squared norm is {square} at step {step}; weights and state "
                    "are those of the step before. Lower lr, or clip gradients before step()"
                )
            seen.append((group, movers, values, gradients, square))
        for group, movers, values, gradients, square in seen:
            states = [self._state(mover, group) for mover in movers]
            averages = [state["gradient_average"] for state in states]
            buffers = [state["momentum_buffer"] for state in states]
            shrink = self._tune(group, gradients, averages, square)
            tuner = group["tuner"]
            _momentum_step(values, gradients, buffers, tuner["lr"], tuner["momentum"], shrink)
            if group["feedback"]:
                self._close_loop(group, states, gradients, shrink)

    def _tune(
        self, group: Group, gradients: list[Tensor], averages: list[Tensor], square: float
    ) -> float:
        """Measure, set the group's rate and momentum, and say what g is multiplied by."""
        tuner, beta, eps = group["tuner"], group["beta"], group["eps"]
        before = Measurements.from_json(tuner["measured"])
        counted = shrink = 1.0
        if group["clip"] and before.step:
            ceiling = before.curvatures(beta)[1]
            if before.step > 1 and square > PROTECT * ceiling:
                counted = math.sqrt(PROTECT * ceiling / square)
            shrink = math.sqrt(ceiling / square) if square > ceiling else 1.0
        measured = before.after(square * counted**2, beta, group["window"], eps)
        if counted == 1.0:
            torch._foreach_lerp_(averages, gradients, 1.0 - beta)
        else:
            torch._foreach_mul_(averages, beta)
            torch._foreach_add_(averages, gradients, alpha=(1.0 - beta) * counted)
        lr, momentum = tuner["smoothed_lr"], tuner["smoothed_momentum"]
        if before.step:
            rate, target = measured.tuned(_squared_norm(averages), beta, eps)
            rate *= min(1.0, measured.step / (10.0 * group["window"]))
            if group["smooth"]:
                rate = lr = beta * lr + (1.0 - beta) * rate
                target = momentum = beta * momentum + (1.0 - beta) * target
        else:
            rate, target = group["base_lr"], group["momentum"]
        rate *= rate_factor(group)
        if group["clip"] and rate * math.sqrt(square) * counted > MOVE:
            rate = MOVE / (math.sqrt(square) * counted)
        group["tuner"] = {
            "lr": rate,
            "momentum": target + tuner["correction"],
            "smoothed_lr": lr,
            "smoothed_momentum": momentum,
            "correction": tuner["correction"],
            "measured": measured.as_json(),
        }
        return shrink

    def _close_loop(
        self, group: Group, states: list[Group], gradients: list[Tensor], shrink: float
    ) -> None:
        """Correct the momentum of the next step by what the total lacks or has too much."""
        length, step = group["staleness"] + 2, group["tuner"]["measured"]["step"]
        ratios = []
        for state, gradient in zip(states, gradients, strict=True):
            past = state["past_buffers"]
            past[step % length] = state["momentum_buffer"]
            if step >= length:
                then, earlier = past[(step + 2) % length], past[(step + 1) % length]
                ratio = (then - shrink * gradient) / earlier
                ratios.append(ratio[earlier != 0])
        measured = torch.cat(ratios) if ratios else torch.empty(0)
        if not measured.numel():
            return
        tuner = group["tuner"]
        target = tuner["momentum"] - tuner["correction"]
        momentum = tuner["momentum"] + group["feedback"] * (target - float(measured.median()))
        correction = min(max(momentum, -MOST_MOMENTUM), MOST_MOMENTUM) - target
        group["tuner"] = {**tuner, "correction": correction}

    def _state(self, mover: Mover, group: Group) -> Group:
        state = self.state[mover.parameter]
        if not state:
            state["gradient_average"] = torch.zeros_like(mover.value)
            state["momentum_buffer"] = torch.zeros_like(mover.value)
            if group["feedback"]:
                shape = (group["staleness"] + 2, *mover.value.shape)
                state["past_buffers"] = mover.value.new_zeros(shape)
        return state


def _squared_norm(tensors: list[Tensor]) -> float:
    if len(tensors) == 1 and tensors[0].dtype in (torch.float32, torch.float64):
        flat = tensors[0].view(-1)
        return float(flat.dot(flat))
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)


def _momentum_step(
    values: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    lr: float,
    momentum: float,
    shrink: float,
) -> None:
    """b ← μb + shrink·g, w ← w − αb; in one pass where torch's kernel for SGD can do it."""
    # For that kernel no momentum means no buffer.
    if momentum and values[0].device.type in ("cpu", "cuda") and _alike(values):
        torch._fused_sgd_(
            values,
            gradients,
            buffers,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=1.0 - shrink,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        # It leaves out the counters by which autograd sees that a tensor is another one.
        torch.autograd.graph.increment_version(values)
        return
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, gradients, alpha=shrink)
    torch._foreach_add_(values, buffers, alpha=-lr)


def _alike(values: list[Tensor]) -> bool:
    return len({(value.device, value.dtype) for value in values}) == 1
