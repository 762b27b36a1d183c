"""Optimizer steps and the copying of a background save wait for each other."""

from __future__ import annotations

import os
import threading

import forked
import pytest
import torch
from support import python
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ringstow
from ringstow._saving import _guard

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
}


class Trainer:
    """A model with one tensor that is streamed, norms and an optimizer."""

    def __init__(self, optimizer="adamw-fused"):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512), torch.nn.Linear(512, 1)
        )
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def backward(self):
        self.model(torch.randn(8, 512)).square().sum().backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def frozen(self):
        return [tensor.clone() for tensor in tensors_of(self.state())]


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if type(value) is list else []
    return [tensor for item in values for tensor in tensors_of(item)]


def check_saved(path, expected):
    back = ringstow.load(path)
    del back["hold"]
    found = tensors_of(back)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_waits_for_the_copies(optimizer, save, on_wait, tmp_path):
    trainer = Trainer(optimizer)
    trainer.step()
    expected = trainer.frozen()
    handle = save(trainer.state())
    trainer.backward()  # the statistics of the norm change here
    assert not handle.staged()
    trainer.backward()  # gradients are accumulated
    trainer.optimizer.step()
    assert on_wait == ["step"]
    assert handle.staged()
    handle.result()
    check_saved(tmp_path / "c", expected)
    trainer.step()
    assert on_wait == ["step"]


def test_a_step_in_another_thread_waits(save, on_wait, tmp_path):
    trainer = Trainer()
    trainer.step()
    expected = trainer.frozen()
    handle = save(trainer.state())
    thread = threading.Thread(target=trainer.step)
    thread.start()
    thread.join(60)
    assert on_wait == ["step"]
    handle.result()
    check_saved(tmp_path / "c", expected)


class InStep:
    """A trainer whose optimizer is in the middle of a step, in another thread."""

    def __init__(self):
        self.trainer = Trainer()
        self.trainer.step()
        self._is_in, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._step)
        self.thread.start()
        assert self._is_in.wait(60)

    def _step(self):
        self.trainer.backward()
        self.trainer.optimizer.step(self._closure)

    def _closure(self):
        self._is_in.set()
        assert self.go_on.wait(60)
        return torch.zeros(())


def test_save_waits_for_a_step_in_another_thread(monkeypatch, tmp_path):
    one = InStep()
    before = one.trainer.frozen()

    def pause():
        one.go_on.set()
        one.thread.join(60)

    monkeypatch.setattr(_guard, "_pause", pause)
    ringstow.save_async({"hold": 1, **one.trainer.state()}, tmp_path / "c").result()
    expected = one.trainer.frozen()
    assert not all(map(torch.equal, before, expected))
    check_saved(tmp_path / "c", expected)


def test_call_fails_if_a_step_does_not_end(monkeypatch, tmp_path):
    one = InStep()
    monkeypatch.setattr(_guard, "_STEP_MAX_S", 0.0)
    with pytest.raises(ringstow.TornSaveError, match="Save between steps"):
        ringstow.save_async(one.trainer.state(), tmp_path / "c")
    assert not _guard._holds
    ringstow.save(one.trainer.state(), tmp_path / "c")  # a blocking save does not wait
    one.go_on.set()
    one.thread.join(60)


def test_save_and_waiting_step_do_not_deadlock(held, save, monkeypatch, tmp_path):
    trainer = Trainer()
    trainer.step()
    trainer.backward()
    expected, waits = trainer.frozen(), threading.Event()
    wait = _guard.Hold.wait
    monkeypatch.setattr(_guard.Hold, "wait", lambda hold: (waits.set(), wait(hold)))
    handles = [save(trainer.state(), path=tmp_path / "a")]
    thread = threading.Thread(target=trainer.optimizer.step)
    thread.start()
    assert waits.wait(60)
    handles.append(save(trainer.state(), path=tmp_path / "b"))
    held.release()
    thread.join(60)
    for name, handle in zip("ab", handles, strict=True):
        handle.result()
        check_saved(tmp_path / name, expected)


def test_step_waits_for_all_running_saves(held, save, on_wait, tmp_path):
    trainer = Trainer()
    trainer.step()
    expected = trainer.frozen()
    handles = [save(trainer.state(), path=tmp_path / name) for name in "ab"]
    trainer.step()
    assert all(handle.staged() for handle in handles)
    for name, handle in zip("ab", handles, strict=True):
        handle.result()
        check_saved(tmp_path / name, expected)


