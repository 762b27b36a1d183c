"""A training of adapters on 4-bit weights resumes from its whole state, bit for bit."""

from __future__ import annotations

import copy
import functools
import signal
import types

import children
import pytest
import qlora_runs as runs
import torch
import torch.distributed.checkpoint as dcp
import transformers
import transformers_processes as processes
from quantized_tensors import dense
from safetensors.torch import load_file
from support import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers_runs import adapters, fit, model, state

import ringstow
import ringstow.dcp
import ringstow.distributed
from ringstow.convert import convert
from ringstow.integrations import bitsandbytes
from ringstow.integrations._accelerate import _shards
from ringstow.integrations._kit._ranks import Ranks

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
ALL = range(runs.BEFORE, runs.BEFORE + runs.AFTER)


@pytest.fixture(scope="module")
def straight():
    """Return the end of a training that nothing has stopped."""
    torch.manual_seed(2)
    made, optimizer = runs.lora()
    runs.train(made, optimizer, range(ALL.stop))
    return made.state_dict(), optimizer.state_dict()


@pytest.fixture(scope="module")
def learned():
    """Return a training at the step of its save, and the random state there."""
    torch.manual_seed(2)
    made, optimizer = runs.lora()
    runs.train(made, optimizer, range(runs.BEFORE))
    return made, optimizer, torch.get_rng_state()


def goes_on(made, optimizer, straight):
    """Train on, and compare with the training that nothing has stopped."""
    runs.train(made, optimizer, ALL)
    assert_same(made.state_dict(), straight[0])
    assert_same(optimizer.state_dict(), straight[1])


def test_a_killed_training_goes_on_as_if_it_had_not_been(tmp_path, straight):
    assert children.exit_code(runs.crash, tmp_path / "run") == -signal.SIGKILL
    made, optimizer = runs.lora(seed=1)  # other base weights: those of the checkpoint replace them
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(into=runs.state_of(made, optimizer)).step == runs.BEFORE
    goes_on(made, optimizer, straight)


def by_load_into(saved, into, path):
    ringstow.save_async(saved, path, staging="guard").result()
    ringstow.load_into(into, path)


def by_state_dicts(saved, into, path):
    """Fill the tensors of ``state_dict()`` in place, which the model holds."""
    saved = {key: one.state_dict() for key, one in saved.items()}
    ringstow.save(saved, path)
    filled = {"model": into["model"].state_dict(), "optimizer": into["optimizer"].state_dict()}
    ringstow.load_into(filled, path)
    into["optimizer"].load_state_dict(filled["optimizer"])


def by_load_state_dict(saved, into, path):
    ringstow.save(saved, path)
    loaded = ringstow.load(path)
    bitsandbytes.use(into["model"]).load_state_dict(loaded["model"])
    into["optimizer"].load_state_dict(loaded["optimizer"])


def by_ranks(saved, into, path):
    ringstow.distributed.save(saved, path)
    ringstow.distributed.load_into(into, path)


def by_dcp(saved, into, path):
    bitsandbytes.use(into["model"])
    dcp.save(saved, checkpoint_id=path, storage_writer=ringstow.dcp.StorageWriter())
    runs.train(into["model"], into["optimizer"], range(1))  # DCP fills existing tensors
    dcp.load(into, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader())


@pytest.mark.parametrize(
    ("face", "seed"),
    [
        (by_load_into, 1),
        (by_load_state_dict, 1),
        (by_ranks, 1),
        (by_state_dicts, 0),
        (by_dcp, 0),
    ],
)
def test_each_face_loads_the_base_too(face, seed, learned, straight, group, tmp_path):
    made, optimizer = runs.lora(seed)
    runs.train(made, optimizer, range(1))
    saved = {"model": learned[0], "optimizer": learned[1]}
    face(saved, {"model": made, "optimizer": optimizer}, tmp_path / "c")
    torch.set_rng_state(learned[2])
    goes_on(made, optimizer, straight)


def test_a_state_dict_of_another_base_is_refused_and_nothing_changes(learned, tmp_path):
    ringstow.save({"model": learned[0]}, tmp_path / "c")
    made, _ = runs.lora(seed=1)
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(ringstow.KeyMismatchError, match=r"nested_offset.*\"model\": model"):
        ringstow.load_into({"model": made.state_dict()}, tmp_path / "c")
    assert_same(made.state_dict(), before)


