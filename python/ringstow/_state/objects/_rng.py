"""The states of the random number generators, as one object of a state."""

from __future__ import annotations

import random
import sys
from typing import Any


class RngState:
    """The random number generators of a process: Python's, NumPy's, torch's, the current GPU's.

    ::

        state = {"model": model, "optimizer": optimizer, "rng": ringstow.RngState()}

    A save stores the state of each generator that the process has imported, and a load sets it.
    Each rank has its own states. If the checkpoint was saved by fewer ranks, a rank without saved
    states keeps its own, and a warning says so.

    Does not include generators that the program has made itself. Put their states into the dict:
    ``{"sampler": generator.get_state()}``.
    """

    is_per_rank = True

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        version, numbers, gauss = random.getstate()
        state: dict[str, Any] = {"python": [version, list(numbers), gauss]}
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators; also accepts all ranks' states, as `ringstow.load` returns them."""
        state = state.get("rank 0", state)
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and "numpy" in state:
            numpy.random.set_state(state["numpy"])
        if torch is not None and "torch" in state:
            torch.set_rng_state(state["torch"])
            if "cuda" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda"])
