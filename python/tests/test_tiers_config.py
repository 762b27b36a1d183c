"""`Config.tiers`: what is saved is copied on, with and without a manager."""

import threading

import pytest
from support import in_child, python, raising
from tiered import before_copies, hold, is_of, pause, refuse, state_of, steps_in

import ringstow
from ringstow._saving import _promote, _tier_copies
from ringstow._saving._copy_queue import Copier


@pytest.fixture(autouse=True)
def no_earlier_copies(monkeypatch):
    """Have `wait_promoted` know of this test's copies alone."""
    monkeypatch.setattr(_tier_copies, "_promoters", {})


@pytest.fixture
def tier(tmp_path):
    return tmp_path / "shared" / "run"


@pytest.fixture
def config(tier):
    return ringstow.Config(tiers=[tier])


@pytest.fixture
def held(monkeypatch):
    """Hold all copies: return what says that one has begun, and what lets them go on."""
    begun, may_go = hold(monkeypatch)
    yield begun, may_go
    may_go.set()
    ringstow.wait_promoted(60)


def test_saves_are_copied_on(tmp_path, tier, config):
    ringstow.save(state_of(1), tmp_path / "run/step-1", config=config)
    assert ringstow.wait_promoted(60)
    handle = ringstow.save_async(state_of(2), tmp_path / "run/step-2", config=config)
    assert handle.wait_promoted(60)
    for step in (1, 2):
        assert is_of(ringstow.load(tier / f"step-{step}"), step)
        assert ringstow.verify(tier / f"step-{step}").ok


def test_copy_that_failed_is_tried_again(tmp_path, tier, config, monkeypatch, caplog):
    is_back, again = threading.Event(), threading.Event()

    def away(path, to):
        if not is_back.is_set():
            raise ConnectionRefusedError("away")
        again.set()

    before_copies(monkeypatch, away)
    pause(monkeypatch, (0.01, 0.01))
    handle = ringstow.save_async(state_of(1), tmp_path / "run/step-1", config=config)
    with pytest.raises(ConnectionRefusedError):
        handle.wait_promoted(60)
    assert "It is tried again" in caplog.text
    is_back.set()
    assert again.wait(60)
    while not ringstow.wait_promoted(60):
        pass  # it was asked between two tries
    assert ringstow.verify(tier / "step-1").ok


def test_failed_copies_of_unlike_names_are_all_tried_again(tmp_path, tier, config, monkeypatch):
    tries = refuse(monkeypatch, lambda *_: len(tries) == 1)
    ringstow.save(state_of(1), tmp_path / "run/best", config=config)
    assert not ringstow.wait_promoted(60)
    ringstow.save(state_of(2), tmp_path / "run/step-2", config=config)
    assert ringstow.wait_promoted(60)
    assert [to.rpartition("/")[2] for to in tries] == ["best", "step-2", "best"]
    assert ringstow.verify(tier / "best").ok


def test_exit_tries_a_copy_that_failed_a_last_time(tmp_path, tier):
    program = f"""
import atexit, numpy, ringstow
from ringstow._saving import _promote
promote, tries = _promote.copied, []
def away(*args, **options):
    tries.append(args)
    if len(tries) == 1:
        raise ConnectionRefusedError("away")
    return promote(*args, **options)
_promote.copied = away
config = ringstow.Config(tiers=[{str(tier)!r}])
ringstow.save({{"w": numpy.ones(9)}}, {str(tmp_path / "run/step-1")!r}, config=config)
assert not ringstow.wait_promoted(60)
"""
    python(program)
    assert ringstow.verify(tier / "step-1").ok


def test_save_over_a_checkpoint_replaces_its_copy(tmp_path, tier, config):
    for step in (1, 2):
        ringstow.save(state_of(step), tmp_path / "run/last", config=config)
        assert ringstow.wait_promoted(60)
    assert ringstow.load(tier / "last")["step"] == 2


def test_save_returns_before_its_copy_is_there(tmp_path, tier, config, held):
    begun, may_go = held
    handle = ringstow.save_async(state_of(1), tmp_path / "run/step-1", config=config)
    handle.result()
    assert begun.wait(60)
    assert not handle.wait_promoted(0)
    assert not ringstow.wait_promoted(0)
    assert not handle.promoted()
    assert not (tier / "step-1").exists()
    may_go.set()
    assert handle.wait_promoted()
    assert handle.promoted()


