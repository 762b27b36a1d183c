"""What `load`, `load_into` and `open` return of other programs' checkpoints."""

import json
import pathlib
import sys
import types

import forked
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import plain, trained, varied
from safetensors.torch import save_file
from support import assert_same

import ringstow
from ringstow._foreign import _deepspeed
from ringstow.convert import convert

pytestmark = pytest.mark.filterwarnings("ignore:.*before 1.6")

LEFT = pathlib.Path(__file__).parent / "left"
STAGES = ["deepspeed-1", "deepspeed-2", "deepspeed-3", "deepspeed-2bf16"]


def test_missing_pytorch_is_named(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(4)}, tmp_path / "m.pt")
    save_file({"w": torch.ones(4)}, tmp_path / "m.safetensors")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ringstow.UnsupportedError, match=r"m\.pt is a .*pip install torch"):
        ringstow.load(tmp_path / "m.pt")
    arrays = ringstow.load(tmp_path / "m.safetensors", framework="numpy")
    assert arrays["w"].tolist() == [1] * 4


def by_torch(state, at):
    torch.save(state, at / "model.pt")
    return at / "model.pt"


def by_torch_before_1_6(state, at):
    torch.save(state, at / "old.pth", _use_new_zipfile_serialization=False)
    return at / "old.pth"


def by_dcp(state, at):
    dcp.save(state, checkpoint_id=at / "dcp", no_dist=True)
    return at / "dcp"


