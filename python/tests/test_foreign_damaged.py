"""Other programs' checkpoints that are hostile, damaged or unfinished: nothing of them runs."""

import os
import pathlib
import shutil

import forked
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import Evil, metadata_of
from safetensors.torch import save_file
from support import flip
from torch.distributed.checkpoint.planner import WriteItemType

import ringstow
from ringstow.convert import convert

LEFT = pathlib.Path(__file__).parent / "left"


def open_all(path):
    with ringstow.open(path) as opened:
        return {name: one.load() for name, one in opened.items()}


def convert_it(path):
    """Convert it; a conversion that is refused leaves nothing."""
    try:
        convert(path, path.parent / "converted", overwrite=True)
    except Exception:
        assert not (path.parent / "converted").exists()
        raise


def into_nothing(path):
    ringstow.load_into({}, path, strict=False)


READS = [ringstow.load, open_all, into_nothing]


def refused(path, kind, match, *others):
    """Assert that no way to read a checkpoint does, and that each says why."""
    for read in (*READS, *others):
        with pytest.raises(kind, match=match) as caught:
            read(path)
        assert str(path) in str(caught.value)


def refused_file(at, state, kind, match):
    """Assert that a file of torch.save with this state is refused."""
    torch.save(state, at / "x.pt")
    refused(at / "x.pt", kind, match)


def left(at, name):
    return shutil.copytree(LEFT / name, at / name)


# Hostile


