"""Objects in a state: modules, optimizers, schedulers and others go in and out by themselves."""

import collections
import copy
import dataclasses
import logging
import random
import types

import numpy as np
import pytest
import torch
from support import assert_same, raising

import ringstow

WAYS = ["save", "save_async", "manager"]


def training(seed=0, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
    )
    made = optimizer(model.parameters(), **{"lr": 0.1, **options})
    scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [2, 5], gamma=0.5)
    return {"model": model, "optimizer": made, "scheduler": scheduler}


def steps(state, first, last):
    for number in range(first, last):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        state["optimizer"].zero_grad()
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()


def trained(path, count):
    """Save a training after some steps; return it."""
    whole = training()
    steps(whole, 0, count)
    ringstow.save(whole, path)
    return whole


def loaded(path, **options):
    """Return another training, filled from a checkpoint."""
    again = training(seed=1, **options)
    ringstow.load_into(again, path)
    return again


def learned(state):
    model, optimizer, scheduler = state["model"], state["optimizer"], state["scheduler"]
    found = [*model.state_dict().values()]
    for parameter in model.parameters():
        held = optimizer.state.get(parameter, {})
        found += [held[name] for name in sorted(held) if torch.is_tensor(held[name])]
    found += [torch.as_tensor(group["lr"]) for group in optimizer.param_groups]
    return [*found, torch.tensor([scheduler.last_epoch, *scheduler.get_last_lr()])]


def assert_alike(one, other):
    assert all(torch.equal(*pair) for pair in zip(learned(one), learned(other), strict=True))


def store(way, state, path):
    if way == "save":
        ringstow.save(state, path)
    elif way == "save_async":
        ringstow.save_async(state, path).result()
    else:
        with ringstow.CheckpointManager(path.parent) as manager:
            manager.save(3, state)


def fill(way, state, path):
    if way == "manager":
        with ringstow.CheckpointManager(path.parent) as manager:
            return manager.restore(into=state)
    return ringstow.load_into(state, path)


@pytest.mark.parametrize("way", WAYS)
def test_objects_are_saved_and_filled_where_they_are(tmp_path, way):
    path = tmp_path / "run" / "step-3"
    whole = training()
    steps(whole, 0, 3)
    store(way, whole, path)
    steps(whole, 3, 6)
    again = training(seed=1)
    objects = dict(again)
    fill(way, again, path)
    assert all(again[key] is objects[key] for key in objects)
    steps(again, 3, 6)
    assert_alike(whole, again)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "NAdam", "LBFGS", "Adafactor"])
def test_an_optimizer_that_has_not_stepped_is_filled(tmp_path, optimizer):
    kind = getattr(torch.optim, optimizer)
    whole = training(optimizer=kind)
    closure = {"LBFGS": lambda: whole["model"](torch.ones(3, 4)).square().mean()}

    def step(state):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(3, 4)).square().mean().backward()
        state["optimizer"].step(*filter(None, [closure.get(optimizer)]))

    step(whole)
    ringstow.save(whole, tmp_path / "a")
    assert_alike(whole, loaded(tmp_path / "a", optimizer=kind))


@pytest.mark.parametrize("saved", ["objects", "dicts"])
def test_what_one_form_saves_the_other_loads(tmp_path, saved):
    whole = training()
    steps(whole, 0, 3)
    dicts = {key: one.state_dict() for key, one in whole.items()}
    ringstow.save(whole if saved == "objects" else dicts, tmp_path / "a")
    again = training(seed=1)
    if saved == "dicts":
        ringstow.load_into(again, tmp_path / "a")
    else:
        state = {key: one.state_dict() for key, one in again.items()}
        ringstow.load_into(state, tmp_path / "a")
        assert state["optimizer"]["param_groups"][0]["params"] == [*range(6)]
        for key, one in again.items():
            one.load_state_dict(state[key])
    assert_alike(whole, again)


def test_what_load_returns_of_objects_is_what_their_load_state_dict_takes(tmp_path):
    whole, again = trained(tmp_path / "a", 3), training(seed=1)
    state = ringstow.load(tmp_path / "a")
    assert state["optimizer"]["param_groups"][0]["params"][0] == "0.weight"
    for key, one in again.items():
        one.load_state_dict(state[key])
    assert_alike(whole, again)


