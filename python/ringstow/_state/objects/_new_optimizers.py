"""Loads an optimizer's state, also into a new optimizer, which has no tensors yet.

A new tensor is like its parameter: each rank gets its own shards of it.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ringstow._core._errors import InvalidStateError
from ringstow._state.objects._modules import ModuleState
from ringstow._state.objects._optimizers import (
    GROUPS,
    PARAMS,
    STATE,
    OptimizerState,
    is_optimizer_state,
)
from ringstow._state.objects._state_dicts import Parts
from ringstow._state.tensors import _composite_shards, _composites, _shards, _torch
from ringstow._state.tensors._optional_packages import imported
from ringstow._state.tree._build import Builder, Contents
from ringstow._state.tree._fitting import cannot_follow
from ringstow._state.tree._walk import COMPOSITE, Box, Leaf, Path, describe, flat_name, stored_in

if TYPE_CHECKING:
    from ringstow._state.tensors._memory import Stored
    from ringstow._state.tree._rename import Rename

_log = logging.getLogger("ringstow")


class Composite(NamedTuple):
    """A stored tensor that is made of others, such as an 8-bit moment."""

    kind: str
    shape: tuple[int, ...]
    inner: dict[str, Stored]
    context: dict[str, Any]

    @classmethod
    def of(cls, contents: Contents, box: Box, path: Path) -> Composite | None:
        """Return the composite of a box; None if it has composites, or tensors in its context.

        Raises:
            UnsupportedError: its type can't be made here.
        """
        inner = box.steps()
        is_simple = all(isinstance(one, Leaf) and one.tag == "$tensor" for _, one in inner)
        if not is_simple or stored_in(box.context):
            return None
        _composites.check(box.name, describe(path))
        context = Builder(contents, {}).value(box.context, path)
        stored = {str(name): contents.stored(leaf, path) for name, leaf in inner}
        return cls(box.name, tuple(context.get("shape", ())), stored, context)


Like = Callable[[Any, str, "Stored | Composite", Path], Any]
"""Returns a new tensor for a parameter's state, by name; None if any memory will do."""


class Merge(Protocol):
    """Plans the changes of a state; see `ringstow._reading._load_plan.Merge`."""

    contents: Contents
    missing: list[tuple[Path, Any]]
    unexpected: list[tuple[Path, Any]]
    mismatched: list[str]
    differs: set[str]
    assigns: list[Any]

    def merge(self, target: Any, node: Any, path: Path) -> Any:
        """Plan the changes that make a target equal to a node."""

    def replace(self, holder: dict[Any, Any], key: Any, node: Any, path: Path) -> None:
        """Plan to put the value of a node into a dict."""

    def is_damaged(self, node: Any) -> bool:
        """Return whether a part of a skeleton holds a damaged tensor."""


# Options that distinguish the types of torch's optimizers.
_TYPICAL = {
    *("betas", "momentum", "dampening", "nesterov", "alpha", "centered", "rho", "momentum_decay"),
    *("lr_decay", "initial_accumulator_value", "etas", "step_sizes", "lambd", "t0", "beta2_decay"),
    *("max_iter", "history_size", "ns_steps"),
}
# Keys of a group that a load keeps: its parameters, and whether Adam is AdamW.
_OWN = {PARAMS, "param_names", "decoupled_weight_decay"}
# States with the shape of their parameter.
_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta"),
    *("grad_avg", "exp_inf", "step_size", "prev", "sum", "ax"),
}


def differs(here: dict[Any, Any], node: Any) -> bool:
    """Return whether a state dict and a skeleton are an optimizer's, with states of others."""
    if not (is_optimizer_state(here) and is_optimizer_state(node)):
        return False
    return bool(here[STATE].keys() != node[STATE].keys())


