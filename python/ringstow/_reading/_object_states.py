"""Loads into the objects of a state dict: plans their states, and passes them afterwards."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ringstow._reading import _quantized_states
from ringstow._reading._targets import holds
from ringstow._state.objects import _new_optimizers
from ringstow._state.objects._modules import ModuleState, has_any_size
from ringstow._state.objects._optimizers import OptimizerState, is_optimizer_state
from ringstow._state.objects._per_rank import PerRank
from ringstow._state.objects._quantized_layers import is_packed
from ringstow._state.objects._state_dicts import OtherState, Part, are_alike, of_rank
from ringstow._state.tensors import _shards
from ringstow._state.tree._build import Survey
from ringstow._state.tree._walk import Path, describe, flat_name

_log = logging.getLogger("ringstow")


class Merge(_new_optimizers.Merge, Protocol):
    """Plans the changes of a state; see `ringstow._reading._load_plan.Merge`."""

    survey: Survey

    def differ(
        self, path: Path, here: str, there: str, *, kind: str = "kind", remedy: str = ""
    ) -> None:
        """Note a mismatch."""


class Objects:
    """The objects whose states a load fills."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._is_per_rank = False
        self._loads: list[tuple[int, Path, Callable[[], None]]] = []
        """Functions that pass loaded states to the objects, in the order of the numbers."""
        self._kept: list[str] = []
        """Objects of which the checkpoint has other ranks' states, but not this rank's."""

    def merge(self, plan: Merge, part: Part, node: Any, path: Path) -> None:
        """Plan the load of an object's state, and pass it to the object afterwards."""
        if isinstance(part, ModuleState):
            self._module(plan, part, part.fitting(node), path)
            self._loads.append((0, path, part.load))
        elif isinstance(part, OptimizerState):
            state = part.state
            if part.is_known and is_optimizer_state(node):
                like = _new_optimizers.like_of(part)
                state = _new_optimizers.optimizer(plan, state, node, path, like, new=True)
            else:
                plan.merge(state, node, path)
            self._loads.append((1, path, functools.partial(part.load, state)))
        else:
            self._other(plan, part, node, path)

    def _module(self, plan: Merge, part: ModuleState, node: Any, path: Path) -> None:
        """Plan a module's state; its ``_extra_state`` may have any size, for example."""
        extra = [name for name in part.state if has_any_size(name)]
        if not extra or not isinstance(node, dict):
            plan.merge(part.state, node, path)
            return
        kept = {name: part.state.pop(name) for name in extra}
        plan.merge(part.state, {key: one for key, one in node.items() if key not in kept}, path)
        part.state.update(kept)
        for name, value in kept.items():
            if name in node:
                if is_packed(name):
                    _quantized_states.compare(plan, value, node[name], (*path, name), is_seen=True)
                plan.replace(part.state, name, node[name], path)
            elif not is_packed(name) or not _quantized_states.is_otherwise(
                plan, value, node, (*path, name)
            ):
                plan.missing.append(((*path, name), value))

    def _other(self, plan: Merge, part: OtherState, node: Any, path: Path) -> None:
        """Plan the state of an object that is neither a module nor an optimizer."""
        # A value in a `PerRank` belongs to one process.
        is_apart, own = of_rank(node, 0 if self._is_per_rank else self._rank)
        load = (2, path, part.load)
        if holds(part.state, _shards.is_sharded):
            plan.merge(part.state, own, path)
            self._loads.append(load)
            return
        wanted = node if own is None and is_apart else own
        if plan.is_damaged(wanted):
            return

        def take(value: Any) -> None:
            if wanted is not node or not is_apart:
                part.state = value
            elif part.is_per_rank or not are_alike([*value.values()]):
                self._kept.append(f"{flat_name(path)} (saved by {len(value)} ranks)")
                return
            else:
                part.state = next(iter(value.values()))
            self._loads.append(load)

        plan.survey.add(wanted, path)
        plan.assigns.append((take, lambda builder: builder.value(wanted, path)))

    def merge_per_rank(self, plan: Merge, target: PerRank, node: Any, path: Path) -> None:
        """Fill a `PerRank` with the value of the rank of the same number."""
        key = str(self._rank)
        if not isinstance(node, dict) or key not in node:
            plan.differs.add("ranks")
            ranks = len(node) if isinstance(node, dict) else 0
            plan.mismatched.append(
                f"{flat_name(path)} is a PerRank here, and the checkpoint has no value of rank "
                f"{key}: it has those of {ranks} ranks"
            )
            return
        self._is_per_rank = True
        make = plan.merge(target.value, node[key], (*path, key))
        self._is_per_rank = False
        if make is not None:
            plan.assigns.append((functools.partial(setattr, target, "value"), make))

    def hand_over(self, path: str) -> None:
        """Pass the loaded states to the objects: models first, then optimizers.

        Raises:
            Exception: the error of an object's ``load_state_dict``, with the object's key as a
                note.
        """
        for _, at, load in sorted(self._loads, key=lambda one: one[0]):
            try:
                load()
            except Exception as error:
                error.add_note(f"raised by load_state_dict() of {describe(at)}")
                raise
        if self._kept:
            _log.warning(
                "%s has states of other ranks and none of rank %d, which keeps its own: %s",
                path,
                self._rank,
                ", ".join(self._kept),
            )
