"""Nodes that share no directory: each rank's, or each pair's, is a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
from unittest.mock import Mock, patch

import forked
import pytest
import torch
import torch.distributed as dist
from layouts import EVEN_HIDDEN, differences, filled, whole
from ranks import on_ranks
from support import assert_same
from test_distributed import SHARED, state_of

import ringstow
from ringstow import distributed
from ringstow._ranks._group import Group
from ringstow.distributed import PerRank, _commit, _fetched_files, _nodes


def path_on(root, rank, per_node=1, name="step-7"):
    """Return where a rank's node has a checkpoint."""
    return root / f"node{rank // per_node}" / "run" / name


def save(rank, layout, root, per_node=1, start=distributed.save):
    model, optimizer, state = state_of(layout, 1, 7, EVEN_HIDDEN)
    state["rng"] = PerRank(torch.tensor([rank]))
    done = start(state, path_on(root, rank, per_node), step=7, nodes=ringstow.Nodes())
    if start is distributed.save_async:
        done = done.result()
    assert done.path == str(path_on(root, rank, per_node))
    return whole(model, optimizer)


def load(rank, layout, root, per_node=1):
    model, optimizer, state = state_of(layout, 2, 0, EVEN_HIDDEN)
    distributed.load_into(state, path_on(root, rank, per_node), strict=False)
    assert state["step"] == 7
    return filled(model, optimizer, state)


def load_own(rank, root, count):
    state = {"step": 0, "own": PerRank(torch.zeros(count, dtype=torch.int64))}
    distributed.load_into(state, path_on(root, rank))
    return state["step"], int(state["own"].value[0])


def names(directory):
    return sorted(os.listdir(directory))


def id_of(root, rank):
    """Return the id of a rank's node."""
    return json.loads((path_on(root, rank).parent / _nodes.FILE).read_text())["id"]


@pytest.fixture
def saved(ranks, tmp_path):
    """Return the model and optimizer of which two nodes have a checkpoint."""
    return ranks(2).run(save, "fsdp2", tmp_path)[0]


@pytest.fixture
def loads(ranks, tmp_path, saved):
    """Have two nodes load what was saved."""

    def check(root=tmp_path):
        assert differences(saved, ranks(2).run(load, "fsdp2", root)[0]) == []

    return check


def ranks_in(directory):
    """Return the ranks whose files a directory has."""
    return sorted({int(name[4:9]) for name in names(directory) if name.startswith("rank")})


@pytest.mark.parametrize("layout", SHARED)
def test_each_node_has_its_own_files_and_any_layout_loads(ranks, tmp_path, layout):
    saved = ranks(4).run(save, layout, tmp_path, 2)[0]
    for node in (0, 1):
        directory = path_on(tmp_path, 2 * node, 2)
        assert ranks_in(directory) == [2 * node, 2 * node + 1]
        assert names(directory.parent) == [".ringstow-node.json", "step-7"]
        report = ringstow.verify(directory)
        assert report.ok
        assert report.elsewhere == report.files > 0
    for other in SHARED:
        loaded = ranks(4).run(load, other, tmp_path, 2)[0]
        assert differences(saved, loaded) == [], other
    assert names(path_on(tmp_path, 0, 2).parent) == [".ringstow-node.json", "step-7"]


def load_all(rank, root):
    return distributed.load(path_on(root, rank))


def test_in_the_background_and_whole_on_each_rank(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path, 1, distributed.save_async)[0]
    for loaded in ranks(2).run(load_all, tmp_path):
        assert differences(saved[0], loaded["model"]) == []
        assert [int(loaded["rng"][rank]) for rank in "01"] == [0, 1]


@pytest.mark.usefixtures("saved")
def test_one_process_is_told_which_node_has_the_rest(tmp_path):
    here = path_on(tmp_path, 0)
    with pytest.raises(ringstow.MissingFilesError, match="is on another node") as raised:
        ringstow.load(here)
    assert id_of(tmp_path, 1) in str(raised.value)
    (found,) = ringstow.steps(here.parent)
    assert (found.status, found.step) == ("committed", 7)
    assert ringstow.latest(here.parent).path == str(here)