def test_overtaken_checkpoint_is_not_promoted(tmp_path, tier, config, held, caplog):
    begun, may_go = held
    handles = []
    for step in (1, 2, 3):
        path = tmp_path / f"run/step-{step}"
        handles.append(ringstow.save_async(state_of(step), path, config=config))
        handles[-1].result()
        assert begun.wait(60)
    may_go.set()
    assert [handle.wait_promoted(60) for handle in handles] == [True, False, True]
    assert sorted(path.name for path in tier.glob("step-*")) == ["step-1", "step-3"]
    assert "step-2 is not copied to" in caplog.text


def test_checkpoints_of_other_names_are_all_copied(tmp_path, tier, config, held):
    begun, may_go = held
    names = ["model", "optim", "best", "step-9", "step-10", "last", "last"]
    for name in names:
        ringstow.save(state_of(1), tmp_path / "run" / name, config=config)
        assert begun.wait(60)
    may_go.set()
    assert ringstow.wait_promoted(60)
    there = sorted(path.name for path in tier.iterdir() if path.is_dir() and path.name[0] != ".")
    assert there == ["best", "last", "model", "optim", "step-10"]


def test_new_directory_goes_on_with_the_run_that_was_loaded(tmp_path, tier, config, caplog):
    ringstow.save(state_of(1), tmp_path / "run/step-1", config=config)
    assert ringstow.wait_promoted(60)
    newest = ringstow.latest([tmp_path / "new", tier])
    assert newest.path == str(tier / "step-1")
    assert ringstow.load(newest)["step"] == 1
    ringstow.save(state_of(2), tmp_path / "new/step-2", config=config)
    assert ringstow.wait_promoted(60)
    assert "goes on with the run whose steps are in" in caplog.text
    assert ringstow.latest([tmp_path / "new", tier]).path == str(tmp_path / "new/step-2")
    ringstow.save(state_of(3), tmp_path / "run/step-3", config=config)  # a program that was lost
    assert not ringstow.wait_promoted(60)
    assert sorted(path.name for path in tier.glob("step-*")) == ["step-1", "step-2"]


def test_error_that_passes_is_not_hidden_by_a_later_one(tmp_path, monkeypatch):
    errors = {"away": OSError("away"), "other": ringstow.InvalidStateError("other")}

    def failing(path, to, **options):
        raise errors[to.split("/")[-2]]

    monkeypatch.setattr(_promote, "copied", failing)
    config = ringstow.Config(tiers=[tmp_path / "away", tmp_path / "other"])
    handle = ringstow.save_async(state_of(1), tmp_path / "run/step-1", config=config)
    with pytest.raises(OSError, match="away"):
        handle.wait_promoted(60)


def test_failed_copy_fails_no_save_and_promoted_raises_it(tmp_path, tier, config, caplog):
    tier.parent.mkdir()
    tier.write_text("a file")
    handle = ringstow.save_async(state_of(1), tmp_path / "run/step-1", config=config)
    assert handle.result().path == str(tmp_path / "run/step-1")
    with pytest.raises(OSError, match="run"):
        handle.wait_promoted(60)
    assert not handle.promoted()
    assert not ringstow.wait_promoted(60)
    tier.unlink()
    ringstow.save(state_of(2), tmp_path / "run/step-2", config=config)
    assert ringstow.wait_promoted(60)
    assert "step-1 is saved, but not copied to" in caplog.text


def test_promoted_raises_what_the_save_failed_of(tmp_path, config):
    (tmp_path / "run").write_text("a file")
    handle = ringstow.save_async(state_of(1), tmp_path / "run/step-1", config=config)
    with pytest.raises(NotADirectoryError):
        handle.wait_promoted(60)


def test_handle_in_a_forked_child_answers_nothing(tmp_path, config):
    handle = ringstow.save_async(state_of(1), tmp_path / "run/step-1", config=config)
    assert handle.wait_promoted(60)

    def child():
        for ask in (handle.promoted, handle.wait_promoted):
            with pytest.raises(ringstow.Error, match="forked from"):
                ask()

    assert in_child(child) == 0


def test_promoted_without_tiers_is_refused(tmp_path):
    handle = ringstow.save_async(state_of(1), tmp_path / "step-1")
    with pytest.raises(ringstow.InvalidStateError, match="name tiers in Config"):
        handle.wait_promoted()
    handle.result()


def test_tier_in_the_directory_of_the_run_is_refused_at_the_call(tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "run" / "copies"])
    for save in (ringstow.save, ringstow.save_async):
        with pytest.raises(ringstow.InvalidStateError, match="copies"):
            save(state_of(1), tmp_path / "run/step-1", config=config)
    assert not (tmp_path / "run").exists()


def test_second_run_in_a_tier_is_refused(tmp_path, config, caplog):
    for run in ("a", "b"):
        ringstow.save(state_of(1), tmp_path / run / "step-1", config=config)
        assert ringstow.wait_promoted(60) == (run == "a")
    assert "another run" in caplog.text


