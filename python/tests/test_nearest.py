"""Loads and `latest` of a list of tiers, and loads of a path whose copies are on tiers."""

import shutil
from errno import EACCES, EIO

import pytest
import torch
from support import flip
from tiered import state_of

import ringstow
from ringstow._reading import _resolve

SMALL = ringstow.Config(shard_bytes=1 << 20, files=1)
COUNT = 4


def large(step):
    """Return a state that takes one file for each tensor."""
    made = torch.arange(1 << 18, dtype=torch.float32)
    return {"step": step, "t": [made + step + number for number in range(COUNT)]}


def is_large(state, step):
    wanted = large(step)
    pairs = zip(state["t"], wanted["t"], strict=True)
    return state["step"] == step and all(torch.equal(*pair) for pair in pairs)


def filled(tiers):
    """Return the report of a load into a state, which is then that of step 2."""
    state = {"step": 0, "t": [torch.zeros(1 << 18) for _ in range(COUNT)]}
    report = ringstow.load_into(state, tiers)
    assert is_large(state, 2)
    return report


@pytest.fixture
def tiers(tmp_path):
    """Return two directories that have steps 1 and 2 of one run."""
    run, shared = tmp_path / "run", tmp_path / "shared"
    with ringstow.CheckpointManager(run, tiers=[shared], config=SMALL) as manager:
        for step in (1, 2):
            manager.save(step, large(step))
            assert manager.wait_promoted(60)
    return [run, shared]


def shards(tier, step):
    found = sorted((tier / f"step-{step:08}").glob("*.safetensors"))
    assert len(found) == COUNT
    return found


def test_newest_step_of_a_list_is_loaded_from_the_nearest_tier(tiers):
    run, shared = tiers
    assert is_large(ringstow.load(tiers), 2)
    with ringstow.open(tiers) as opened:
        assert opened.path == str(run / "step-00000002")
    shutil.rmtree(run / "step-00000002")
    with ringstow.open(tiers) as opened:
        assert opened.path == str(shared / "step-00000002")
    assert filled([str(tier) for tier in tiers]).path == str(shared / "step-00000002")


def test_what_one_copy_lacks_or_has_damaged_comes_from_the_other(tiers, caplog):
    run, shared = tiers
    here, there = shards(run, 2), shards(shared, 2)
    here[0].unlink()
    flip(here[1], 300_000)
    flip(there[2], 300_000)
    there[3].unlink()
    assert is_large(ringstow.load(tiers), 2)
    for file in here[:2]:
        assert f"instead of {file}" in caplog.text
    assert f"instead of {here[2]}" not in caplog.text
    part = ringstow.load(tiers, keys=["t.1"], framework="numpy")
    assert (part["t"][1] == large(2)["t"][1].numpy()).all()
    used = [step.wanted for step in filled(tiers).fallbacks if step.kind == "copy"]
    assert sorted(used) == [str(file) for file in here[:2]]
    assert not ringstow.load(tiers, on_corrupt="skip").damaged
    # Each copy is damaged still.
    for tier in tiers:
        with pytest.raises((ringstow.CorruptCheckpointError, ringstow.MissingFilesError)):
            ringstow.load(tier / "step-00000002")
        assert ringstow.verify(tier / "step-00000002").damage


def test_tiers_of_the_configuration_have_the_copies_of_a_path(tiers, monkeypatch):
    run, shared = tiers
    flip(shards(run, 1)[0], 300_000)
    config = ringstow.Config(tiers=[shared])
    assert is_large(ringstow.load(run / "step-00000001", config=config), 1)
    (run / "newest").symlink_to("step-00000001")
    assert is_large(ringstow.load(run / "newest", config=config), 1)
    shutil.rmtree(run / "step-00000001")
    assert is_large(ringstow.load(run / "step-00000001", config=config), 1)
    with ringstow.open(run / "step-00000001", config=config) as opened:
        assert opened.path == str(shared / "step-00000001")
    monkeypatch.setenv("RINGSTOW_TIERS", str(shared))
    assert is_large(ringstow.load(run / "step-00000001"), 1)
    with pytest.raises(FileNotFoundError, match="step-00000003"):
        ringstow.load(run / "step-00000003")