def same_tensors(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


# A file of torch.save


@pytest.mark.parametrize(
    ("write", "state"),
    [(by_torch, trained), (by_torch, varied), (by_torch_before_1_6, trained)],
)
def test_a_torch_file_loads_as_it_was_saved(at, write, state):
    path = write(state(), at)
    expected = plain(torch.load(path, weights_only=False))
    assert_same(ringstow.load(path), expected)


def test_tied_tensors_of_a_torch_file_stay_tied_and_views_do_not(at):
    whole = torch.arange(12.0)
    state = ringstow.load(by_torch({"a": whole[:4], "b": whole[:4], "c": whole[2:6]}, at))
    state["a"][3] = 9
    assert state["b"][3] == 9
    assert state["c"][1] == 3


def test_a_loaded_state_does_not_depend_on_the_file(at):
    path = by_torch({"w": torch.ones(1000)}, at)
    state = ringstow.load(path)
    path.write_bytes(b"")
    assert state["w"].sum() == 1000


def test_a_part_of_a_torch_file_is_selected_by_its_names(at):
    state = trained()
    path = by_torch(state, at)
    part = ringstow.load(path, prefix="optimizer.state")
    assert_same(part, {"optimizer": {"state": state["optimizer"]["state"]}})
    part = ringstow.load(path, keys=["model.0.bias", "step"])
    assert [*part] == ["model", "step"]
    assert [*part["model"]] == ["0.bias"]
    assert_same(part["model"]["0.bias"], state["model"]["0.bias"])
    assert part["step"] == 7
    with pytest.raises(ringstow.KeyMismatchError, match="perhaps 'model.0.bias'"):
        ringstow.load(path, keys=["model.0.bia"])


def test_a_torch_file_loads_as_arrays(at):
    saved = {"w": torch.arange(3.0), "h": torch.ones(2).bfloat16(), "d": torch.int8}
    state = ringstow.load(by_torch(saved, at), framework="numpy")
    assert_same(state["w"], np.arange(3, dtype=np.float32))
    assert state["h"].dtype.name == "bfloat16"
    assert state["d"] == np.dtype("int8")


@pytest.mark.parametrize("write", [by_torch, by_dcp])
def test_load_into_fills_the_tensors_that_are_there(at, write):
    path = write(trained(), at)
    into = trained()
    tensor = into["model"]["0.weight"]
    for one in into["model"].values():
        one.zero_()
    into["step"] = 0
    strided = into["model"]["0.bias"] = torch.zeros(32)[::2]
    report = ringstow.load_into(into, path)
    assert into["model"]["0.weight"] is tensor
    assert into["model"]["0.bias"] is strided
    assert same_tensors(into["model"], trained()["model"])
    assert into["step"] == 7
    assert report.verified is (write is by_torch)
    assert report.tensors > 4


def test_load_into_changes_nothing_unless_everything_fits(at):
    path = by_torch({"w": torch.ones(3), "v": torch.ones(2)}, at)
    into = {"w": torch.zeros(3), "v": torch.zeros(3)}
    with pytest.raises(ringstow.KeyMismatchError, match="v is F32"):
        ringstow.load_into(into, path)
    assert into["w"].sum() == 0
    into = {"w": torch.zeros(3, dtype=torch.float16)}
    report = ringstow.load_into(into, path, strict=False, cast=True)
    assert into["w"].tolist() == [1, 1, 1]
    assert report.unexpected == ("v",)


def test_open_looks_into_a_torch_file(at):
    weight = torch.randn(6, 5)
    path = by_torch({"model": {"w": weight, "t": weight.t()}, "step": 3, "n": np.arange(4)}, at)
    with ringstow.open(path) as opened:
        assert opened.info.kind == "torch"
        assert opened.info.tensors == 3
        assert {name: (one.dtype, one.shape) for name, one in opened.items()} == {
            "model.w": ("float32", (6, 5)),
            "model.t": ("float32", (5, 6)),
            "n": ("int64", (4,)),
        }
        assert opened.value("step") == 3
        assert torch.equal(opened["model.w"][1:5:2, ::-1], weight[1:5:2].flip(1))
        assert torch.equal(opened["model.t"][2], weight[:, 2])
        assert opened["n"][1:3].tolist() == [1, 2]
        assert opened.tree["model"]["w"].load().equal(weight)


def test_what_is_no_state_dict_is_named(at):
    path = by_torch([torch.ones(1)], at)
    with pytest.raises(ringstow.InvalidStateError, match="holds a list, not a state dict"):
        ringstow.load(path)


# Directories


def test_a_directory_of_dcp_loads_nested_as_it_was_saved(at):
    state = trained()
    loaded = ringstow.load(by_dcp(state, at))
    assert torch.equal(loaded["model"]["0.weight"], state["model"]["0.weight"])
    # DCP's keys are text, and with them an optimizer would silently begin anew.
    assert loaded["optimizer"]["state"].keys() == state["optimizer"]["state"].keys()
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert (loaded["step"], loaded["name"]) == (7, "naïve")


def test_what_lightnings_sharded_strategies_keep_beside_the_shards_is_there(at):
    path = by_dcp({"model": {"w": torch.ones(2)}, "optimizer_0": {}}, at)
    torch.save({"epoch": 1, "global_step": 5, "loops": {}}, path / "meta.pt")
    state = ringstow.load(path)
    assert state["model"]["w"].tolist() == [1, 1]
    assert state["lightning"][0]["global_step"] == 5


@pytest.mark.parametrize("name", ["deepspeed-0", *STAGES])
def test_deepspeeds_files_are_there_as_they_are(name):
    state = ringstow.load(LEFT / name)
    for file in (LEFT / name / "global_step2").glob("*.pt"):
        held = state.pop(file.stem)
        if "model_states" in file.stem:
            expected = torch.load(file, weights_only=True)
            assert_same(held["module"], plain(expected["module"]))
            assert held["epoch"] == 3
        else:
            groups = held["optimizer_state_dict"]
            assert isinstance(groups["loss_scaler"], types.SimpleNamespace)
            assert groups["zero_stage"] == int(name[10])
    assert [*state] == ([] if name.endswith("0") else ["fp32"])


@pytest.mark.parametrize("name", STAGES)
def test_deepspeeds_weights_are_joined_as_its_own_program_joins_them(name):
    expected = torch.load(LEFT / f"{name}.expected", weights_only=True)
    for path in (LEFT / name, LEFT / name / "global_step2"):
        joined = ringstow.load(path, prefix="fp32")["fp32"]
        for key, tensor in expected.items():
            # Its program leaves frozen parameters in the precision of the training.
            assert_same(joined.pop(key), tensor.float() if key == "3.bias" else tensor, key)
        # Its program drops frozen parameters of stage 1.
        assert [*joined] == (["3.bias"] if name == "deepspeed-1" else [])
    assert _deepspeed.weights(str(LEFT / name)).keys() >= expected.keys()


def test_megatrons_tensors_are_whole_and_the_rest_is_there():
    state = ringstow.load(LEFT / "megatron")
    common = state.pop("common")
    assert (common["iteration"], common["args"].params_dtype) == (7, torch.bfloat16)
    assert_same(state.pop("decoder.weight"), torch.arange(8.0).reshape(4, 2))
    assert_same(state.pop("decoder.bias"), torch.full((3,), 0.5, dtype=torch.bfloat16))
    for rank in range(2):
        extra = state.pop(f"decoder._extra_state/shard_{rank}_2")
        assert_same(extra, {"amax": torch.ones(2), "rank": rank})
    assert state == {}


def trainers_folder(at):
    path = at / "checkpoint-500"
    path.mkdir()
    state = trained()
    save_file(state["model"], path / "model.safetensors")
    torch.save(state["optimizer"], path / "optimizer.pt")
    torch.save({"last_epoch": 3}, path / "scheduler.pt")
    rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state()}
    torch.save(rng, path / "rng_state.pth")
    torch.save(Arguments(), path / "training_args.bin")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 500}))
    (path / "config.json").write_text("{}")
    return path, state


