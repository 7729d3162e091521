"""The posterior over a network's weights: predict, sample, save.

A posterior owns its tensors: the distribution q over the random weights, the point estimates of the
others, and the buffers (batch-norm statistics). It predicts on a copy of the network, so that
several threads may predict at once, and the network may be trained or run by others meanwhile.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Generator, Tensor, nn

from credo import storage
from credo.display import Display, Displayed
from credo.errors import BindingError, DataError
from credo.families import Delta, Family
from credo.model import Model
from credo.network import FlatParams
from credo.network.batches import (
    BATCH_SIZE,
    as_inputs,
    chunks,
    input_rows,
    inputs_alone,
    is_loader,
    like_weights,
    map_inputs,
    number_of_examples,
)
from credo.network.replica import borrowed, private
from credo.noise import Draws, NoiseSource, source
from credo.posterior.link import Link, check_link, predictive
from credo.posterior.outputs import Linearisation, OutputGaussian
from credo.posterior.predictive import Predictive
from credo.types import Inputs, Json, Vector

At: TypeAlias = Literal["samples", "mean", "linearised"]
WAYS: tuple[At, ...] = get_args(At)

SAMPLES = 64
"""Draws of the weights that a prediction takes unless it is told."""

KEPT_BYTES = 2**30
"""What the outputs of a bag's samples may take if nobody said how many of them to use."""


