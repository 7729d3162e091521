r"""What the natural-gradient optimizers share: draws, harvest, prior, temperature, resume.

Each of them learns q = N(m, diag σ²) by the learning rule for

    n·E_q[ℓ̄(θ)] + τ·KL(q ‖ N(0, 1/p))        equivalently        N·E_q[ℓ̄] + KL,    N = n/τ

where ℓ̄ is the mean loss per example. All of them keep a curvature h per example, from which

    σ² = 1/(N(h + δ)),      δ = p/N

so temperature, augmentation and warm-up enter through N alone: time constants and the size of a
step don't depend on them, and the resting point is that of the tempered objective, exactly. N is
read when the first block of a step begins.

====== ==================== ====================================================================
symbol argument             meaning
====== ==================== ====================================================================
n      ``num_data``         training examples, times ``augmentation`` (how many distinct
                            examples one image is worth under data augmentation)
τ      ``temperature``      weight of the KL, raised linearly to it over ``kl_warmup`` steps
p      ``prior_precision``  1/variance of the prior; p/n is what others call weight decay
m                           the network's own weights: outside of ``sampled()`` they are the mean
h      ``hess_init``        the curvature's first value; ``state[p]["curvature"]``
ξ, β   ``lr``, ``betas``    step size; shares that the gradient's and the curvature's averages keep
γ      ``damping``          added to the mean's denominator only: σ stays the posterior's
====== ==================== ====================================================================

Noise is a function of (``seed``, step, sample), so nothing is stored to resume exactly.

Many ranks. Where ``torch.distributed`` was initialised (``torchrun``), each rank draws noise of its
own and ``step()`` averages over blocks and ranks: `credo.optim.ranks`. K ranks are K samples, or
with ``shared_noise=True`` one sample for a batch that is K times as large. Ranks count alike for
their blocks (`VOGN` weighs them by their examples), which have to be equally many. The state of
any rank can be loaded on any number of them. ``process_group`` names the ranks, by default all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from credo.collectives import unwrap
from credo.errors import UnsupportedError
from credo.network.flat import Draw
from credo.noise import Draws, source
from credo.optim.groups import Group, Params, check_options, groups_of
from credo.optim.layout import Layout, Run
from credo.optim.ranks import Tally, Team
from credo.optim.results import posterior_of, refuse_nonfinite, refuse_strange_state
from credo.posterior.posterior import Posterior
from credo.types import Likelihood, Vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NaturalOptimizer(Optimizer, ABC):
    """A `torch.optim.Optimizer` whose weights have a distribution.

    ``params`` is a module (its norm layers become a deterministic group without a prior),
    parameters, or groups; a group may set any of the options, ``weight_decay`` (p/n) in place of
    ``prior_precision``, and ``deterministic=True`` for point estimates, which have no prior unless
    they ask for one. Frozen parameters are left out.

    The loss is a *mean* over examples. Gradients are collected when a ``sampled()`` block ends:
    clip or unscale them inside of it. Several blocks before ``step()`` are averaged, be they
    draws or micro-batches of equal size. A module may be a `DistributedDataParallel`: in the block
    it leaves each rank its own gradients, which ``step()`` averages.

    Args:
        params: A module, parameters or groups, as above.
        own: The options of the optimizer itself, with their values.
        debias: Divide the averages by 1 − βᵗ, so that their start at zero does not count.
        temperature: Weight τ of the KL; below 1 the posterior is narrower than Bayes'.
        augmentation: How many distinct examples one is worth under data augmentation.
        kl_warmup: Steps over which the temperature rises linearly to its value.
        samples: Draws in each step when it is given a closure.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        seed: Same seed, same noise.
        process_group: The ranks that train together; None is all of them.
        shared_noise: Let all ranks draw the same noise: one sample for a batch of all of them.
        module: The network whose parameters ``params`` are, if that is not a module itself.
    """

    vectors: ClassVar[tuple[str, ...]] = ("momentum", "curvature")
    """What is remembered of each weight; views of flat vectors in ``state``."""

    _unscales: ClassVar[bool] = True
    """Whether all that a block collects follows from ``.grad``, also after ``unscale_``."""

    _keeps_first_draw: ClassVar[bool] = False
    """Whether the memory of a step's first draw is needed until the step."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        own: Group,
        *,
        debias: bool = True,
        temperature: float = 1.0,
        augmentation: float = 1.0,
        kl_warmup: int = 0,
        samples: int = 1,
        draws: Draws = "table",
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        shared_noise: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self._team = Team(params, process_group, shared_noise)
        params = unwrap(params) if isinstance(params, nn.Module) else params
        options: Group = {
            **own,
            "debias": debias,
            "temperature": temperature,
            "augmentation": augmentation,
            "kl_warmup": kl_warmup,
            "samples": samples,
            "draws": draws,
            "seed": seed,
            "deterministic": False,
        }
        groups = groups_of(params, options)
        for group in groups:
            check_options(group, type(self).__init__)
        self._is_built = False
        super().__init__(groups, {"step": 0, "skipped": 0})
        self._is_built = True
        module = params if isinstance(params, nn.Module) else module
        self._layout = Layout(module, self.param_groups)
        like = self._layout.like.new_zeros(self._layout.size)
        self._num_random = self._layout.num_random
        self._team.agree_on_layout(like, self._num_random)
        self._memory = {name: torch.zeros_like(like) for name in self.vectors}
        for run, group in self._parts():
            self._memory["curvature"][run.where] = group["hess_init"]
        self._point_state_at_memory()
        self._gradient = like
        self._scratch, self._shifted = torch.empty_like(like), torch.empty_like(like)
        self._eps = torch.empty_like(like[: self._num_random])
        self._effective_data = [1.0] * len(groups)
        self._shifted_from: dict[tuple[int, int], tuple[int, float]] = {}
        self._noise = source(draws, seed)
        self._samples = 0
        self._is_sampling = False

    # --- what an optimizer adds -------------------------------------------------------------------

    @abstractmethod
    def _update(self, group: Group, mean: Vector, where: slice, delta: float) -> None:
        """Move ``mean`` (a view of the network) and the memory at ``where``.

        ``self._gradient[where]`` is the mean gradient; it may be used up. ``delta`` is δ.
        """

    def _before_forward(self) -> AbstractContextManager[None]:
        """A context that surrounds the user's forward and backward passes."""
        return nullcontext()

    def _harvest(self, gradient: Vector, draw: Vector) -> None:
        """Collect from a block what is needed besides its ``gradient``; ``draw`` may be used up."""

    def _average(self, samples: float, unit: float) -> None:
        """Make what was collected a mean: of ``samples`` blocks, of losses times ``unit``."""

    def _sums(self) -> list[tuple[Vector, int]]:
        """What ranks add up, and the power of the loss's factor in it; first the gradient."""
        return [(self._gradient, 1), *((vector, 1) for vector in self._collected().values())]

    def _weight(self, samples: int) -> float:
        """How much this rank's mean over ``samples`` blocks counts among the others'."""
        return float(samples)

    def _collected(self) -> dict[str, Vector]:
        """What `_harvest` collected, by name, to be looked at for overflow."""
        return {}

    # --- the user's side --------------------------------------------------------------------------

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """The network at a draw of its weights, for one forward and backward pass.

        On leaving the weights are the mean again, whatever happened; after an exception nothing of
        the block is kept.
        """
        if self._is_sampling:
            raise UnsupportedError(
                "sampled() inside of sampled(): the weights are a draw already. Leave the first "
                "block before the next; several blocks before step() are averaged"
            )
        draw = self._layout.room_for_draw(int(self._keeps_first_draw and self._samples > 0))
        for parameter in self._layout.parameters:
            parameter.grad = None
        self._is_sampling = True
        try:
            with torch.no_grad():
                self._perturb(draw)
            with self._team.block(self._layout.parameters), self._before_forward():
                yield
            with torch.no_grad():
                self._gather(draw.vector)
        finally:
            self._is_sampling = False
            self._layout.show_mean()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the mean and the scales by what the ``sampled()`` blocks since the last step found.

        With a ``closure``, which computes the loss, calls ``backward`` and returns the loss, the
        blocks are made here: ``samples`` of them. Returns the mean of their losses.
        """
        if self._is_sampling:
            raise UnsupportedError("step() inside of sampled(): leave the block first")
        losses = [] if closure is None else self._losses(closure)
        if not self._samples and not self._team.several:
            raise UnsupportedError(
                "step() without a draw: compute the loss and call backward inside "
                "`with optimizer.sampled():`, or give step() a closure"
            )
        samples, self._samples = self._samples, 0
        with torch.no_grad():
            self._advance(samples)
        if not losses:
            return None
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0]) / len(losses)

    def posterior(self, net: nn.Module, likelihood: Likelihood) -> Posterior:
        """q over the random weights of ``net``, as every method gives it.

        Parameters that are deterministic, or that the optimizer does not know, stay what they are.

        Args:
            net: The network that was trained, or one that contains its parameters.
            likelihood: How targets follow from its outputs: what the loss was the negative log of.

        Returns:
            A posterior with its own copies of all tensors.
        """
        if self._is_sampling:
            raise UnsupportedError("posterior() inside of sampled(): leave the block first")
        scale = self._scale()
        return posterior_of(unwrap(net), likelihood, self.param_groups, self._layout, scale)

    def add_param_group(self, param_group: Group) -> None:
        """Only the constructor may: the flat vectors are laid out once."""
        if self._is_built:
            raise UnsupportedError(
                "parameters can't be added later, because all live in one flat vector: build a new "
                "optimizer with all groups, and load_state_dict what it shares with the old one"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``state_dict()`` gave, also one whose flat order was another.

        The network's weights are the mean, so load them too. Harvests since the last step are lost.
        """
        refuse_strange_state(state_dict, self.param_groups, self.vectors, type(self).__name__)
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for parameter in self._layout.parameters:
                for name, memory in self._memory.items():
                    self._layout.part(memory, parameter).copy_(self.state[parameter][name])
        self._point_state_at_memory()
        self._team.doubt()
        self._samples = 0
        clock = self.param_groups[0]
        self._noise = source(clock["draws"], clock["seed"])

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "an optimizer lives in its network's memory and can't be copied or pickled: copy "
            "optimizer.state_dict() and load it into a new one"
        )

    # --- arithmetic that all share ----------------------------------------------------------------

    @staticmethod
    def effective_data(group: Group) -> float:
        """N = n/τ, with the warm-up of τ.

        Args:
            group: One of ``param_groups``.
        """
        temperature = group["temperature"]
        if group["kl_warmup"]:
            temperature *= min(1.0, (group["step"] + 1) / group["kl_warmup"])
        return float(group["num_data"] * group["augmentation"] / temperature)

    def _precision(self, where: slice, delta: float) -> Vector:
        """h + δ: computed once for a step and the draws after it, unless h or δ is changed."""
        h, found = self._memory["curvature"][where], self._shifted[where]
        state, key = (h._version, delta), (where.start, where.stop)
        if self._shifted_from.get(key) != state:
            torch.add(h, delta, out=found)
            self._shifted_from[key] = state
        return found

    def _denominator(self, group: Group, where: slice, delta: float) -> Vector:
        """h + δ + γ."""
        precision, damping = self._precision(where, delta), group["damping"]
        return torch.add(precision, damping, out=self._scratch[where]) if damping else precision

    def _scale(self) -> Vector:
        """σ = 1/√(N(h + δ)) of the random weights."""
        scale = torch.empty_like(self._eps)
        for run, group in self._parts():
            if not group["deterministic"]:
                n = self.effective_data(group)
                precision = self._precision(run.where, group["prior_precision"] / n)
                torch.rsqrt(precision, out=scale[run.where]).mul_(n**-0.5)
        return scale

    def _perturb(self, draw: Draw) -> None:
        """Let the network look at m + σε."""
        if not self._samples:
            self._effective_data = [self.effective_data(group) for group in self.param_groups]
        if not self._num_random:
            return
        noise = self._noise.draw(self._eps, *self._noise_key())
        groups = zip(self.param_groups, self._layout.runs, self._effective_data, strict=True)
        for group, runs, n in groups:
            if group["deterministic"]:
                continue
            for run in runs:
                where, target = run.where, draw.vector[run.where]
                torch.rsqrt(self._precision(where, group["prior_precision"] / n), out=target)
                # √N belongs to σ, but costs nothing here.
                torch.addcmul(run.mean, target, noise[where], value=n**-0.5, out=target)
        self._layout.show_draw(draw)

    def _noise_key(self) -> tuple[int, int, int]:
        """Of the block that is next or under way: its step and draw."""
        clock = self.param_groups[0]
        return clock["step"] + clock["skipped"], self._team.draw_number(self._samples), 0

    # --- machinery --------------------------------------------------------------------------------

    def _call(self, closure: Callable[[], Any]) -> Any:
        return closure()

    def _losses(self, closure: Callable[[], Any]) -> list[Any]:
        losses = []
        try:
            for _ in range(self.param_groups[0]["samples"]):
                with torch.enable_grad(), self.sampled():
                    losses.append(self._call(closure))
        except BaseException:
            self._samples = 0
            raise
        return losses

    def _advance(self, blocks: int) -> None:
        samples, unit = float(blocks), self._unit(blocks)
        vectors = [self._gradient, *self._collected().values()]
        found_inf = getattr(self, "found_inf", None)
        overflow = found_inf is not None and bool(found_inf)
        if self._team.several:
            samples, overflow = self._add_up_ranks(blocks, unit, overflow)
            unit = 1.0
        if overflow or not all(_is_finite(vector) for vector in vectors):
            for group in self.param_groups:
                group["skipped"] += 1
            if found_inf is None:
                named = {"gradient": self._gradient, **self._collected()}
                refuse_nonfinite(named, self._layout, self.param_groups[0]["step"])
            return
        if samples * unit != 1.0:
            self._gradient.div_(samples * unit)
        self._average(samples, unit)
        with self._layout.writing():
            groups = zip(self.param_groups, self._layout.runs, self._effective_data, strict=True)
            for group, runs, n in groups:
                delta = group["prior_precision"] / n
                group["step"] += 1
                for run in runs:
                    self._update(group, run.mean, run.where, delta)

    def _add_up_ranks(self, blocks: int, unit: float, overflow: bool) -> tuple[float, bool]:
        """Make the sums those of all ranks, of which each undoes its own scaling of the loss."""
        weight = self._weight(blocks) if blocks else 0.0
        for vector, power in self._sums():
            if not blocks:
                vector.zero_()
            elif weight != blocks * unit**power:
                vector.mul_(weight / (blocks * unit**power))
        clock = self.param_groups[0]
        self._layout.check()
        means = [run.mean for runs in self._layout.runs for run in runs]
        state = {"weights": means, "state": list(self._memory.values())}
        total = self._team.add_up(
            [vector for vector, _ in self._sums()],
            Tally(blocks, weight, overflow),
            clock["step"] + clock["skipped"],
            state,
        )
        return total.weight, total.overflow

    def _unit(self, samples: int) -> float:
        """What `torch.amp.GradScaler` multiplied the loss by, as far as it was not undone."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            return float(scale)
        if hasattr(self, "found_inf"):  # GradScaler.unscale_ came first
            inside = samples == 1 and self._unscales and self._layout.holds(self._gradient)
            if not (inside or bool(self.found_inf)):
                raise UnsupportedError(
                    "scaler.unscale_(optimizer) after the sampled() block comes too late: "
                    f"{type(self).__name__} has taken the gradients already. "
                    + (
                        "Unscale, and clip, inside of the (one) block"
                        if self._unscales
                        else "Leave unscaling to scaler.step(optimizer)"
                    )
                )
        return 1.0

    def _gather(self, draw: Vector) -> None:
        """Add the gradients of the block; ``.grad`` stays, because GradScaler looks at it."""
        gradient = self._layout.gather(self._scratch if self._samples else self._gradient)
        self._harvest(gradient, draw)
        if self._samples:
            self._gradient.add_(gradient)
        self._samples += 1

    def _parts(self) -> Iterator[tuple[Run, Group]]:
        """Every run of weights with its group."""
        for runs, group in zip(self._layout.runs, self.param_groups, strict=True):
            for run in runs:
                yield run, group

    def _point_state_at_memory(self) -> None:
        for parameter in self._layout.parameters:
            self.state[parameter] = {
                name: self._layout.part(memory, parameter) for name, memory in self._memory.items()
            }


def _is_finite(vector: Vector) -> bool:
    """Whether all numbers are."""
    # A sum is one cheap pass; it may overflow where no number is infinite.
    return math.isfinite(vector.sum().item()) or bool(vector.isfinite().all())
