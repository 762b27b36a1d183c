"""What a step holds: a function of the seed, the step and the save, so that every byte is known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import ranks

Array = npt.NDArray[Any]

# A tensor that changes with every so many steps: files of a save with a base change with it.
SLOW_STEPS = 3


@dataclass(frozen=True)
class Shape:
    """How large the tensors of a run are, in elements."""

    seed: int
    frozen: int
    slow: int
    weight: int
    ranks: int = 1
    """How many ranks save; several have a sharded tensor, too."""
    is_whole: bool = True
    """Whether a state has all of the sharded tensor, and not this rank's rows."""

    @classmethod
    def of(cls, rng: random.Random, seed: int, ranks: int) -> Shape:
        """Choose one."""
        frozen, slow, weight = (rng.choice([1, 1000, 20_000, 100_000]) for _ in range(3))
        return cls(seed, frozen, slow, weight, ranks)

    def state(self, step: int, save: int) -> dict[str, Any]:
        """Return the state of a step, as the save of this number stores it."""
        state = self._replicated(step, save)
        if self.ranks > 1:
            rows = self._array(self.weight, 6, step, save)
            state["model"]["rows"] = rows if self.is_whole else ranks.sharded(rows, self.ranks)
        return state

    def _replicated(self, step: int, save: int) -> dict[str, Any]:
        frozen = self._array(self.frozen, 1)
        return {
            "model": {
                "frozen": frozen,
                "slow": self._array(self.slow, 2, step // SLOW_STEPS),
                "weight": self._array(self.weight, 3, step, save),
                "empty": np.zeros((0, 3), np.int16),
            },
            "optimizer": {"moment": self._array(self.weight, 4, step, save), "count": step},
            "ema": {"weight": self._array(self.weight, 5, step), "frozen": frozen.copy()},
            "note": {"step": step, "save": save, "text": f"save {save} of step {step}"},
        }

    def _array(self, elements: int, *numbers: int) -> Array:
        dice = np.random.default_rng([self.seed, *numbers])
        return dice.integers(0, 1 << 32, elements, np.uint32).view(np.float32)

    def wrong(self, found: dict[str, Any], dropped: tuple[str, ...]) -> list[str]:
        """Return the names that differ from what the save stored that a loaded state names."""
        note = found.get("note", {})
        step, save = note.get("step"), note.get("save")
        if not isinstance(step, int) or not isinstance(save, int):
            return ["note"]
        wanted = {
            name: part for name, part in self.state(step, save).items() if name not in dropped
        }
        return differences(found, wanted)


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Return the names whose values are not the same, bit by bit."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [name]
        wrong = [f"{name}/{key}" for key in found.keys() ^ wanted.keys()]
        for key in found.keys() & wanted.keys():
            wrong += differences(found[key], wanted[key], f"{name}/{key}")
        return wrong
    found, wanted = _local(found), _local(wanted)
    if isinstance(wanted, np.ndarray):
        is_same = isinstance(found, np.ndarray) and _bits(found) == _bits(wanted)
        return [] if is_same else [name]
    return [] if type(found) is type(wanted) and found == wanted else [name]


def _local(value: Any) -> Any:
    """Return a tensor, or this rank's rows of it, as an array; anything else as it is."""
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.numpy() if hasattr(value, "numpy") else value


def _bits(array: Array) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()