@pytest.mark.parametrize("where", ["optimizer", "all", "closure"])
def test_save_within_a_step_copies_before_it_returns(where, save, on_wait, tmp_path):
    trainer = Trainer("adamw-fused")
    trainer.step()
    trainer.backward()
    expected, handles = trainer.frozen(), []

    def hook(*_):
        handles.append(save(trainer.state()))

    def closure():
        hook()
        return torch.zeros(())

    if where == "closure":
        trainer.optimizer.step(closure)
    else:
        one = trainer.optimizer.register_step_pre_hook
        registered = register_optimizer_step_pre_hook(hook) if where == "all" else one(hook)
        try:
            trainer.optimizer.step()
        finally:
            registered.remove()
    assert on_wait[0] == "call"
    handles[0].result()
    check_saved(tmp_path / "c", expected)


@pytest.mark.parametrize("kind", ["first", "later"])
def test_first_save_may_run_within_a_step_with_hooks(kind, tmp_path):
    """torch iterates over its table of hooks meanwhile, and fails if the table changes."""
    code = f"""
import sys, torch, ringstow
from torch.optim.optimizer import register_optimizer_step_pre_hook
w = torch.nn.Parameter(torch.zeros(1 << 18))
optimizer = torch.optim.AdamW([w], 0.1, fused=True)
if {kind == "later"}:
    ringstow.save({{"w": w}}, sys.argv[1])
saved = []
def hook(*_):
    if not saved:
        saved.append(ringstow.save_async({{"w": w}}, sys.argv[1]))
register_optimizer_step_pre_hook(hook)
register_optimizer_step_pre_hook(lambda *_: None)
for _ in range(3):
    w.grad = torch.ones_like(w)
    optimizer.step()
saved[0].result()
assert not ringstow.load(sys.argv[1])["w"].any()
"""
    done = forked.python(code, tmp_path / "c")
    assert (done.returncode, done.stderr) == (0, "")


def test_change_of_averaged_weights_fails_the_save(save, held):
    """Its update is not an optimizer's step and does not wait, so the save detects the change."""
    trainer = Trainer()
    average = torch.optim.swa_utils.AveragedModel(trainer.model)
    handle = save({"ema": average.state_dict()})
    average.update_parameters(trainer.model)
    average.update_parameters(trainer.model)
    held.release()
    with pytest.raises(ringstow.TornSaveError, match=r"ema\.module\.0\.weight"):
        handle.result()


@pytest.mark.parametrize("staging", ["guard", "snapshot", "wait", "unguarded"])
def test_failed_save_does_not_block_a_step(staging, tmp_path):
    trainer = Trainer()
    (tmp_path / "file").write_text("in the way")
    handle = ringstow.save_async(trainer.state(), tmp_path / "file" / "c", staging=staging)
    trainer.step()
    with pytest.raises(OSError, match="file"):
        handle.result()
    with pytest.raises(ringstow.InvalidStateError):
        ringstow.save_async({"a": object()}, tmp_path / "c", staging=staging)
    trainer.step()


def test_cancelled_save_does_not_block_a_step(save, held):
    trainer = Trainer()
    handle = save(trainer.state())
    handle.cancel()
    held.release()
    trainer.step()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_steps_without_its_parents_save(save, held):
    torch.set_num_threads(1)  # otherwise the child waits for torch threads that it lacks
    trainer = Trainer("sgd")
    handle = save(trainer.state())
    child = os.fork()
    if child == 0:
        trainer.optimizer.step()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not handle.staged()


def test_save_async_without_torch_does_not_import_it(tmp_path):
    code = """
import sys, numpy, ringstow
handle = ringstow.save_async({"a": numpy.zeros(8)}, sys.argv[1])
handle.result()
assert "torch" not in sys.modules
"""
    done = python(code, tmp_path / "c")
    assert (done.returncode, done.stderr) == (0, "")


def test_compiled_step_waits_for_the_copies(save, on_wait, tmp_path):
    trainer = Trainer("adamw-foreach")
    trainer.step()

    @torch.compile(backend="eager")
    def step():
        trainer.optimizer.step()

    trainer.backward()
    step()
    expected = trainer.frozen()
    handle = save(trainer.state())
    step()
    assert on_wait == ["step"]
    handle.result()
    check_saved(tmp_path / "c", expected)
    step()