def test_another_quantization_is_named(tmp_path):
    made = [runs.four_bits(*shape) for shape in ((64, 32), (32, 64), (64, 32))]
    layers, unquantized = [one.to("cpu") for one in made[:2]], made[2]
    ringstow.save({"model": layers[0]}, tmp_path / "c")
    before = copy.deepcopy(layers[1].state_dict())
    with pytest.raises(ringstow.KeyMismatchError, match=r"\[64, 32\].* here and .*\[32, 64\]"):
        ringstow.load_into({"model": layers[1]}, tmp_path / "c")
    assert_same(layers[1].state_dict(), before)
    with pytest.raises(RuntimeError, match=r"0\.weight is quantized otherwise.*\[64, 32\].* here"):
        bitsandbytes.use(layers[1]).load_state_dict(layers[0].state_dict())
    with pytest.raises(RuntimeError, match=r"0\.weight is quantized in the state and not here"):
        bitsandbytes.use(unquantized).load_state_dict(layers[0].state_dict())
    assert_same(layers[1].state_dict(), before)


SQUARE = functools.partial(runs.four_bits, 64, 64)
EIGHT = functools.partial(runs.eight_bits, 1)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (SQUARE, {"absmax": None, "quant": None}, "codes in the state, and no scales"),
        (SQUARE, {"absmax": None}, "not what it writes"),
        (SQUARE, {"quant_state": torch.zeros(3, dtype=torch.uint8)}, "not what it writes"),
        (SQUARE, {"absmax": torch.zeros(3)}, "absmax of other shapes"),
        (EIGHT, {"SCB": None}, "only one of codes and scales"),
        (
            functools.partial(runs.eight_bits, 1),
            {"SCB": torch.zeros(3)},
            r"SCB has the shape \[32\]",
        ),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_codes_and_scales_load_together_or_not_at_all(make, change, message, strict):
    made, other = (bitsandbytes.use(make().to("cpu")) for _ in range(2))
    if make is not SQUARE:
        made(torch.randn(4, 64))  # the layer now keeps its scales
    before = copy.deepcopy(made.state_dict())
    state = dict(other.state_dict())
    for part, value in change.items():
        for name in [one for one in state if part in one.removeprefix("0.weight")]:
            state.pop(name)
            if value is not None:
                state[name] = value
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state, strict=strict)
    assert_same(made.state_dict(), before)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("there", ["fp4", "codes alone", "no tensor"])
def test_another_kind_of_codes_is_refused_also_if_names_may_be_missing(there, whole, tmp_path):
    made, other = SQUARE().to("cpu"), runs.four_bits(64, 64, kind="fp4").to("cpu")
    state = (other if there == "fp4" else made).state_dict()
    if there == "codes alone":
        state = {"0.weight": state["0.weight"] + 1}
    elif there == "no tensor":
        state["0.weight.quant_state.bitsandbytes__nf4"] = [1]
    ringstow.save({"model": state}, tmp_path / "c")
    before = copy.deepcopy(made.state_dict())
    into = made if whole else made.state_dict()
    with pytest.raises(ringstow.KeyMismatchError, match=r"weight\.quant_state.*nf4 is .* here"):
        ringstow.load_into({"model": into}, tmp_path / "c", strict=False)
    assert_same(made.state_dict(), before)


def test_only_a_model_with_such_layers_can_be_used():
    with pytest.raises(ringstow.InvalidStateError, match="no Linear4bit"):
        bitsandbytes.use(torch.nn.Linear(2, 2))


def test_fsdp2_saves_the_scales_that_its_state_dict_lacks(tmp_path):
    path = tmp_path / "c"
    for act, ranks in (("save", 2), ("load", 2), ("load", 1)):
        outputs = [tmp_path / f"{rank}" for rank in range(ranks)]
        codes = children.exit_codes(ranks, runs.as_rank, act, path, outputs=outputs)
        assert codes == [0] * ranks, [one.read_text()[-900:] for one in outputs]
    convert(path, tmp_path / "hf", target="hf", prefix="model.", dequantize=True)
    torch.manual_seed(0)
    layer = runs.four_bits(64, 64, bias=True).to("cpu")[0]
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["0.weight"].equal(dense(layer.weight))


SHARDED = {
    "dcp": lambda state, to: dcp.save(
        {"model": state}, checkpoint_id=to, storage_writer=ringstow.dcp.StorageWriter()
    ),
    "distributed": lambda state, to: ringstow.distributed.save({"model": state}, to),
    "export": ringstow.dcp.export_hf,
    "export dense": lambda state, to: ringstow.dcp.export_hf(state, to, dequantize=True),
}


REFUSED = r"codes of 4-bit .*0\.weight.*bitsandbytes\.use\(model\)"


@pytest.mark.parametrize("face", SHARDED)
def test_codes_of_shards_without_their_scales_are_refused(face, group, tmp_path):
    made, plain = runs.sharded(0), torch.nn.Sequential(torch.nn.Linear(1, 64))
    plain = fully_shard(plain, mesh=init_device_mesh("cpu", (1,)))
    SHARDED[face](plain.state_dict(), tmp_path / "plain")
    with pytest.raises((ringstow.InvalidStateError, CheckpointException), match=REFUSED):
        SHARDED[face](made.state_dict(), tmp_path / "c")
    assert not list(tmp_path.glob("c/*.safetensors"))
    if face == "export dense":
        return  # no rank could make them dense alone
    SHARDED[face](bitsandbytes.use(made).state_dict(), tmp_path / "c")
    assert any("0.weight.absmax" in name for name in [*ringstow.open(tmp_path / "c")])


