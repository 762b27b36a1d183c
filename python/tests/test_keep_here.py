"""`keep_here`: steps leave the manager's directory once all tiers have them, and not before."""

import os
import shutil
import threading

import pytest
from tiered import before_copies, state_of

import ringstow
from ringstow._manager import _after_save, _rules


def manager_of(tmp_path, *names, keep=None, keep_there=None, **there):
    places = [tmp_path / name for name in names or ("shared",)]
    tiers = ringstow.Tiers(places, keep=keep_there, **there)
    return ringstow.CheckpointManager(tmp_path / "run", keep=keep, tiers=tiers)


def here(tmp_path):
    return [found.step for found in ringstow.steps(tmp_path / "run")]


def there(tmp_path, name="shared"):
    return [found.step for found in ringstow.steps(tmp_path / name)]


def save(manager, *steps, loss=float):
    for step in steps:
        manager.save(step, state_of(step), metrics={"loss": loss(step)})
        assert manager.wait_promoted(60)


def test_all_steps_are_on_the_tiers_and_the_newest_here(tmp_path):
    with manager_of(tmp_path, "shared", "far", keep_here=2) as manager:
        save(manager, 1, 2, 3, 4)
        assert here(tmp_path) == [3, 4]
        assert manager.restore(1).state["step"] == 1
    assert there(tmp_path) == there(tmp_path, "far") == [1, 2, 3, 4]


def test_no_step_is_passed_over_where_no_rule_removes_it(tmp_path, monkeypatch):
    """The tier is away while three steps are saved."""
    is_away = [True]

    def away(path, to):
        if is_away[0]:
            raise ConnectionRefusedError(to)

    before_copies(monkeypatch, away)
    with manager_of(tmp_path, keep_here=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
            assert not manager.wait_promoted(60)
        assert here(tmp_path) == [1, 2, 3]
        is_away[0] = False
    assert there(tmp_path) == [1, 2, 3]
    assert here(tmp_path) == [3]


def test_what_every_rule_keeps_leaves_too_and_best_is_found_on_the_tier(tmp_path):
    rules = {"keep": ringstow.Retention(last=2, every=10, best=("loss", "min", 1))}
    with manager_of(tmp_path, keep_here=1, keep_there=2, **rules) as manager:
        save(manager, 10, 20, 25, 26, 27, loss=lambda step: abs(step - 25))
        best = manager.best()
        assert (best.step, os.path.dirname(best.path)) == (25, str(tmp_path / "shared"))
        assert manager.restore(best.step).state["step"] == 25
    assert here(tmp_path) == [27]
    assert there(tmp_path) == [10, 20, 25, 26, 27]


def test_step_that_one_tier_lacks_stays(tmp_path, monkeypatch):
    def refused(path, to):
        if to.endswith("far/step-00000001"):
            raise PermissionError(to)

    before_copies(monkeypatch, refused)
    with manager_of(tmp_path, "shared", "far", keep_here=1) as manager:
        manager.save(1, state_of(1))
        assert not manager.wait_promoted(60)
        for step in (2, 3):
            manager.save(step, state_of(step))
            assert not manager.wait_promoted(60)  # step 1 is tried again, too
    assert here(tmp_path) == [1, 3]


def test_step_that_is_saved_again_leaves_as_the_save_that_was_copied(tmp_path):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1, 2)
        manager.save(1, state_of(100))
        assert manager.wait_promoted(60)
        save(manager, 3)
    assert here(tmp_path) == [3]
    assert ringstow.load(tmp_path / "shared/step-00000001")["step"] == 100


def test_next_process_finds_out_what_the_tiers_have(tmp_path):
    with manager_of(tmp_path) as manager:  # it keeps all here
        save(manager, 1, 2, 3)
    ringstow.remove(tmp_path / "shared/step-00000002")
    with manager_of(tmp_path, keep_here=1) as manager:
        assert manager.restore().step == 3
        save(manager, 4)
    assert here(tmp_path) == [4]
    assert there(tmp_path) == [1, 2, 3, 4]


def test_step_that_a_link_leads_to_stays(tmp_path):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1)
        (tmp_path / "run" / "good").symlink_to("step-00000001")
        save(manager, 2, 3)
    assert here(tmp_path) == [1, 3]


def test_link_to_a_file_in_a_step_keeps_the_step(tmp_path):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1)
        [shard] = (tmp_path / "run/step-00000001").glob("*.safetensors")
        (tmp_path / "run" / "best.safetensors").symlink_to(shard)
        save(manager, 2, 3)
    assert here(tmp_path) == [1, 3]


def lose_step(shared):
    ringstow.remove(shared / "step-00000001")


def lose_disk(shared):
    shutil.rmtree(shared)
    shared.mkdir()


def lose_file(shared):
    [shard] = (shared / "step-00000001").glob("*.safetensors")
    shard.unlink()


