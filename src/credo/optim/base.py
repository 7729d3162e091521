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
their blocks (`VOGN` weighs them by their examples), which have to be equally many, or by what
``rank_weight`` was set to. The state of any rank can be loaded on any number of them.
``process_group`` names the ranks, by default all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from credo.collectives import unwrap
from credo.errors import UnsupportedError
from credo.families import DiagGaussian, Gaussian
from credo.network.flat import Draw
from credo.noise import Draws, source
from credo.optim.by_layer import FIRST_NOISE, first_curvature
from credo.optim.groups import LAYER, Accumulation, Group, Params, check_options, groups_of
from credo.optim.layout import Layout, Merger, Parcel, Run, Shift, part_of
from credo.optim.norm_layers import told_of, undecided
from credo.optim.ranks import NOTHING, Tally, Team
from credo.optim.results import posterior_of, refuse_nonfinite, refuse_strange_state
from credo.posterior.posterior import Posterior
from credo.temperature import NATURAL_TEMPERATURE, Balanced
from credo.types import Likelihood, Vector

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NaturalOptimizer(Optimizer, ABC):
    """A `torch.optim.Optimizer` whose weights have a distribution.

    ``params`` is a module (its norm layers become a deterministic group without a prior),
    parameters, or groups; a group may set any of the options, ``weight_decay`` (p/n) in place of
    ``prior_precision``, and ``deterministic=True`` for point estimates, which have no prior unless
    they ask for one. Frozen parameters are left out.

    The loss is a *mean* over examples. Several blocks before ``step()`` are averaged, be they draws
    or micro-batches of equal size; or added, where each loss was divided by the number of blocks
    (``accumulation="sum"``). Gradients are collected when a block ends, and ``.grad`` then holds
    what the blocks so far make up. What is done to it before ``step()`` (clipping, unscaling,
    masks) counts, as with any optimizer: the gradients of one block are collected anew; those of
    several may be changed by one common factor where the curvature is read off them. A module may
    be a `DistributedDataParallel`: in the block it leaves each rank its own gradients, which
    ``step()`` averages.

    Args:
        params: A module, parameters or groups, as above.
        own: The options of the optimizer itself, with their values.
        debias: Divide the averages by 1 − βᵗ, so that their start at zero does not count.
        temperature: Weight τ of the KL; below 1 the posterior is narrower than Bayes'. A number or
            a `credo.Balanced`; None is ``Balanced(0.3)``, or 1 where ``hess_init`` is given.
        augmentation: How many distinct examples one is worth under data augmentation.
        kl_warmup: Steps over which the temperature rises linearly to its value.
        samples: Draws in each step when it is given a closure.
        draws: The noise source: "table" (fast), "pool" (fastest) or "normal" (torch's).
        seed: Same seed, same noise.
        accumulation: What ``step()`` makes of several blocks: their "mean", or their "sum" for
            loops that divide each loss by the number of blocks. A closure's are always averaged.
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

    _first_noise: ClassVar[float] = FIRST_NOISE
    """The first noise as a share of the layer's scale, where ``hess_init`` is not given."""

    rank_weight: float | None = None
    """What this rank's blocks count for among the others' at the next step; None: their number.

    The number of its examples, where parts of a batch are not equally large."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        own: Group,
        *,
        debias: bool = True,
        temperature: float | Balanced | None = None,
        augmentation: float = 1.0,
        kl_warmup: int = 0,
        samples: int = 1,
        draws: Draws = "table",
        seed: int = 0,
        accumulation: Accumulation = "mean",
        process_group: ProcessGroup | None = None,
        shared_noise: bool = False,
        module: nn.Module | None = None,
    ) -> None:
        self._team = Team(params, process_group, shared_noise)
        params = _readable_twice(params)
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
        module = params if isinstance(params, nn.Module) else module
        groups = groups_of(params, options, module)
        for group in groups:
            check_options(group, type(self).__init__)
        self._is_built = False
        super().__init__(groups, {"step": 0, "skipped": 0})
        self._is_built = True
        self.accumulation = accumulation
        self._undecided = {} if isinstance(params, nn.Module) else undecided([*params], groups)
        self._layout = Layout(module, self.param_groups)
        like = self._layout.like.new_zeros(self._layout.size)
        self._num_random = self._layout.num_random
        self._team.agree_on_layout(like, self._num_random)
        self._settle_start(published=own["hess_init"] is not None)
        self._memory = {name: torch.zeros_like(like) for name in self.vectors}
        for run, group in self._parts():
            self._memory["curvature"][run.where] = group["hess_init"]
        self._point_state_at_memory()
        self._gradient = like
        self._scratch, self._shifted = torch.empty_like(like), torch.empty_like(like)
        self._eps = torch.empty_like(like[: self._num_random])
        self._effective_data = [1.0] * len(groups)
        self._n = 1.0
        self._merger = Merger(self._layout, self.param_groups, self._can_merge)
        self._shifted_from: dict[tuple[int, int], tuple[int, Shift]] = {}
        self._noise = source(draws, seed)
        self._samples = 0
        self._is_sampling = False

    # --- what an optimizer adds -------------------------------------------------------------------

    @abstractmethod
    def _update(self, group: Group, mean: Vector, where: slice, delta: Shift) -> None:
        """Move ``mean`` (a view of the network) and the memory at ``where``.

        ``self._gradient[where]`` is the mean gradient; it may be used up. ``delta`` is δ, and
        ``self._n`` is N.
        """

    def _can_merge(self, group: Group) -> bool:
        """Whether `_update` takes weights of several groups like this one, with a vector for δ."""
        return False

    def _before_forward(self) -> AbstractContextManager[None]:
        """A context that surrounds the user's forward and backward passes."""
        return NOTHING

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

    def _shift(self, group: Group, n: float) -> float:
        """What is added to h to make 1/(Nσ²): δ, unless an optimizer needs more."""
        return float(group["prior_precision"] / n)

    def _coloured(self, where: slice, noise: Vector, out: Vector) -> Vector:
        """Noise of independent weights as q correlates them: in ``out``, or as it came."""
        return noise

    def _remembered_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """All that is remembered of a parameter, by name: its entries in ``state``."""
        return {name: self._layout.part(v, parameter) for name, v in self._memory.items()}

    def _q(self, mean: Vector, parameters: Sequence[Tensor]) -> Gaussian:
        """q around ``mean``, over these of the random parameters in their order."""
        scale = self._scale()
        places = [self._layout.place(parameter).slice for parameter in parameters]
        return DiagGaussian(mean, torch.cat([scale[place] for place in places]))

    # --- the user's side --------------------------------------------------------------------------

    def sampled(self) -> AbstractContextManager[None]:
        """The network at a draw of its weights, for one forward and backward pass.

        On leaving the weights are the mean again, whatever happened, and ``.grad`` is the mean (or
        sum) over the blocks since the last step; after an exception nothing of the block is kept.
        """
        return _Block(self)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any]) -> Any: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the mean and the scales by what the ``sampled()`` blocks since the last step found.

        With a ``closure``, which computes the loss, calls ``backward`` and returns the loss, the
        blocks are made here: ``samples`` of them. Returns the mean of their losses.
        """
        return self._observed_step(closure) if _is_observed(self) else self._step(closure)

    # Torch would wrap it for hooks and profilers, which takes as long as a tiny network's draw.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._is_sampling:
            raise UnsupportedError("step() inside of sampled(): leave the block first")
        losses = [] if closure is None else self._losses(closure)
        if not self._samples and not self._team.several:
            raise UnsupportedError(
                "step() without a draw: compute the loss and call backward inside "
                "`with optimizer.sampled():`, or give step() a closure"
            )
        with torch.no_grad():
            try:
                self._advance(self._samples, adds=self.accumulation == "sum" and closure is None)
            finally:
                self._samples = 0
                self._layout.forget_gradients()
        if not losses:
            return None
        return losses[0] if len(losses) == 1 else sum(losses[1:], losses[0]) / len(losses)

    _observed_step = Optimizer.profile_hook_step(_step)

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
        return posterior_of(unwrap(net), likelihood, self.param_groups, self._q)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what blocks have collected stays collected.

        Args:
            set_to_none: Free the gradients rather than fill them with zeros.
        """
        if set_to_none:
            for parameter in self._layout.parameters:
                parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)
        self._layout.forget_gradients()

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
        refuse_strange_state(
            state_dict, self.param_groups, self._remembered_of, type(self).__name__
        )
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for parameter in self._layout.parameters:
                for name, memory in self._remembered_of(parameter).items():
                    memory.copy_(self.state[parameter][name])
        self._point_state_at_memory()
        self._team.doubt()
        self._samples = 0
        self._layout.forget_gradients()
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

    def _precision(self, where: slice, delta: Shift) -> Vector:
        """h + δ: computed once for a step and the draws after it, unless h or δ is changed."""
        h, found = part_of(self._memory["curvature"], where), part_of(self._shifted, where)
        version, key = h._version, (where.start, where.stop)
        before, by = self._shifted_from.get(key, (-1, 0.0))
        # Vectors of equal numbers are the same vector.
        if before != version or (by is not delta and (isinstance(delta, Tensor) or by != delta)):
            torch.add(h, delta, out=found)
            self._shifted_from[key] = version, delta
        return found

    def _denominator(self, group: Group, where: slice, delta: Shift) -> Vector:
        """h + δ + γ."""
        precision, damping = self._precision(where, delta), group["damping"]
        if not damping:
            return precision
        return torch.add(precision, damping, out=part_of(self._scratch, where))

    def _scale(self) -> Vector:
        """σ = 1/√(N(h + δ)) of the random weights."""
        scale = torch.empty_like(self._eps)
        for parcel in self._parcels([self.effective_data(group) for group in self.param_groups]):
            if parcel.is_random:
                shift = self._shift_of(parcel)
                for run in parcel.runs:
                    precision = self._precision(run.where, shift)
                    torch.rsqrt(precision, out=scale[run.where]).mul_(parcel.n**-0.5)
        return scale

    def _perturb(self, draw: Draw) -> None:
        """Let the network look at m + σε."""
        if not self._num_random:
            return
        noise = self._noise.draw(self._eps, *self._noise_key())
        for parcel in self._parcels(self._effective_data):
            if not parcel.is_random:
                continue
            shift = self._shift_of(parcel)
            for run in parcel.runs:
                where = run.where
                target, offset = part_of(draw.vector, where), part_of(self._eps, where)
                torch.rsqrt(self._precision(where, shift), out=target)
                # It stays in this memory until the block ends. √N belongs to σ, but costs nothing
                # in the addition.
                torch.mul(target, part_of(noise, where), out=offset)
                offset = self._coloured(where, offset, target)
                torch.add(run.mean, offset, alpha=parcel.n**-0.5, out=target)
        self._layout.show_draw(draw)

    def _parcels(self, data: Sequence[float]) -> list[Parcel]:
        """What is computed together; ``data`` are the groups' N."""
        parcels = self._merger.parcels(self.param_groups, data)
        if self._merger.has_changed:
            # Their memory is the same, but not the keys.
            self._shifted_from.clear()
        return parcels

    def _shift_of(self, parcel: Parcel) -> Shift:
        return self._merger.spread([self._shift(group, parcel.n) for group in parcel.groups])

    def _noise_key(self) -> tuple[int, int, int]:
        """Of the block that is next or under way: its step and draw."""
        clock = self.param_groups[0]
        return clock["step"] + clock["skipped"], self._team.draw_number(self._samples), 0

    # --- machinery --------------------------------------------------------------------------------

    def _begin(self) -> tuple[Draw, AbstractContextManager[Any] | None]:
        """Show a draw; give it, and the contexts around the user's passes, if there are any."""
        if self._is_sampling:
            raise UnsupportedError(
                "sampled() inside of sampled(): the weights are a draw already. Leave the first "
                "block before the next; several blocks before step() are averaged"
            )
        draw = self._room_for_draw()
        for parameter in self._layout.parameters:
            parameter.grad = None
        self._is_sampling = True
        try:
            with torch.no_grad():
                if not self._samples:
                    self._effective_data = [self.effective_data(g) for g in self.param_groups]
                self._perturb(draw)
            return draw, self._surroundings()
        except BaseException:
            self._close(failed=True)
            raise

    def _surroundings(self) -> AbstractContextManager[Any] | None:
        around = [self._team.block(self._layout.parameters), self._first_look()]
        inner = self._before_forward()
        if all(context is NOTHING for context in around):
            if inner is NOTHING:
                return None
            inner.__enter__()
            return inner
        with ExitStack() as stack:
            for context in (*around, inner):
                stack.enter_context(context)
            return stack.pop_all()

    def _end(self, draw: Draw) -> None:
        """Collect what the block left in ``.grad``, and show the mean."""
        failed = True
        try:
            with torch.no_grad():
                self._gather(draw.vector)
            failed = False
        finally:
            self._close(failed)

    def _close(self, failed: bool) -> None:
        self._is_sampling = False
        self._layout.show_mean()
        if failed:
            self._layout.put_gradients_back()

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

    def _advance(self, blocks: int, adds: bool) -> None:
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        overflow = found_inf is not None and bool(found_inf)
        if blocks and not overflow:
            self._take_edits(blocks, is_unscaled=found_inf is not None and scale is None)
        # What the losses were multiplied by, as far as it was not undone.
        unit = (1.0 if scale is None else float(scale)) / (blocks if adds and blocks else 1)
        samples, vectors = float(blocks), [self._gradient, *self._collected().values()]
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
            for group in self.param_groups:
                group["step"] += 1
            for groups, runs, n in self._parcels(self._effective_data):
                delta = self._merger.spread([group["prior_precision"] / n for group in groups])
                self._n = n
                for run in runs:
                    self._update(groups[0], run.mean, run.where, delta)

    def _add_up_ranks(self, blocks: int, unit: float, overflow: bool) -> tuple[float, bool]:
        """Make the sums those of all ranks, of which each undoes its own scaling of the loss."""
        weight = self._weight(blocks) if self.rank_weight is None else self.rank_weight
        weight = weight if blocks else 0.0
        for vector, power in self._sums():
            if not blocks:
                vector.zero_()
            elif weight != blocks * unit**power:
                vector.mul_(weight / (blocks * unit**power))
        clock = self.param_groups[0]
        self._layout.check()
        means = [run.mean for runs in self._layout.runs for run in runs]
        state = {"weights": means, "state": self._remembered()}
        total = self._team.add_up(
            [vector for vector, _ in self._sums()],
            Tally(blocks, weight, overflow),
            clock["step"] + clock["skipped"],
            state,
        )
        return total.weight, total.overflow

    def _room_for_draw(self) -> Draw:
        """Memory for the draw of the block that is next."""
        return self._layout.room_for_draw(int(self._keeps_first_draw and self._samples > 0))

    def _first_look(self) -> AbstractContextManager[None]:
        """In the first block, a context that sees which layers own the parameters."""
        if not self._undecided:
            return NOTHING
        undecided, self._undecided = self._undecided, {}
        return told_of(undecided)

    def _gather(self, draw: Vector) -> None:
        """Add the gradients of the block; ``.grad`` stays, as the mean or sum over blocks."""
        gradient = self._layout.gather(self._scratch if self._samples else self._gradient)
        self._harvest(gradient, draw)
        if self._samples:
            self._gradient.add_(gradient)
        self._samples += 1
        if self._samples > 1:
            self._layout.show_gradients(self._gradient, self._share_shown())
        self._layout.note_gradients()

    def _share_shown(self) -> float:
        """``.grad`` over what is collected, after several blocks."""
        return 1.0 if self.accumulation == "sum" else 1.0 / self._samples

    def _take_edits(self, blocks: int, is_unscaled: bool) -> None:
        """Use the gradients as they are now, if somebody changed them since the last block.

        GradScaler has ``is_unscaled`` them, inside of a block or after it.
        """
        edited = self._layout.gradients_were_edited()
        if is_unscaled and not edited:
            shown = self._gradient if blocks == 1 else self._gradient * self._share_shown()
            edited = not self._layout.holds(shown)
        if is_unscaled and not (self._unscales and (edited or blocks == 1)):
            raise UnsupportedError(
                f"scaler.unscale_(optimizer) reaches not all that {type(self).__name__} has "
                "collected. "
                + (
                    "Call it once, after all blocks of the step"
                    if self._unscales
                    else "Leave unscaling to scaler.step(optimizer), and clip the scaled gradients "
                    "to max_norm * scaler.get_scale()"
                )
            )
        if edited and blocks == 1:
            self._collect_anew()
        elif edited:
            self._rescale(blocks)

    def _collect_anew(self) -> None:
        """The one block's harvest once more; its noise is a function of its key."""
        self._samples = 0
        draw = self._room_for_draw()
        try:
            self._perturb(draw)
        finally:
            self._layout.show_mean()
        self._gather(draw.vector)

    def _rescale(self, blocks: int) -> None:
        """Replace the sum over blocks by the edited one, and do alike to what was read off it."""
        share = self._share_shown()
        before = self._gradient * share
        after = self._layout.gather(self._gradient)
        read_off = self._sums()[1:] if self._unscales else []
        if read_off and _is_finite(after):
            largest = before.abs().argmax()
            factor = float(after[largest] / before[largest]) if before[largest] else 1.0
            # A factor is applied with a few roundings.
            tolerance = 32 * torch.finfo(after.dtype).eps * after.abs().max()
            if not bool(((after - factor * before).abs() <= tolerance).all()):
                raise UnsupportedError(
                    f"the gradients were changed after {blocks} sampled() blocks, and not by one "
                    f"factor for all of them, as clip_grad_norm_ does: {type(self).__name__} reads "
                    "curvature off each block's own gradients. Make that change inside of every "
                    "block, or take one block"
                )
            for vector, _ in read_off:
                vector.mul_(factor)
        after.div_(share)

    def _parts(self) -> Iterator[tuple[Run, Group]]:
        """Every run of weights with its group."""
        for runs, group in zip(self._layout.runs, self.param_groups, strict=True):
            for run in runs:
                yield run, group

    def _settle_start(self, published: bool) -> None:
        """Make numbers of the temperature and of the first curvature, now that weights are counted.

        Whoever gives the first curvature has the published optimizer: temperature 1.
        """
        random = [s for s in self._layout.segments if s.stop <= self._num_random]
        for group in self.param_groups:
            temperature = group["temperature"]
            if temperature is None:
                temperature = 1.0 if published or not random else NATURAL_TEMPERATURE
            if isinstance(temperature, Balanced):
                temperature = temperature.resolve(random, group["num_data"])
            group["temperature"] = temperature
            layer = group.pop(LAYER, 0.0)
            if group["hess_init"] is None:
                n = group["num_data"] * group["augmentation"] / temperature
                start = first_curvature(group["prior_precision"] / n, layer / n, self._first_noise)
                group["hess_init"] = 0.0 if group["deterministic"] else start

    def _point_state_at_memory(self) -> None:
        for parameter in self._layout.parameters:
            self.state[parameter] = self._remembered_of(parameter)

    def _remembered(self) -> list[Tensor]:
        """Everything that has to be equal on every rank, besides the weights."""
        return list(self._memory.values())


