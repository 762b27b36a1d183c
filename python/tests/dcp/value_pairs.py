"""Values, the faces that save them, and the faces that load them."""

from __future__ import annotations

import collections
import copy
import inspect
import warnings

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from value_list import EQUAL, Level, Mode

import ringstow
import ringstow.dcp
import ringstow.distributed

SHARED = (
    *("None", "bool", "large int", "float", "complex", "bytes", "set", "frozenset", "deque"),
    *("numpy scalar", "big-endian array", "torch.Size", "torch.dtype", "torch.device"),
    *("IntEnum", "str Enum", "tuple of tensors"),
)
PLAIN = {name: EQUAL[name]() for name in SHARED} | {
    "bools": [True, False],
    "empty dict": {},
    "empty list": [],
    "empty tuple": (),
    "empty OrderedDict": collections.OrderedDict(),
    "empty Counter": collections.Counter(),
    "nested empty": {"a": {"b": {}}, "c": []},
    "lists of empty": {"a": [{}], "b": [{}, {"x": 1}], "c": [{"x": 1}, {}], "d": [[{}], 1]},
    "int keys": {5: 1, 8: 2},
    "negative int keys": {-1: 1, 0: 2},
    "bool keys": {True: 1, False: 2},
    "float keys": {0.5: 1, 1.0: 2},
    "tuple keys": {(1, "a"): 1, (2,): 2},
    "None key": {None: 1},
    "bytes keys": {b"a": 1},
    "numpy keys": {np.int64(3): 1},
    "Enum keys": {Level.LOW: 1, Mode.TRAIN: 2},
    "dtype keys": {torch.float32: 1},
    "mixed keys": {5: 1, "a": {True: 2}},
    "text of number keys": {"5": 1, "08": 2},
    "nested number keys": {"a": {0: {1: {2: "x"}}}},
    "number keys in a list": [{0: 1}, {"a": {1: 2}}],
    "tensors by number": {0: {"m": torch.arange(3.0)}, 1: {"m": torch.arange(4.0)}},
    "Counter": collections.Counter({5: 1, 8: 1}),
    "Counter of text": collections.Counter("abca"),
    "Counter of numbers as text": collections.Counter({"5": 1}),
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "OrderedDict of tensors": collections.OrderedDict(b=torch.ones(2), a=torch.ones(1)),
    "OrderedDict by number": collections.OrderedDict([(2, 1), (1, [{3: 4}])]),
    "defaultdict": collections.defaultdict(list, {"a": [1], 2: [3]}),
    "defaultdict without a factory": collections.defaultdict(None, {1: 2}),
    "empty defaultdict": collections.defaultdict(int),
    "array": np.arange(6, dtype="<i4").reshape(2, 3),
    "strided array": np.arange(6.0)[::2],
    "array of bool": np.array([True, False]),
    "array of complex": np.array([1j, 2]),
    "array of half": np.ones(3, np.float16),
    "0-d array": np.array(2.5),
    "empty array": np.zeros((0, 3)),
    "arrays": {"a": np.ones(2), "b": [np.ones(1), {"c": np.zeros(3, "u1")}]},
    "numpy ints": [np.int64(1), np.bool_(True)],
    "torch's own": [torch.Size([1, 2]), torch.bfloat16, torch.device("cpu")],
    "list of tensors": [torch.arange(2.0), 1, "a"],
    "list of a tuple": [(1, 2), {"a": (3,)}],
    "0-d tensor": torch.tensor(3.0),
}


def blank(value):
    """Return a value of the same structure, types and keys, with other content."""
    if torch.is_tensor(value):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if type(value) in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = blank(item)
        return made
    if type(value) in (list, tuple):
        return type(value)(map(blank, value))
    if type(value) in (int, float):
        return type(value)(value + 1)
    return value


def optimizer_of(name, steps):
    """Return an optimizer after some steps."""
    make = OPTIMIZERS[name]
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = make(weight)
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = (weight**2).sum()
            loss.backward()
            if isinstance(optimizer, torch.optim.SparseAdam):
                weight.grad = weight.grad.to_sparse()
            return loss

        closure()
        optimizer.step(closure)
    return optimizer


def _named(name, **options):
    kind = getattr(torch.optim, name)
    return lambda weight: kind([weight], **({"lr": 0.1} | options))


OPTIMIZERS = {
    name: _named(name)
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and name not in ("Optimizer", "lr_scheduler")
} | {
    "SGD with momentum": _named("SGD", momentum=0.9),
    "Adam amsgrad": _named("Adam", amsgrad=True),
    "Adam capturable lr": _named("Adam", lr=torch.tensor(0.1)),
}

_lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda o: _lr.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: _lr.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: _lr.StepLR(o, 2),
    "MultiStepLR": lambda o: _lr.MultiStepLR(o, [5, 8, 8]),
    "ConstantLR": _lr.ConstantLR,
    "LinearLR": _lr.LinearLR,
    "ExponentialLR": lambda o: _lr.ExponentialLR(o, 0.9),
    "PolynomialLR": _lr.PolynomialLR,
    "CosineAnnealingLR": lambda o: _lr.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: _lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: _lr.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "OneCycleLR": lambda o: _lr.OneCycleLR(o, 0.2, total_steps=20),
    "ReduceLROnPlateau": lambda o: _lr.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: _lr.ChainedScheduler(
        [_lr.ConstantLR(o), _lr.MultiStepLR(o, [5, 8])], optimizer=o
    ),
    "SequentialLR": lambda o: _lr.SequentialLR(
        o, [_lr.ConstantLR(o, total_iters=2), _lr.MultiStepLR(o, [5, 8])], milestones=[2]
    ),
    "SequentialLR of LambdaLR": lambda o: _lr.SequentialLR(
        o, [_lr.LambdaLR(o, Warm()), _lr.StepLR(o, 2)], milestones=[2]
    ),
    "LambdaLR of an object": lambda o: _lr.LambdaLR(o, Warm()),
    "LambdaLR of an object with state": lambda o: _lr.LambdaLR(o, Warm(3)),
}


class Warm:
    """A rule of LambdaLR, whose attributes are in the state."""

    def __init__(self, steps=None):
        if steps is not None:
            self.steps = steps

    def __call__(self, n):
        return min(1.0, n / 3)


def scheduler_of(name, steps=0):
    """Return a scheduler after some steps, over a new optimizer."""
    optimizer = optimizer_of("SGD with momentum", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = SCHEDULERS[name](optimizer)
        scheduler.optimizer = optimizer
        for _ in range(steps):
            optimizer.step()
            with_loss = isinstance(scheduler, _lr.ReduceLROnPlateau)
            scheduler.step(1.0) if with_loss else scheduler.step()
    return scheduler


def _scaler(steps):
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": steps})
    return scaler.state_dict()


def _values():
    values = {
        name: (lambda v=v: copy.deepcopy(v), lambda v=v: blank(v)) for name, v in PLAIN.items()
    }
    for name in OPTIMIZERS:
        fresh = lambda name=name: optimizer_of(name, 0).state_dict()  # noqa: E731
        done = lambda name=name: optimizer_of(name, 2).state_dict()  # noqa: E731
        values[f"{name} before a step"] = fresh, fresh
        values[f"{name} after a step"] = done, lambda done=done: blank(done())
    for name in SCHEDULERS:
        values[name] = (
            lambda name=name: scheduler_of(name, 4).state_dict(),
            lambda name=name: scheduler_of(name).state_dict(),
        )
    values["GradScaler"] = lambda: _scaler(3), lambda: _scaler(0)
    values["disabled GradScaler"] = (
        lambda: torch.amp.GradScaler("cpu", enabled=False).state_dict(),
    ) * 2
    return values


VALUES = _values()
"""What makes each value, and what a load fills."""


def _dcp_save(state, path, **options):
    dcp.save(state, checkpoint_id=path, **options)
    return path


def _save(state, path):
    ringstow.save(state, path)
    return path


def _distributed_save(state, path):
    ringstow.distributed.save(state, path)
    return path


def _torch_save(state, path):
    torch.save(state, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def _ringstow_dcp_save(state, path, **options):
    return _dcp_save(state, path, storage_writer=ringstow.dcp.StorageWriter(), **options)


SAVERS = {
    "save": _save,
    "distributed.save": _distributed_save,
    "dcp.save": _ringstow_dcp_save,
    "dcp.save, SavePlanner": lambda state, path: _ringstow_dcp_save(
        state, path, planner=ringstow.dcp.SavePlanner()
    ),
    "stock dcp.save": _dcp_save,
    "torch.save": _torch_save,
}
"""What saves a state at a path, and returns the path."""


def _into(load):
    def loaded(path, target):
        load(target, path)
        return target

    return loaded


def _dcp_load(path, target, **options):
    dcp.load(target, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader(), **options)
    return target


def _restore(path, target):
    with ringstow.CheckpointManager(path.parent) as manager:
        restored = manager.restore(into=target)
    return restored.state


LOADERS = {
    "load": lambda path, target: ringstow.load(path),
    "load_into": _into(ringstow.load_into),
    "distributed.load": lambda path, target: ringstow.distributed.load(path),
    "distributed.load_into": _into(ringstow.distributed.load_into),
    "restore()": lambda path, target: _restore(path, None),
    "restore(into=)": _restore,
    "dcp.load": _dcp_load,
    "dcp.load, LoadPlanner": lambda path, target: _dcp_load(
        path, target, planner=ringstow.dcp.LoadPlanner()
    ),
}
