"""vLLM's load format ``ringstow`` keeps the contract of vLLM's own loaders.

vLLM does not install on a machine without a GPU. Its interface and the order of its calls stand
here as version 0.33 has them; where vLLM is installed, its own base class and registry are used.
"""

import importlib.util
import sys
import tomllib
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import assert_same, flip, shards_of

import ringstow
from ringstow.integrations import vllm as ours

WEIGHTS = {
    "layers.0.q.weight": torch.arange(6.0).reshape(3, 2),
    "layers.0.k.weight": torch.arange(4.0).reshape(2, 2),
    "norm.weight": torch.ones(3),
}


class Registry(types.ModuleType):
    """vLLM's ``model_executor.model_loader``: its registry and its base class."""

    def __init__(self):
        super().__init__("vllm.model_executor.model_loader")
        self._LOAD_FORMAT_TO_MODEL_LOADER = {"auto": object}
        self.BaseModelLoader = Base

    def register_model_loader(self, load_format):
        def wrapper(cls):
            assert issubclass(cls, self.BaseModelLoader)
            self._LOAD_FORMAT_TO_MODEL_LOADER[load_format] = cls
            return cls

        return wrapper

    def get_model_loader(self, load_config):
        return self._LOAD_FORMAT_TO_MODEL_LOADER[load_config.load_format](load_config)


class Base:
    """The base class of vLLM's loaders: a subclass has the two methods that raise here."""

    def __init__(self, load_config):
        self.load_config = load_config

    def download_model(self, model_config):
        raise NotImplementedError

    def load_weights(self, model, model_config):
        raise NotImplementedError

    def load_model(self, vllm_config, model_config, prefix=""):
        model = Model()
        self.load_weights(model, model_config)
        return model.eval()


class Model(torch.nn.Module):
    """A model as vLLM has them: fused parameters, filled from the checkpoint's names."""

    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(5, 2))
        self.norm = torch.nn.Parameter(torch.zeros(3))

    def load_weights(self, weights):
        loaded = set()
        with torch.no_grad():
            for name, value in weights:
                if name == "norm.weight":
                    self.norm.copy_(value)
                    loaded.add("norm")
                elif name.endswith(("q.weight", "k.weight")):
                    (self.qk[:3] if ".q." in name else self.qk[3:]).copy_(value)
                    loaded.add("qk")
        return loaded


@pytest.fixture
def loader(monkeypatch):
    """Return a function that makes the loader of options, as vLLM does in a worker."""
    if importlib.util.find_spec("vllm") is None:
        registry = Registry()
        package = types.ModuleType("vllm.model_executor")
        package.model_loader = registry
        for module in (types.ModuleType("vllm"), package, registry):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    from vllm.model_executor import model_loader

    ours.register()
    ours.register()  # vLLM may call it several times

    def make(**extra):
        config = types.SimpleNamespace(load_format="ringstow", model_loader_extra_config=extra)
        return model_loader.get_model_loader(config)

    return make


def load(loader, path):
    config = types.SimpleNamespace(model=str(path), model_weights="", quantization=None)
    loader.download_model(config)
    return loader.load_model(types.SimpleNamespace(load_config=loader.load_config), config)


def check(model):
    expected = torch.cat([WEIGHTS["layers.0.q.weight"], WEIGHTS["layers.0.k.weight"]])
    assert model.qk.equal(expected)
    assert model.norm.eq(1).all()
    assert not model.training


STATES = {
    "a trainer's": {"model": WEIGHTS, "optimizer": {"state": {0: {"m": torch.ones(2)}}}, "step": 3},
    "flat": WEIGHTS,
    "shards of RingstowTrainer": {"__model__": WEIGHTS, "__trainer__": {"x": torch.ones(1)}},
}


@pytest.mark.parametrize("name", [*STATES, "another program's"])
def test_the_weights_of_a_checkpoint_are_loaded(name, loader, tmp_path):
    if name == "another program's":
        torch.save({"state_dict": WEIGHTS}, tmp_path / "c")
    else:
        ringstow.save(STATES[name], tmp_path / "c")
    check(load(loader(), tmp_path / "c"))


def test_a_prefix_and_a_rename_are_options(loader, tmp_path):
    state = {"ema": {f"module.{name}": value for name, value in WEIGHTS.items()}, "other": {}}
    ringstow.save(state, tmp_path / "c")
    check(load(loader(prefix="ema", rename={"module": ""}), tmp_path / "c"))
    with pytest.raises(ringstow.InvalidStateError, match="takes prefix, rename, verify, not prefx"):
        loader(prefx="ema")


def test_weights_that_the_checkpoint_lacks_are_an_error(loader, tmp_path):
    """vLLM would serve the random values that the model began with."""
    ringstow.save({"model": {"norm.weight": torch.ones(3)}}, tmp_path / "c")
    with pytest.raises(ringstow.KeyMismatchError, match=r"lacks weights of the model: qk"):
        load(loader(), tmp_path / "c")
    ringstow.save({"optimizer": {"m": torch.ones(3)}}, tmp_path / "o")
    with pytest.raises(ringstow.KeyMismatchError, match="no tensor below ''"):
        load(loader(), tmp_path / "o")


def test_a_flipped_bit_is_an_error(loader, tmp_path):
    ringstow.save(WEIGHTS, tmp_path / "c")
    (shard,) = shards_of(tmp_path / "c")
    flip(shard, -1)
    with pytest.raises(ringstow.CorruptCheckpointError):
        load(loader(), tmp_path / "c")


def test_few_bytes_are_read_ahead(tmp_path, monkeypatch):
    from ringstow.integrations._servers import _weights

    submitted = []

    class Counted(ThreadPoolExecutor):
        def submit(self, *call):
            submitted.append(call)
            return super().submit(*call)

    monkeypatch.setattr(_weights, "ThreadPoolExecutor", Counted)
    monkeypatch.setattr(_weights, "_AHEAD_BYTES", 4 << 20)
    state = {f"w{n:02}": torch.full((1 << 18,), float(n)) for n in range(12)}  # 1 MiB each
    ringstow.save(state, tmp_path / "c")
    taken = ours.weights(tmp_path / "c")
    first = next(taken)
    assert len(submitted) <= 5
    assert_same(dict([first, *taken]), state)


def test_vllm_finds_the_load_format_by_its_plugins():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    entry = project["project"]["entry-points"]["vllm.general_plugins"]["ringstow"]
    module, _, function = entry.partition(":")
    assert getattr(importlib.import_module(module), function) is ours.register
