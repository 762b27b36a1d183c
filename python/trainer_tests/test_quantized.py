"""A training with quantized weights or an 8-bit optimizer goes on from its save, bit for bit."""

from __future__ import annotations

import pathlib
import signal

import children
import pytest
import quantized_runs as runs
import torch
from quantized_tensors import MAKERS, dense, kind_of, parts_of
from safetensors.torch import load_file
from tensor_list import FACES

import ringstow
from ringstow.convert import convert

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
    acts = [("save", 2), ("load", 2), ("again", 4), ("again", 1), ("export", 2), ("dcp", 2)]
    for act, ranks in acts:
        to = learned if act in ("save", "load") else f"{path}-{act}-{ranks}"
        codes = children.exit_codes(
            ranks, runs.as_rank, kind, act, path, to, outputs=[tmp_path / f"{r}" for r in range(4)]
        )
        assert codes == [0] * ranks, [(tmp_path / f"{r}").read_text()[-900:] for r in range(ranks)]
        if act == "export":  # the same bytes as an export by one process, without quantized tensors
            one = f"{path}-by-one"
            convert(path, one, target="hf", prefix="model.", dequantize=True)
            files = [pathlib.Path(root, "model.safetensors") for root in (to, one)]
            assert files[0].read_bytes() == files[1].read_bytes()
            assert load_file(files[0])["0.weight"].dtype == torch.float32
        if act == "again":  # the same tensors, whole, however they were sharded
            assert not ringstow.diff(path, to).differing
            assert ringstow.diff(path, to).equal_tensors > 8


@pytest.fixture(scope="module")
def outcomes(group, tmp_path_factory):
    """Return the outcome of each face for each type: whether it is bit-equal, or the error."""
    found = {}
    for make in MAKERS:
        wanted = make(1)
        for face, call in FACES.items():
            path = tmp_path_factory.mktemp("c") / "c"
            try:
                loaded = call({"w": wanted}, {"w": make(2)}, path)["w"]
                assert type(loaded) is type(wanted)
                one, other = parts_of(loaded), parts_of(wanted)
                assert one.keys() == other.keys()
                same = [_same(one[name], other[name]) for name in one]
                outcome = "bit-equal" if all(same) else "other bits"
            except AssertionError:
                raise
            except BaseException as error:  # DCP's is one
                outcome = error
            found.setdefault(kind_of(make), {})[face] = outcome
    return found


# Without a function that returns what they stand for.
NOT_DEQUANTIZED = ("UintxTensor", "BlockSparseTensor")


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: kind_of(make).partition(" ")[2])
def test_every_type_that_can_be_dequantized_is_exported_dense(make, tmp_path):
    tensor = make(1)
    state = {"w": tensor, "again": tensor, "x": torch.ones(2)}
    ringstow.save(state, tmp_path / "c")
    exports = [
        lambda to, **asked: convert(tmp_path / "c", to, target="hf", dequantize=True, **asked),
        lambda to, **asked: ringstow.dcp.export_hf(state, to, dequantize=True, **asked),
    ]
    for number, export in enumerate(exports):
        if type(tensor).__name__ in NOT_DEQUANTIZED:
            with pytest.raises(ringstow.UnsupportedError, match="w.*dequantize"):
                export(tmp_path / f"{number}")
            continue
        assert export(tmp_path / f"{number}").tied == (("again", "w"),)
        found = load_file(tmp_path / f"{number}" / "model.safetensors")["w"]
        assert _same(found, dense(tensor))
        export(tmp_path / f"{number}-cast", dtype="bfloat16")
        found = load_file(tmp_path / f"{number}-cast" / "model.safetensors")["w"]
        assert _same(found, dense(tensor).bfloat16())
    if type(tensor).__name__ not in NOT_DEQUANTIZED:
        for refuse in (
            lambda: convert(tmp_path / "c", tmp_path / "no", target="hf"),
            lambda: ringstow.dcp.export_hf(state, tmp_path / "no"),
        ):
            with pytest.raises(ringstow.UnsupportedError, match=r"w.*dequantize=True"):
                refuse()


def _same(one, other):
    if not torch.is_tensor(one):
        return one == other
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and raw[0].equal(raw[1])


def test_every_type_comes_back_bit_for_bit(outcomes):
    for kind, by_face in outcomes.items():
        for face, outcome in by_face.items():
            assert outcome == "bit-equal", (kind, face, outcome)


def test_the_documentation_has_this_table(outcomes):
    rows = ["| type | all calls of ringstow, and DCP |", "|---|---|"]
    rows += [f"| {kind} | bit-equal |" for kind in outcomes]
    text = (pathlib.Path(__file__).parents[2] / "docs" / "values.md").read_text()
    assert "\n".join(rows) in text, "\n" + "\n".join(rows)