class _Block(AbstractContextManager[None]):
    """What `sampled` gives; a class, because generators take as long as a tiny network's draw."""

    __slots__ = ("_around", "_draw", "_optimizer")

    def __init__(self, optimizer: NaturalOptimizer) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        self._draw, self._around = self._optimizer._begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_whole = False
        try:
            if self._around is not None:
                self._around.__exit__(kind, error, trace)
            is_whole = kind is None
        finally:
            if is_whole:
                self._optimizer._end(self._draw)
            else:
                self._optimizer._close(failed=True)


def _is_observed(optimizer: Optimizer) -> bool:
    """Whether its steps have hooks, or a profiler that would record them."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or profiler._is_profiler_enabled
    )


def _readable_twice(params: Params) -> Params:
    """The network itself, or the parameters or groups in a list, theirs too."""
    if isinstance(params, nn.Module):
        return unwrap(params)
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        return params
    return [_group_readable_twice(item) for item in params]


def _group_readable_twice(item: Any) -> Any:
    own = item.get("params") if isinstance(item, Mapping) else None
    return {**item, "params": [*own]} if isinstance(own, Iterator) else item


def _is_finite(vector: Vector) -> bool:
    """Whether all numbers are."""
    # A sum is one cheap pass; it may overflow where no number is infinite.
    return math.isfinite(vector.sum().item()) or bool(vector.isfinite().all())