@pytest.mark.parametrize("lose", [lose_step, lose_disk, lose_file])
def test_step_that_a_tier_has_lost_stays_and_is_copied_again(tmp_path, caplog, lose):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1)
        lose(tmp_path / "shared")
        save(manager, 2)
        assert here(tmp_path) == there(tmp_path) == [1, 2]
        assert f"{tmp_path}/run/step-00000001 stays: {tmp_path}/shared/step-" in caplog.text
        save(manager, 3)
    assert here(tmp_path) == [3]
    assert there(tmp_path) == [1, 2, 3]


def test_step_stays_while_a_tier_does_not_answer(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    rules = ringstow.Retention()
    clearing = _rules.clearing(str(tmp_path / "run"), rules, ("s3://bucket/run",), 1, None)
    assert clearing.evict([]) == []  # nobody knows whether another copy is needed
    assert "step-00000001 stays: s3://bucket/run does not answer" in caplog.text
    assert here(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"keep_here": 3, "keep_there": 1}, "Tiers.keep=1 .* Tiers.keep_here=3"),
        ({"keep_here": 2, "keep": 9, "keep_there": 5}, "Tiers.keep=5 .* keep=9"),
    ],
)
def test_settings_that_leave_a_step_nowhere_are_refused(tmp_path, settings, names):
    with pytest.raises(ringstow.InvalidStateError, match=names):
        manager_of(tmp_path, **settings)
    manager_of(tmp_path, **{**settings, "keep_there": 9}).close()
    manager_of(tmp_path, **{**settings, "keep_there": None}).close()


def test_step_that_a_rule_removes_before_its_copy_is_no_failure(tmp_path, caplog):
    """The tier is slower than the saves, and `keep` removes steps that wait for their copy."""
    rules = {"keep": 2, "keep_here": 1, "rate": 20_000}
    with manager_of(tmp_path, **rules) as manager:
        for step in range(1, 9):
            manager.save(step, state_of(step))
        assert manager.wait_promoted(60)
        assert manager.promotion_error is None
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert 8 in there(tmp_path)


def test_damaged_step_here_stays_until_it_is_copied(tmp_path):
    """The copy finds the damage, and commits nothing of it."""
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1)
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, state_of(2))
    [shard] = (tmp_path / "run/step-00000002").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.restore(1)
        manager.save(3, state_of(3))
        manager.save(4, state_of(4))
        manager.wait_promoted(60)
    assert 2 in here(tmp_path)
    assert 2 not in there(tmp_path)


def test_save_for_which_there_is_no_room_waits_for_the_copies(tmp_path, monkeypatch, caplog):
    may_send = threading.Event()

    def held(path, to):
        assert may_send.wait(60)

    def free(directory):  # room for two steps
        return 0 if len(here(tmp_path)) >= 2 else 1 << 40

    waited = []

    def wait():
        may_send.set()
        waited.append(here(tmp_path))
        return copies_wait()

    before_copies(monkeypatch, held)
    monkeypatch.setattr(_after_save, "_free", free)
    with manager_of(tmp_path, keep_here=1) as manager:
        copies_wait = manager._copier.wait
        monkeypatch.setattr(manager._copier, "wait", wait)
        manager.save(1, state_of(1))
        manager.save(2, state_of(2))
        manager.save_async(3, state_of(3)).result()
        assert waited == [[1, 2]]
        assert "is full: the save waits" in caplog.text
        assert here(tmp_path)[-1] == 3
        assert 1 not in here(tmp_path)  # and 2 leaves as soon as 3 is there
    assert there(tmp_path) == [1, 2, 3]


def test_best_and_latest_are_found_on_the_tiers_by_any_manager(tmp_path):
    """A new node, or a program that evaluates: nothing is in its own directory."""
    with manager_of(
        tmp_path, keep_here=1, keep=ringstow.Retention(best=("loss", "min", 1))
    ) as manager:
        save(manager, 1, 2, 3, loss=lambda step: abs(step - 2))
    for root in ("run", "new"):
        with ringstow.CheckpointManager(tmp_path / root, tiers=[tmp_path / "shared"]) as manager:
            assert manager.best("loss", "min").step == 2
            assert manager.latest().step == 3
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        [shard] = (tmp_path / "run/step-00000003").glob("*.safetensors")
        shard.unlink()
    with manager_of(tmp_path) as manager:
        assert manager.latest().path == str(tmp_path / "shared/step-00000003")


def test_best_step_that_copies_have_passed_over_is_copied_later(tmp_path, monkeypatch):
    may_send = threading.Event()

    def held(path, to):
        assert may_send.wait(60)

    before_copies(monkeypatch, held)
    rules = {"keep": ringstow.Retention(last=1, best=("loss", "min", 1))}
    with manager_of(tmp_path, keep_here=1, **rules) as manager:
        for step, loss in ((1, 5), (2, 1), (3, 4), (4, 3)):  # 1 is sent, 2 and 3 are overtaken
            manager.save(step, state_of(step), metrics={"loss": loss})
        may_send.set()
        assert manager.wait_promoted(60)
        save(manager, 5)
    assert here(tmp_path) == [5]
    assert 2 in there(tmp_path)


