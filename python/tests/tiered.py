"""States and programs for tests of tiers of any kind."""

import torch


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
