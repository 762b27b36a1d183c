"""Nodes that share no directory: each rank's, or each pair's, is a folder of its own."""

from __future__ import annotations

import json
import os
import shutil

import forked
import pytest
import torch
from layouts import EVEN_HIDDEN, differences, whole
from test_distributed import SHARED, state_of
from torch.distributed.checkpoint.state_dict import set_state_dict

import ringstow
from ringstow import distributed
from ringstow.distributed import PerRank, _nodes


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
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    return whole(model, optimizer)


def load_all(rank, root, per_node=1):
    return distributed.load(path_on(root, rank, per_node))


def names(directory):
    return sorted(os.listdir(directory))


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


def test_in_the_background_and_whole_on_each_rank(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path, 1, distributed.save_async)[0]
    for loaded in ranks(2).run(load_all, tmp_path):
        assert differences(saved[0], loaded["model"]) == []
        assert [int(loaded["rng"][rank]) for rank in "01"] == [0, 1]


def test_one_process_is_told_which_node_has_the_rest(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path)
    here = path_on(tmp_path, 0)
    with pytest.raises(ringstow.MissingFilesError, match="is on another node") as raised:
        ringstow.load(here)
    other = json.loads((path_on(tmp_path, 1).parent / ".ringstow-node.json").read_text())
    assert other["id"] in str(raised.value)
    (found,) = ringstow.steps(here.parent)
    assert (found.status, found.step) == ("committed", 7)
    assert ringstow.latest(here.parent).path == str(here)


# In a process of its own: it keeps Ctrl-C from the tests that come after.
PROGRAM = "from ringstow._program import _cli; _cli.main()"


def test_program_shows_what_one_node_has(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path)
    here = path_on(tmp_path, 1)
    shown = forked.python(PROGRAM, "show", here, check=True).stdout
    ids = [
        json.loads((path_on(tmp_path, n).parent / _nodes.FILE).read_text())["id"] for n in (0, 1)
    ]
    out = " ".join(shown.split())
    assert all(f"({ids[rank]}) with rank {rank}" in out for rank in (0, 1)), out
    own = len(list(here.glob("*.safetensors")))
    assert f"; {own} of {2 * own} files are here" in out
    assert "it is on another node" in out
    verified = forked.python(PROGRAM, "verify", here, check=True).stdout
    assert "on other nodes, not checked" in verified


def test_files_of_all_nodes_in_one_directory_are_a_usual_checkpoint(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]
    together = tmp_path / "all"
    for rank in (0, 1):
        shutil.copytree(path_on(tmp_path, rank), together, dirs_exist_ok=True)
    assert differences(saved[0], ringstow.load(together)["model"]) == []
    report = ringstow.verify(together)
    assert (report.ok, report.elsewhere) == (True, 0)


def test_lost_file_is_missing_on_its_own_node(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path)
    here = path_on(tmp_path, 1)
    lost = next(here.glob("rank00001*"))
    lost.unlink()
    with pytest.raises(ringstow.MissingFilesError, match=lost.name):
        ringstow.load(here)
    with pytest.raises(ringstow.MissingFilesError, match=f"on none of the 2 nodes: {lost.name}"):
        ranks(2).run(load, "fsdp2", tmp_path)


def test_lost_node_is_named(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path)
    gone = json.loads((path_on(tmp_path, 1).parent / ".ringstow-node.json").read_text())["id"]
    shutil.rmtree(path_on(tmp_path, 1).parent)
    with pytest.raises(ringstow.MissingFilesError, match=gone):
        ranks(2).run(load, "fsdp2", tmp_path)


def test_new_node_gets_what_the_others_have(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]
    shutil.copytree(path_on(tmp_path, 1), path_on(tmp_path, 0), dirs_exist_ok=True)
    shutil.rmtree(path_on(tmp_path, 1).parent)
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []
    assert names(path_on(tmp_path, 1)) == ["manifest.json"]


def crash(rank, root, when):
    """Save, and have the commit fail on rank 1 at one of its steps."""
    from ringstow.distributed import _commit

    if rank == 1:
        session = _commit._native.NodeSession

        class Failing:
            def __init__(self, *args):
                self.session = session(*args)

            def prepare(self, *args):
                if when == "prepare":
                    raise OSError(28, "No space left on device", "manifest.json.part")
                return self.session.prepare(*args)

            def abandon(self):
                self.session.abandon()

            def keep(self):
                self.session.keep()

        _commit._native.NodeSession, was = Failing, session
    try:
        state = {"step": 8, "rng": PerRank(torch.tensor([rank]))}
        with pytest.raises((OSError, ringstow.Error), match="No space"):
            distributed.save(state, path_on(root, rank), step=8, nodes=ringstow.Nodes())
    finally:
        if rank == 1:
            _commit._native.NodeSession = was


