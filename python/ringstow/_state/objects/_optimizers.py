"""An optimizer's state by the names of its parameters, if a module beside it has them.

`torch.optim.Optimizer.state_dict` numbers the parameters. Numbers change when a layer is added, and
refer to different parameters on each stage of a pipeline. The form here is that of
`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, without a step of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ringstow._state.objects import _fsdp
from ringstow._state.objects._modules import ModuleState, named_parameters
from ringstow._state.tree._walk import Path, flat_name

if TYPE_CHECKING:
    import torch

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


class Modules:
    """The modules of a state, and the names of their parameters."""

    def __init__(self, modules: Iterable[tuple[Path, torch.nn.Module, ModuleState]]) -> None:
        self._modules = list(modules)
        self._named: list[dict[int, str]] | None = None
        self._sharded = [
            (module, state, {id(one) for one in module.parameters()})
            for _, module, state in self._modules
            if state.is_fsdp
        ]

    def names_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, str] | None:
        """Return the names of parameters by their ``id``; None if no module has one of them.

        The names are from the first module that has all of them. If only several modules together
        have them, the names begin with the module's name in the state.
        """
        wanted = {id(one) for one in parameters}
        if self._named is None:
            self._named = [named_parameters(module) for _, module, _ in self._modules]
        for named in self._named:
            if named.keys() >= wanted:
                return named
        together: dict[int, str] = {}
        for (path, *_), named in zip(self._modules, self._named, strict=True):
            for key, name in named.items():
                together.setdefault(key, f"{flat_name(path)}.{name}")
        return together if together.keys() >= wanted else None

    def fsdp_of(
        self, parameters: Iterable[torch.Tensor]
    ) -> tuple[torch.nn.Module, ModuleState] | None:
        """Return the module that FSDP1 shards and that has all these parameters, if any."""
        wanted = {id(one) for one in parameters} if self._sharded else set()
        for module, state, held in self._sharded:
            if wanted <= held:
                return module, state
        return None


class OptimizerState:
    """The state of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Modules) -> None:
        self._optimizer = optimizer
        groups = [list(group[PARAMS]) for group in optimizer.param_groups]
        every = [one for group in groups for one in group]
        found = modules.fsdp_of(every)
        self._fsdp = None if found is None else found[0]
        self._raw: Any = None
        self.shards: dict[Any, torch.Tensor] = {}
        """This rank's part of each parameter, by its key in the state."""
        if found is not None:
            module, state = found
            self.state: Any = _fsdp.optimizer_state(module, optimizer)
            self.shards = dict(state.state)
            return
        self._raw = self.state = optimizer.state_dict()
        if not is_optimizer_state(self._raw) or _keys(self._raw) != list(range(len(every))):
            self._raw = None  # a custom type, which only the optimizer knows
            return
        names = modules.names_of(every)
        if names is not None and len({names[id(one)] for one in every}) == len(every):
            self.state = _renamed(self._raw, [names[id(one)] for one in every])
        self.shards = dict(zip(_keys(self.state), every, strict=True))

    @property
    def is_known(self) -> bool:
        """Whether the state is in the form of torch's optimizers."""
        return self._raw is not None or self._fsdp is not None

    def load(self, state: dict[str, Any]) -> None:
        """Load a state with the keys of ``self.state`` into the optimizer."""
        if self._fsdp is not None:
            _fsdp.load_optimizer(self._fsdp, self._optimizer, state)
        elif self._raw is not None:
            self._optimizer.load_state_dict(_renamed(state, range(len(self.shards))))
        else:
            self._optimizer.load_state_dict(state)


def is_optimizer_state(value: object) -> bool:
    """Return whether a dict is an optimizer's state dict, or the skeleton of one."""
    if not isinstance(value, dict):
        return False
    state, groups = value.get(STATE), value.get(GROUPS)
    return (
        isinstance(state, dict)
        and isinstance(groups, list)
        and all(isinstance(one, dict) and isinstance(one.get(PARAMS), list) for one in groups)
        and all(isinstance(one, dict) for one in state.values())
    )


def _keys(state: dict[str, Any]) -> list[Any]:
    """Return the keys of the parameters, in the order of the groups."""
    return [key for group in state[GROUPS] for key in group[PARAMS]]


def _renamed(state: dict[str, Any], keys: Iterable[Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with other keys of its parameters, in the same order."""
    new = dict(zip(_keys(state), keys, strict=True))
    groups = [{**one, PARAMS: [new[key] for key in one[PARAMS]]} for one in state[GROUPS]]
    of_each = {new.get(key, key): one for key, one in state[STATE].items()}
    return {**state, STATE: of_each, GROUPS: groups}