# In a process of its own: it keeps Ctrl-C from the tests that come after.
PROGRAM = "from ringstow._program import _cli; _cli.main()"


@pytest.mark.usefixtures("saved")
def test_program_shows_what_one_node_has(tmp_path):
    here = path_on(tmp_path, 1)
    out = " ".join(forked.python(PROGRAM, "show", here, check=True).stdout.split())
    assert all(f"({id_of(tmp_path, rank)}) with rank {rank}" in out for rank in (0, 1)), out
    own = len(list(here.glob("*.safetensors")))
    assert f"; {own} of {2 * own} files are here" in out
    assert "it is on another node" in out
    verified = forked.python(PROGRAM, "verify", here, check=True).stdout
    assert "on other nodes, not checked" in verified


def test_files_of_all_nodes_in_one_directory_are_a_usual_checkpoint(saved, tmp_path):
    together = tmp_path / "all"
    for rank in (0, 1):
        shutil.copytree(path_on(tmp_path, rank), together, dirs_exist_ok=True)
    assert differences(saved[0], ringstow.load(together)["model"]) == []
    report = ringstow.verify(together)
    assert (report.ok, report.elsewhere) == (True, 0)


@pytest.mark.usefixtures("saved")
def test_lost_file_is_missing_on_its_own_node(ranks, tmp_path):
    here = path_on(tmp_path, 1)
    lost = next(here.glob("rank00001*"))
    lost.unlink()
    with pytest.raises(ringstow.MissingFilesError, match=lost.name):
        ringstow.load(here)
    with pytest.raises(ringstow.MissingFilesError, match=f"on none of the 2 nodes: {lost.name}"):
        ranks(2).run(load, "fsdp2", tmp_path)


@pytest.mark.usefixtures("saved")
def test_lost_node_is_named(ranks, tmp_path):
    gone = id_of(tmp_path, 1)
    shutil.rmtree(path_on(tmp_path, 1).parent)
    with pytest.raises(ringstow.MissingFilesError, match=gone):
        ranks(2).run(load, "fsdp2", tmp_path)


def test_new_node_gets_what_the_others_have(loads, tmp_path):
    shutil.copytree(path_on(tmp_path, 1), path_on(tmp_path, 0), dirs_exist_ok=True)
    shutil.rmtree(path_on(tmp_path, 1).parent)
    loads()
    assert names(path_on(tmp_path, 1)) == ["manifest.json"]


def crash(rank, root):
    """Save, and have the disk of rank 1 be full once it prepares the commit."""
    native = _commit._native.NodeSession
    full = OSError(28, "No space left on device", "manifest.json.part")

    def failing(*args):
        return Mock(wraps=native(*args), **({"prepare.side_effect": full} if rank == 1 else {}))

    state = {"step": 8, "rng": PerRank(torch.tensor([rank]))}
    with (
        patch.object(_commit._native, "NodeSession", failing),
        pytest.raises((OSError, ringstow.Error), match="No space"),
    ):
        distributed.save(state, path_on(root, rank), step=8, nodes=ringstow.Nodes())


def test_full_disk_on_one_node_commits_on_none_and_keeps_the_old_one(ranks, loads, tmp_path):
    before = [names(path_on(tmp_path, rank)) for rank in (0, 1)]
    ranks(2).run(crash, tmp_path)
    assert [names(path_on(tmp_path, rank)) for rank in (0, 1)] == before
    loads()


def test_commit_that_was_cut_between_nodes_is_finished_by_the_load(loads, tmp_path):
    # As if rank 1 had been killed before its rename: all names are those before the commit.
    there = path_on(tmp_path, 1)
    for name in names(there):
        os.rename(there / name, there / f"{name}.part")
    swept = ringstow.prune(there.parent)
    assert "other nodes may have committed it" in swept.left[0].reason
    assert ringstow.steps(there.parent)[0].status == "incomplete"
    loads()
    assert ringstow.steps(there.parent)[0].status == "committed"
    assert not [name for name in names(there) if name.endswith(".part")]


