"""States, managers and programs for tests of tiers of any kind."""

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


def pause(patch, pauses_s=AT_ONCE):
    """Set the first and the longest pause before a copy that failed is tried again."""
    patch.setattr(_copy_queue, "_PAUSES_S", pauses_s)


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def save_step_2_again(manager):
    """Save steps 1 and 2, go back to step 1, and save another step 2."""
    with manager:
        manager.save(1, state_of(1))
        manager.save(2, {"w": torch.zeros(1000)})
        manager.wait_promoted()
        manager.restore(1)
        manager.save(2, state_of(2))
    assert manager.promotion_error is None


def manager_of(tmp_path, *, keep_there=None, keep_here=None, **options):
    tiers = ringstow.Tiers([tmp_path / "shared/run"], keep=keep_there, keep_here=keep_here)
    return ringstow.CheckpointManager(tmp_path / "run", tiers=tiers, **options)


def save_step_1(tmp_path):
    with manager_of(tmp_path) as manager:
        manager.save(1, state_of(1))


def steps_in(directory):
    return [found.step for found in ringstow.steps(directory)]