def test_an_optimizer_goes_by_the_names_of_its_parameters(tmp_path):
    whole = trained(tmp_path / "a", 2)
    again = training(seed=1)
    parameters = [*again["model"].parameters()]
    again["optimizer"] = torch.optim.AdamW(parameters[::-1], lr=0.3)
    again["scheduler"] = torch.optim.lr_scheduler.MultiStepLR(again["optimizer"], [2, 5])
    ringstow.load_into(again, tmp_path / "a")
    assert_alike(whole, again)


def test_an_optimizer_without_its_model_goes_by_numbers(tmp_path):
    whole, again = training(), training(seed=1)
    steps(whole, 0, 2)
    ringstow.save({"optimizer": whole["optimizer"]}, tmp_path / "a")
    assert [*ringstow.load(tmp_path / "a")["optimizer"]["state"]] == [*range(6)]
    ringstow.load_into({"optimizer": again["optimizer"]}, tmp_path / "a")
    state = again["optimizer"].state_dict()["state"]
    assert torch.equal(state[0]["exp_avg"], whole["optimizer"].state_dict()["state"][0]["exp_avg"])


def test_two_models_of_one_optimizer_give_their_names_in_the_state(tmp_path):
    left, right = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*left.parameters(), *right.parameters()], lr=0.1, momentum=0.9)
    (left(torch.ones(1, 2)) + right(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    ringstow.save({"left": left, "right": right, "optimizer": optimizer}, tmp_path / "a")
    names = ringstow.load(tmp_path / "a")["optimizer"]["param_groups"][0]["params"]
    assert names == ["left.weight", "left.bias", "right.weight", "right.bias"]


@pytest.mark.parametrize("wrap", ["compiled", "data parallel", "checkpointed", "none"])
def test_a_model_has_the_same_names_in_each_wrapper(tmp_path, wrap):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = training()
    steps(plain, 0, 2)
    again = training(seed=1)
    inner = again["model"]
    wraps = {
        "compiled": lambda: torch.compile(inner, backend="eager"),
        "data parallel": lambda: torch.nn.DataParallel(inner),
        "checkpointed": lambda: checkpoint_wrapper(inner),
        "none": lambda: inner,
    }
    again["model"] = wraps[wrap]()
    ringstow.save(plain, tmp_path / "plain")
    ringstow.load_into(again, tmp_path / "plain")
    assert_alike(plain, {**again, "model": inner})
    steps(again, 2, 3)
    ringstow.save(again, tmp_path / "wrapped")
    ringstow.load_into(plain, tmp_path / "wrapped")
    assert_alike(plain, {**again, "model": inner})


def test_a_model_takes_the_names_that_an_earlier_version_kept(tmp_path):
    whole = training()
    steps(whole, 0, 1)
    wrapped = torch.nn.DataParallel(whole["model"]).state_dict()
    assert all(name.startswith("module.") for name in wrapped)
    ringstow.save({"model": wrapped}, tmp_path / "a")
    again = training(seed=1)["model"]
    ringstow.load_into({"model": again}, tmp_path / "a")
    assert torch.equal(again[0].weight, whole["model"][0].weight)


class Average:
    """An object of a program's own, with tensors and values."""

    def __init__(self, value):
        self.kept = {"mean": torch.full((3,), float(value)), "count": value}

    def state_dict(self):
        return self.kept

    def load_state_dict(self, state):
        self.kept = state


@dataclasses.dataclass
class Bundle:
    average: Average
    number: int


def test_objects_are_found_in_lists_tuples_and_fields(tmp_path):
    def state(value):
        return {
            "list": [Average(value), {"deep": Average(value + 1)}],
            "tuple": (Average(value + 2),),
            "fields": Bundle(Average(value + 3), value),
            3: collections.OrderedDict(x=Average(value + 4)),
        }

    ringstow.save(state(1), tmp_path / "a")
    into = state(10)
    objects = [into["list"][0], into["list"][1]["deep"], into["tuple"][0], into["fields"].average]
    objects.append(into[3]["x"])
    ringstow.load_into(into, tmp_path / "a")
    assert [one.kept["count"] for one in objects] == [1, 2, 3, 4, 5]
    assert [one.kept["mean"][0].item() for one in objects] == [1, 2, 3, 4, 5]
    assert into["list"][0] is objects[0]
    assert into["fields"].number == 1


def test_an_object_that_is_twice_in_a_state_is_saved_once_and_filled(tmp_path):
    model = torch.nn.Linear(3, 3)
    ringstow.save({"model": model, "again": model}, tmp_path / "a")
    other = torch.nn.Linear(3, 3)
    ringstow.load_into({"model": other, "again": other}, tmp_path / "a")
    assert torch.equal(model.weight, other.weight)


def test_an_objects_failure_names_its_key(tmp_path):
    class Broken(Average):
        load_state_dict = raising(RuntimeError("no"))

    ringstow.save({"a": {"b": Average(1)}}, tmp_path / "a")
    with pytest.raises(RuntimeError, match="no") as caught:
        ringstow.load_into({"a": {"b": Broken(1)}}, tmp_path / "a")
    assert caught.value.__notes__ == ["raised by load_state_dict() of a['b']"]

    class Silent(Average):
        state_dict = raising(RuntimeError("never"))

    with pytest.raises(RuntimeError) as caught:
        ringstow.save({"a": [Silent(1)]}, tmp_path / "b")
    assert caught.value.__notes__ == ["raised by state_dict() of a[0]"]
    assert not (tmp_path / "b").exists()


def test_a_class_is_no_object_with_a_state(tmp_path):
    with pytest.raises(ringstow.InvalidStateError, match=r"model is a type"):
        ringstow.save({"model": torch.nn.Linear}, tmp_path / "a")


def test_another_model_changes_nothing_and_names_each_difference(tmp_path):
    trained(tmp_path / "a", 0)
    other = training()
    other["model"] = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 2))
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters(), lr=0.1)
    before = copy.deepcopy(other["model"].state_dict())
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(other, tmp_path / "a")
    assert "model.0.weight is F32 [7, 4] here and F32 [5, 4] in the checkpoint" in str(caught.value)
    assert_same(other["model"].state_dict(), before)