def damage(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damaged_manifest_of_one_node_is_replaced_by_the_others(loads, tmp_path):
    damage(path_on(tmp_path, 0) / "manifest.json", 100)
    loads()
    assert ringstow.verify(path_on(tmp_path, 0)).ok
    for rank in (0, 1):
        damage(path_on(tmp_path, rank) / "manifest.json", 100)
    with pytest.raises(ringstow.CorruptCheckpointError, match="manifest"):
        loads()


@pytest.fixture
def links(tmp_path):
    """Let the runs of two nodes be links; return the root of links to their checkpoints."""
    for rank in (0, 1):
        (tmp_path / f"disk{rank}").mkdir()
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / "run").symlink_to(tmp_path / f"disk{rank}")
        link = path_on(tmp_path / "links", rank)
        link.parent.mkdir(parents=True)
        link.symlink_to(tmp_path / f"disk{rank}" / "step-7")
    return tmp_path / "links"


def test_links_lead_to_runs_and_checkpoints(links, loads):
    loads()
    loads(links)


@pytest.mark.usefixtures("saved")
def test_copied_directory_is_no_node_of_its_own(ranks, tmp_path):
    shutil.rmtree(path_on(tmp_path, 1).parent)
    shutil.copytree(path_on(tmp_path, 0).parent, path_on(tmp_path, 1).parent)
    with pytest.raises(ringstow.InvalidStateError, match="was copied from another node"):
        ranks(2).run(save, "fsdp2", tmp_path)
    (path_on(tmp_path, 1).parent / _nodes.FILE).unlink()
    ranks(2).run(save, "fsdp2", tmp_path)


@on_ranks(2)
def test_tied_tensors_are_compared_after_they_were_fetched(rank, tmp_path):
    """Two targets of one memory, of tensors that were saved apart and are equal."""
    state = {"a": torch.ones(5000), "b": torch.ones(5000)}
    distributed.save(state, path_on(tmp_path, rank), nodes=ringstow.Nodes())
    weight = torch.zeros(5000)
    distributed.load_into({"a": weight, "b": weight}, path_on(tmp_path, rank))
    assert weight.sum() == 5000.0


def test_nothing_is_written_where_no_rank_lacks_anything(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path, 2)
    run = path_on(tmp_path, 0, 2).parent
    before = run.stat().st_mtime_ns
    ranks(2).run(load, "fsdp2", tmp_path, 2)
    assert run.stat().st_mtime_ns == before


@on_ranks(2)
def test_interrupt_after_all_have_prepared_loses_neither_save(rank, tmp_path):
    """Rank 1 is interrupted once all have prepared; rank 0 commits before it notices."""
    save_again(rank, tmp_path)
    agreed = Group.agreed

    def agreed_and_interrupted(group, error, value):
        said = agreed(group, error, value)
        if rank == 1 and value is None:  # without a value: all have prepared
            raise KeyboardInterrupt
        return said

    def commit_alone(save):
        save._session.commit()
        raise RuntimeError("Connection closed by peer")

    state = {"step": 8, "own": PerRank(torch.full((5000,), rank))}
    with (
        patch.object(Group, "agreed", agreed_and_interrupted),
        patch.object(_commit.Apart, "_commit", commit_alone),
        pytest.raises(RuntimeError if rank == 0 else KeyboardInterrupt),
    ):
        distributed.save(state, path_on(tmp_path, rank), step=8, nodes=ringstow.Nodes())
    dist.barrier()
    assert load_own(rank, tmp_path, 5000) == (8, rank)