def test_a_snapshot_for_another_process_is_refused_here(group):
    made, writer = runs.sharded(0), ringstow.dcp.StorageWriter()
    with pytest.raises(ringstow.InvalidStateError, match=REFUSED):
        writer.stage({"model": made.state_dict()})
    assert "0.weight.absmax" in writer.stage({"m": bitsandbytes.use(made).state_dict()})["m"]


def test_accelerate_saves_and_loads_the_scales_of_shards(group, tmp_path):
    made, other = runs.sharded(0), runs.sharded(5)
    rows = torch.randn(3, 64)
    of = types.SimpleNamespace(_models=[made], _optimizers=[], scaler=None)
    ringstow.distributed.save(_shards.collect(of, {}), tmp_path / "c")
    assert not other(rows).equal(made(rows))
    of._models = [other]
    ranks = Ranks()
    _shards.load_into(of, str(tmp_path / "c"), ranks, strict=True)
    assert other(rows).equal(made(rows))


def test_eight_bit_layers_load_after_a_step(tmp_path):
    saved, other = runs.eight_bits(0), runs.eight_bits(1)
    rows = torch.randn(4, 64)
    wanted = saved(rows)  # the layers now keep their scales
    assert not other(rows).equal(wanted)
    with pytest.raises(ringstow.UnsupportedError, match=r"0\.weight.*layer has taken its scales"):
        ringstow.save({"model": dict(saved.named_parameters())}, tmp_path / "c")
    ringstow.save({"model": saved}, tmp_path / "c")
    ringstow.load_into({"model": other}, tmp_path / "c")
    assert other(rows).equal(wanted)


def test_weights_that_a_forward_pass_has_packed_are_refused_or_unpacked(tmp_path):
    made = runs.four_bits(64, 32).to("cpu")
    wanted = copy.deepcopy(made.state_dict())
    with torch.no_grad():
        made.eval()(torch.randn(4, 64))
    if not getattr(made[0].weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("only CPUs with AVX512-BF16 pack them")
    with pytest.raises(ringstow.UnsupportedError, match=r"0\.weight.*packed for this CPU"):
        ringstow.save(dict(made.named_parameters()), tmp_path / "c")
    bitsandbytes.use(made).load_state_dict(wanted)
    assert_same(made.state_dict(), wanted)


def test_transformers_opens_an_export_of_the_quantized_base(tmp_path):
    made = runs.base()
    ringstow.dcp.export_hf(made.state_dict(), tmp_path / "out")
    made.config.save_pretrained(tmp_path / "out")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(opened.state_dict(), made.state_dict())


def test_the_quantized_base_is_exported_dense(tmp_path):
    made = runs.base()
    ringstow.save({"model": made}, tmp_path / "c")
    ringstow.dcp.export_hf(made.state_dict(), tmp_path / "0")
    convert(tmp_path / "c", tmp_path / "1", target="hf", prefix="model.", dequantize=True)
    convert(tmp_path / "0", tmp_path / "2", source="hf", target="hf", dequantize=True)
    ringstow.dcp.export_hf(made.state_dict(), tmp_path / "3", dequantize=True)
    for number in (1, 2, 3):
        found = load_file(tmp_path / f"{number}" / "model.safetensors")
        assert {*found} == {*made.state_dict()} & {*model().state_dict()} - {"lm_head.weight"}
        for name, tensor in found.items():
            weight = made.get_parameter(name)
            wanted = dense(weight) if hasattr(weight, "quant_state") else weight
            assert tensor.equal(wanted), name


def test_tied_layers_are_exported_once(tmp_path):
    tied = torch.nn.Sequential(*[runs.four_bits(64, 64).to("cpu")[0]] * 2)
    assert tied[0].weight.quant_state.nested
    ringstow.save(tied.state_dict(), tmp_path / "c")
    for report in (
        ringstow.dcp.export_hf(tied.state_dict(), tmp_path / "1", dequantize=True),
        convert(tmp_path / "c", tmp_path / "2", target="hf", dequantize=True),
    ):
        assert report.tied == (("1.weight", "0.weight"),)


def test_a_killed_trainer_of_such_a_model_resumes(tmp_path):
    (tmp_path / "stock").mkdir()
    made = adapters(runs.base())
    expected = state(fit(tmp_path / "stock", model=made, kind=transformers.Trainer))
    run = (processes.run, tmp_path / "run", {"is_quantized": True})
    assert children.exit_codes(0, *run, "copying", 3) == [-signal.SIGKILL]
    assert_same(children.results(0, *run)[0], {**expected, "said": []})