def test_a_model_with_a_new_layer_keeps_what_it_has_there_without_strict(tmp_path):
    whole = trained(tmp_path / "a", 2)
    model = torch.nn.Sequential(*training(seed=1)["model"], torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(ringstow.KeyMismatchError, match=r"model.3.weight"):
        ringstow.load_into(dict(state), tmp_path / "a")
    report = ringstow.load_into(state, tmp_path / "a", strict=False)
    assert {"model.3.weight", "model.3.bias"} <= set(report.missing)
    assert torch.equal(model[0].weight, whole["model"][0].weight)
    assert len(optimizer.state) == 6
    assert not optimizer.state.get(model[3].weight)


def test_an_optimizer_that_has_stepped_goes_back_to_one_that_had_not(tmp_path):
    trained(tmp_path / "a", 0)
    state = training()
    steps(state, 0, 2)
    ringstow.load_into(state, tmp_path / "a")
    assert_alike(state, training())


def test_frozen_parameters_have_no_state_of_an_optimizer(tmp_path):
    whole = training()
    whole["model"][0].requires_grad_(False)
    steps(whole, 0, 2)
    ringstow.save(whole, tmp_path / "a")
    assert_alike(whole, loaded(tmp_path / "a"))


def test_slim_drops_the_state_of_an_optimizer_that_was_saved_as_an_object(tmp_path):
    state = training()
    steps(state, 0, 1)
    ringstow.save(state, tmp_path / "a", droppable=["optimizer"])
    ringstow.slim(tmp_path / "a", drop=["optimizer"])
    assert [*ringstow.load(tmp_path / "a")] == ["model", "scheduler"]
    with pytest.raises(ringstow.InvalidStateError, match=r"nothing named 'optimiser'"):
        ringstow.save(state, tmp_path / "b", droppable=["optimiser"])


def test_random_numbers_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), np.random.rand(), torch.rand(3).tolist()

    draw()
    ringstow.save({"rng": ringstow.RngState()}, tmp_path / "a")
    wanted = draw()
    draw()
    ringstow.load_into({"rng": ringstow.RngState()}, tmp_path / "a")
    assert draw() == wanted
    ringstow.RngState().load_state_dict(ringstow.load(tmp_path / "a")["rng"])
    assert draw() == wanted