def test_step_that_was_removed_before_its_turn_is_no_failure(tmp_path, monkeypatch):
    with manager_of(tmp_path) as manager:
        save(manager, 1, 2)
    ringstow.remove(tmp_path / "shared/step-00000001")
    tried = []

    def removed_first(path, to):
        if path.endswith("1") and not tried:
            tried.append(path)
            ringstow.remove(path)

    before_copies(monkeypatch, removed_first)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.restore()
        assert manager.wait_promoted(60)
        assert manager.promotion_error is None
    assert tried


def test_steps_are_slimmed_once_their_copies_are_whole(tmp_path, monkeypatch):
    may_send = threading.Event()

    def held(path, to):
        assert may_send.wait(60)

    before_copies(monkeypatch, held)
    with manager_of(tmp_path, keep_here=3, keep=ringstow.Retention(slim_after=1)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": state_of(step), "optimizer": state_of(step)})
        may_send.set()
        assert manager.wait_promoted(60)
        save_slim(manager, 4)
        save_slim(manager, 5)
    assert [found.dropped for found in ringstow.steps(tmp_path / "run")] == [
        ("optimizer",),
        ("optimizer",),
        (),
    ]
    assert here(tmp_path) == [3, 4, 5]
    for step in there(tmp_path):
        assert "optimizer" in ringstow.load(tmp_path / f"shared/step-{step:08}")
    assert there(tmp_path) == [1, 2, 3, 4, 5]


def save_slim(manager, step):
    manager.save(step, {"model": state_of(step), "optimizer": state_of(step)})
    assert manager.wait_promoted(60)
    assert manager.promotion_error is None


def test_slimmed_step_has_its_whole_copy(tmp_path):
    path, there = tmp_path / "a", tmp_path / "shared/a"
    parts = {"model": state_of(1), "optimizer": state_of(1)}
    ringstow.save(parts, path, droppable=["optimizer"])
    ringstow.promote(path, there)
    ringstow.slim(path, ["optimizer"])
    assert ringstow.promote(path, there).was_there
    next(there.glob("*.safetensors")).unlink()
    with pytest.raises(FileExistsError, match="another checkpoint is there"):
        ringstow.promote(path, there)


def test_damaged_step_that_a_restore_passes_over_fails_no_wait(tmp_path):
    with manager_of(tmp_path) as manager:
        save(manager, 1, 2)
    for place in ("run", "shared"):
        [shard] = (tmp_path / place / "step-00000002").glob("*.safetensors")
        shard.write_bytes(bytes(shard.stat().st_size))
    ringstow.remove(tmp_path / "shared/step-00000002")
    with manager_of(tmp_path, keep_here=1) as manager:
        assert manager.restore(on_corrupt="previous").step == 1
        assert manager.wait_promoted(60)
        save(manager, 3)
    assert there(tmp_path) == [1, 3]


def test_last_saves_stay_after_the_run_went_back(tmp_path):
    with manager_of(tmp_path, keep_here=2) as manager:
        save(manager, *range(1, 8))
        manager.restore(3)
        save(manager, 4, 5)
    assert here(tmp_path) == [4, 5]


def test_step_whose_copy_was_refused_is_copied_after_later_saves(tmp_path, monkeypatch):
    refusals = []

    def refused(path, to):
        if path.endswith("1") and len(refusals) < 3:
            refusals.append(path)
            raise ringstow.InvalidStateError("not now")

    before_copies(monkeypatch, refused)
    with manager_of(tmp_path, keep_here=1) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
            manager.wait_promoted(60)
    assert len(refusals) == 3
    assert there(tmp_path) == [1, 2, 3, 4, 5]
    assert here(tmp_path) == [5]


def test_program_that_restored_nothing_asks_the_tiers_when_there_is_no_room(tmp_path, monkeypatch):
    with manager_of(tmp_path) as manager:
        save(manager, 1, 2, 3)
    rooms = []

    def free(directory):
        rooms.append(len(here(tmp_path)))
        return 0 if rooms[-1] >= 2 else 1 << 40

    monkeypatch.setattr(_after_save, "_free", free)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.save(4, state_of(4))
    assert rooms[0] == 3
    assert here(tmp_path) == [4]


def test_new_step_is_copied_before_those_that_were_found(tmp_path, monkeypatch):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
    sent, may_send = [], threading.Event()

    def held(path, to):
        assert may_send.wait(60)
        sent.append(int(path[-2:]))

    before_copies(monkeypatch, held)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.restore()
        manager.save(6, state_of(6))
        may_send.set()
        assert manager.wait_promoted(60)
    assert sorted(sent) == there(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert sent.index(6) <= 1  # the first one was on its way
