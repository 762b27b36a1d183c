"""`keep_here`: steps leave the manager's directory once all tiers have them, and not before."""

import os
import shutil

import pytest
from support import flip
from tiered import hold, manager_of, refuse, save, state_of, steps_in

import ringstow
from ringstow._manager import _after_save, _rules


def here(tmp_path):
    return steps_in(tmp_path / "run")


def there(tmp_path, name="shared/run"):
    return steps_in(tmp_path / name)


def best(**rules):
    return ringstow.Retention(best=("loss", "min", 1), **rules)


def test_all_steps_are_on_the_tiers_and_the_newest_here(tmp_path):
    with manager_of(tmp_path, "shared/run", "far", keep_here=2) as manager:
        save(manager, 1, 2, 3, 4)
        assert here(tmp_path) == [3, 4]
        assert manager.restore(1).state["step"] == 1
    assert there(tmp_path) == there(tmp_path, "far") == [1, 2, 3, 4]


def test_no_step_is_passed_over_where_no_rule_removes_it(tmp_path, monkeypatch):
    """The tier is away while three steps are saved."""
    is_away = [True]
    refuse(monkeypatch, lambda *_: is_away)
    with manager_of(tmp_path, keep_here=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
            assert not manager.wait_promoted(60)
        assert here(tmp_path) == [1, 2, 3]
        is_away.clear()
    assert (here(tmp_path), there(tmp_path)) == ([3], [1, 2, 3])


def test_what_every_rule_keeps_leaves_too_and_best_is_found_on_the_tier(tmp_path):
    rules = best(last=2, every=10)
    with manager_of(tmp_path, keep_here=1, keep_there=2, keep=rules) as manager:
        save(manager, 10, 20, 25, 26, 27, loss=lambda step: abs(step - 25))
        found = manager.best()
        assert (found.step, os.path.dirname(found.path)) == (25, str(tmp_path / "shared/run"))
        assert manager.restore(found.step).state["step"] == 25
    assert (here(tmp_path), there(tmp_path)) == ([27], [10, 20, 25, 26, 27])


def test_step_that_one_tier_lacks_stays(tmp_path, monkeypatch):
    refuse(monkeypatch, lambda _, to: to.endswith("far/step-00000001"), PermissionError)
    with manager_of(tmp_path, "shared/run", "far", keep_here=1) as manager:
        for step in (1, 2, 3):  # with each, step 1 is tried again, too
            manager.save(step, state_of(step))
            assert not manager.wait_promoted(60)
    assert here(tmp_path) == [1, 3]


def test_step_that_is_saved_again_leaves_as_the_save_that_was_copied(tmp_path):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1, 2)
        manager.save(1, state_of(100))
        assert manager.wait_promoted(60)
        save(manager, 3)
    assert here(tmp_path) == [3]
    assert ringstow.load(tmp_path / "shared/run/step-00000001")["step"] == 100


def test_next_process_finds_out_what_the_tiers_have(tmp_path):
    with manager_of(tmp_path) as manager:  # it keeps all here
        save(manager, 1, 2, 3)
    ringstow.remove(tmp_path / "shared/run/step-00000002")
    with manager_of(tmp_path, keep_here=1) as manager:
        assert manager.restore().step == 3
        save(manager, 4)
    assert (here(tmp_path), there(tmp_path)) == ([4], [1, 2, 3, 4])


@pytest.mark.parametrize("to", ["a step", "a file of it"])
def test_step_that_a_link_leads_to_stays(tmp_path, to):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1)
        step = tmp_path / "run/step-00000001"
        (tmp_path / "run/good").symlink_to(
            step.name if to == "a step" else next(step.glob("*.safetensors"))
        )
        save(manager, 2, 3)
    assert here(tmp_path) == [1, 3]


def lose_disk(shared):
    shutil.rmtree(shared)
    shared.mkdir()


