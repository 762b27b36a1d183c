"""The weights in a checkpoint: which part they are, and all of them one after the other."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ringstow import _foreign, _native
from ringstow._core._arguments import StrPath, directory_to_read
from ringstow._core._config import Config, given
from ringstow._core._errors import KeyMismatchError
from ringstow._foreign._lazy_tensors import lazy_state
from ringstow._reading._checkpoint import open as open_checkpoint
from ringstow._reading._mapped_tensors import Mapped
from ringstow._reading._names import Names, skeleton_of
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree._fitting import renamed_tree
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._walk import flat_name
from ringstow.convert._targets import prefix_of
from ringstow.integrations._transformers._weights import ADAPTERS, SHARDS, TRAINER

if TYPE_CHECKING:
    import torch

    from ringstow._state.tree._rename import Given

# The names that programs give the model's part of a state dict.
_PARTS = (SHARDS, "model", "state_dict", "model_state_dict", "module")
# What is never a weight.
_BESIDES = (f"{TRAINER}.", f"{ADAPTERS}.", "optimizer.", "optim.")
# How much to read ahead of who takes the tensors.
_AHEAD_BYTES = 256 << 20


def part_of(path: str, config: Config | None, prefix: str | None = None) -> str:
    """Return the name of the part with the weights; empty if it is the whole checkpoint.

    Raises:
        KeyMismatchError: there are several such parts, or none.
        Exception: there is no such checkpoint, also if the ``prefix`` says which part it is.
    """
    with open_checkpoint(path, config=config) as opened:
        if prefix is not None:
            return prefix.removesuffix(".")
        kind, tops = opened.info.kind, opened.tree
    if kind in ("ringstow", "torch", "dcp"):
        return next((one for one in _PARTS if isinstance(tops.get(one), Mapping)), "")
    return "" if kind == "safetensors" else prefix_of(tops, path, kind).removesuffix(".")


def weights_in(state: Any, path: str, part: str) -> dict[str, Any]:
    """Return the weights of a part's nested state, by their dotted names, in their order.

    Raises:
        KeyMismatchError: there are none.
    """
    found: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", state)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [
                (f"{name}.{flat_name((key,))}".removeprefix("."), child)
                for key, child in reversed([*value.items()])
            ]
        elif (type(value) is LazyTensor or hasattr(value, "untyped_storage")) and not (
            f"{name}.".startswith(_BESIDES)
        ):
            found[name] = value
    if not found:
        raise KeyMismatchError(
            f"{path} has no tensor below {part!r}: give prefix= the part with the weights",
            path=path,
            missing=[part],
        )
    return found


def weights(
    path: StrPath,
    *,
    prefix: str | None = None,
    rename: Given | None = None,
    verify: bool = True,
    config: Config | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the tensors of a model's weights, as servers take them.

    Reads ringstow's checkpoints, also of several ranks, and those of other programs. At most
    256 MiB are read ahead of what is taken, and one tensor.

    Args:
        path: the checkpoint's directory or file, or its URL.
        prefix: the part with the weights; ``""`` means all of it. None finds it.
        rename: maps the checkpoint's names to the server's; see `ringstow.load_into`.
        verify: compare checksums, if the checkpoint has any.
        config: the settings; None means the defaults.

    Raises:
        KeyMismatchError: the checkpoint has no weights of a model, or several.
        Exception: any error of `ringstow.load`, also between two tensors.
    """
    where = directory_to_read(path)
    part = part_of(where, config, prefix)
    state = _state(where, part, rename, given(config).to_json(), verify=verify)
    return _read(weights_in(state, where, part))


def _state(path: str, part: str, rename: Given | None, config: str, *, verify: bool) -> Any:
    """Return the state of the part, whose tensors load on demand."""
    opened: Any = _foreign.opened(path, config, verify=verify)
    if opened is None:
        opened = _native.Checkpoint(path, config, foreign=True, verify=verify)
        opened.check_whole([name for name, *_ in opened.tensors])
    skeleton = Names(part).skeleton(opened, path) if part else skeleton_of(opened, path)
    source = Mapped(opened)
    if rename is not None:
        skeleton = renamed_tree(skeleton, Rename(rename), source.tensors_for(path), path)
    return lazy_state(path, source, skeleton, allow_pickle=False)


def _read(found: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Load tensors in a thread, some ahead of who takes them."""
    waiting: collections.deque[tuple[str, int, Future[Any]]] = collections.deque()
    ahead = 0
    with ThreadPoolExecutor(1, "ringstow-weights") as thread:
        for name, lazy in found.items():
            if type(lazy) is not LazyTensor:
                yield name, lazy
                continue
            while waiting and ahead + lazy.nbytes > _AHEAD_BYTES:
                yield _taken(*waiting.popleft())
                ahead = sum(nbytes for _, nbytes, _ in waiting)
            waiting.append((name, lazy.nbytes, thread.submit(lazy.load)))
            ahead += lazy.nbytes
        while waiting:
            yield _taken(*waiting.popleft())


def _taken(name: str, _: int, loaded: Future[Any]) -> tuple[str, torch.Tensor]:
    return name, loaded.result()