def optimizer(
    merge: Merge, here: dict[str, Any], node: dict[str, Any], path: Path, like: Like, *, new: bool
) -> dict[str, Any]:
    """Plan to change an optimizer's state dict to the checkpoint's.

    Args:
        merge: collects the changes and the mismatches.
        here: the state dict.
        node: its skeleton.
        path: the path of both.
        like: makes tensors for states that do not exist here yet.
        new: whether to make a new state dict with the checkpoint's entries, instead of changing
            this one.

    Returns:
        The state dict that will be filled.
    """
    pairs, groups = _paired(merge, here, node, path)
    made = {**here, STATE: {}, GROUPS: [dict(one) for one in here[GROUPS]]} if new else here
    for key, there in pairs.items():
        _state(merge, (here[STATE], made[STATE]), key, _of(node[STATE], there), path, like)
    for number, (group, saved) in enumerate(zip(made[GROUPS], groups, strict=True)):
        _group(merge, group, saved, (*path, GROUPS, number))
    if new:  # keep entries that the checkpoint lacks
        unpaired = here[STATE].keys() - pairs.keys()
        made[STATE].update((key, one) for key, one in here[STATE].items() if key in unpaired)
    _own_values(merge, made, node, path)
    return made


def _own_values(merge: Merge, made: dict[str, Any], node: dict[str, Any], path: Path) -> None:
    """Plan entries specific to a type of optimizer, beside the usual ones and in the state."""
    for key in node.keys() - {STATE, GROUPS}:
        merge.replace(made, key, node[key], path)
    known = {str(key) for group in node[GROUPS] for key in group[PARAMS]}
    for key, child in node[STATE].items():
        if str(key) not in known:
            merge.replace(made[STATE], key, child, (*path, STATE))


def renamed(node: dict[str, Any], rename: Rename, where: str) -> dict[str, Any]:
    """Return the skeleton of an optimizer's state dict with other names of its parameters.

    Raises:
        UnsupportedError: ``rename`` joins or splits parameters: how their states follow depends on
            the optimizer.
    """
    keys = (key for key in node[STATE] if type(key) is str)
    joined = next((key for key in keys if rename.takes(tuple(key.split(".")))), None)
    if joined is not None:
        raise cannot_follow(joined, where)

    def name(key: Any) -> Any:
        if type(key) is not str:
            return key
        return ".".join(map(str, rename.there(tuple(key.split(".")))))

    groups = [{**one, PARAMS: [name(key) for key in one[PARAMS]]} for one in node[GROUPS]]
    return {**node, STATE: {name(key): one for key, one in node[STATE].items()}, GROUPS: groups}


def _paired(
    merge: Merge, here: dict[str, Any], node: dict[str, Any], path: Path
) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """Pair parameters, by name if both have names, otherwise by position; note unpaired ones.

    Returns:
        The checkpoint's keys by the keys here, and for each group here its group in the checkpoint.
    """
    keys = [key for group in here[GROUPS] for key in group[PARAMS]]
    saved = {key: group for group in node[GROUPS] for key in group[PARAMS]}
    if all(type(key) is str for key in (*keys, *saved)):
        pairs = {key: key for key in keys if key in saved}
        merge.unexpected += [
            ((*path, STATE, key, name), child)
            for key in saved.keys() - pairs.keys()
            for name, child in (_of(node[STATE], key) or {}).items()
        ]
        if node[STATE]:
            lacking = [key for key in keys if key not in pairs]
            merge.missing += [((*path, STATE, key), here[STATE].get(key)) for key in lacking]
    elif _sizes(here) == _sizes(node):
        pairs = dict(zip(keys, saved, strict=True))
    else:
        pairs = {}
        merge.differs.add("kind")
        merge.mismatched.append(
            f"{flat_name(path)} has groups of {_sizes(here)} parameters here and of "
            f"{_sizes(node)} in the checkpoint, and one of them does not know their names"
        )
    _refuse_another(merge, here, node, path)
    groups = []
    for number, group in enumerate(here[GROUPS]):
        known = [key for key in group[PARAMS] if key in pairs]
        found = saved[pairs[known[0]]] if known else {}
        # Load a group's options only for the same parameters; otherwise keep them.
        theirs = [key for key in pairs if saved[pairs[key]] is found]
        groups.append(found if sorted(map(str, theirs)) == sorted(map(str, known)) else {})
        if known and not groups[-1]:
            _log.warning(
                "%s: group %d has other parameters than any group in the checkpoint, so its "
                "options, such as lr, stay as they are",
                flat_name(path),
                number,
            )
    return pairs, groups


