"""Runs of torchtitan that are killed at any moment of a save resume and end with the same bits."""

import os
import signal
import threading

import children
import pytest
import torchtitan_processes as processes
from support import assert_same

import ringstow

pytestmark = pytest.mark.timeout(300)

NUMBER = 3  # of the save that is killed; each step is saved

# The moment, the number of ranks, and which of them are killed.
MOMENTS = [
    ("beginning", 1, (0,)),
    ("writing", 1, (0,)),
    ("training", 1, (0,)),
    ("written", 1, (0,)),
    ("committing", 1, (0,)),
    ("committed", 1, (0,)),
    ("removing", 1, (0,)),
    ("marked", 1, (0,)),
    ("clearing", 1, (0,)),
    ("writing", 2, (0, 1)),
    ("training", 2, (0, 1)),
    ("training", 2, (0,)),
    ("written", 2, (1,)),
    ("committing", 2, (0,)),
    ("committed", 2, (0,)),
    ("marked", 2, (0,)),
]


def killed(rank, ranks, root, moment, victims, **options):
    """Train, and be killed at a moment of a save or of the removal after it."""
    import torchtitan_runs

    from ringstow.dcp import _mark
    from ringstow.distributed._commit import Shared
    from ringstow.distributed._save import _Save
    from ringstow.integrations import _rename_when_complete
    from ringstow.integrations._torchtitan import _steps

    count, has_begun = 0, threading.Event()
    write = _Save._write_share

    def begin(*_):
        nonlocal count
        count += 1

    def at(*moments):
        def act(*_):
            if rank in victims and moment in moments and count == NUMBER:
                if moment == "training":
                    assert has_begun.wait(300)
                children.die()

        return act

    def write_share(self, state):
        done = write(self, state)
        at("written")()
        return done

    children.before(_Save, "_meet", at("beginning"))
    children.before(_Save, "_meet", begin)
    _Save._write_share = write_share
    children.before(_Save, "_write_share", at("writing", "training"))
    children.before(Shared, "_commit", at("committing"))
    children.before(_mark, "write", at("committed"))
    children.before(_steps.Steps, "_remove", at("removing"))
    children.before(_steps, "remove", at("marked"))  # once `.metadata` is away
    children.before(_rename_when_complete, "take_name", at("exported"))
    if moment == "clearing":  # the manifest is renamed, and files are left
        _steps.remove = lambda path, **_: (
            os.rename(f"{path}/manifest.json", f"{path}/manifest.json.retired"),
            at("clearing")(),
        )
    run = torchtitan_runs.trainer(root, torchtitan_runs.settings(keep_latest_k=2, **options))
    children.before(run, "train_step", lambda *_: has_begun.set())
    children.before(run.checkpointer, "save", lambda *_: has_begun.clear())
    run.train()
    run.close()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return what runs learn that are not killed, by their number of ranks."""
    at = tmp_path_factory.mktemp("unbroken")
    ends = {ranks: processes.results(ranks, processes.fit, at / f"{ranks}")[0] for ranks in (1, 2)}
    assert [begun for begun, _ in ends.values()] == [0, 0]
    return {ranks: learned for ranks, (_, learned) in ends.items()}


@pytest.mark.parametrize(("moment", "ranks", "victims"), MOMENTS)
def test_a_killed_run_resumes_and_ends_with_the_same_bits(
    moment, ranks, victims, tmp_path, unbroken
):
    codes = processes.exit_codes(ranks, killed, tmp_path, moment, victims)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes  # the others do not take a lost save for a success
    is_committed = moment in ("committed", "removing", "marked", "clearing")
    newest = NUMBER if is_committed else NUMBER - 1
    folder = tmp_path / "checkpoint"
    assert ringstow.verify(ringstow.latest(folder)).ok
    assert os.path.basename(ringstow.latest(folder)) == f"step-{newest}"
    valid = [p.parent.name for p in folder.glob("*/.metadata")]
    assert all((folder / name / "manifest.json").exists() for name in valid)

    again = processes.results(ranks, processes.fit, tmp_path, keep_latest_k=2)[0]
    assert_same(again, (newest, unbroken[ranks]))
    names = sorted(os.listdir(folder))
    assert names[-1] == "step-4"
    assert "step-1" not in names or newest == NUMBER  # then no save came after it but the last
    for name in names:
        if not name.startswith(".") and (folder / name / "manifest.json").exists():
            assert ringstow.verify(folder / name).ok


def test_a_kill_before_the_export_has_its_name_leaves_the_steps_and_no_export(tmp_path):
    last = {"last_save_model_only": True, "last_save_in_hf": True}
    codes = processes.exit_codes(2, killed, tmp_path, "exported", (0,), **last)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    folder = tmp_path / "checkpoint"
    assert not (folder / "step-4").exists()
    assert not any("step-4" in name for name in os.listdir(folder))
    processes.results(2, processes.fit, tmp_path, **last)
    assert (folder / "step-4" / "model.safetensors.index.json").exists()
    assert not any(name.startswith(".") for name in os.listdir(folder))