def test_full_disk_on_one_node_commits_on_none_and_keeps_the_old_one(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]
    before = [names(path_on(tmp_path, rank)) for rank in (0, 1)]
    ranks(2).run(crash, tmp_path, "prepare")
    assert [names(path_on(tmp_path, rank)) for rank in (0, 1)] == before
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []


def test_commit_that_was_cut_between_nodes_is_finished_by_the_load(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]
    # As if rank 1 had been killed before its rename: all names are those before the commit.
    there = path_on(tmp_path, 1)
    for name in names(there):
        os.rename(there / name, there / f"{name}.part")
    swept = ringstow.prune(there.parent)
    assert "other nodes may have committed it" in swept.left[0].reason
    assert ringstow.steps(there.parent)[0].status == "incomplete"
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []
    assert ringstow.steps(there.parent)[0].status == "committed"
    assert not [name for name in names(there) if name.endswith(".part")]


def damage(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_damaged_manifest_of_one_node_is_replaced_by_the_others(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]
    damage(path_on(tmp_path, 0) / "manifest.json", 100)
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []
    assert ringstow.verify(path_on(tmp_path, 0)).ok
    for rank in (0, 1):
        damage(path_on(tmp_path, rank) / "manifest.json", 100)
    with pytest.raises(ringstow.CorruptCheckpointError, match="manifest"):
        ranks(2).run(load, "fsdp2", tmp_path)


def test_links_lead_to_runs_and_checkpoints(ranks, tmp_path):
    for rank in (0, 1):
        (tmp_path / f"disk{rank}").mkdir()
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / "run").symlink_to(tmp_path / f"disk{rank}")
        (tmp_path / "links" / f"node{rank}" / "run").mkdir(parents=True)
        link = path_on(tmp_path / "links", rank)
        link.symlink_to(tmp_path / f"disk{rank}" / "step-7")
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path / "links")[0]) == []


def test_copied_directory_is_no_node_of_its_own(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path)
    shutil.rmtree(path_on(tmp_path, 1).parent)
    shutil.copytree(path_on(tmp_path, 0).parent, path_on(tmp_path, 1).parent)
    with pytest.raises(ringstow.InvalidStateError, match="was copied from another node"):
        ranks(2).run(save, "fsdp2", tmp_path)
    (path_on(tmp_path, 1).parent / ".ringstow-node.json").unlink()
    ranks(2).run(save, "fsdp2", tmp_path)


def load_tied(rank, root):
    """Two targets of one memory, of tensors that were saved apart and are equal."""
    weight = torch.zeros(5000)
    state = {"a": weight, "b": weight}
    distributed.load_into(state, path_on(root, rank))
    return float(weight.sum())


def save_untied(rank, root):
    state = {"a": torch.ones(5000), "b": torch.ones(5000)}
    distributed.save(state, path_on(root, rank), nodes=ringstow.Nodes())


def test_tied_tensors_are_compared_after_they_were_fetched(ranks, tmp_path):
    ranks(2).run(save_untied, tmp_path)
    assert ranks(2).run(load_tied, tmp_path) == [5000.0, 5000.0]


def test_nothing_is_written_where_no_rank_lacks_anything(ranks, tmp_path, monkeypatch):
    ranks(2).run(save, "fsdp2", tmp_path, 2)
    run = path_on(tmp_path, 0, 2).parent
    before = run.stat().st_mtime_ns
    ranks(2).run(load, "fsdp2", tmp_path, 2)
    assert run.stat().st_mtime_ns == before


def interrupted(rank, root):
    """Rank 1 is interrupted once all have prepared; rank 0 commits before it notices."""
    from ringstow._ranks._group import Group
    from ringstow.distributed._commit import Apart

    agreed, commit = Group.agreed, Apart._commit

    def agreed_and_interrupted(group, error, value):
        said = agreed(group, error, value)
        if rank == 1 and value is None:  # without a value: all have prepared
            raise KeyboardInterrupt
        return said

    def commit_alone(save):
        save._session.commit()
        raise RuntimeError("Connection closed by peer")

    Group.agreed, Apart._commit = agreed_and_interrupted, commit_alone
    try:
        state = {"step": 8, "own": PerRank(torch.full((5000,), rank))}
        with pytest.raises(RuntimeError if rank == 0 else KeyboardInterrupt):
            distributed.save(state, path_on(root, rank), step=8, nodes=ringstow.Nodes())
    finally:
        Group.agreed, Apart._commit = agreed, commit


def load_own(rank, root):
    state = {"step": 0, "own": PerRank(torch.zeros(5000, dtype=torch.int64))}
    distributed.load_into(state, path_on(root, rank))
    return state["step"], int(state["own"].value[0])


def test_interrupt_after_all_have_prepared_loses_neither_save(ranks, tmp_path):
    ranks(2).run(save_again, tmp_path)
    ranks(2).run(interrupted, tmp_path)
    assert ranks(2).run(load_own, tmp_path) == [(8, 0), (8, 1)]