def _sizes(state: dict[str, Any]) -> list[int]:
    return [len(group[PARAMS]) for group in state[GROUPS]]


def _refuse_another(merge: Merge, here: dict[str, Any], node: dict[str, Any], path: Path) -> None:
    """Note a mismatch if another type of optimizer was saved: each has options of its own."""
    ours, theirs = (
        {name for group in one[GROUPS] for name in group} & _TYPICAL for one in (here, node)
    )
    if ours != theirs:
        merge.differs.add("kind")
        merge.mismatched.append(
            f"{flat_name(path)} is an optimizer with {_listed(ours)} here, and one with "
            f"{_listed(theirs)} in the checkpoint: its state is of no use to this one, so leave "
            "the optimizer out"
        )


def _listed(options: set[str]) -> str:
    return ", ".join(sorted(options)) or "neither betas nor momentum"


def _of(states: dict[Any, Any], key: Any) -> dict[str, Any] | None:
    """Return the state of a parameter; its number may be text, as DCP writes it."""
    found: dict[str, Any] | None = states.get(key, states.get(str(key)))
    return found


def _state(
    merge: Merge,
    states: tuple[dict[Any, Any], dict[Any, Any]],
    key: Any,
    node: dict[str, Any] | None,
    path: Path,
    like: Like,
) -> None:
    """Plan the state of one parameter: fill the existing entries, and add missing ones."""
    here, made = states
    own = here.get(key)
    at = (*path, STATE, key)
    if here is made and own is not None:
        merge.merge(own, {} if node is None else node, at)
        return
    if node is None:
        return
    if merge.is_damaged(node):
        if own is not None:
            made[key] = own
        return
    new: dict[str, Any] = dict.fromkeys(node)  # in the order of the checkpoint
    for name, child in node.items():
        stored = tensor = None
        if isinstance(child, Leaf) and child.tag == "$tensor":
            stored = merge.contents.stored(child, (*at, name))
        is_tensor = stored is not None or (isinstance(child, Box) and child.tag == COMPOSITE)
        if is_tensor and own is not None and _torch.is_tensor(own.get(name)):
            tensor = own[name]
        elif stored is not None and name != "step":  # torch chooses the device of ``step``
            tensor = like(key, name, stored, at)
        elif stored is None and is_tensor and (whole := Composite.of(merge.contents, child, at)):
            tensor = like(key, name, whole, at)
        if tensor is None:
            merge.replace(new, name, child, at)
        else:
            new[name] = tensor
            merge.merge(tensor, child, (*at, name))
    if here is made:
        merge.assigns.append((functools.partial(made.__setitem__, key), lambda _: new))
    else:
        made[key] = new


def _group(merge: Merge, group: dict[str, Any], saved: dict[str, Any], path: Path) -> None:
    """Plan a group's options: the checkpoint's, and options that only this group has."""
    for name, child in saved.items():
        if name in _OWN:
            continue
        is_tensor = isinstance(child, Leaf) and child.tag == "$tensor"
        if is_tensor and _torch.is_tensor(group.get(name)):
            merge.merge(group[name], child, (*path, name))
        else:
            merge.replace(group, name, child, path)


def like_of(part: OptimizerState) -> Like:
    """Return a function that makes new tensors for the parameters of an optimizer in the state."""
    return lambda key, name, stored, path: _new_like(part.shards.get(key), name, stored, path)


