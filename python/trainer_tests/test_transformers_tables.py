"""transformers' tables of weight conversions are taken by ``rename=``, and load what it loads."""

from __future__ import annotations

import children
import pytest
import torch
from support import assert_same
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    PermuteForRope,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
)
from transformers_runs import mixtral, qwen2_moe

import ringstow
import ringstow.distributed

pytestmark = pytest.mark.timeout(300)
children.preload(__name__)

MODELS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_s_own_table_loads_its_directory(kind, tmp_path):
    """The directory has one tensor an expert, and the model has fused ones."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[kind]()).save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_config(MODELS[kind]())
    with pytest.raises(ringstow.KeyMismatchError):
        ringstow.load_into(other.state_dict(), tmp_path)
    table = get_model_conversion_mapping(other)
    assert not ringstow.load_into(other.state_dict(), tmp_path, rename=table).missing
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(other.state_dict()), dict(loaded.state_dict()))


def into_shards(rank, ranks, path):
    """Load a directory into a model that FSDP2 has sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(rank)
    made = AutoModelForCausalLM.from_config(MODELS["mixtral"]())
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (*made.model.layers, made):
        fully_shard(layer, mesh=mesh)
    table = get_model_conversion_mapping(made)
    ringstow.distributed.load_into(made.state_dict(), path, rename=table)
    expected = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, value in made.state_dict().items():
        assert value.full_tensor().equal(expected[name]), name


def test_shards_get_their_parts_of_the_experts(tmp_path):
    AutoModelForCausalLM.from_config(MODELS["mixtral"]()).save_pretrained(tmp_path)
    children.results(2, into_shards, str(tmp_path))


def converted(transform, state, targets):
    """Return what transformers' own operations make of tensors."""
    collected = {}
    for name, value in state.items():
        collected.setdefault(transform.rename_source_key(name)[1], []).append(value)
    for operation in transform.operations:
        collected = operation.convert(
            collected,
            source_patterns=transform.source_patterns,
            target_patterns=transform.target_patterns,
            full_layer_name=transform.target_patterns[0],
            model=type("Model", (), {"get_parameter": lambda _, name: targets[name]})(),
            config=None,
        )
    return {name: v[0] if isinstance(v, list) else v for name, v in collected.items()}


rows = torch.randn

OPERATIONS = {
    "chunk": (WeightConverter("w", ["a", "b"], [Chunk(dim=0)]), {"w": rows(6, 2)}),
    "concatenate": (
        WeightConverter(["q", "k"], "qk", [Concatenate(dim=1)]),
        {"q": rows(2, 3), "k": rows(2, 1)},
    ),
    "split": (WeightConverter("w", ["a", "b"], [Split(dim=0)]), {"w": rows(6, 2)}),
    "transpose": (WeightConverter("w", "v", [Transpose(0, 1)]), {"w": rows(2, 3)}),
    "interleave": (WeightConverter("w", "v", [Interleave(dim=0)]), {"w": rows(6, 3)}),
    "interleave back": (
        WeightConverter("w", "v", [Interleave(dim=1, inverse=True)]),
        {"w": rows(2, 8)},
    ),
    "both": (
        WeightConverter("w", ["a", "b"], [Interleave(dim=1), Chunk(dim=1)]),
        {"w": rows(2, 8, 3)},
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_transformers_does(name, tmp_path):
    transform, state = OPERATIONS[name]
    ringstow.save(state, tmp_path / "c")
    sizes = {"a": torch.zeros(4, 2), "b": torch.zeros(2, 2)}
    expected = converted(transform, state, sizes)
    into = {key: torch.zeros_like(value) for key, value in expected.items()}
    ringstow.load_into(into, tmp_path / "c", rename=[transform])
    for key, value in into.items():
        assert value.equal(expected[key]), key


def test_an_operation_that_needs_the_model_s_settings_is_named(tmp_path):
    ringstow.save({"q": torch.ones(4, 2)}, tmp_path / "c")
    table = [WeightConverter("q", "p", [PermuteForRope()])]
    with pytest.raises(ringstow.UnsupportedError, match="PermuteForRope.*from_pretrained"):
        ringstow.load_into({"p": torch.zeros(4, 2)}, tmp_path / "c", rename=table)


def test_a_table_and_a_dict_follow_each_other(tmp_path):
    ringstow.save({"module.old.q.weight": torch.ones(2)}, tmp_path / "c")
    rename = [{"module": ""}, WeightRenaming(r"^old\.", "new."), {"q": "k"}]
    into = {"new.k.weight": torch.zeros(2)}
    ringstow.load_into(into, tmp_path / "c", rename=rename)
    assert into["new.k.weight"].eq(1).all()
