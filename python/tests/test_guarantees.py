"""tools/guarantees.py flips one bit of a tensor, and finds pickles."""

import pickle

import guarantees
import torch


def test_one_bit_of_a_tensor_flips(tmp_path):
    state = {str(one): torch.ones(250_000) for one in range(guarantees.TENSORS)}
    file = tmp_path / "state.pt"
    torch.save(state, file)
    before = file.read_bytes()
    guarantees._flip(file)
    changed = [a ^ b for a, b in zip(before, file.read_bytes(), strict=True) if a != b]
    assert changed == [1]
    loaded = torch.load(file)
    assert sum(not torch.equal(loaded[key], tensor) for key, tensor in state.items()) == 1


def test_pickles_are_found(tmp_path):
    torch.save({}, tmp_path / "zip")
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "json").write_text("{}")
    found = {path.name: guarantees._is_pickle(path) for path in (*tmp_path.iterdir(), tmp_path)}
    assert found == {"zip": True, "pickle": True, "json": False, tmp_path.name: False}