LOSSES = {
    "step": lambda shared: ringstow.remove(shared / "step-00000001"),
    "disk": lose_disk,
    "file": lambda shared: next((shared / "step-00000001").glob("*.safetensors")).unlink(),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_step_that_a_tier_has_lost_stays_and_is_copied_again(tmp_path, caplog, lost):
    with manager_of(tmp_path, keep_here=1) as manager:
        save(manager, 1)
        LOSSES[lost](tmp_path / "shared/run")
        save(manager, 2)
        assert here(tmp_path) == there(tmp_path) == [1, 2]
        assert f"{tmp_path}/run/step-00000001 stays: {tmp_path}/shared/run/step-" in caplog.text
        save(manager, 3)
    assert (here(tmp_path), there(tmp_path)) == ([3], [1, 2, 3])


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
    for enough in (9, None):
        manager_of(tmp_path, **{**settings, "keep_there": enough}).close()


def test_step_that_a_rule_removes_before_its_copy_is_no_failure(tmp_path, caplog):
    """The tier is slower than the saves, and `keep` removes steps that wait for their copy."""
    with manager_of(tmp_path, keep=2, keep_here=1, rate=20_000) as manager:
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
    flip(next((tmp_path / "run/step-00000002").glob("*.safetensors")), -5)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.restore(1)
        for step in (3, 4):
            manager.save(step, state_of(step))
        manager.wait_promoted(60)
    assert 2 in here(tmp_path)
    assert 2 not in there(tmp_path)


def test_save_for_which_there_is_no_room_waits_for_the_copies(tmp_path, monkeypatch, caplog):
    waited = []

    def free(directory):  # room for two steps
        return 0 if len(here(tmp_path)) >= 2 else 1 << 40

    def wait():
        may_go.set()
        waited.append(here(tmp_path))
        return copies_wait()

    _, may_go = hold(monkeypatch)
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
    with manager_of(tmp_path, keep_here=1, keep=best()) as manager:
        save(manager, 1, 2, 3, loss=lambda step: abs(step - 2))
    for root in ("run", "new"):
        tiers = [tmp_path / "shared/run"]
        with ringstow.CheckpointManager(tmp_path / root, tiers=tiers) as manager:
            assert (manager.best("loss", "min").step, manager.latest().step) == (2, 3)
    next((tmp_path / "run/step-00000003").glob("*.safetensors")).unlink()
    with manager_of(tmp_path) as manager:
        assert manager.latest().path == str(tmp_path / "shared/run/step-00000003")


def test_best_step_that_copies_have_passed_over_is_copied_later(tmp_path, monkeypatch):
    _, may_go = hold(monkeypatch)
    with manager_of(tmp_path, keep_here=1, keep=best(last=1)) as manager:
        for step, loss in ((1, 5), (2, 1), (3, 4), (4, 3)):  # 1 is sent, 2 and 3 are overtaken
            manager.save(step, state_of(step), metrics={"loss": loss})
        may_go.set()
        assert manager.wait_promoted(60)
        save(manager, 5)
    assert here(tmp_path) == [5]
    assert 2 in there(tmp_path)


def test_step_that_was_removed_before_its_turn_is_no_failure(tmp_path, monkeypatch):
    with manager_of(tmp_path) as manager:
        save(manager, 1, 2)
    ringstow.remove(tmp_path / "shared/run/step-00000001")

    def removes(path, _):
        if path.endswith("1") and os.path.exists(path):
            ringstow.remove(path)

    tried = refuse(monkeypatch, removes)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.restore()
        assert manager.wait_promoted(60)
        assert manager.promotion_error is None
    assert [to for to in tried if to.endswith("1")]
    assert here(tmp_path) == [2]


def test_steps_are_slimmed_once_their_copies_are_whole(tmp_path, monkeypatch):
    def state(step):
        return {"model": state_of(step), "optimizer": state_of(step)}

    _, may_go = hold(monkeypatch)
    with manager_of(tmp_path, keep_here=3, keep=ringstow.Retention(slim_after=1)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        may_go.set()
        assert manager.wait_promoted(60)
        for step in (4, 5):
            manager.save(step, state(step))
            assert manager.wait_promoted(60)
            assert manager.promotion_error is None
    found = {step.step: step.dropped for step in ringstow.steps(tmp_path / "run")}
    assert found == {3: ("optimizer",), 4: ("optimizer",), 5: ()}
    assert there(tmp_path) == [1, 2, 3, 4, 5]
    for step in there(tmp_path):
        assert "optimizer" in ringstow.load(tmp_path / f"shared/run/step-{step:08}")


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
    flip(next((tmp_path / "run/step-00000002").glob("*.safetensors")), -5)
    ringstow.remove(tmp_path / "shared/run/step-00000002")
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

    def thrice(path, _):
        if path.endswith("1") and len(refusals) < 3:
            refusals.append(path)
            return True

    refuse(monkeypatch, thrice, ringstow.InvalidStateError)
    with manager_of(tmp_path, keep_here=1) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step))
            manager.wait_promoted(60)
    assert len(refusals) == 3
    assert (here(tmp_path), there(tmp_path)) == ([5], [1, 2, 3, 4, 5])


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
    _, may_go = hold(monkeypatch)
    sent = refuse(monkeypatch, lambda *_: False)
    with manager_of(tmp_path, keep_here=1) as manager:
        manager.restore()
        manager.save(6, state_of(6))
        may_go.set()
        assert manager.wait_promoted(60)
    order = [int(to[-2:]) for to in sent]
    assert sorted(order) == there(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert order.index(6) <= 1  # the first one was on its way