def _new_like(tensor: Any, name: str, stored: Stored | Composite, path: Path) -> Any:
    """Return a new tensor of a stored dtype and shape, with a parameter's device and layout.

    Returns:
        None if any memory will do.
    """
    if tensor is None or _composites.is_composite(tensor):
        return None
    local = _shards.local_of(tensor)
    if isinstance(stored, Composite):
        if local is None:
            return None
        key = describe((*path, name))
        inner = {n: (_torch.dtype_of(one.dtype, key), one.shape) for n, one in stored.inner.items()}
        return _composite_shards.local_like(tensor, stored.kind, inner, stored.context, key)
    torch = imported("torch")
    dtype = _torch.dtype_of(stored.dtype, describe((*path, name)))
    with torch.no_grad():
        # A state with a shape other than its parameter's belongs to another parameter: refused
        # later.
        if tuple(tensor.shape) == stored.shape or name in _LIKE_PARAMETER:
            if local is not None and _composites.is_composite(local):
                plain = torch.empty(local.shape, dtype=dtype, device=local.device)
                return _shards.dtensor_like(tensor, plain)
            return torch.empty_like(tensor, dtype=dtype)
        if not stored.shape or type(tensor).__name__ != "DTensor":
            return None
        # For example a factor of the second moment, which each rank has in full.
        from torch.distributed.tensor import DTensor, Replicate

        mesh = tensor.device_mesh
        local = torch.empty(stored.shape, dtype=dtype, device=tensor.to_local().device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Layouts:
    """The shards of this rank for the parameters that an optimizer's state dict numbers or names.

    Such a dict does not refer to parameters: they are the parameters of the same names in the state
    beside it, or the parameters of the optimizer that made it.
    """

    def __init__(self, state: dict[Any, Any], parts: Parts) -> None:
        self._state = state
        self._parts = parts

    @functools.cached_property
    def _named(self) -> dict[object, Any]:
        """The sharded tensors of the state by their last key; empty if nothing is sharded."""
        return {
            name: one for name, one in _tensors(self._state, self._parts) if _shards.is_sharded(one)
        }

    @functools.cached_property
    def _optimizers(self) -> list[list[list[Any]]]:
        """The parameter groups of the state's optimizers, or else of this process's optimizers."""
        kind = imported("torch").optim.Optimizer
        found = [one for one in gc.get_objects() if issubclass(type(one), kind)]
        groups = [[list(group[PARAMS]) for group in one.param_groups] for one in found]
        here = {_address(one) for one in self._named.values()} - {None}

        def is_ours(parameters: list[list[Any]]) -> bool:
            held = {_address(one) for group in parameters for one in group} - {None}
            return bool(held) and held <= here

        ours = [one for one in groups if is_ours(one)]
        return ours or groups

    def of(self, state: dict[str, Any]) -> Like:
        """Return a function that makes new tensors for an optimizer's state dict."""
        return functools.partial(self._like, [group[PARAMS] for group in state[GROUPS]])

    def _like(
        self, groups: list[list[Any]], key: Any, name: str, stored: Stored | Composite, path: Path
    ) -> Any:
        """Return a new tensor for the parameter of a key, which is in one of the groups.

        Raises:
            InvalidStateError: it is not clear which optimizer made the state dict.
        """
        if not self._named or not stored.shape:
            return None
        if key in self._named:
            return _new_like(self._named[key], name, stored, path)
        at = [one for group in groups for one in group].index(key)
        sizes = [len(group) for group in groups]
        alike = [
            [one for group in parameters for one in group][at]
            for parameters in self._optimizers
            if [len(group) for group in parameters] == sizes
        ]
        if len({_layout(one) for one in alike}) != 1:
            raise InvalidStateError(
                f"{describe((*path, name))}: it is not clear which shards of it this rank needs, "
                "since no optimizer or several may have made this state dict: put the optimizer "
                "itself into the state"
            )
        return _new_like(alike[0], name, stored, path)


def _address(tensor: Any) -> int | None:
    """Return this rank's boxes of a DTensor; None if it has none, or is not a DTensor."""
    if not hasattr(tensor, "to_local"):
        return None
    local = tensor.to_local()
    return local.data_ptr() if local.numel() else None


def _layout(tensor: Any) -> object:
    if hasattr(tensor, "placements"):
        return (tensor.device_mesh, tensor.placements)
    return None


def _tensors(value: Any, parts: Parts, name: object = "") -> Iterator[tuple[object, Any]]:
    """Yield the last key and value of each tensor in a state, without optimizers."""
    part = parts.of(value)
    if isinstance(part, ModuleState):
        value = part.state
    if isinstance(value, dict):
        if not is_optimizer_state(value):
            for key, item in value.items():
                yield from _tensors(item, parts, key)
    elif _shards.is_sharded(value) or _torch.is_tensor(value):
        yield name, value
