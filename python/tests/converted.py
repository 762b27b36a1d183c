"""States and helpers for the tests of conversions."""

import collections
import contextlib
import json
import os
import pickle

import numpy as np
import torch
from safetensors import safe_open

from ringstow._foreign import _pickles


def trained():
    """Return a trainer's state after a step: a model, an optimizer, counters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "name": "naïve",
        "rng": torch.get_rng_state(),
    }


def varied():
    """Return a state with every kind of value that both torch and ringstow keep."""
    weight = torch.randn(30, 4)
    return {
        "tied": [weight, weight],
        "view": weight.t(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5).bfloat16(),
        "fp8": torch.randn(6).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex128),
        "nan": torch.tensor([float("nan"), -0.0]),
        "array": np.arange(5.0),
        "number": np.float32(3),
        "odict": collections.OrderedDict(a=1),
        "tuple": (1, torch.ones(2)),
        "dtype": torch.float32,
        "size": torch.Size([2, 3]),
        3: {"nested": {}},
    }


def saved(state, path):
    torch.save(state, path)
    return path


def plain(state):
    """Return the state with dense tensors, as in the checkpoint."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        copy = type(state)((key, plain(value)) for key, value in state.items())
        vars(copy).update(vars(state)) if hasattr(state, "__dict__") else None
        return copy
    if type(state) in (list, tuple):
        return type(state)(map(plain, state))
    return state


@contextlib.contextmanager
def metadata_of(path):
    """Yield the metadata of a directory of DCP, to be changed."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    yield metadata
    file.write_bytes(pickle.dumps(metadata))


def mild_load(path):
    """Load a torch file without running code from it."""
    return _pickles.unpickled(path)


def read_hf(path):
    """Read a model as transformers does: through the index, or from the single file."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        with safe_open(path / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    listed = json.loads(index.read_text())
    state = {}
    for name, shard in listed["weight_map"].items():
        with safe_open(path / shard, "pt") as file:
            state[name] = file.get_tensor(name)
    assert listed["metadata"] == {"total_size": sum(t.nbytes for t in state.values())}
    return state


class Evil:
    """Creates a directory when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)
