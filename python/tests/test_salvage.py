"""A damaged checkpoint: verify names the lost tensors, and a load can return all others."""

import collections
import dataclasses
import functools
import warnings

import numpy as np
import pytest
import torch
from support import assert_same, flip, manifest_of

import ringstow

CONFIG = ringstow.Config(block_bytes=4096, pool_bytes=64 << 10)
FILES = ringstow.Config(block_bytes=4096, pool_bytes=64 << 10, shard_bytes=40 << 10)


@dataclasses.dataclass
class Ema:
    decay: float
    weight: torch.Tensor


def state_of():
    def big(n):
        return torch.full((4096,), float(n))

    return {
        "model": collections.OrderedDict(a=big(1), b=big(2)),
        "optimizer": {"state": {0: {"exp_avg": big(3), "step": 5}}},
        "list": [big(4), "text", big(5)],
        "pair": (big(6), 7),
        "default": collections.defaultdict(list, x=big(8)),
        "ema": Ema(0.9, big(9)),
        "array": np.full(4096, 10.0),
        "step": 7,
    }


NAMES = {
    "model.b": ("model", "b"),
    "optimizer.state.0.exp_avg": ("optimizer", "state", 0, "exp_avg"),
    "array": ("array",),
}


@pytest.fixture
def path(tmp_path):
    ringstow.save(state_of(), tmp_path / "c", config=CONFIG)
    return tmp_path / "c"


def place_of(path, name):
    """Return the file and offset of a tensor's first byte."""
    manifest = manifest_of(path)
    (entry,) = [entry for entry in manifest["tensors"] if entry["name"] == name]
    chunk = entry["chunks"][0]
    return path / manifest["files"][chunk["file"]]["name"], chunk["begin"]


def damage(path, *names):
    """Flip a byte of each tensor in a checksum chunk that holds no other tensor."""
    for name in names:
        file, begin = place_of(path, name)
        flip(file, begin + 8000)


def salvage(path, **options):
    with pytest.warns(ringstow.CorruptCheckpointWarning) as caught:
        loaded = ringstow.load(path, on_corrupt="skip", **options)
    (warning,) = caught
    assert warning.filename == __file__
    for item in loaded.damaged:
        assert repr(item.name) in str(warning.message)
        assert item.file in str(warning.message)
    return loaded


def names(loaded):
    return [item.name for item in loaded.damaged]


def test_the_error_names_the_tensor(path):
    damage(path, "model.b")
    with pytest.raises(ringstow.CorruptCheckpointError, match=r"model\.b") as caught:
        ringstow.load(path)
    assert caught.value.tensors == ["model.b"]
    with ringstow.open(path) as checkpoint:
        with pytest.raises(ringstow.CorruptCheckpointError, match=r"model\.b"):
            checkpoint["model.b"].load()
        with pytest.raises(ringstow.CorruptCheckpointError, match=r"model\.b"):
            checkpoint["model.b"][1990:2010]
        assert checkpoint["model.a"][0] == 1


def test_an_intact_checkpoint_loads_whole_and_without_a_warning(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = ringstow.load(path, on_corrupt="skip")
    assert loaded.damaged == ()
    assert isinstance(loaded, ringstow.Salvaged)
    assert_same(dict(loaded), state_of())


@pytest.mark.parametrize("name", NAMES)
def test_a_dict_lacks_the_key_of_what_is_damaged(path, name):
    damage(path, name)
    loaded = salvage(path)
    assert names(loaded) == [name]
    expected = state_of()
    *above, last = NAMES[name]
    holder = expected
    for key in above:
        holder = holder[key]
    del holder[last]
    assert_same(dict(loaded), expected)


def test_containers_hold_the_name_of_a_lost_item(path):
    damage(path, "list.2", "pair.0", "default.x", "ema.weight")
    loaded = salvage(path)
    places = {
        "list.2": loaded["list"][2],
        "pair.0": loaded["pair"][0],
        "default.x": loaded["default"]["x"],
        "ema.weight": loaded["ema"].weight,
    }
    assert sorted(names(loaded)) == sorted(places)
    for name, item in places.items():
        assert isinstance(item, ringstow.DamagedTensor)
        assert item.name == name
        assert name in repr(item)
        assert "crc32" in item.why
    assert_same(loaded["list"][0], state_of()["list"][0])
    assert loaded["list"][1] == "text"
    assert loaded["pair"][1] == 7
    assert loaded["ema"].decay == 0.9


def test_salvaged_state_saves_as_a_dict(path, tmp_path):
    damage(path, "model.b")
    loaded = salvage(path)
    for number, save in enumerate((ringstow.save, lambda *to: ringstow.save_async(*to).result())):
        save(loaded, tmp_path / f"new-{number}")
        assert_same(ringstow.load(tmp_path / f"new-{number}"), dict(loaded))
    ringstow.save({"nested": [loaded]}, tmp_path / "nested")
    assert_same(ringstow.load(tmp_path / "nested"), {"nested": [dict(loaded)]})
    loaded[7] = "by number"
    ringstow.save({"nested": loaded}, tmp_path / "numbers")
    assert_same(ringstow.load(tmp_path / "numbers"), {"nested": dict(loaded)})


def test_salvaged_module_keeps_its_metadata(tmp_path):
    """Without it, load_state_dict migrates the state as one of an old version."""
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(4096))
    state = module.state_dict()
    state._metadata["0"]["extra"] = torch.full((4096,), 3.0)
    ringstow.save(state, tmp_path / "c", config=CONFIG)
    damage(tmp_path / "c", "0.weight", "_metadata.0.extra")
    salvaged = salvage(tmp_path / "c")
    assert names(salvaged) == ["0.weight", "_metadata.0.extra"]
    del state["0.weight"], state._metadata["0"]["extra"]
    assert salvaged._metadata == state._metadata
    ringstow.save(salvaged, tmp_path / "again")
    assert_same(ringstow.load(tmp_path / "again"), state)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_save_of_a_lost_tensor_says_to_put_a_value_there(path, tmp_path, allow_pickle):
    damage(path, "list.0")
    loaded = salvage(path)
    with pytest.raises(ringstow.InvalidStateError, match="lost; put a value in its pl") as caught:
        ringstow.save(loaded, tmp_path / "newer", allow_pickle=allow_pickle)
    assert "list" in str(caught.value)
    assert "allow_pickle" not in str(caught.value)


