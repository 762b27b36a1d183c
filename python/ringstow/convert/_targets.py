"""Writes a state, loading its tensors on demand. One function per kind."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import InvalidStateError, KeyMismatchError, UnsupportedError
from ringstow._foreign import _pickles
from ringstow._foreign._nested_states import State, is_stored, is_tensor, loaded, replaced, stored
from ringstow._ranks import _concurrent_saves
from ringstow._reports._io_reports import SaveReport
from ringstow._saving import _jobs
from ringstow._state.tensors import _bitsandbytes, _composites, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _encode
from ringstow._state.tree._custom_types import parts
from ringstow._state.tree._walk import Path, describe, flat_name, leaves
from ringstow.convert import _torch_files
from ringstow.convert._sources import Options

_log = logging.getLogger("ringstow")

Advance = Callable[[str, int, int], None]
"""Called with the phase, its bytes done, and its bytes in all."""

_ALIGN = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """The written target, for the report and the comparison."""

    expected: State
    """The target's expected state: the source's, without values that the format can't hold."""
    report: SaveReport | None = None
    left_out: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()


def to_ringstow(state: State, path: str, advance: Advance, options: Options) -> Written:
    """Save a state as a ringstow checkpoint."""
    _concurrent_saves.refuse_other_ranks(path)
    encoded = _encode.encode(state, allow_pickle=options.allow_pickle)
    # No other code has the tensors, so they need no guard.
    config = options.config.to_json()
    report = _saved(
        lambda: _native.start_save(
            encoded.tensors, encoded.tree, path, config, only_new=not options.overwrite
        ),
        path,
        advance,
    )
    return Written(expected=state, report=report)


def _saved(begin: Callable[[], _native.SaveJob], path: str, advance: Advance) -> SaveReport:
    """Start a save, report its progress, and return once it is durable; Ctrl-C cancels it."""
    report = _jobs.run(
        begin, path, advance=lambda written, total: advance("writing", written, total)
    )
    advance("writing", report.file_bytes, report.file_bytes)
    return report


def to_dcp(state: State, path: str, advance: Advance, options: Options) -> Written:
    """Write a state as torch.distributed.checkpoint does."""
    from ringstow.convert import _dcp

    expected = _dcp.as_stored(state)
    empty = {flat_name(at) for at, value in leaves(state) if isinstance(value, dict) and not value}
    with counted(advance, "writing", sum(v.nbytes for _, v in stored(expected))) as wrote:
        _dcp.write(state, path, wrote)
    return Written(expected=expected, left_out=tuple(sorted(empty)))


def to_torch(state: State, path: str, advance: Advance, options: Options) -> Written:
    """Write a state as torch.save does, into an empty file.

    torch.save needs all tensors at once. They are copied into an unlinked, mapped file beside the
    target, so that the system decides how much of it stays in memory. Numpy arrays stay in memory.
    """
    with (
        _pickles.naming(path),
        tempfile.TemporaryFile(dir=os.path.dirname(path)) as scratch,
        _files.rewriting(path) as stream,
    ):
        _torch_files.save(_mapped(state, scratch.fileno(), advance), stream)
        stream.flush()
        os.fsync(stream.fileno())
    return Written(expected=state)


def _mapped(state: State, file: int, advance: Advance) -> State:
    """Return a state with each lazy tensor loaded once, into one mapped file."""
    import torch

    lazies = {id(v): v for _, v in stored(state) if type(v) is LazyTensor and not v.array}
    offsets: dict[int, int] = {}
    size = 0
    for key, lazy in lazies.items():
        offsets[key] = size
        size += -(-lazy.nbytes // _ALIGN) * _ALIGN
    # Reserve the space: a full disk is an error now, not a SIGBUS when a page is written.
    os.posix_fallocate(file, 0, max(size, 1))
    memory = mmap.mmap(file, max(size, 1))
    done: dict[int, Any] = {}

    def place(value: Any, _path: object) -> Any:
        made = done.get(id(value))
        if made is None:
            made = loaded(value)
            if value.nbytes and id(value) in offsets:
                at, count = offsets[id(value)], value.nbytes
                flat = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=at)
                made = flat.view(made.dtype).view(made.shape).copy_(made)
                # The pages stay in the page cache but no longer count as this process's memory.
                memory.madvise(mmap.MADV_DONTNEED, at, count)
                wrote(count)
            done[id(value)] = made  # once, so that tied tensors stay tied
        return made

    with counted(advance, "writing", sum(lazy.nbytes for lazy in lazies.values())) as wrote:
        return replaced(state, place)  # type: ignore[no-any-return]