def test_a_per_rank_value_is_rank_0s_in_one_process(tmp_path):
    ringstow.save({"position": ringstow.PerRank({"at": 7})}, tmp_path / "a")
    assert ringstow.load(tmp_path / "a") == {"position": {"0": {"at": 7}}}
    state = {"position": ringstow.PerRank({"at": 0})}
    ringstow.load_into(state, tmp_path / "a")
    assert state["position"].value == {"at": 7}


def test_one_process_that_is_none_of_the_ranks_with_a_state_keeps_its_own(tmp_path, caplog):
    ringstow.save({"loader": {"rank 1": {"at": 1}, "rank 2": {"at": 2}}}, tmp_path / "a")
    loader = Average(5)
    with caplog.at_level(logging.WARNING, logger="ringstow"):
        ringstow.load_into({"loader": loader}, tmp_path / "a")
    assert loader.kept["count"] == 5
    assert "none of rank 0, which keeps its own: loader (saved by 2 ranks)" in caplog.text


def test_a_state_that_was_never_committed_starts_the_same_training(tmp_path):
    state = training()
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        assert manager.restore(into=state) is None
    assert_alike(state, training())
    assert not state["optimizer"].state


def test_a_namespace_of_functions_is_no_object_with_a_state(tmp_path):
    state = {"x": types.SimpleNamespace(state_dict=1, load_state_dict=2)}
    ringstow.save(state, tmp_path / "a")
    assert ringstow.load(tmp_path / "a") == state


class Scaled(torch.optim.AdamW):
    """An optimizer with entries of its own."""

    scale = 1.0

    def state_dict(self):
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state.pop("scale")
        super().load_state_dict(state)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_what_an_optimizer_has_of_its_own_is_filled(tmp_path, has_stepped):
    whole = training(optimizer=Scaled)
    steps(whole, 0, 2)
    whole["optimizer"].scale = 65536.0
    whole["optimizer"].state["global"] = {"k": 3}
    ringstow.save(whole, tmp_path / "a")
    again = training(seed=1, optimizer=Scaled)
    if has_stepped:
        steps(again, 0, 1)
    ringstow.load_into(again, tmp_path / "a")
    assert again["optimizer"].scale == 65536.0
    assert again["optimizer"].state["global"] == {"k": 3}
    assert_alike(whole, again)


def test_parameters_that_the_checkpoint_does_not_know_keep_their_moments(tmp_path):
    whole = trained(tmp_path / "a", 2)
    model = torch.nn.Sequential(*training(seed=1)["model"], torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model[3].weight]["exp_avg"].clone()
    ringstow.load_into({"model": model, "optimizer": optimizer}, tmp_path / "a", strict=False)
    assert torch.equal(optimizer.state[model[3].weight]["exp_avg"], kept)
    saved = whole["optimizer"].state[whole["model"][0].weight]["exp_avg"]
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], saved)


def test_another_type_of_optimizer_is_refused(tmp_path):
    whole = training()
    steps(whole, 0, 1)
    ringstow.save({"optimizer": whole["optimizer"]}, tmp_path / "a")
    other = torch.optim.SGD(training()["model"].parameters(), lr=0.1, momentum=0.9)
    wrong = "an optimizer with dampening, momentum, nesterov here, and one with betas in the"
    with pytest.raises(ringstow.KeyMismatchError, match=wrong):
        ringstow.load_into({"optimizer": other}, tmp_path / "a")