@pytest.mark.usefixtures("saved")
def test_damage_is_met_where_it_is_and_named(ranks, tmp_path):
    for damaged in path_on(tmp_path, 1).glob("rank*"):
        damage(damaged)
    with pytest.raises(ringstow.CorruptCheckpointError, match="rank00001"):
        ranks(2).run(load, "plain", tmp_path)


@on_ranks(2)
def test_rank_that_fails_before_the_others_send_fails_all(rank, tmp_path):
    saved = save(rank, "plain", tmp_path)
    broken = None if rank == 1 else _fetched_files.tempfile.mkdtemp
    with (
        patch.object(_fetched_files.tempfile, "mkdtemp", broken),
        pytest.raises((TypeError, ringstow.Error), match="NoneType"),
    ):
        load(rank, "plain", tmp_path)
    assert differences(saved, load(rank, "plain", tmp_path)) == []


def save_again(rank, root):
    for step in (1, 2, 3):
        state = {"step": step, "own": PerRank(torch.full((1000,), step + rank))}
        distributed.save(state, path_on(root, rank), step=step, nodes=ringstow.Nodes())
    return load_own(rank, root, 1000)


def test_saves_replace_each_other_on_all_nodes(ranks, tmp_path):
    assert ranks(2).run(save_again, tmp_path) == [(3, 3), (3, 4)]
    for rank in (0, 1):
        assert ranks_in(path_on(tmp_path, rank)) == [rank]


@on_ranks(2)
def test_first_rank_writes_what_is_small_and_on_all(rank, tmp_path):
    """Each node of a load needs it: from one file, not from the files of all ranks."""
    path = path_on(tmp_path, rank)
    state = {f"small.{n}": torch.full((n,), n) for n in range(50)}
    state["large"] = torch.arange(3 << 20)  # each rank writes a part
    distributed.save(state, path, nodes=ringstow.Nodes())
    assert_same(distributed.load(path), state)
    manifest = json.loads((path / "manifest.json").read_text())
    files = [file["name"] for file in manifest["files"]]
    ranks_of = {
        tensor["name"]: {int(files[chunk["file"]][4:9]) for chunk in tensor["chunks"]}
        for tensor in manifest["tensors"]
    }
    assert ranks_of == {name: {0} for name in state} | {"large": {0, 1}}


@on_ranks(2)
def test_what_cannot_be_is_refused_on_all(rank, tmp_path):
    def is_refused(match, name="step-7", **options):
        options = {"nodes": ringstow.Nodes(), **options}
        with pytest.raises(ringstow.InvalidStateError, match=match):
            distributed.save({"w": torch.ones(3)}, path_on(tmp_path, rank, name=name), **options)

    is_refused("base is for a directory", base=tmp_path / "x")
    is_refused("is for a ringstow.CheckpointManager", nodes=ringstow.Nodes(replicas=2))
    for settings in (ringstow.Config(stripe=[str(tmp_path)]), ringstow.Config(recycle=True)):
        is_refused("all ranks share", config=settings)
    is_refused("same call", name=f"step-{rank}")
    is_refused("same call", nodes=ringstow.Nodes() if rank == 0 else None)
    dist.barrier()
    assert not list(tmp_path.glob("*/run/*"))


@on_ranks(2)
def test_what_is_nowhere_is_not_found_and_other_paths_have_a_hint(rank, tmp_path):
    with pytest.raises(FileNotFoundError):
        distributed.load_into({"w": torch.ones(3)}, path_on(tmp_path, rank))
    with pytest.raises(ringstow.InvalidStateError, match=r"say so: nodes=ringstow.Nodes\(\)"):
        distributed.save({"w": torch.ones(3)}, path_on(tmp_path, rank))


@on_ranks(2)
def test_one_directory_for_all_ranks_is_one_node(rank, tmp_path):
    path = tmp_path / "run/step-1"
    distributed.save({"w": torch.ones(3), "step": 1}, path, nodes=ringstow.Nodes())
    assert (distributed.load(path)["step"], ringstow.load(path)["step"]) == (1, 1)