def test_checkpoint_of_another_run_is_never_loaded_instead(tiers, tmp_path):
    config = ringstow.Config(tiers=[tiers[1]])
    other = tmp_path / "other"
    with pytest.raises(FileNotFoundError, match="step-00000001"):
        ringstow.load(other / "step-00000001", config=config)
    with ringstow.CheckpointManager(other, tiers=[tmp_path / "others"]) as manager:
        manager.save(7, state_of(7))
    with pytest.raises(FileNotFoundError, match="step-00000001"):
        ringstow.load(other / "step-00000001", config=config)
    (other / "step-00000007" / "manifest.json").write_text("damaged")
    with pytest.raises((ringstow.CorruptCheckpointError, ringstow.FormatError)):
        ringstow.load(other / "step-00000007", config=config)


def test_damaged_manifests_are_told_and_no_new_beginning(tiers, caplog):
    for tier in tiers:
        (tier / "step-00000002" / "manifest.json").write_text("damaged")
    assert is_large(ringstow.load(tiers), 1)
    for tier in tiers:
        assert f"passing over {tier}/step-00000002" in caplog.text
        shutil.rmtree(tier / "step-00000001")
    with pytest.raises((ringstow.CorruptCheckpointError, ringstow.FormatError)):
        ringstow.load(tiers)


def test_manager_restores_what_any_tier_has(tiers):
    run, shared = tiers
    flip(shards(run, 2)[1], 300_000)
    flip(shards(shared, 2)[2], 300_000)
    with ringstow.CheckpointManager(run, tiers=[shared], config=SMALL) as manager:
        restored = manager.restore()
    assert restored.path == str(run / "step-00000002")
    assert is_large(restored.state, 2)


def test_chunk_that_no_copy_has_is_damage(tiers):
    flip(shards(tiers[0], 2)[1], 300_000)
    flip(shards(tiers[1], 2)[1], 300_001)
    with pytest.raises(ringstow.CorruptCheckpointError, match=str(shards(tiers[0], 2)[1])) as met:
        ringstow.load(tiers)
    assert met.value.__notes__ == [f"no copy helped: {tiers[1]}/step-00000002"]
    with pytest.warns(ringstow.CorruptCheckpointWarning):
        [damaged] = ringstow.load(tiers, on_corrupt="skip").damaged
    assert damaged.name == "t.1"


def test_what_is_no_path_and_no_tier_says_what_is(tiers, tmp_path):
    with pytest.raises(TypeError, match="a path, or the list of the tiers of a run, not a gen"):
        ringstow.load(tier for tier in tiers)
    for wrong in (
        lambda: ringstow.load("s4://bucket/run"),
        lambda: ringstow.load([tmp_path, "s4://bucket/run"]),
        lambda: ringstow.Config(tiers=["s4://bucket/run"]),
        lambda: ringstow.CheckpointManager(tmp_path / "x", tiers=["s4://bucket/run"]),
    ):
        with pytest.raises(ringstow.InvalidStateError, match=r"not of an object store \(s3://"):
            wrong()


def test_tier_that_is_not_there_is_told(tiers, tmp_path, caplog):
    assert is_large(ringstow.load([tmp_path / "unmounted", tiers[1]]), 2)
    assert f"{tmp_path}/unmounted does not exist" in caplog.text
    (tiers[1] / "step-00000002" / "manifest.json").unlink()
    assert is_large(ringstow.load([tiers[1]]), 1)
    assert "whose manifest is gone" in caplog.text


def test_list_without_a_step_is_refused(tmp_path):
    with pytest.raises(ringstow.NoCheckpointError, match="empty list"):
        ringstow.load([])
    outcomes = []
    with (
        ringstow.on_done(outcomes.append),
        pytest.raises(ringstow.NoCheckpointError, match="no step was committed"),
    ):
        ringstow.load([tmp_path / "a", tmp_path / "b"])
    assert [type(one.error) for one in outcomes] == [ringstow.NoCheckpointError]


