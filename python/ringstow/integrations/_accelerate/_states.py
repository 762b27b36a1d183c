"""An Accelerator's state besides models and optimizers: collected at a save, restored at a load.

It is one value of the checkpoint, below `ACCELERATOR`.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler

from ringstow._core._errors import InvalidStateError

ACCELERATOR = "accelerator"
_log = logging.getLogger("ringstow")


def key(kind: str, number: int) -> str:
    """Return the name of the state of a model or an optimizer: ``model``, ``model_1``, ..."""
    return kind if number == 0 else f"{kind}_{number}"


def is_optimizers(name: str) -> bool:
    """Return whether a name of `key` is an optimizer's."""
    return name.partition("_")[0] == "optimizer"


def counts(accelerator: Any, models: int | None) -> dict[str, int]:
    """Return how many objects of each kind an Accelerator saves.

    Args:
        accelerator: the Accelerator.
        models: how many models the hooks leave to the save; None means all.
    """
    return {
        "models": len(accelerator._models) if models is None else models,
        "optimizers": len(accelerator._optimizers),
        "schedulers": len(accelerator._schedulers),
        "dataloaders": len(accelerator._dataloaders),
        "registered objects": len(accelerator._custom_objects),
        "gradient scalers": int(accelerator.scaler is not None),
    }


def common(accelerator: Any) -> dict[str, Any]:
    """Return the state that is equal on all ranks."""
    return {
        "step": accelerator.step,
        "schedulers": [one.state_dict() for one in accelerator._schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "objects": [one.state_dict() for one in accelerator._custom_objects],
    }


def own(accelerator: Any) -> dict[str, Any]:
    """Return this rank's own state: random numbers, and the positions of its dataloaders."""
    return {
        "random": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        },
        "dataloaders": [_dataloader(one) for one in accelerator._dataloaders],
    }


def check_counts(accelerator: Any, saved: dict[str, int], models: int | None, path: str) -> None:
    """Refuse a checkpoint that lacks objects; log its surplus objects.

    Raises:
        InvalidStateError: names the missing objects.
    """
    here = counts(accelerator, models)
    lacking = [
        f"{saved.get(kind, 0)} {kind}, and {number} are here"
        for kind, number in here.items()
        if saved.get(kind, 0) < number or (kind == "registered objects" and saved[kind] != number)
    ]
    if lacking:
        raise InvalidStateError(
            f"{path} holds {'; '.join(lacking)}: prepare and register what the run had that saved "
            "it, in the same order"
        )
    more = [f"{saved[kind]} {kind}" for kind, number in here.items() if saved[kind] > number]
    if more:
        _log.warning(
            "%s holds %s, which is more than is here: the rest is left out", path, ", ".join(more)
        )


def put_common(accelerator: Any, saved: dict[str, Any]) -> None:
    """Restore the state that is equal on all ranks."""
    accelerator.step = saved["step"]
    for one, state in zip(accelerator._schedulers, saved["schedulers"], strict=False):
        one.load_state_dict(state)
    put_scaler(accelerator, saved)
    for one, state in zip(accelerator._custom_objects, saved["objects"], strict=True):
        one.load_state_dict(state)


def put_scaler(accelerator: Any, saved: dict[str, Any]) -> None:
    """Restore the state of the gradient scaler."""
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(saved["scaler"])


def put_own(accelerator: Any, saved: list[dict[str, Any]], path: str) -> None:
    """Restore this rank's own state; for a new rank, rank 0's dataloaders."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    mine = saved[rank] if rank < len(saved) else None
    for one, state in zip(
        accelerator._dataloaders, (mine or saved[0])["dataloaders"], strict=False
    ):
        _put_dataloader(one, state, is_own=len(saved) == ranks, path=path)
    if mine is None:
        _log.warning(
            "%s was saved by %d ranks: rank %d keeps the random numbers that it has. Seed each "
            "rank in another way, such as set_seed(seed, device_specific=True)",
            path,
            len(saved),
            rank,
        )
        return
    if rank == 0 and ranks < len(saved):
        _log.warning(
            "%s was saved by %d ranks: the random numbers of ranks %d to %d are left out",
            path,
            len(saved),
            ranks,
            len(saved) - 1,
        )
    _put_random(mine["random"], path)


def _put_random(state: dict[str, Any], path: str) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if not torch.cuda.is_available():
        return
    devices = torch.cuda.device_count()
    for device, one in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(one, device)
    if len(state["cuda"]) < devices:
        _log.warning(
            "%s was saved with %d GPUs: the random numbers of GPUs from number %d on stay as they "
            "are",
            path,
            len(state["cuda"]),
            len(state["cuda"]),
        )


def _dataloader(one: Any) -> dict[str, Any]:
    """Return a dataloader's epoch, and its position if it is stateful."""
    sampler = _seedable(one)
    return {
        "epoch": getattr(one, "iteration", None),
        "seed": None if sampler is None else sampler.initial_seed,
        "sampler_epoch": None if sampler is None else sampler.epoch,
        "state": one.state_dict() if getattr(one, "use_stateful_dataloader", False) else None,
    }


def _put_dataloader(one: Any, state: dict[str, Any], *, is_own: bool, path: str) -> None:
    if state["epoch"] is not None and hasattr(one, "iteration"):
        one.iteration = state["epoch"]
    sampler = _seedable(one)
    if sampler is not None and state["seed"] is not None:
        sampler.initial_seed = state["seed"]
        sampler.set_epoch(state["sampler_epoch"])
    if state["state"] is None or not getattr(one, "use_stateful_dataloader", False):
        return
    if not is_own:
        _log.warning(
            "%s was saved by another number of ranks: the stateful dataloaders begin their epoch "
            "anew",
            path,
        )
        return
    one.load_state_dict(state["state"])


def _seedable(one: Any) -> SeedableRandomSampler | None:
    sampler = get_sampler(one)
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