def program(at, code, *args):
    return python(f"import atexit, sys, numpy, ringstow\n{code}", *args, cwd=at, check=True)


SAVE = "ringstow.save({'w': numpy.ones(1 << 20)}, 'run/step-1')"


@pytest.mark.parametrize("code", [SAVE, f"atexit.register(lambda: {SAVE})"])
def test_program_ends_after_its_copies_also_of_saves_at_its_exit(tmp_path, tier, monkeypatch, code):
    monkeypatch.setenv("RINGSTOW_TIERS", f"{tier}:{tmp_path / 'second'}")
    monkeypatch.setenv("RINGSTOW_PROMOTION_RATE", "1G")
    program(tmp_path, code)
    for place in (tier, tmp_path / "second"):
        assert ringstow.verify(place / "step-1").ok


def test_manager_copies_to_the_tiers_of_its_config(tmp_path, tier, config):
    with ringstow.CheckpointManager(tmp_path / "run", config=config) as manager:
        handle = manager.save_async(1, state_of(1))
        assert handle.wait_promoted(60)
        assert manager.promotion_report.to == str(tier / "step-00000001")
        manager.save(2, state_of(2))
    assert steps_in(tier) == [1, 2]
    assert ringstow.wait_promoted(0)  # nobody else copied them


def test_manager_with_its_own_tiers_leaves_those_of_the_config(tmp_path, tier, config):
    with ringstow.CheckpointManager(tmp_path / "run", tiers=[], config=config) as manager:
        manager.save(1, state_of(1))
        with pytest.raises(ringstow.InvalidStateError, match="tiers"):
            manager.save_async(2, state_of(2)).wait_promoted()
    assert not tier.exists()


def test_file_found_by_chance_names_no_tiers(tmp_path, tier, monkeypatch):
    (tmp_path / "ringstow.toml").write_text(f'tiers = ["{tier}"]\n')
    assert "ignored tiers" in program(tmp_path, SAVE).stderr
    assert not tier.exists()
    monkeypatch.setenv("RINGSTOW_CONFIG", str(tmp_path / "ringstow.toml"))
    program(tmp_path, SAVE)
    assert ringstow.verify(tier / "step-1").ok


def test_forked_child_copies_what_it_saves(tmp_path, tier, config):
    ringstow.save(state_of(1), tmp_path / "run/step-1", config=config)
    assert ringstow.wait_promoted(60)

    def child():
        with pytest.raises(ringstow.InvalidStateError, match="forked from"):
            ringstow.wait_promoted(60)
        ringstow.save(state_of(2), tmp_path / "run/step-2", config=config)
        assert ringstow.wait_promoted(60)

    assert in_child(child) == 0
    assert ringstow.verify(tier / "step-2").ok


def test_copier_that_breaks_leaves_nobody_waiting(monkeypatch):
    monkeypatch.setattr(Copier, "_copy", raising(ZeroDivisionError))
    copier = Copier(["somewhere"])
    ended = copier.expected()
    copier.add("step-1", is_new=True, ended=ended)
    with pytest.raises(ZeroDivisionError):
        ended.result(60)
    copier.close()
    assert not copier.wait(0)


def test_manager_that_is_not_closed_copies_its_last_step(tmp_path, tier):
    code = """
tiers = ringstow.Tiers([sys.argv[1]], keep=3)
manager = ringstow.CheckpointManager("run", tiers=tiers)
save = manager.save if sys.argv[2] == "1" else manager.save_async
save(int(sys.argv[2]), {"w": numpy.ones(1 << 20)})
"""
    for step in (1, 2):
        program(tmp_path, code, tier, step)
    assert steps_in(tier) == [1, 2]


def test_exit_tries_a_copy_that_failed_a_last_time_and_does_not_wait_for_more(tmp_path):
    (tmp_path / "file").touch()
    code = "manager = ringstow.CheckpointManager('run', tiers=['file/run'])\n"
    code += "manager.save(1, {'w': numpy.ones(9)})\nassert not manager.wait_promoted()"
    ran = program(tmp_path, code)
    assert ran.stderr.count("is saved, but not copied to") == 2


def test_secret_in_a_url_is_refused_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGSTOW_TIERS", "s3://key:SECRET@bucket/x")
    ran = python("import ringstow; ringstow.save({'w': 1}, 'run/step-1')", cwd=tmp_path)
    assert ran.returncode == 1
    assert "s3://..." in ran.stderr
    assert "SECRET" not in ran.stderr
    assert not list(tmp_path.iterdir())
