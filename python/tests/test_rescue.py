"""A save whose last sync fails is committed, and gets copies on the tiers all the same."""

import pytest
from tiered import state_of

import ringstow
from ringstow import NotDurableError
from ringstow._saving import _jobs


@pytest.fixture(params=["save", "save_async"])
def save(request, monkeypatch):
    """Return a call that saves, and whose sync fails at the end."""
    run, report = _jobs.run, _jobs.Claim.report

    def fails(path):
        raise NotDurableError(f"{path} is committed", path=str(path), errno=5)

    def ran(start, where, **how):
        run(start, where, **how)
        fails(where)

    def reported(claim):
        report(claim)
        fails("it")

    monkeypatch.setattr(_jobs, "run", ran)
    monkeypatch.setattr(_jobs.Claim, "report", reported)

    def call(saves, *args, **options):
        if request.param == "save":
            saves.save(*args, **options)
        else:
            saves.save_async(*args, **options).result()

    return call


def test_manager_copies_it(save, tmp_path, caplog):
    manager = ringstow.CheckpointManager(tmp_path / "run", tiers=[tmp_path / "shared"])
    with pytest.raises(NotDurableError):
        save(manager, 1, state_of(1))
    manager.close()
    assert "may not survive a crash: copying it" in caplog.text
    assert ringstow.load(tmp_path / "shared/step-00000001")["step"] == 1


def test_tiers_of_the_configuration_get_it(save, tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "shared"])
    with pytest.raises(NotDurableError):
        save(ringstow, state_of(1), tmp_path / "run/step-1", config=config)
    assert ringstow.wait_promoted(60)
    assert ringstow.load(tmp_path / "shared/step-1")["step"] == 1


def test_without_tiers_nothing_is_said_of_copies(save, tmp_path, caplog):
    manager = ringstow.CheckpointManager(tmp_path / "run")
    with pytest.raises(NotDurableError):
        save(manager, 1, state_of(1))
    manager.close()
    assert "copying" not in caplog.text
