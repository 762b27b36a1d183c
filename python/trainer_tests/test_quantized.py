"""A training with quantized weights or an 8-bit optimizer goes on from its save, bit for bit."""

from __future__ import annotations

import signal

import children
import pytest
import quantized_runs as runs

import ringstow

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", runs.OPTIMIZERS)
def test_killed_training_goes_on_as_if_it_had_not_been(name, tmp_path):
    assert children.exit_code(runs.crash, name, tmp_path / "c") == -signal.SIGKILL
    straight = runs.model_of()
    optimizer = runs.OPTIMIZERS[name](list(straight.parameters()))
    runs.train(straight, optimizer, range(runs.BEFORE + runs.AFTER))
    for steps in (0, 1):  # a new optimizer, and one that already has a state to fill in place
        model = runs.model_of()
        again = runs.OPTIMIZERS[name](list(model.parameters()))
        runs.train(model, again, range(steps))
        ringstow.load_into({"model": model, "optimizer": again}, tmp_path / "c")
        runs.train(model, again, range(runs.BEFORE, runs.BEFORE + runs.AFTER))
        pairs = zip(straight.parameters(), model.parameters(), strict=True)
        assert all(one.equal(other) for one, other in pairs), steps


@pytest.mark.parametrize("kind", runs.MODELS)
def test_fsdp2_shards_of_quantized_tensors_load_on_another_number_of_ranks(kind, tmp_path):
    path, learned = str(tmp_path / "c"), str(tmp_path / "learned")
    for act, ranks in (("save", 2), ("load", 2), ("again", 4), ("again", 1)):
        to = f"{path}-{ranks}" if act == "again" else learned
        codes = children.exit_codes(
            ranks, runs.as_rank, kind, act, path, to, outputs=[tmp_path / f"{r}" for r in range(4)]
        )
        assert codes == [0] * ranks, [(tmp_path / f"{r}").read_text()[-900:] for r in range(ranks)]
        if act == "again":  # the same tensors, whole, however they were sharded
            assert not ringstow.diff(path, to).differing
            assert ringstow.diff(path, to).equal_tensors > 8