def test_parts_come_from_a_store_and_a_directory(tmp_path, bucket, caplog):
    url = f"{bucket.url}/run"
    with ringstow.CheckpointManager(tmp_path / "run", tiers=[url], config=SMALL) as manager:
        manager.save(1, large(1))
    here = shards(tmp_path / "run", 1)
    here[0].unlink()
    flip(here[1], 300_000)
    assert is_large(ringstow.load([tmp_path / "run", url]), 1)
    assert f"its copy {url}/step-00000001/" in caplog.text
    assert is_large(ringstow.load([url, tmp_path / "run"]), 1)


def test_small_state_of_two_stores_is_loaded(tmp_path, bucket):
    first, second = f"{bucket.url}/a", f"{bucket.url}/b"
    with ringstow.CheckpointManager(tmp_path / "run", tiers=[first, second]) as manager:
        manager.save(3, state_of(3))
    shutil.rmtree(tmp_path / "run")
    ringstow.remove(f"{first}/step-00000003")
    assert ringstow.load([first, second])["step"] == 3


def test_bad_sector_of_a_manifest_is_passed_over_and_a_refusal_is_not(tiers):
    found = _resolve.Found(f"{tiers[0]}/step-00000001", [f"{tiers[1]}/step-00000001"])

    def attempt(path, copies, errno):
        if path == found.path:
            raise OSError(errno, "reading")
        return path

    assert _resolve.opened(found, lambda *at: attempt(*at, EIO)) == found.copies[0]
    with pytest.raises(PermissionError):
        _resolve.opened(found, lambda *at: attempt(*at, EACCES))


# `latest` of a list


def found(tiers, **options):
    newest = ringstow.latest(tiers, **options)
    return newest and (newest.path, ringstow.load(newest)["step"])


def test_nearest_copy_of_the_newest_step_is_found(tiers):
    run, shared = tiers
    assert found(tiers) == (str(run / "step-00000002"), 2)
    assert found(tiers[::-1]) == (str(shared / "step-00000002"), 2)
    shutil.rmtree(run / "step-00000002")
    assert found(tiers) == (str(shared / "step-00000002"), 2)
    assert found(tiers, before=2) == (str(run / "step-00000001"), 1)
    shutil.rmtree(run)
    assert found(tiers) == (str(shared / "step-00000002"), 2)


def test_newer_save_of_one_number_comes_first(tiers):
    run, _ = tiers
    with ringstow.CheckpointManager(run, tiers=[]) as manager:
        manager.save(2, {"step": 22})
    assert found(tiers[::-1]) == (str(run / "step-00000002"), 22)


def test_damaged_copies_are_passed_over_by_verify(tiers, caplog):
    run, shared = tiers
    flip(shards(run, 2)[0], -1)
    assert found(tiers, verify=True) == (str(shared / "step-00000002"), 2)
    for shard in (*shards(run, 1), *shards(run, 2)):
        shard.unlink()
    assert found(tiers) == (str(shared / "step-00000002"), 2)
    assert f"{run} has no step that can be loaded" in caplog.text
    shutil.rmtree(shared)
    with pytest.raises(ringstow.MissingFilesError, match="step-00000002"):
        found(tiers)


def test_nothing_is_found_where_nothing_is_committed(tmp_path):
    assert ringstow.latest([tmp_path / "a", tmp_path / "b"]) is None
    assert ringstow.latest([]) is None


def test_tiers_of_two_runs_are_refused(tmp_path, tiers):
    with ringstow.CheckpointManager(tmp_path / "c", tiers=[tmp_path / "d"]) as manager:
        manager.save(1, state_of(1))
    with pytest.raises(ringstow.InvalidStateError, match="another run"):
        ringstow.latest([tiers[0], tmp_path / "d"])


def test_before_a_path_is_for_one_directory(tiers):
    with pytest.raises(TypeError, match="before"):
        ringstow.latest(tiers, before=tiers[0] / "step-00000002")
