"""Who waits for a save for long says so once: for which save, and what it has not done yet."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
from held_save import ONE

import ringstow
from ringstow._core import _waiting
from ringstow._core._call_lock import CallLock


@pytest.fixture
def said(held, monkeypatch):
    """Lose patience at once, and let the save go on then; return what was said."""
    monkeypatch.setattr(_waiting, "PATIENCE_S", 0.0)
    texts = []

    class Handler(logging.Handler):
        def emit(self, record):
            if "so far" in record.getMessage():
                texts.append(record.getMessage())
                held.release()

    handler = Handler()
    logging.getLogger("ringstow").addHandler(handler)
    yield texts
    logging.getLogger("ringstow").removeHandler(handler)


STATE = {"w": torch.ones(512, 512)}


def about(texts, path):
    return [text for text in texts if str(path) in text]


def test_a_step_names_the_save_that_it_waits_for(save, said, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2)).sum().backward()
    save(STATE)
    optimizer.step()
    optimizer.step()
    assert len(said) == 1
    assert "an optimizer's step waits for the save to" in said[0]
    assert str(tmp_path / "c") in said[0]
    assert "has not copied all tensors, for 0 s so far" in said[0]


@pytest.mark.parametrize("wait", ["wait_staged", "result", "exception"])
def test_a_wait_for_a_handle_names_its_save(save, said, tmp_path, wait):
    handle = save(STATE)
    getattr(handle, wait)()
    (text,) = about(said, tmp_path / "c")
    assert "the program waits for the save to" in text
    handle.result()


def test_a_wait_with_a_timeout_says_nothing(save, said):
    handle = save(STATE)
    assert not handle.wait_staged(0.01)
    with pytest.raises(TimeoutError):
        handle.result(0.01)
    assert said == []


def test_a_manager_names_the_save_that_its_next_call_waits_for(held, said, tmp_path):
    manager = ringstow.CheckpointManager(tmp_path / "run", config=ONE)
    manager.save_async(1, held.state(STATE))
    assert len(manager.steps()) == 1
    (text,) = about(said, tmp_path / "run" / "step-00000001")
    assert "rank 0 of the manager waits for the save to" in text
    manager.close()


def test_short_waits_say_nothing(tmp_path, caplog):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
        manager.save_async(2, STATE).result()
        manager.save_async(3, STATE).wait_staged()
        manager.steps()
    assert not [one for one in caplog.records if "so far" in one.getMessage()]


def test_a_call_of_ranks_says_that_it_waits_for_another_one(said, held, monkeypatch):
    lock = CallLock("a save")
    lock.acquire()
    lock.hand_over()
    monkeypatch.setattr(held, "release", lambda: threading.Thread(target=lock.release).start())
    with lock.held():
        pass
    (text,) = said
    assert text.startswith("a save waits for another one of this process, for 0 s so far, on node ")


def test_a_wait_that_polls_says_it_once(said):
    patience = _waiting.Patience("x waits for y")
    patience.check()
    patience.check()
    here = f"on node {os.uname().nodename} in process {os.getpid()}"
    assert said == [f"x waits for y, for 0 s so far, {here}"]
