"""Directories of models with several files of weights: the ones that from_pretrained takes."""

import json
import pickle
import tarfile

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support import logged

import ringstow
from ringstow.convert import convert

INDEX = "model.safetensors.index.json"
READS = (ringstow.load, ringstow.open, lambda path: convert(path, path.parent / "to"))


def weights(number):
    return {"w": torch.full((3,), float(number)), "b": torch.full((2,), float(number))}


def put(at, name, number):
    """Write weights of a number under a name."""
    save = save_file if name.endswith(".safetensors") else torch.save
    save(weights(number), at / name)


def put_shards(at, number, count=2, *, stem="model", index=INDEX):
    names = [f"{stem}-0000{n}-of-0000{count}.safetensors" for n in range(1, count + 1)]
    held = weights(number) | {f"more-{n}": torch.full((1,), float(number)) for n in range(2, count)}
    listed = dict(zip(held, names, strict=True))
    for name, file in listed.items():
        save_file({name: held[name]}, at / file)
    if index:
        (at / index).write_text(json.dumps({"weight_map": listed}))
    return names


def taken(at):
    """Return the number of the weights that every way to read a directory takes."""
    convert(at, at.parent / "ckpt", overwrite=True)
    found = [ringstow.load(at), ringstow.load(at.parent / "ckpt")]
    with ringstow.open(at) as opened:
        found.append({name: one.load() for name, one in opened.items()})
    numbers = {value for one in found for tensor in one.values() for value in tensor.tolist()}
    assert {tuple(sorted(one)) for one in found} == {("b", "w")}
    (number,) = numbers
    return number


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors", "model.fp16.safetensors"],
        ["model.safetensors", "model.fp16.safetensors", "model.non_ema.safetensors"],
        ["model.safetensors", "pytorch_model.bin"],
        ["model.safetensors", "consolidated.safetensors"],
        ["model.safetensors", "adapter_model.safetensors"],
        ["pytorch_model.bin", "pytorch_model.fp16.bin"],
        ["pytorch_model.bin", "model.fp16.safetensors"],
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"],
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"],
        ["diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin"],
        ["adapter_model.safetensors", "adapter_model.bin"],
        ["model.fp16.safetensors", "notes.safetensors"],
    ],
)
def test_the_first_file_that_from_pretrained_looks_for_is_read_alone(model, names):
    for number, name in enumerate(names):
        put(model, name, number)
    assert taken(model) == 0


@pytest.mark.parametrize("index", [INDEX, None])
def test_a_single_file_goes_before_shards_and_their_index(model, index):
    put(model, "model.safetensors", 1)
    first, *_ = put_shards(model, 2, index=index)
    assert taken(model) == 1
    (model / first).unlink()  # a stale set, or a stale index, is of no matter
    assert taken(model) == 1


def test_diffusers_looks_for_the_index_first(model):
    stem = "diffusion_pytorch_model"
    put(model, f"{stem}.safetensors", 1)
    put(model, f"{stem}.fp16.safetensors", 3)
    put_shards(model, 2, stem=stem, index=f"{stem}.safetensors.index.json")
    assert taken(model) == 2


def test_an_index_goes_before_shards_of_an_earlier_save_and_variants(model):
    put_shards(model, 4, stem="model.fp16", index="model.safetensors.index.fp16.json")
    assert taken(model) == 4  # a variant in shards, if it is all there is
    put_shards(model, 1, 3, index=None)
    put_shards(model, 2)
    put(model, "model.fp16.safetensors", 3)
    assert taken(model) == 2


def test_several_variants_without_a_plain_one_are_named(model):
    for name in ("model.fp16.safetensors", "model.non_ema.safetensors"):
        put(model, name, 1)
    for read in READS:
        with pytest.raises(ringstow.InvalidStateError, match=r"fp16, non_ema.*model\.fp16\.safe"):
            read(model)
    assert ringstow.load(model / "model.fp16.safetensors").keys() == {"w", "b"}


def test_a_stale_index_is_named_with_the_files_that_it_does_not_list(model):
    listed = put_shards(model, 1, 3)
    for name in listed:
        (model / name).unlink()
    newer = put_shards(model, 2, index=None)
    for read in READS:
        with pytest.raises(ringstow.MissingFilesError, match="index is of an earlier") as caught:
            read(model)
        assert newer[0] in str(caught.value)
    (model / INDEX).unlink()
    assert taken(model) == 2


def test_an_index_that_lists_tensors_in_other_files_is_read_as_from_pretrained_does(model):
    put_shards(model, 1)
    listed = json.loads((model / INDEX).read_text())
    first, second = listed["weight_map"].values()
    listed["weight_map"] = {"w": second, "b": first}
    (model / INDEX).write_text(json.dumps(listed))
    assert taken(model) == 1
    listed["weight_map"] |= {"gone": first}
    (model / INDEX).write_text(json.dumps(listed))
    with pytest.raises(ringstow.MissingFilesError, match="gone"):
        ringstow.load(model)


