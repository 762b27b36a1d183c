"""State dicts for the tests, and comparisons."""

import copy

import torch
import torch.distributed.checkpoint as dcp

import ringstow.dcp


def every_kind():
    """Return a state with tensors of every shape, stride and dtype, and with objects."""
    floats = torch.arange(24.0).reshape(4, 6)
    return {
        "model": {
            "dense": floats.clone(),
            "transposed": floats.clone().t(),
            "column": floats.clone()[:, 2:5],
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "conj": torch.complex(floats, -floats).conj(),
            "neg": torch.complex(floats, -floats).conj().imag,
            "expanded": torch.arange(3.0).expand(2, 3),
            "parameter": torch.nn.Parameter(floats.clone()),
        },
        "dtypes": {
            str(dtype).removeprefix("torch."): torch.ones(2, 3).to(dtype)
            for dtype in (
                *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16),
                *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn),
                torch.float8_e5m2,
            )
        },
        "optimizer": {
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "params": [0, 1]}],
            "state": [{"step": torch.tensor(3.0)}, {"step": torch.tensor(4.0)}],
        },
        "$odd": {"$key": 1, "none": None, "text": "ü", "raw": b"\0\1"},
        "steps": 7,
    }


def blank(value):
    """Return a state of the same structure with none of the values."""
    if isinstance(value, torch.Tensor):
        if value.dtype.itemsize == 1 or value.dtype == torch.bool:
            return torch.empty(value.shape, dtype=torch.uint8).fill_(255).view(value.dtype)
        return torch.full(value.shape, -1, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return None if value is not None else 5


def plain(value):
    """Return the state with its tensors as a load returns them: dense, and without Parameters."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().contiguous().resolve_conj().resolve_neg()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return copy.deepcopy(value)


def load(path, state, **options):
    """Load into a blank state of the same structure and return it."""
    target = blank(state)
    dcp.load(target, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader(), **options)
    return target