class Arguments:
    """Stands for what only pickle can make."""


def test_the_files_of_a_folder_are_parts_by_their_names(at, caplog):
    path, state = trainers_folder(at)
    loaded = ringstow.load(path)
    assert [*loaded] == ["model", "optimizer", "rng_state", "scheduler", "trainer_state"]
    assert loaded["trainer_state"] == {"global_step": 500}
    assert_same(loaded["optimizer"], state["optimizer"])
    assert same_tensors(loaded["model"], state["model"])
    assert "left out training_args.bin" in caplog.text
    with ringstow.open(path) as opened:
        assert opened.info.kind == "trainer"
        assert opened["model.0.weight"].shape == (16, 8)
    everything = ringstow.load(path, allow_pickle=True)
    assert isinstance(everything["training_args"], Arguments)


def test_a_part_of_a_folder_opens_no_other_file(at):
    path, state = trainers_folder(at)
    (path / "optimizer.pt").write_bytes(b"junk")
    loaded = ringstow.load(path, prefix="model")["model"]
    assert torch.equal(loaded["0.weight"], state["model"]["0.weight"])
    with pytest.raises(ringstow.InvalidStateError, match="optimizer.pt was not written by"):
        ringstow.load(path)


def test_a_model_of_several_files_is_one_part(at):
    path, state = trainers_folder(at)
    (path / "model.safetensors").unlink()
    model, names = state["model"], [*state["model"]]
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file({name: model[name] for name in names[:3]}, path / files[0])
    save_file({name: model[name] for name in names[3:]}, path / files[1])
    listed = {name: files[n >= 3] for n, name in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert ringstow.load(path)["model"].keys() == model.keys()
    (path / files[1]).unlink()
    for prefix in (None, "model"):
        with pytest.raises(ringstow.MissingFilesError, match=files[1]):
            ringstow.load(path, prefix=prefix)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_models_directory_and_file_load_flat(at, kind):
    weights = {"a.w": torch.randn(3), "b": torch.ones(2, 2).bfloat16()}
    if kind == "bin":
        torch.save(weights, at / "pytorch_model.bin")
    else:
        save_file(weights, at / "model.safetensors")
        assert_same(ringstow.load(at / "model.safetensors"), weights)
    assert_same(ringstow.load(at), weights)
    assert_same(ringstow.load(at, keys=["b"]), {"b": weights["b"]})
    into = {"a.w": torch.zeros(3), "b": torch.zeros(2, 2).bfloat16()}
    ringstow.load_into(into, at)
    assert_same(into, weights)
    with ringstow.open(at) as opened:
        assert opened["b"].load().sum() == 4


@pytest.mark.parametrize("name", ["deepspeed-2", "megatron"])
def test_convert_reads_it(at, name):
    report = convert(LEFT / name, at / "ckpt")
    assert report.source_kind == name.partition("-")[0]
    assert report.verified
    assert_same(ringstow.load(at / "ckpt"), ringstow.load(LEFT / name))


def test_convert_reads_a_trainers_folder(at):
    path, _ = trainers_folder(at)
    assert convert(path, at / "ckpt").source_kind == "trainer"
    assert_same(ringstow.load(at / "ckpt"), ringstow.load(path))
    assert convert(path, at / "weights", source="hf").tensors == 7


# A trainer's directory to a model


def model_of(path, at, **options):
    report = convert(path, at / "hf", target="hf", overwrite=True, **options)
    found = ringstow.load(at / "hf")
    return found | {name: found[kept] for name, kept in report.tied}


def test_a_trainers_folder_becomes_a_model_without_its_optimizer(at):
    path, state = trainers_folder(at)
    assert same_tensors(model_of(path, at), state["model"])
    (path / "model.safetensors").unlink()
    with pytest.raises(ringstow.KeyMismatchError, match=r"no weights of a model.*optimizer, rng"):
        model_of(path, at)
    found = model_of(path, at, prefix="optimizer.state.0.")
    assert found.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_an_accelerators_directory_becomes_a_model_if_it_holds_one(at):
    weights = {"w": torch.ones(2)}
    (at / "acc").mkdir()
    save_file(weights, at / "acc" / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, at / "acc" / "optimizer.bin")
    torch.save({"step": 3}, at / "acc" / "random_states_0.pkl")
    assert same_tensors(model_of(at / "acc", at), weights)
    save_file(weights, at / "acc" / "model_1.safetensors")
    with pytest.raises(ringstow.KeyMismatchError, match=r"several models: give --prefix.* model\."):
        model_of(at / "acc", at)
    assert same_tensors(model_of(at / "acc", at, prefix="model_1."), weights)


@pytest.mark.parametrize("name", ["deepspeed-0", "deepspeed-2"])
def test_deepspeeds_directory_becomes_a_model_without_its_slices(at, name):
    found = ringstow.load(LEFT / name)
    weights = found.get("fp32") or found["mp_rank_00_model_states"]["module"]
    assert same_tensors(model_of(LEFT / name, at), weights)


def test_a_sharded_checkpoint_of_lightning_becomes_a_model(at):
    optimizer = {"state": {"w": {"exp_avg": torch.ones(2)}}}
    path = by_dcp({"model": {"w": torch.ones(2)}, "optimizer_0": optimizer}, at)
    torch.save({"epoch": 1}, path / "meta.pt")
    assert same_tensors(model_of(path, at), {"w": torch.ones(2)})


def test_any_other_state_becomes_a_model_without_its_optimizer(at, caplog):
    state = trained()
    path = by_torch({**state, "optimizer_head": {"w": torch.ones(1)}}, at)
    found = model_of(path, at)
    expected = {f"model.{name}" for name in state["model"]} | {"rng", "optimizer_head.w"}
    assert found.keys() == expected
    assert "a model has no optimizer: optimizer is left out; --prefix" in caplog.text
    path = by_torch({"optimizer": state["optimizer"]}, at)
    with pytest.raises(ringstow.KeyMismatchError, match="not an optimizer's; there are opt"):
        model_of(path, at)


def test_the_program_shows_what_another_program_left(at):
    ran = forked.ringstow("show", LEFT / "megatron", check=True)
    for text in ("kind     megatron", "weight  float32  [4, 2]  32 B", "common.iteration  7"):
        assert text in ran.stdout
    shown = json.loads(forked.ringstow("show", "--json", LEFT / "deepspeed-3").stdout)
    assert shown["kind"] == "deepspeed"
    assert shown["values"]["zero_pp_rank_0_mp_rank_00_model_states.epoch"] == "3"
    ringstow.save({"w": torch.ones(2)}, at / "ours")
    assert "written by" in forked.ringstow("show", at / "ours").stdout
    (at / "x.pt").write_bytes(b"PK\x03\x04")
    ran = forked.ringstow("show", at / "x.pt")
    assert (ran.returncode, "cut short" in ran.stderr) == (1, True)
    assert forked.ringstow("show", at / "gone").returncode == 2
    ran = forked.ringstow("ls", LEFT / "deepspeed-3")
    assert "holds 1 of other programs" in ran.stderr
    assert "global_step2 (deepspeed)" in ran.stderr
    assert forked.ringstow("verify", LEFT / "deepspeed-1.expected").returncode == 2
