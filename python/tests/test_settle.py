"""A background save finishes copying while an operation still writes to a tensor.

torch increments a tensor's version only after an operation ends. The tests use operations that
are long enough to overlap with a save; on a machine where they are too short, nothing is tested.
"""

import threading

import pytest
import torch

import ringstow
from ringstow._state.tensors._memory import LazyTensor

pytestmark = pytest.mark.usefixtures("one_thread")

ONE = ringstow.Config(fillers=1, pool_bytes=4 << 20, block_bytes=1 << 20)
LONG = 1 << 24  # elements: tens of milliseconds to add to
SAVED = 1 << 18
ROUNDS = 8


def adding(tensor):
    """Return a thread that has begun to add to each element of a tensor."""
    thread = threading.Thread(target=tensor.add_, args=(1,))
    thread.start()
    first = tensor.numpy()
    while first[0] == 0:
        pass
    return thread


def outcome(handle, path):
    """Return the outcome of a save of zeros: "saved" or "refused"."""
    try:
        handle.result()
    except ringstow.TornSaveError:
        return "refused"
    assert not ringstow.load(path, keys=["t"])["t"].any()
    return "saved"


def test_save_waits_for_operation_of_another_thread(tmp_path):
    for number in range(ROUNDS):
        tensor, may_go_on = torch.zeros(LONG), threading.Event()

        def load(may_go_on=may_go_on):
            assert may_go_on.wait(60)
            return torch.zeros(SAVED)

        hold = LazyTensor("F32", (SAVED,), 4 * SAVED, load)
        path = tmp_path / str(number)
        handle = ringstow.save_async({"hold": hold, "t": tensor[:SAVED]}, path, config=ONE)
        thread = adding(tensor)
        may_go_on.set()  # the save copies the rest now, while the other thread still adds
        assert outcome(handle, path) == "refused"
        thread.join()


def test_save_waits_for_operation_of_the_caller(tmp_path):
    for number in range(ROUNDS):
        tensor = torch.zeros(LONG)
        path = tmp_path / str(number)
        handle = ringstow.save_async({"t": tensor[: SAVED * (number + 1)]}, path)
        tensor.add_(1)
        outcome(handle, path)


def test_snapshot_during_an_operation_of_another_thread_is_not_torn(tmp_path):
    for number in range(2 * ROUNDS):
        tensor = torch.zeros(LONG)
        path = tmp_path / str(number)
        begin = number * LONG // 32
        part = tensor[begin : begin + LONG // 16]
        thread = adding(tensor)
        try:
            ringstow.save_async({"t": part}, path, staging="snapshot").result()
        except ringstow.TornSaveError:
            continue
        finally:
            thread.join()
        saved = ringstow.load(path)["t"]
        assert torch.equal(saved, saved[:1].expand_as(saved))


def test_operation_elsewhere_does_not_delay_blocking_save(tmp_path):
    """The caller is blocked and writes nothing, so the save need not wait."""
    handle = ringstow.save_async({"t": torch.zeros(SAVED)}, tmp_path / "c")
    assert handle.wait_staged()
    assert outcome(handle, tmp_path / "c") == "saved"
    ringstow.save({"t": torch.zeros(SAVED)}, tmp_path / "c")
