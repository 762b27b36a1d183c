"""Loading torch tensors as numpy arrays, with and without torch."""

import collections
import sys

import numpy as np
import pytest
import torch
from support import assert_same, python

import ringstow


@pytest.fixture
def path(tmp_path):
    shared = torch.arange(6.0).view(2, 3)
    state = {
        "model": collections.OrderedDict(w=shared, tied=shared, flags=torch.tensor([True, False])),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "z": torch.tensor([1 + 2j]),
        "array": np.arange(3, dtype=">i4"),
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
        "device": torch.device("cuda:1"),
        "step": 3,
    }
    ringstow.save(state, tmp_path / "c")
    return tmp_path / "c"


SIX = np.arange(6.0, dtype=np.float32).reshape(2, 3)
EXPECTED = {
    "model": collections.OrderedDict(w=SIX, tied=SIX, flags=np.array([True, False])),
    "empty": np.empty((0, 3), np.float32),
    "scalar": np.array(7),
    "z": np.array([1 + 2j], np.complex64),
    "array": np.arange(3, dtype=">i4"),
    "size": (2, 3),
    "dtype": np.dtype(np.float16),
    "device": "cuda:1",
    "step": 3,
}


def test_torch_tensors_load_as_numpy_arrays(path):
    back = ringstow.load(path, framework="numpy")
    assert_same(back, EXPECTED)
    back["model"]["w"][0, 0] = 9
    assert back["model"]["tied"][0, 0] == 9
    part = ringstow.load(path, keys=["scalar"], framework="numpy")
    assert_same(part, {"scalar": np.array(7)})


def test_unknown_framework_is_refused(path):
    with pytest.raises(ValueError, match='"torch" or "numpy", not \'jax\''):
        ringstow.load(path, framework="jax")
    with pytest.raises(ValueError, match="device"):
        ringstow.load(path, framework="numpy", device="cpu")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np, ringstow
path = sys.argv[1]
w = np.zeros((2, 3), np.float32)
ringstow.load_into({"model": {"w": w}}, path, strict=False)
assert w.tolist() == [[0, 1, 2], [3, 4, 5]]
wide = np.zeros((3, 4), np.float64)
ringstow.load_into({"model": {"w": wide[:2, :3]}}, path, strict=False, cast=True)
assert wide.tolist() == [[0, 1, 2, 0], [3, 4, 5, 0], [0, 0, 0, 0]]
back = ringstow.load(path, framework="numpy")
assert back["model"]["w"].tolist() == w.tolist() and back["size"] == (2, 3)
try:
    ringstow.load(path)
except ringstow.UnsupportedError as error:
    assert 'needs torch' in str(error) and 'framework="numpy"' in str(error), error
else:
    raise AssertionError
print("done")
"""


def test_torch_is_not_needed(path):
    ran = python(WITHOUT_TORCH, path)
    assert ran.stdout == "done\n", ran.stderr


def test_arrays_are_filled_from_tensors_of_any_layout(path):
    state = {
        "scalar": np.zeros((), np.int64),
        "z": np.zeros(1, ">c8"),
        "model": {"w": np.zeros((3, 2), np.float32).T, "flags": np.zeros(2, bool)},
    }
    ringstow.load_into(state, path, strict=False)
    assert state["scalar"] == 7
    assert state["z"][0] == 1 + 2j
    assert state["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["model"]["flags"].tolist() == [True, False]


LOW = {
    "bf": (torch.bfloat16, "bfloat16"),
    "e4": (torch.float8_e4m3fn, "float8_e4m3fn"),
    "e5": (torch.float8_e5m2, "float8_e5m2"),
}


@pytest.fixture
def low(tmp_path):
    ringstow.save({name: torch.ones(4, dtype=dtype) for name, (dtype, _) in LOW.items()}, tmp_path)
    return tmp_path


def test_low_precision_without_ml_dtypes_is_refused(low, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ringstow.UnsupportedError, match="^bf is bfloat16.* install ml_dtypes"):
        ringstow.load(low, framework="numpy")


def test_low_precision_with_ml_dtypes_round_trips(low):
    import ml_dtypes

    back = ringstow.load(low, framework="numpy")
    for name, (_, numpys) in LOW.items():
        assert back[name].dtype == getattr(ml_dtypes, numpys)
        assert back[name].astype(float).tolist() == [1] * 4
    into = {name: np.zeros_like(array) for name, array in back.items()}
    ringstow.load_into(into, low)
    assert all(into[name].tobytes() == array.tobytes() for name, array in back.items())
    wide = {name: np.zeros(4, np.float32) for name in LOW}
    ringstow.load_into(wide, low, cast=True)
    assert all(array.tolist() == [1.0] * 4 for array in wide.values())
