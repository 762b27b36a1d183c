"""Changes to a training loop's tensors, to choose from at random.

After a change in `SEEN`, a save must not commit the new values: it commits the old ones or fails.
A save cannot see the changes in `UNSEEN`; docs/background.md lists them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch

from .trainer import Trainer

# The limit of `staging="guard"`: the call copies tensors up to this size.
SMALL = 64 << 10

Change = Callable[[Trainer, random.Random], None]


def _any(trainer: Trainer, rng: random.Random) -> torch.Tensor:
    kinds = [kind for kind in (trainer.weights, trainer.moments, trainer.buffers) if kind]
    return rng.choice(rng.choice(kinds))


def _sized(trainer: Trainer, rng: random.Random, *, large: bool) -> torch.Tensor | None:
    every = [*trainer.weights, *trainer.moments, *trainer.buffers]
    fitting = [tensor for tensor in every if (tensor.nbytes > SMALL) == large]
    return rng.choice(fitting) if fitting else None


# Steps of a training loop.


def forward_and_backward(trainer: Trainer, rng: random.Random) -> None:
    trainer.backward()


def forward_only(trainer: Trainer, rng: random.Random) -> None:
    with torch.no_grad():
        trainer.model(torch.randint(0, trainer.words, (4,)))


def accumulate(trainer: Trainer, rng: random.Random) -> None:
    for _ in range(rng.choice([2, 3])):
        trainer.backward()


def step(trainer: Trainer, rng: random.Random) -> None:
    trainer.step()


def step_without_backward(trainer: Trainer, rng: random.Random) -> None:
    trainer.optimizer.step()


def update_average(trainer: Trainer, rng: random.Random) -> None:
    if trainer.average is not None:
        trainer.average.update_parameters(trainer.model)


# Changes in place.


def add(trainer: Trainer, rng: random.Random) -> None:
    with torch.no_grad():
        _any(trainer, rng).add_(1)


def add_to_all_weights(trainer: Trainer, rng: random.Random) -> None:
    with torch.no_grad():
        torch._foreach_add_(list[torch.Tensor](trainer.weights), 1.0)


def clip(trainer: Trainer, rng: random.Random) -> None:
    with torch.no_grad():
        for weight in trainer.weights:
            weight.clamp_(-0.01, 0.01)


def copy_over(trainer: Trainer, rng: random.Random) -> None:
    tensor = _any(trainer, rng)
    with torch.no_grad():
        tensor.copy_(torch.ones_like(tensor))


def write_a_view(trainer: Trainer, rng: random.Random) -> None:
    tensor = _any(trainer, rng)
    with torch.no_grad():
        tensor.view(-1)[rng.randrange(tensor.numel()) :] = 3


def fill_a_buffer(trainer: Trainer, rng: random.Random) -> None:
    rng.choice(trainer.buffers).fill_(rng.randrange(100))


def initialise_again(trainer: Trainer, rng: random.Random) -> None:
    torch.nn.init.normal_(rng.choice(trainer.weights))


def load_model(trainer: Trainer, rng: random.Random) -> None:
    state = trainer.model.state_dict()
    trainer.model.load_state_dict({name: torch.zeros_like(state[name]) for name in state})


def assign_model(trainer: Trainer, rng: random.Random) -> None:
    state = trainer.model.state_dict()
    trainer.model.load_state_dict(
        {name: torch.zeros_like(state[name]) for name in state}, assign=rng.random() < 0.5
    )


def load_optimizer(trainer: Trainer, rng: random.Random) -> None:
    state = copy.deepcopy(trainer.optimizer.state_dict())
    trainer.optimizer.load_state_dict(state)


def change_moments(trainer: Trainer, rng: random.Random) -> None:
    for moment in trainer.moments:
        moment.mul_(2).add_(1)


def data_of_a_small_one(trainer: Trainer, rng: random.Random) -> None:
    tensor = _sized(trainer, rng, large=False)
    if tensor is not None:
        tensor.data.add_(1)


def numpy_of_a_small_one(trainer: Trainer, rng: random.Random) -> None:
    tensor = _sized(trainer, rng, large=False)
    if tensor is not None:
        tensor.detach().numpy()[...] = 5


def data_of_a_large_one(trainer: Trainer, rng: random.Random) -> None:
    tensor = _sized(trainer, rng, large=True)
    if tensor is not None:
        tensor.data.add_(1)


def numpy_of_a_large_one(trainer: Trainer, rng: random.Random) -> None:
    tensor = _sized(trainer, rng, large=True)
    if tensor is not None:
        tensor.detach().numpy()[...] = 5


# An ordinary loop makes these. `run` uses them alone half of the time, because the others make
# nearly every save fail.
ORDINARY: list[Change] = [
    forward_and_backward,
    forward_only,
    accumulate,
    step,
    step_without_backward,
    data_of_a_small_one,
    numpy_of_a_small_one,
]
SEEN: list[Change] = [
    *ORDINARY,
    update_average,
    add,
    add_to_all_weights,
    clip,
    copy_over,
    write_a_view,
    fill_a_buffer,
    initialise_again,
    load_model,
    assign_model,
    load_optimizer,
    change_moments,
]
# Two threads must not run these at once.
TRAINING: frozenset[Change] = frozenset(
    [
        forward_and_backward,
        forward_only,
        accumulate,
        step,
        step_without_backward,
        update_average,
        load_model,
        assign_model,
        load_optimizer,
    ]
)
UNSEEN: list[Change] = [data_of_a_large_one, numpy_of_a_large_one]