@pytest.mark.parametrize("how", ["file", "folder", "deepspeed", "lightning", "metadata", "object"])
def test_a_hostile_pickle_is_refused_and_does_not_run(at, how):
    evil = {"w": torch.ones(1), "evil": Evil(at / "mark")}
    path = at / "ckpt"
    if how == "file":
        path = at / "x.pt"
        torch.save(evil, path)
    elif how == "folder":
        path.mkdir()
        (path / "trainer_state.json").write_text("{}")
        torch.save(evil, path / "optimizer.pt")
    elif how == "deepspeed":
        path = left(at, "deepspeed-2")
        torch.save(evil, path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    else:
        state = evil if how == "object" else {"w": torch.ones(1)}
        dcp.save(state, checkpoint_id=path, no_dist=True)
        if how == "metadata":
            with metadata_of(path) as metadata:
                metadata.planner_data = Evil(at / "mark")
        if how == "lightning":
            torch.save(evil, path / "meta.pt")
    refused(path, ringstow.UnsupportedError, "allow_pickle=True", convert_it)
    assert not (at / "mark").exists()


def test_a_trusted_pickle_loads_when_allowed(at):
    refused_file(at, {"f": max}, ringstow.UnsupportedError, "allow_pickle")
    assert ringstow.load(at / "x.pt", allow_pickle=True) == {"f": max}


def test_names_that_lead_out_of_the_directory_are_refused(at):
    save_file({"w": torch.ones(1)}, at / "outside.safetensors")
    path = at / "ckpt"
    path.mkdir()
    (path / "trainer_state.json").write_text("{}")
    listed = '{"weight_map": {"w": "../outside.safetensors"}}'
    (path / "model.safetensors.index.json").write_text(listed)
    refused(path, ringstow.FormatError, "not a file in its directory")
    run = left(at, "deepspeed-1")
    (run / "latest").write_text("../ckpt")
    refused(run, ringstow.NoCheckpointError, "nothing was saved here")


def test_a_pipe_in_place_of_a_file_is_refused_at_once(at):
    os.mkfifo(at / "x.pt")
    with pytest.raises(NotADirectoryError):
        ringstow.load(at / "x.pt")
    dcp.save({"w": torch.ones(1)}, checkpoint_id=at / "dcp", no_dist=True)
    (data,) = (at / "dcp").glob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    refused(at / "dcp", ringstow.FormatError, "not a regular file")


def test_links_are_followed_as_in_the_hubs_cache_and_a_loop_is_an_error(at):
    torch.save({"w": torch.ones(1)}, at / "blob")
    (at / "model.pt").symlink_to(at / "blob")
    assert ringstow.load(at / "model.pt")["w"].tolist() == [1]
    (at / "loop.pt").symlink_to(at / "loop.pt")
    with pytest.raises(OSError, match=r"loop\.pt"):
        ringstow.load(at / "loop.pt")


# Damaged


def test_a_file_of_another_program_is_named(at):
    (at / "x.pt").write_bytes(b"hello, this is no checkpoint")
    refused(at / "x.pt", ringstow.InvalidStateError, "not written by torch.save")
    (at / "x.txt").write_bytes(b"hello, this is no checkpoint")
    refused(at / "x.txt", NotADirectoryError, "a checkpoint is a directory")


def test_a_changed_byte_of_a_tensor_is_found_when_it_is_read(at):
    torch.save({"a": torch.zeros(5000), "b": torch.ones(5000)}, at / "x.pt")
    flip(at / "x.pt", (at / "x.pt").read_bytes().index(torch.ones(9).numpy().tobytes()) + 400)
    assert ringstow.load(at / "x.pt", keys=["a"])["a"].sum() == 0
    for read in (ringstow.load, open_all, convert_it):
        with pytest.raises(ringstow.CorruptCheckpointError, match="checksum"):
            read(at / "x.pt")
    ringstow.load(at / "x.pt", verify=False)


def test_a_changed_byte_of_a_slice_is_found_before_it_is_joined(at):
    path = left(at, "deepspeed-2")
    file = path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = ringstow.load(file)
    vector = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    flip(file, file.read_bytes().index(vector.numpy().tobytes()))
    with pytest.raises(ringstow.CorruptCheckpointError, match="checksum"):
        ringstow.load(path, prefix="fp32")


@pytest.mark.parametrize("cut", [4, 20, 200])
def test_a_cut_safetensors_file_is_damaged(at, cut):
    save_file({"w": torch.ones(100)}, at / "x.safetensors")
    os.truncate(at / "x.safetensors", cut)
    refused(at / "x.safetensors", ringstow.CorruptCheckpointError, "safetensors|cut short")


@pytest.mark.parametrize("change", ["remove", "truncate"])
def test_a_missing_or_cut_file_of_dcp_is_named(at, change):
    dcp.save({"w": torch.randn(50_000)}, checkpoint_id=at / "dcp", no_dist=True)
    (data,) = (at / "dcp").glob("*.distcp")
    if change == "remove":
        data.unlink()
        refused(at / "dcp", ringstow.MissingFilesError, data.name, convert_it)
    else:
        os.truncate(data, data.stat().st_size // 2)
        for read in (ringstow.load, open_all, convert_it):
            with pytest.raises(ringstow.CorruptCheckpointError, match="cut short"):
                read(at / "dcp")


@pytest.mark.parametrize("name", ["deepspeed-1", "deepspeed-3"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_file_of_a_deepspeed_rank_is_named(at, name, rank):
    path = left(at, name)
    (path / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    refused(path, ringstow.MissingFilesError, f"zero_pp_rank_{rank}_")


def test_slices_that_do_not_fit_are_refused(at):
    path = left(at, "deepspeed-2")
    tag = path / "global_step2"
    state = ringstow.load(tag / "mp_rank_00_model_states.pt")
    state["param_shapes"][0]["0.weight"] = torch.Size([50, 4])
    torch.save(state, tag / "mp_rank_00_model_states.pt")
    refused(path, ringstow.FormatError, "elements")


# Unfinished, or of a format that is not read


@pytest.mark.parametrize(
    ("names", "program", "last"),
    [
        (["model.safetensors", "optimizer.pt", "scheduler.pt"], "Trainer", "trainer_state.json"),
        (["model.safetensors", "optimizer.bin"], "Accelerate", "random_states_0.pkl"),
        (["metadata.json", "common.pt", "__0_0.distcp"], "Megatron-Core", ".metadata"),
    ],
)
def test_a_save_that_has_not_ended_is_named_with_its_program(at, names, program, last):
    for name in names:
        (at / name).write_text('{"sharded_backend": "torch_dist"}')
    refused(at, ringstow.NotCommittedError, f"{program}.* lacks {last}")
    with pytest.raises(ringstow.NotCommittedError):
        convert(at, at.parent / "to")


def test_megatrons_other_backends_are_named(at):
    (at / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    refused(at, ringstow.UnsupportedError, "'zarr'.*--dist-ckpt-format torch_dist")


def test_sparse_and_quantized_tensors_are_named(at):
    sparse = {"m": {"s": torch.eye(3).to_sparse()}}
    refused_file(at, sparse, ringstow.UnsupportedError, r"m\['s'\] is sparse")


def test_damage_cannot_be_skipped(at):
    torch.save({"w": torch.ones(1)}, at / "x.pt")
    with pytest.raises(ringstow.UnsupportedError, match="on_corrupt"):
        ringstow.load(at / "x.pt", on_corrupt="skip")


# Memory


BOUNDED = """
import resource, sys
import ringstow, torch
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
ringstow.load(sys.argv[1])
before = peak()
path = sys.argv[2]
if sys.argv[3] == "one":
    ringstow.load(path, keys=["w7"])
    with ringstow.open(path) as opened:
        opened["w9"][3:5]
else:
    into = {f"w{n}": torch.zeros(256, 1024) for n in range(100)}
    before = peak()
    ringstow.load_into(into, path, verify=False)
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("what", ["one", "into"])
def test_a_load_needs_no_second_copy(at, kind, what):
    for name, count in (("small", 2), ("big", 100)):
        state = {f"w{n}": torch.randn(256, 1024) for n in range(count)}
        if kind == "torch":
            torch.save(state, at / name)
        else:
            dcp.save(state, checkpoint_id=at / name, no_dist=True)
    ran = forked.python(BOUNDED, at / "small", at / "big", what, check=True)
    # Pages of a mapped file count, though the system takes them back when it needs memory.
    limit = 150 << 20 if (kind, what) == ("torch", "into") else 40 << 20
    assert int(ran.stdout) < limit


@pytest.mark.parametrize("saves", [1, 2])
def test_files_of_a_checkpoint_without_its_manifest_are_no_model(tmp_path, saves):
    for _ in range(saves):  # later files have the number of the save in their names
        ringstow.save({"w": torch.ones(9)}, tmp_path)
    (shard,) = tmp_path.glob("*.safetensors")
    with pytest.raises(ringstow.UnsupportedError, match=f"one file of .* load {tmp_path}"):
        ringstow.load(shard)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ringstow.Error, match=r"manifest\.json"):
        ringstow.load(tmp_path)


# Runs


def test_a_killed_save_of_deepspeed_is_not_the_newest(at, caplog):
    run = left(at, "deepspeed-2")
    complete, killed = run / "global_step2", run / "global_step4"
    killed.mkdir()
    shutil.copy(next(complete.glob("*mp_rank_00_model_states.pt")), killed)
    assert ringstow.latest(run).path == str(complete)
    assert f"passing over {killed}" in caplog.text
    with ringstow.CheckpointManager(run) as manager:
        assert manager.restore().path == str(complete)


def test_a_tag_of_deepspeed_is_the_newest_without_the_file_latest(at):
    run = left(at, "deepspeed-2")
    shutil.copytree(run / "global_step2", run / "global_step4")
    (run / "latest").unlink()
    assert ringstow.latest(run).path == str(run / "global_step4")


# Classes of this process


def _changing(metadata, target, name, value):
    """Return a pickle that sets an attribute of what a pickled expression names, then goes on."""
    state = b"(N}X" + len(name).to_bytes(4, "little") + name.encode() + value + b"st"
    return metadata[:2] + target + state + b"b0" + metadata[2:]


_ORDERED = b"ccollections\nOrderedDict\n"
_WRITE = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"


@pytest.mark.parametrize("how", ["method", "new name", "bases", "member", "function"])
def test_metadata_that_changes_classes_of_the_process_leaves_them_as_they_were(at, how):
    dcp.save({"t": torch.ones(3)}, checkpoint_id=at / "c")
    file = at / "c" / ".metadata"
    target, name, value = {
        "method": (b"cpathlib\nPosixPath\n", "exists", _ORDERED),
        "new name": (b"cpathlib\nPosixPath\n", "ringstow", _ORDERED),
        "bases": (b"cpathlib\nPosixPath\n", "__bases__", b"cpathlib\nPurePosixPath\n\x85"),
        "member": (_WRITE + b"K\x02\x85R", "_value_", b"K\x09"),
        "function": (b"ctorch.serialization\n_get_layout\n", "__defaults__", b"N"),
    }[how]
    kinds = [pathlib.PosixPath, WriteItemType, WriteItemType(2)]
    before = [dict(vars(one)) for one in kinds]
    before.append(pathlib.PosixPath.__bases__)
    file.write_bytes(_changing(file.read_bytes(), target, name, value))
    if how == "function":
        torch.serialization._get_layout.__defaults__ = defaults = (1,)
        try:
            ringstow.load(at / "c")
            assert torch.serialization._get_layout.__defaults__ is defaults
        finally:
            torch.serialization._get_layout.__defaults__ = None
    else:
        refused(at / "c", ringstow.UnsupportedError, f"it changes .*{name}")
    assert [*[dict(vars(one)) for one in kinds], pathlib.PosixPath.__bases__] == before


# numpy


class _Forged:
    """Pickles as a call of numpy's and a state for its result."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def _pointer(how):
    """Return what counts bytes of the file as pointers once numpy has unpickled it."""
    fields = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    dtype = _Forged(np.dtype, ("V8", False, True), fields)
    if how == "scalar":
        return _Forged(np._core.multiarray.scalar, (dtype, b"A" * 8))
    made = (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"))
    return {"in a list": [_Forged(*made, (1, (1,), dtype, False, b"A" * 8))]}


@pytest.mark.parametrize("how", ["scalar", "array"])
def test_a_forged_dtype_of_numpy_is_refused_before_its_bytes_count_as_pointers(at, how):
    forged = {"w": torch.ones(1), "x": _pointer(how)}
    refused_file(at, forged, ringstow.UnsupportedError, "dtype that is not plain")


def test_forged_flags_of_a_plain_dtype_are_refused(at):
    dtype = _Forged(np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 0x1))
    one = _Forged(np._core.multiarray.scalar, (dtype, np.float64(2.5).tobytes()))
    refused_file(at, {"x": one}, ringstow.UnsupportedError, "dtype f8 that is not plain")


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_arrays_of_numpy_1_and_2_load_with_their_order_and_layout(at, module):
    state = {
        "big": np.arange(6, dtype=">i4").reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "nested": [(np.float32(1.5), {"empty": np.zeros((0, 2), np.uint8)})],
        "scalar": np.bool_(True),
        "text": np.str_("abc"),
    }
    state["twice"] = state["big"]
    torch.save(state, at / "x.pt", _use_new_zipfile_serialization=False)
    data = (at / "x.pt").read_bytes()
    (at / "x.pt").write_bytes(data.replace(b"numpy._core.multiarray", module))
    with pytest.warns(UserWarning, match="before 1.6"):
        found = ringstow.load(at / "x.pt")
    for key in ("big", "fortran", "twice"):
        assert np.array_equal(found[key], state[key])
        assert found[key].dtype.isnative  # as numpy itself does
    number, rest = found["nested"][0]
    assert number == np.float32(1.5)
    assert rest["empty"].shape == (0, 2)
    assert found["scalar"] == np.bool_(True)
    assert found["text"] == "abc"


def test_an_array_with_fewer_bytes_than_its_shape_is_damage(at):
    made = (np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b"))
    short = _Forged(*made, (1, (4,), np.dtype("f8"), False, b"A" * 8))
    refused_file(at, {"x": short}, ringstow.CorruptCheckpointError, "8 bytes are not")


@pytest.mark.parametrize("how", ["scalar", "array"])
def test_what_a_program_lets_torch_unpickle_lets_no_forged_array_in(at, how):
    """Transformers and Accelerate let torch make numpy's own classes, for their own files."""
    core = np._core.multiarray
    theirs = [core._reconstruct, core.scalar, np.ndarray, np.dtype, pathlib.PurePosixPath]
    plain = {"rng": np.arange(5, dtype=np.uint32), "n": np.float64(2.5)}
    torch.save(plain, at / "plain.pt")
    torch.save({"x": _pointer(how)}, at / "x.pt")
    torch.save({"path": pathlib.PurePosixPath("a")}, at / "path.pt")
    with torch.serialization.safe_globals(theirs):
        before = set(torch.serialization.get_safe_globals())
        found = ringstow.load(at / "plain.pt")
        assert np.array_equal(found["rng"], plain["rng"])
        assert found["n"] == 2.5
        refused(at / "x.pt", ringstow.UnsupportedError, "not plain")
        assert set(torch.serialization.get_safe_globals()) == before
        # What else the program allows still counts.
        assert torch.load(at / "path.pt", weights_only=True) == {"path": pathlib.PurePosixPath("a")}