def test_damage_is_met_where_it_is_and_named(ranks, tmp_path):
    ranks(2).run(save, "fsdp2", tmp_path)
    for damaged in path_on(tmp_path, 1).glob("rank*"):
        damage(damaged)
    with pytest.raises(ringstow.CorruptCheckpointError, match="rank00001"):
        ranks(2).run(load, "plain", tmp_path)


def fail_to_make_room(rank, root):
    from ringstow.distributed import _fetched_files

    if rank == 1:
        _fetched_files.tempfile.mkdtemp, was = None, _fetched_files.tempfile.mkdtemp
    try:
        with pytest.raises((TypeError, ringstow.Error), match="NoneType"):
            load(rank, "plain", root)
    finally:
        if rank == 1:
            _fetched_files.tempfile.mkdtemp = was


def test_rank_that_fails_before_the_others_send_fails_all(ranks, tmp_path):
    saved = ranks(2).run(save, "plain", tmp_path)[0]
    ranks(2).run(fail_to_make_room, tmp_path)
    assert differences(saved, ranks(2).run(load, "plain", tmp_path)[0]) == []


def save_again(rank, root):
    for step in (1, 2, 3):
        state = {"step": step, "own": PerRank(torch.full((1000,), step + rank))}
        distributed.save(state, path_on(root, rank), step=step, nodes=ringstow.Nodes())
    state = {"step": 0, "own": PerRank(torch.zeros(1000, dtype=torch.int64))}
    distributed.load_into(state, path_on(root, rank))
    return state["step"], int(state["own"].value[0])


def test_saves_replace_each_other_on_all_nodes(ranks, tmp_path):
    assert ranks(2).run(save_again, tmp_path) == [(3, 3), (3, 4)]
    for rank in (0, 1):
        assert ranks_in(path_on(tmp_path, rank)) == [rank]


def save_many_small(rank, root):
    state = {f"small.{n}": torch.full((n,), n) for n in range(50)}
    state["large"] = torch.arange(3 << 20)  # each rank writes a part
    distributed.save(state, path_on(root, rank), nodes=ringstow.Nodes())
    loaded = distributed.load(path_on(root, rank))
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_first_rank_writes_what_is_small_and_on_all(ranks, tmp_path):
    """Each node of a load needs it: from one file, not from the files of all ranks."""
    ranks(2).run(save_many_small, tmp_path)
    manifest = json.loads((path_on(tmp_path, 0) / "manifest.json").read_text())
    files = [file["name"] for file in manifest["files"]]
    ranks_of = {
        tensor["name"]: {int(files[chunk["file"]][4:9]) for chunk in tensor["chunks"]}
        for tensor in manifest["tensors"]
    }
    assert ranks_of.pop("large") == {0, 1}
    assert len(ranks_of) == 50
    assert all(of == {0} for of in ranks_of.values())


def refused(rank, root):
    state = {"w": torch.ones(3)}
    with pytest.raises(ringstow.InvalidStateError, match="base is for a directory"):
        distributed.save(state, path_on(root, rank), nodes=ringstow.Nodes(), base=root / "x")
    with pytest.raises(ringstow.InvalidStateError, match="is for a ringstow.CheckpointManager"):
        distributed.save(state, path_on(root, rank), nodes=ringstow.Nodes(replicas=2))
    for settings in (ringstow.Config(stripe=[str(root)]), ringstow.Config(recycle=True)):
        with pytest.raises(ringstow.InvalidStateError, match="all ranks share"):
            distributed.save(state, path_on(root, rank), nodes=ringstow.Nodes(), config=settings)
    with pytest.raises(ringstow.InvalidStateError, match="same call"):
        distributed.save(state, path_on(root, rank, name=f"step-{rank}"), nodes=ringstow.Nodes())
    with pytest.raises(ringstow.InvalidStateError, match="same call"):
        distributed.save(state, path_on(root, rank), nodes=ringstow.Nodes() if rank == 0 else None)


def test_what_cannot_be_is_refused_on_all(ranks, tmp_path):
    ranks(2).run(refused, tmp_path)
    assert not list(tmp_path.glob("*/run/*"))


def load_what_is_not_there(rank, root):
    with pytest.raises(FileNotFoundError):
        distributed.load_into({"w": torch.ones(3)}, path_on(root, rank))
    with pytest.raises(ringstow.InvalidStateError, match=r"say so: nodes=ringstow.Nodes\(\)"):
        distributed.save({"w": torch.ones(3)}, path_on(root, rank))


def test_what_is_nowhere_is_not_found_and_other_paths_have_a_hint(ranks, tmp_path):
    ranks(2).run(load_what_is_not_there, tmp_path)


def shared(rank, path):
    distributed.save({"w": torch.ones(3), "step": 1}, path, nodes=ringstow.Nodes())
    return distributed.load(path)["step"]


def test_one_directory_for_all_ranks_is_one_node(ranks, tmp_path):
    assert ranks(2).run(shared, tmp_path / "run/step-1") == [1, 1]
    assert ringstow.load(tmp_path / "run/step-1")["step"] == 1