def test_partial_load_ignores_damage_elsewhere(path):
    damage(path, "model.b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = ringstow.load(path, prefix="list", on_corrupt="skip")
    assert loaded.damaged == ()
    assert names(salvage(path, prefix="model")) == ["model.b"]
    assert dict(salvage(path, keys=["model.b"])) == {"model": {}}
    assert names(salvage(path, framework="numpy")) == ["model.b"]


def test_tied_tensors_are_missing_under_every_name(tmp_path):
    weight = torch.ones(4096)
    ringstow.save({"a": weight, "b": weight, "c": torch.ones(3)}, tmp_path / "c", config=CONFIG)
    damage(tmp_path / "c", "a")
    assert list(salvage(tmp_path / "c")) == ["c"]


def test_open_reads_what_is_there_of_a_checkpoint_with_missing_files(tmp_path, caplog):
    path = tmp_path / "c"
    ringstow.save(state_of(), path, config=FILES)
    file, _ = place_of(path, "list.0")
    file.unlink()
    report = ringstow.verify(path)
    lost = report.damaged_tensors
    assert report.problem
    assert set(names(salvage(path))) == set(lost)
    with ringstow.open(path) as ckpt:
        assert file.name in caplog.text
        assert len(ckpt) == 9
        assert ckpt.value("step") == 7
        for name, entry in ckpt.items():
            if name in lost:
                with pytest.raises(ringstow.MissingFilesError):
                    entry.load()
                with pytest.raises(ringstow.MissingFilesError):
                    entry[:3]
            else:
                assert entry.load() is not None


def lost_of(state):
    return state["model"]["b"], state["list"][0], state["pair"][0], state["ema"].weight


def test_load_into_keeps_targets_of_damaged_tensors(path):
    damage(path, "model.b", "list.0", "pair.0", "ema.weight")
    state = state_of()
    for value in (*lost_of(state), state["model"]["a"], state["list"][2]):
        value.fill_(-1)
    state["step"] = 0
    with pytest.warns(ringstow.CorruptCheckpointWarning, match=r"model\.b"):
        report = ringstow.load_into(state, path, on_corrupt="skip")
    assert sorted(names(report)) == ["ema.weight", "list.0", "model.b", "pair.0"]
    assert (report.missing, report.unexpected) == ((), ())
    expected = state_of()
    for value in lost_of(expected):
        value.fill_(-1)
    assert_same(state, expected)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(4096, dtype=torch.int64), np.zeros(3, np.float32), {}]
)
def test_load_into_compares_damaged_tensors_before_anything_changes(path, wrong):
    damage(path, "model.b")
    state = state_of()
    state["model"]["a"].fill_(-1)
    state["model"]["b"] = wrong
    with pytest.raises(ringstow.KeyMismatchError, match=r"model\.b") as caught:
        ringstow.load_into(state, path, on_corrupt="skip")
    assert len(caught.value.mismatched) == 1
    assert (state["model"]["a"] == -1).all()


def test_load_into_keeps_values_with_damaged_parts(path):
    damage(path, "list.0", "array")
    state = {**state_of(), "list": ["mine"], "array": None}
    with pytest.warns(ringstow.CorruptCheckpointWarning):
        ringstow.load_into(state, path, on_corrupt="skip")
    assert state["list"] == ["mine"]
    assert state["array"] is None


@pytest.mark.parametrize("load", [ringstow.load, functools.partial(ringstow.load_into, state_of())])
def test_a_warning_points_at_the_line_of_the_call(path, load):
    damage(path, "model.b")
    with pytest.warns(ringstow.CorruptCheckpointWarning) as caught:
        load(path, on_corrupt="skip")
    (warning,) = caught
    code = test_a_warning_points_at_the_line_of_the_call.__code__
    lines = {line for _, _, line in code.co_lines()}
    assert warning.filename == __file__
    assert warning.lineno in lines


def test_wrong_choices_are_refused(path):
    with pytest.raises(ValueError, match="on_corrupt"):
        ringstow.load(path, on_corrupt="ignore")
    with pytest.raises(ValueError, match="verify=True"):
        ringstow.load(path, on_corrupt="skip", verify=False)
    with pytest.raises(ValueError, match="verify=True"):
        ringstow.load_into({}, path, on_corrupt="skip", verify=False)


def test_an_empty_manifest_is_called_empty(path):
    (path / "manifest.json").write_bytes(b"")
    with pytest.raises(
        ringstow.CorruptCheckpointError, match="length in bytes should be more than"
    ):
        ringstow.load(path, config=CONFIG)