def test_moments_of_other_parameters_are_refused_where_no_names_tell(tmp_path):
    first = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(first.parameters())
    first(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ringstow.save({"optimizer": optimizer}, tmp_path / "a")
    other = torch.optim.AdamW(torch.nn.Linear(5, 7).parameters())
    with pytest.raises(ringstow.KeyMismatchError, match=r"F32 \[7, 5\] here and F32 \[3, 3\]"):
        ringstow.load_into({"optimizer": other}, tmp_path / "a")
    groups = [{"params": [one]} for one in torch.nn.Linear(3, 3).parameters()]
    with pytest.raises(ringstow.KeyMismatchError, match=r"groups of \[1, 1\] parameters here"):
        ringstow.load_into({"optimizer": torch.optim.AdamW(groups)}, tmp_path / "a")


class Versioned(torch.nn.Linear):
    """A layer whose weights of an earlier version were half of what they are."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_wrapped_module_keeps_the_versions_of_its_layers(tmp_path):
    inner = Versioned(2, 2)
    ringstow.save({"model": inner}, tmp_path / "a")
    wrapped = torch.compile(Versioned(2, 2), backend="eager")
    ringstow.load_into({"model": wrapped}, tmp_path / "a")
    assert torch.equal(wrapped._orig_mod.weight, inner.weight)


class Extra(torch.nn.Linear):
    """A layer with a state beside its tensors, of any size."""

    extra = torch.zeros(0)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_the_extra_state_of_a_module_may_have_another_size(tmp_path):
    model = torch.nn.Sequential(Extra(2, 2))
    model[0].extra = torch.arange(5.0)
    ringstow.save({"model": model}, tmp_path / "a")
    again = torch.nn.Sequential(Extra(2, 2))
    ringstow.load_into({"model": again}, tmp_path / "a")
    assert again[0].extra.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(again[0].weight, model[0].weight)


def test_a_state_that_only_another_rank_has_is_taken_if_there_is_one(tmp_path):
    ringstow.save({"scheduler": {"rank 1": {"at": 4}}, "w": torch.ones(2)}, tmp_path / "a")
    state = {"scheduler": Average(0), "w": torch.zeros(2)}
    ringstow.load_into(state, tmp_path / "a")
    assert state["scheduler"].kept == {"at": 4}


def test_a_state_that_is_nested_too_deep_is_refused(tmp_path):
    deep = [Average(1)]
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ringstow.InvalidStateError, match="200 levels"):
        ringstow.save({"deep": deep}, tmp_path / "a")


def test_a_load_that_fills_one_layer_of_three_fills_something(tmp_path):
    ringstow.save({"model": torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))}, tmp_path / "a")
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ringstow.load_into({"model": model, "optimizer": optimizer}, tmp_path / "a", strict=False)
    assert torch.equal(model[0].weight, ringstow.load(tmp_path / "a")["model"]["0.weight"])


def test_rename_maps_the_names_of_a_module_and_of_its_optimizer(tmp_path):
    def named(name):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = named("encoder")
    model["head"](model["encoder"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    ringstow.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    other, fresh = named("backbone")
    state = {"model": other, "optimizer": fresh}
    with pytest.raises(ringstow.KeyMismatchError, match=r'rename=\{"encoder": "backbone"\}'):
        ringstow.load_into(state, tmp_path / "a")
    ringstow.load_into(state, tmp_path / "a", rename={"encoder": "backbone"})
    assert torch.equal(other["backbone"].weight, model["encoder"].weight)
    moments = (optimizer.state[model["encoder"].weight], fresh.state[other["backbone"].weight])
    assert torch.equal(moments[0]["exp_avg"], moments[1]["exp_avg"])


@pytest.mark.parametrize("other", ["RMSprop", "Adagrad", "NAdam", "Adadelta", "ASGD"])
def test_each_other_type_of_optimizer_is_refused(tmp_path, other):
    trained(tmp_path / "a", 1)
    state = training(optimizer=getattr(torch.optim, other))
    with pytest.raises(ringstow.KeyMismatchError, match="so leave the optimizer out"):
        ringstow.load_into(state, tmp_path / "a")


def test_adam_that_goes_on_with_adamws_moments_stays_adam(tmp_path):
    trained(tmp_path / "a", 1)
    state = training(optimizer=torch.optim.Adam)
    ringstow.load_into(state, tmp_path / "a")
    assert state["optimizer"].param_groups[0]["decoupled_weight_decay"] is False


def test_groups_that_were_divided_in_another_way_keep_their_options(tmp_path, caplog):
    trained(tmp_path / "a", 1)
    model = training(seed=1)["model"]
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": others, "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups)
    ringstow.load_into({"model": model, "optimizer": optimizer}, tmp_path / "a", strict=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert len(optimizer.state) == 6
    assert "group 1 has other parameters than any group in the checkpoint" in caplog.text