class Posterior(Displayed):
    """A model with a distribution over its weights.

    ``mean`` is the flat mean (P,); ``sample(n)`` flat draws (n, P); ``predict(x)`` a `Predictive`.
    ``predicts`` is how ``predict`` works unless it is told: by drawn weights, but for Laplace's
    approximation, which holds for the linearised network.

    Args:
        model: Network, likelihood and prior.
        q: The distribution over the network's random weights.
        point: The values of its other trainable parameters, one after the other.
        buffers: The network's buffers by name, as predictions will use them.
        draws: The noise source that predictions draw from.
    """

    predicts: At = "samples"

    def __init__(
        self,
        model: Model,
        q: Family,
        point: Vector,
        buffers: Mapping[str, Tensor],
        draws: Draws = "table",
    ) -> None:
        self.model, self.q, self.draws = model, q, draws
        self.point, self.buffers = point, dict(buffers)
        self.history: list[Json] = []

    @classmethod
    def at_network(cls, model: Model, q: Family, draws: Draws = "table") -> Posterior:
        """q with the point parameters, buffers and learned noise that the network has now.

        Args:
            model: Whose network it is.
            q: The distribution over its random weights.
            draws: The noise source that predictions draw from.
        """
        owned = model.replace(likelihood=copy.deepcopy(model.likelihood))
        buffers = {name: b.detach().clone() for name, b in model.net.named_buffers()}
        return cls(owned, q, model.weights(model.deterministic), buffers, draws)

    @property
    def mean(self) -> Vector:
        """E_q[w], (P,)."""
        return self.q.mean

    @property
    def centre(self) -> Vector:
        """The weights at which `credo.fit` leaves the network, (P,): the mean.

        Of a mixture they are the first member's: the mean of several modes is no network.
        """
        return self.q.mean

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        """Weights drawn from q, (n, P).

        Args:
            n: How many.
            generator: Where randomness comes from; torch's own if None.
        """
        return self.q.sample(n, generator)

    def predict(
        self,
        x: Inputs | Any,
        samples: int | None = None,
        batch_size: int | None = None,
        generator: Generator | None = None,
        *,
        at: At | None = None,
        link: Link | None = None,
        keep_samples: bool = True,
    ) -> Predictive:
        """The predictive distribution at ``x``.

        Safe from several threads: it runs on a copy of the network that nobody else sees.

        Args:
            x: A tensor, an array, several of them or a mapping as the network takes them, or a
                loader whose batches are inputs alone or (inputs, targets).
            samples: How many draws of the weights (of the outputs, where it is linearised). By
                default 64; of a bag, such as chains leave, all, as long as their outputs take at
                most 1 GiB (``keep_samples=False`` has no such bound). A bag never has more than
                all.
            batch_size: Inputs that pass at once; memory is that of one batch plus the result.
            generator: Where the seed of the draws comes from. Without it the same weights are
                drawn every time, so predictions are repeatable.
            at: "samples" draws weights; "mean" runs the network once, at q's mean; "linearised"
                makes the network linear in its weights around q's mean, so that a Gaussian q makes
                its outputs Gaussian (see `credo.posterior.outputs`): exact for a Gaussian
                likelihood. By default what ``predicts`` says.
            link: For "linearised": "probit" takes a formula in place of draws of the outputs.
            keep_samples: Keep every sample, (S, B, ...); else only averages over them, (B, ...).

        Returns:
            Probabilities or mean and standard deviation, entropy, intervals, ….

        >>> import torch, credo
        >>> net = torch.nn.Linear(2, 3)
        >>> model = credo.Model(net, credo.likelihoods.Categorical())
        >>> data = torch.randn(30, 2), torch.randint(3, (30,))
        >>> posterior = credo.fit(model, credo.VI(lr=0.1), data, epochs=5, progress=False)
        >>> posterior.predict(data[0], samples=16).outputs.shape
        torch.Size([16, 30, 3])
        """
        if samples is not None and samples < 1:
            raise DataError(f"samples={samples} must be at least 1")
        at = at or self.predicts
        if at not in WAYS:
            raise DataError(f'at={at!r} must be "samples", "mean" or "linearised"')
        if link is not None and at != "linearised":
            raise DataError(f'link={link!r} is for at="linearised", not for at={at!r}')
        seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator))
        # In inference mode there would be no gradients for the linear form.
        with torch.inference_mode(False), self.on_copy() as (model, flat):
            if at == "linearised":
                check_link(link, model.likelihood)
                outputs = self._linearised(model, flat, x, batch_size)
                draws = samples or SAMPLES
                return predictive(outputs, model.likelihood, link, draws, seed, keep_samples)
            drawn = Delta(self.q.mean) if at == "mean" else self.q
            noise = partial(source, self.draws, seed)
            if samples is None:
                samples = self.default_samples(x, keep_samples) if drawn is self.q else 1
            walk = self._draws_on(model, flat, drawn, samples, noise, keep_samples)
            if is_loader(x):
                parts = [walk.predict(inputs_alone(batch), None) for batch in x]
                if not parts:
                    raise DataError("the loader yields no batches: there is nothing to predict")
                return Predictive.concatenate(parts)
            return walk.predict(as_inputs(x), batch_size)

    @property
    def points(self) -> int | None:
        """How many samples `predict` can draw that differ; None where they can't be counted."""
        return self.q.points

    def default_samples(self, x: Any, keep_samples: bool, budget: int = KEPT_BYTES) -> int:
        """How many samples `predict` draws if it is not told: 64, of a bag all within memory.

        Args:
            x: What is to be predicted.
            keep_samples: Whether their outputs stay in memory.
            budget: How much of it, in bytes.
        """
        points = self.points
        if points is None or points <= SAMPLES or not keep_samples:
            return points or SAMPLES
        # What can be read only once can't be measured first; an empty loader is refused later.
        if is_loader(x) and not (isinstance(x, Sized) and len(x)):
            return SAMPLES
        most = max(SAMPLES, budget // self._bytes_of_outputs(x))
        if most < points:
            warnings.warn(
                f"predicting with {most:,} of the posterior's {points:,} samples: the outputs of "
                f"all would take more than {budget / 2**30:.2g} GiB. predict(keep_samples=False) "
                f"averages over all of them; samples={points} keeps them all",
                stacklevel=3,
            )
        return min(points, most)

    def _bytes_of_outputs(self, x: Any) -> int:
        """What one sample's outputs take, of all examples."""
        if is_loader(x):
            inputs = next(inputs_alone(batch) for batch in x)
            count = len(x) * number_of_examples(inputs)
        else:
            inputs = as_inputs(x)
            count = number_of_examples(inputs)
        with self.on_copy() as (model, flat), torch.no_grad():
            one = model.outputs(like_weights(input_rows(inputs, slice(1)), flat.vector))
        return max(1, count * one.numel() * one.element_size())

    @contextmanager
    def on_copy(self) -> Iterator[tuple[Model, FlatParams]]:
        """A copy of the model that nobody else sees, at this posterior's mean and in eval mode.

        Yields:
            The model whose ``net`` is the copy (see `credo.network.replica`), and its parameters.
        """
        with private(self.model.net, self.buffers) as flat:
            model = self.model.replace(net=flat.module)
            self._put_mean(model, flat)
            yield model, flat

    @contextmanager
    def in_network(self) -> Iterator[FlatParams]:
        """The user's network itself, in eval mode, at this posterior's mean and buffers.

        On leaving, its weights, buffers and modes are what they were. Meanwhile everybody who uses
        the network sees them: on several threads, take `on_copy`.

        Yields:
            The network's parameters.
        """
        with borrowed(self.model.net, self.buffers) as flat:
            self._put_mean(self.model, flat)
            yield flat

    def save(self, path: str | Path) -> None:
        """Write q, point parameters, buffers and configuration to one safetensors file.

        Args:
            path: The file; one that is there is replaced at once and whole.
        """
        storage.write_tensors(Path(path), *self.pack())

    def pack(self) -> tuple[dict[str, Tensor], Json]:
        """Everything that `save` writes, as tensors and JSON."""
        q_tensors, q_meta = self.q.pack()
        tensors = {f"q.{name}": tensor for name, tensor in q_tensors.items()}
        tensors["point"] = self.point
        tensors |= {f"buffer.{name}": tensor for name, tensor in self.buffers.items()}
        prior_meta: Json | None = None
        if isinstance(self.model.prior, Family):
            prior_tensors, prior_meta = self.model.prior.pack()
            tensors |= {f"prior.{name}": tensor for name, tensor in prior_tensors.items()}
        random, fixed = self.model.split(self.model.segments)
        meta = {
            "kind": "posterior",
            "version": 1,
            "q": q_meta,
            "draws": self.draws,
            "predicts": self.predicts,
            "likelihood": self.model.likelihood.config(),
            "prior": prior_meta or self.model.prior.config(),
            "random": [[s.name, list(s.shape)] for s in random.segments],
            "deterministic": [[s.name, list(s.shape)] for s in fixed.segments],
        }
        return tensors, meta

    def _display(self) -> Display:
        model, last = self.model, self.history[-1] if self.history else {}
        net, likelihood = type(model.net).__name__, type(model.likelihood).__name__
        family = type(self.q).__name__
        return Display(
            f"{type(self).__name__}: {family} over {self.q.size:,} weights of {net}, "
            f"{likelihood} likelihood",
            'pred = posterior.predict(x); posterior.save("p.safetensors")',
            rows=[
                ("distribution", family, f"over {self.q.size:,} weights of {net}"),
                *(
                    [("samples", f"{self.points:,}", "all that predict can draw")]
                    if self.points
                    else []
                ),
                ("points", f"{self.point.numel():,}", "other weights, without a distribution"),
                ("likelihood", likelihood, "how targets follow from outputs"),
                ("prior", type(model.prior).__name__, "what was believed of the weights"),
                ("predicts by", self.predicts, "unless predict(at=…) says otherwise"),
                *(
                    (name, f"{last[name]:.4g}", "in the last epoch")
                    for name in last
                    if isinstance(last[name], int | float)
                ),
            ],
        )

    def _draws_on(
        self, model: Model, flat: FlatParams, q: Family, samples: int,
        noise: Callable[[], NoiseSource], keep: bool,
    ) -> NetworkDraws:  # fmt: skip
        """How draws of q come into the network."""
        return NetworkDraws(model, flat, q, samples, noise, keep)

    def _linearised(
        self, model: Model, flat: FlatParams, x: Any, batch_size: int | None
    ) -> OutputGaussian:
        linear = Linearisation(model, flat, self.q)
        parts = []
        for batch in (inputs_alone(b) for b in x) if is_loader(x) else (as_inputs(x),):
            inputs = map_inputs(_differentiable, like_weights(batch, flat.vector))
            size = batch_size or linear.batch_size(inputs)
            parts += [linear.at(chunk) for chunk in chunks(inputs, size)]
        if not parts:
            raise DataError("the loader yields no batches: there is nothing to predict")
        return OutputGaussian.concatenate(parts)

    def _put_mean(self, model: Model, flat: FlatParams) -> None:
        """Into a network of ours; first follow it, if it was moved or re-typed after training."""
        random, fixed = model.split(flat.segments)
        if self.q.size != random.size:
            raise BindingError(
                f"this posterior is over {self.q.size} weights, but the network now has "
                f"{random.size} random ones: layers were added, removed or frozen. "
                "Fit again, or undo the change."
            )
        like = flat.vector
        if (self.q.mean.dtype, self.q.mean.device) != (like.dtype, like.device):
            self.q = self.q.on(random.segments, like)
            self.point = self.point.to(like)
            if isinstance(model.likelihood, nn.Module):
                model.likelihood.to(like.device, like.dtype)
        with flat.writing() as vector:
            random.write(vector, self.q.mean)
            fixed.write(vector, self.point)


class NetworkDraws:
    """A network at one draw of its weights after the other.

    Args:
        model: Whose network it is.
        flat: The network's parameters.
        q: The distribution of its random weights.
        samples: How many draws.
        noise: Makes the source of their normals.
        keep: Keep every sample, or only averages over them.
    """

    def __init__(
        self,
        model: Model,
        flat: FlatParams,
        q: Family,
        samples: int,
        noise: Callable[[], NoiseSource],
        keep: bool,
    ) -> None:
        self._model, self._flat, self._q = model, flat, q
        self._samples, self._noise, self._keep = samples, noise, keep
        self._random = model.split(flat.segments)[0]

    def predict(self, inputs: Inputs, batch_size: int | None) -> Predictive:
        """What the draws predict.

        Args:
            inputs: As the network takes them.
            batch_size: Inputs that pass at once.
        """
        parts = list(chunks(like_weights(inputs, self._flat.vector), batch_size or BATCH_SIZE))
        with torch.no_grad():
            stream = (self._forward(parts) for _ in self._weights_in_place())
            if self._keep:
                found = Predictive(torch.stack(list(stream)), self._model.likelihood)
            else:
                found = Predictive.from_stream(stream, self._model.likelihood)
            return found.out_of(self._q.points)

    def _weights_in_place(self) -> Iterator[None]:
        """Put one draw after the other into the network."""
        random, flat, q = self._random, self._flat, self._q
        # With one run a draw can be written where it will be read; `writing` then only tells torch.
        out = random.view(flat.vector) if random.is_one_run else torch.empty_like(q.mean)
        for weights in q.walk(self._samples, self._noise(), out):
            with flat.writing() as vector:
                random.write(vector, weights)
            yield

    def _forward(self, parts: list[Inputs]) -> Tensor:
        pieces = [self._model.outputs(part) for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _differentiable(x: Tensor) -> Tensor:
    """A tensor that was made in inference mode can't take part in a backward pass; a copy can."""
    return x.clone() if x.is_inference() else x