def test_a_trainers_folder_has_the_weights_that_its_program_takes(model):
    (model / "trainer_state.json").write_text("{}")
    put(model, "model.safetensors", 1)
    put(model, "pytorch_model.bin", 2)
    put_shards(model, 3)
    put(model, "adapter_model.safetensors", 4)
    put(model, "adapter_model.bin", 5)
    found = ringstow.load(model)
    assert [*found] == ["adapter_model", "model", "trainer_state"]
    assert found["model"]["w"][0] == 1
    assert found["adapter_model"]["w"][0] == 4


def test_an_unfinished_export_beside_older_weights_is_still_refused(model):
    put(model, "model.safetensors", 1)
    put_shards(model, 2, index=None)
    (model / f"{INDEX}.part").write_text("{}")
    with pytest.raises(ringstow.IncompleteCheckpointError):
        ringstow.load(model)


# Files that stand for others


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("names", "path"),
    [
        (["model.safetensors"], "."),
        (["model-00001-of-00001.safetensors"], "."),
        (["model.safetensors", "model.fp16.safetensors"], "."),
        ([INDEX], "."),
        (["pytorch_model.bin"], "."),
        (["model.safetensors", "trainer_state.json"], "."),
        (["x.pt"], "x.pt"),
        (["x.ckpt"], "x.ckpt"),
        (["x.safetensors"], "x.safetensors"),
        ([".metadata", "__0_0.distcp"], "."),
    ],
)
def test_a_pointer_of_git_lfs_is_called_one(model, names, path):
    for name in names:
        (model / name).write_text(POINTER)
    if INDEX in names:
        put_shards(model, 1, index=None)
    for read in (*READS, lambda path: ringstow.load(path, allow_pickle=True)):
        with pytest.raises(ringstow.MissingFilesError, match="Git LFS pointer.*git lfs pull"):
            read(model / path)


def test_a_shard_of_dcp_that_is_a_pointer_is_called_one(tmp_path):
    state = {"w": torch.ones(4)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    shard.write_text(POINTER)
    with pytest.raises(ringstow.MissingFilesError, match=r"distcp is a Git LFS pointer"):
        ringstow.load(tmp_path / "dcp")


def test_a_tar_archive_that_torch_did_not_write_is_no_old_torch_file(tmp_path):
    torch.save(weights(1), tmp_path / "model.pt")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "model.pt", "model.pt")
        archive.add(tmp_path / "model.pt", "storages")
    match = r"x\.tar is a tar archive, and not by torch.save: it holds model.pt, storages"
    with pytest.raises(ringstow.InvalidStateError, match=match):
        ringstow.load(tmp_path / "x.tar")
    with pytest.raises(ringstow.InvalidStateError, match=match):
        convert(tmp_path / "x.tar", tmp_path / "to", allow_pickle=True)


def test_a_tar_archive_by_an_old_torch_needs_pickle(tmp_path):
    none, state = pickle.dumps(0, 2), pickle.dumps({"a": 5}, 2)
    held = {"sys_info": none, "storages": none + pickle.dumps([], 2), "tensors": none}
    for name, data in {**held, "pickle": state}.items():
        (tmp_path / name).write_bytes(data)
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.add(tmp_path / name, name)
    match = r"torch before 0\.1\.10.*allow_pickle=True"
    with pytest.raises(ringstow.UnsupportedError, match=match):
        ringstow.load(tmp_path / "old.tar")
    with pytest.warns(UserWarning, match="before 1.6"):
        assert ringstow.load(tmp_path / "old.tar", allow_pickle=True) == {"a": 5}


def test_a_web_page_in_place_of_a_file_is_called_one(tmp_path):
    """As a download leaves it that needs a login."""
    (tmp_path / "model.safetensors").write_text("<!DOCTYPE html><html><body>Log in</body></html>")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ringstow.FormatError, match="begins like a web page.*download it again"):
            ringstow.load(path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ringstow.FormatError, match="first 8 bytes are not the length of a header"):
        ringstow.load(tmp_path)


def test_one_file_of_several_is_loaded_with_a_warning(tmp_path):
    for number in (1, 2):
        path = tmp_path / f"model-{number:05}-of-00002.safetensors"
        save_file({f"w{number}": torch.ones(2)}, path)
    with logged("reading file 1 of 2, which holds a part of the model") as said:
        assert ringstow.load(tmp_path / "model-00001-of-00002.safetensors")
        assert len(said) == 1
        ringstow.load(tmp_path)
    assert len(said) == 1


def test_ls_says_that_a_directory_is_a_model(tmp_path):
    save_file(weights(1), tmp_path / "model.safetensors")
    told = forked.ringstow("ls", tmp_path).stdout
    for text in ("no checkpoints of ringstow's", "safetensors", "`ringstow show`"):
        assert text in told
