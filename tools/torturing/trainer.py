"""A small training loop per seed: model, averages, optimizer, and the state to save."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH = 8

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}


class Net(nn.Module):
    """An embedding, linear layers and norms, with buffers that the forward pass changes."""

    def __init__(self, words: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


class Trainer:
    """One training loop. `rng` determines everything random in it."""

    def __init__(self, rng: random.Random) -> None:
        torch.manual_seed(rng.randrange(1 << 30))
        self.words = rng.choice([16, 1000, 4000])
        self.model = Net(self.words, rng.choice([32, 128, 256, 512]), rng.choice([1, 2, 4]))
        self.kind = rng.choice(sorted(OPTIMIZERS))
        self.optimizer = OPTIMIZERS[self.kind](self.model.parameters())
        self.average: AveragedModel | None = None
        if rng.random() < 0.5:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.keeps_parameters = rng.random() < 0.3
        # torch's modules and optimizers are not thread-safe.
        self.lock = threading.Lock()
        for _ in range(rng.choice([0, 1, 2])):
            self.step()
        # The saved tensors, even after the model has got others.
        self.weights = list(self.model.parameters())
        self.buffers = list(self.model.buffers())
        self.moments = [tensor for _, tensor in tensors_of(self.optimizer.state_dict()["state"])]

    def backward(self) -> None:
        """Run a forward and a backward pass, which change statistics and gradients."""
        self.model(torch.randint(0, self.words, (BATCH,))).backward()

    def step(self) -> None:
        """Run one ordinary step of training."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        """Return the state to save, with references to the live tensors."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(keep_vars=self.keeps_parameters),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.average is not None:
            state["average"] = self.average.state_dict()
        return state


def frozen(value: Any) -> Any:
    """Return a deep copy of a state."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return [frozen(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state and their names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from tensors_of(item, f"{name}.{key}" if name else str(key))


def differences(found: Any, expected: Any) -> list[str]:
    """Return the names of tensors that are not bit-identical to the expected ones."""
    has, wants = dict(tensors_of(found)), dict(tensors_of(expected))
    wrong = sorted(has.keys() ^ wants.keys())
    for name in has.keys() & wants.keys():
        a, b = has[name].detach(), wants[name]
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            wrong.append(name)
    return wrong