def to_hf(state: State, path: str, advance: Advance, options: Options) -> Written:
    """Write the tensors of a state in Hugging Face's format."""
    model = _Model(state, options.prefix, options.dtype)
    config = dataclasses.replace(options.config, shard_bytes=options.max_shard_bytes).to_json()
    report = _saved(lambda: _native.start_export(model.stored, path, config), path, advance)
    return Written(
        expected=model.tensors,
        report=report,
        left_out=tuple(model.left_out),
        tied=tuple(model.tied),
    )


# The names that programs give a model's weights: a part of the state, or a part of a part.
_WEIGHTS = {
    "accelerate": (r"model(_\d+)?",),
    "deepspeed": (r"fp32", r"mp_rank_\d+_model_states"),
    "lightning": (r"state_dict|model",),
    "trainer": (r"model",),
}
_INSIDE = {"mp_rank_00_model_states": "module."}
_OPTIMIZER = re.compile(r"optim|optimizers?(_states?)?(_\d+)?")


def prefix_of(state: State, path: str, kind: str) -> str:
    """Return the prefix of the model's weights in a trainer's checkpoint; empty for other kinds.

    Args:
        state: the trainer's parts.
        path: the checkpoint, for messages.
        kind: the kind of the source, a key of `foreign.KINDS`.

    Raises:
        KeyMismatchError: it has no such part, or several such parts; lists its parts.
    """
    if kind not in _WEIGHTS:
        return ""
    found: list[str] = []
    for pattern in _WEIGHTS[kind]:
        found = found or [part for part in map(str, state) if re.fullmatch(pattern, part)]
    if len(found) == 1:
        return f"{found[0]}.{_INSIDE.get(found[0], '')}"
    raise KeyMismatchError(
        f"{path} holds {'several models' if found else 'no weights of a model'}: give --prefix "
        f"(prefix=) the part to write, such as {[*found, *state, ''][0]}.; there are "
        f"{', '.join(map(str, state))}"
    )


class _Model:
    """The tensors of a state whose names have a prefix, each once.

    Without a prefix, an optimizer's tensors are left out: they do not belong to the model.
    """

    def __init__(self, state: State, prefix: str, dtype: str | None) -> None:
        self.tensors: State = {}
        self.stored = _native.Tensors()
        self.left_out: list[str] = []
        self.tied: list[tuple[str, str]] = []
        self._name_of: dict[tuple[object, ...], str] = {}
        outside: set[str] = set()
        fixed = set() if dtype is None else _fixed_in(state)
        for at, value in _leaves(state):
            name = flat_name(at)
            top, _, _ = name.partition(".")
            if _is_models(name, prefix):
                to = None if name in fixed else dtype
                self._add(name.removeprefix(prefix), value, to, describe(at))
            else:
                outside.add(top)
        if outside and not prefix:
            _log.warning(
                "a model has no optimizer: %s is left out; --prefix (prefix=) names what to write",
                ", ".join(sorted(outside)),
            )
        if not self.tensors:
            others = ", ".join(sorted(outside)[:20])
            what = f"that starts with {prefix!r}" if prefix else "in it that is not an optimizer's"
            what += f"; there are {others}" if others else ""
            raise KeyMismatchError(f"no tensor has a name {what}", missing=[prefix])

    def _add(self, name: str, value: Any, dtype: str | None, key: str) -> None:
        if not is_tensor(value):
            self.left_out.append(name)
            return
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidStateError(
                f"{key}: the name {name!r:.80} is not valid Unicode (a lone surrogate), which "
                "safetensors needs: rename the key in the source"
            ) from None
        if name in self.tensors or any(name == other for other, _ in self.tied):
            raise InvalidStateError(f"{key}: another tensor is named {name!r} already")
        memory = _memory(value, key)
        known = self._name_of.setdefault(memory.identity, name) if memory.nbytes else name
        if known != name:
            self.tied.append((name, known))
            return
        tensor = cast(value, dtype, key)
        memory = _memory(tensor, key)
        self.tensors[name] = tensor
        self.stored.add(name, memory)


