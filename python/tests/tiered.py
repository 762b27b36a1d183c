"""States, managers and programs for tests of tiers of any kind."""

import threading

import torch

import ringstow
from ringstow._saving import _copy_queue, _promote

AT_ONCE = (0.0, 0.0)
"""The pauses of copies that are tried again at once."""


def before_copies(patch, look):
    """Call a function with where from and where to before each copy; what it raises fails it."""
    for name in ("sent", "copied"):
        copy = getattr(_promote, name)

        def looked(path, to, copy=copy, **how):
            look(path, to)
            return copy(path, to, **how)

        patch.setattr(_promote, name, looked)


def refuse(patch, when, error=ConnectionRefusedError):
    """Fail the copies for which a function of where from and where to says so.

    Return the list of the places to which a copy was tried.
    """
    tried = []

    def look(path, to):
        tried.append(to)
        if when(path, to):
            raise error(to)

    before_copies(patch, look)
    return tried


def hold(patch):
    """Hold all copies: return what says that one has begun, and what lets them go on."""
    begun, may_go = threading.Event(), threading.Event()

    def look(path, to):
        begun.set()
        assert may_go.wait(300)

    before_copies(patch, look)
    return begun, may_go


def pause(patch, pauses_s=AT_ONCE):
    """Set the first and the longest pause before a copy that failed is tried again."""
    patch.setattr(_copy_queue, "_PAUSES_S", pauses_s)


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def save(manager, *steps, loss=float):
    """Save steps, each with its loss, and wait for the copies of each."""
    for step in steps:
        manager.save(step, state_of(step), metrics={"loss": loss(step)})
        assert manager.wait_promoted(60)


def is_of(state, step):
    """Tell whether a loaded state is a step's."""
    return torch.equal(state["w"], state_of(step)["w"]) and state["step"] == step


def ruin(checkpoint):
    """Overwrite the only shard of a checkpoint with zeros; return its path."""
    [shard] = checkpoint.glob("*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    return shard


def manager_of(tmp_path, *names, keep_there=None, keep_here=None, rate=None, **options):
    """Return a manager whose tiers are directories of these names, or ``shared/run``."""
    places = [tmp_path / name for name in names or ("shared/run",)]
    tiers = ringstow.Tiers(places, keep=keep_there, keep_here=keep_here, rate=rate)
    return ringstow.CheckpointManager(tmp_path / "run", tiers=tiers, **options)


def save_step_1(tmp_path):
    with manager_of(tmp_path) as manager:
        save(manager, 1)


def steps_in(directory):
    return [found.step for found in ringstow.steps(directory)]
