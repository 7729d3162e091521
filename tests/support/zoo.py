"""Small networks of every kind that the library promises to bind, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Specimen:
    """A network, inputs it takes, and the number of classes it predicts."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int = 3


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class TiedAutoencoder(nn.Module):
    """The decoder is the transposed encoder; a classifier reads the reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(x))
        return self.head(nn.functional.linear(code, self.encoder.weight.t()))


class TiedByName(nn.Module):
    """Two modules that hold the same Parameter object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, stride=2), nn.GroupNorm(2, 4), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def _transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))


def _images(n: int) -> Tensor:
    return torch.randn(n, 2, 8, 8)


ZOO: dict[str, Specimen] = {
    "mlp": Specimen(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda n: torch.randn(n, 4),
    ),
    "layer norm": Specimen(_normed, lambda n: torch.randn(n, 4)),
    "conv, batch norm, group norm": Specimen(_convolutional, _images),
    "transposed conv": Specimen(_transposed, lambda n: torch.randn(n, 2, 4, 4)),
    "attention": Specimen(SelfAttention, lambda n: torch.randn(n, 5, 8)),
    "transformer layer": Specimen(Encoder, lambda n: torch.randn(n, 5, 8)),
    "lstm": Specimen(lambda: Recurrent(nn.LSTM), lambda n: torch.randn(n, 4, 5)),
    "gru": Specimen(lambda: Recurrent(nn.GRU), lambda n: torch.randn(n, 4, 5)),
    "embedding": Specimen(Words, lambda n: torch.randint(11, (n, 4))),
    "tied autoencoder": Specimen(TiedAutoencoder, lambda n: torch.randn(n, 6)),
    "tied by name": Specimen(TiedByName, lambda n: torch.randn(n, 4)),
}


def specimen(name: str, seed: int = 0, n: int = 8) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, inputs and labels, built from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        chosen = ZOO[name]
        return chosen.build(), chosen.inputs(n), torch.randint(chosen.classes, (n,))