def _is_models(name: str, prefix: str) -> bool:
    """Return whether a tensor belongs to the model that a prefix names; not an optimizer's."""
    top, _, below = name.partition(".")
    is_optimizers = not prefix and below and _OPTIMIZER.fullmatch(top)
    return name.startswith(prefix) and len(name) > len(prefix) and not is_optimizers


def _memory(value: Any, key: str) -> Any:
    if type(value) is LazyTensor:
        return _encode.lazy_memory(value, key)
    return _torch.memory_of(value, key)


def cast(value: Any, dtype: str | None, key: str) -> Any:
    """Return a lazy tensor of another dtype, if this one is floating; otherwise this one.

    Floats of at most eight bits stay: they are codes, with their scales in other tensors.
    """
    if dtype is None:
        return value
    memory = _memory(value, key)
    code = _torch.cast_code(memory.dtype, dtype)
    if memory.dtype == code:
        return value
    to = _torch.dtype_of(code, key)
    size = to.itemsize
    count = value.nbytes // _torch.dtype_of(memory.dtype, key).itemsize
    return LazyTensor(
        code, tuple(memory.shape), count * size, lambda: loaded(value).detach().to(to)
    )


def _fixed_in(state: State) -> set[str]:
    """Return the names of entries of bitsandbytes' layers: codes, and the scales that fit them."""
    return _bitsandbytes.entries_in(flat_name(at) for at, _ in _leaves(state))


def _leaves(state: State) -> Iterator[tuple[Any, Any]]:
    """Yield all leaves except empty containers, with which nothing is lost."""
    for at, value in leaves(state):
        if is_stored(value) or not (isinstance(value, (dict, list, tuple)) and not value):
            yield at, value


def refuse_composites(state: State, source: str, kind: str, options: Options) -> None:
    """Refuse to write tensors that are made of others, which only ringstow's checkpoints hold.

    Also those that `dequantized` has left, if it was to leave none.

    Raises:
        UnsupportedError: names the first one, and says what to do.
    """
    if kind == "ringstow" and not options.dequantize:
        return
    is_written = writes(kind, options)
    for at, value in _composites_in(state, ()):
        is_layout = _composites.is_layout(value.type)
        if not is_written(at) or (is_layout and kind == "ringstow"):
            continue
        name = f"{source}: {describe(at)} is a {value.type.replace(':', '.')}"
        if options.dequantize and not is_layout:
            raise UnsupportedError(
                f"{name}, which has no dequantize() to call: load it, and save a plain tensor made "
                "from it"
            )
        remedy = "dequantize=True (--dequantize) writes its values"
        if is_layout:
            other = ".view(torch.uint8)" if value.type == "bits" else ".to_dense()"
            remedy = f"load it, and save {other} of it"
        raise UnsupportedError(
            f"{name}, a tensor that is made of others, which a target of the kind {kind!r} can't "
            f"hold: {remedy}"
        )


def writes(kind: str, options: Options) -> Callable[[Path], bool]:
    """Return a function that returns whether a target of a kind gets what is at a path."""
    return lambda at: kind != "hf" or _is_models(flat_name(at), options.prefix)


def _composites_in(node: Any, path: Path) -> Iterator[tuple[Path, TensorParts]]:
    if type(node) is TensorParts:
        yield path, node
    elif not is_stored(node):
        for key, child in parts(node) or ():
            yield from _composites_in(child, (*path, key))


@contextlib.contextmanager
def counted(advance: Advance, phase: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that adds bytes to the progress of a phase."""
    done = 0
    advance(phase, 0, total)

    def add(count: int) -> None:
        nonlocal done
        done += count
        advance(phase, min(done, total), total)

    yield add


WRITERS: dict[str, Callable[[State, str, Advance, Options], Written]] = {
    "ringstow": to_ringstow,
    "dcp": to_dcp,
    "torch": to_torch,
    "hf": to_hf,
}
