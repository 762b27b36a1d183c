"""Finds the checkpoints that another program has left in a run's directory, in order.

Training must not start from scratch beside them. They are ordered by the numbers in their names, as
their programs order them.
"""

from __future__ import annotations

import logging
import os
import re
from typing import NamedTuple

from ringstow import _native
from ringstow._core._errors import IncompleteCheckpointError, InvalidStateError, UnsupportedError

_log = logging.getLogger("ringstow")

# checkpoint-500, step_500.pt, global_step500, iter_0000500, epoch=1-step=500.ckpt, ...-v1.ckpt
_STEP = re.compile(
    r"(?:.*[-_.])?(?:checkpoint|ckpt|step|global_step|iter|iteration)[-_=]?(\d{1,18})(?:-v\d+)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(\d{1,18})$")
# Common names of checkpoints without a number.
_WORDS = re.compile(r"checkpoint|ckpt|step|iter|epoch|latest|last|best|resume|state", re.IGNORECASE)


class Left(NamedTuple):
    """A checkpoint of another program in the directory of a run."""

    path: str
    kind: str
    step: int | None
    """The step in its name; None if the name has no step."""


def found_in(root: str) -> list[Left]:
    """Return the checkpoints of other programs directly in a directory, the newest last.

    Checkpoints without a number come first. Models without a trainer's state do not count. Skips
    and logs each checkpoint that is incomplete or cannot be read.

    Raises:
        OSError: the directory can't be read.
    """
    if not os.path.isdir(root):
        return []
    found: list[Left] = []
    for name in os.listdir(root):
        path = os.path.join(root, name)
        if name.startswith("."):
            continue
        try:
            left = _left(path, name)
        except FileNotFoundError:  # another process has removed it meanwhile
            continue
        except (IncompleteCheckpointError, UnsupportedError) as error:
            _log.warning("passing over %s: %s", path, error)
            continue
        if left is not None:
            found.append(left)
    ordered = sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.path))
    return _up_to_latest(root, ordered)


def _up_to_latest(root: str, found: list[Left]) -> list[Left]:
    """Skip DeepSpeed's tags after the tag that its file ``latest`` names.

    DeepSpeed writes ``latest`` last, and nothing in a tag says that its save has ended.
    """
    tag = _native.deepspeed_directory(root)
    named = next((one.step for one in found if one.path == tag), None)
    if named is None:
        return found
    kept: list[Left] = []
    for one in found:
        if one.kind == "deepspeed" and (one.step or 0) > named:
            _log.warning(
                "passing over %s: %s names %s, so the save was killed, is in progress, or had "
                "save_latest=False. If it is complete, load it with ringstow.load(%r)",
                one.path,
                os.path.join(root, "latest"),
                os.path.basename(str(tag)),
                one.path,
            )
        else:
            kept.append(one)
    return kept


def newest_in(root: str) -> Left | None:
    """Return the newest checkpoint of another program directly in a directory; None if it has none.

    Raises:
        InvalidStateError: there are several, and the newest is not clear.
        OSError: the directory can't be read.
    """
    found = found_in(root)
    if not found:
        return None
    last = found[-1]
    if last.step is None:
        raise InvalidStateError(
            f"{root} holds no step of ringstow's, and {last.path}, a checkpoint of another program "
            f"({last.kind}), whose name does not say its step: training must not begin anew beside "
            f"it. Load it with ringstow.load({last.path!r}), or give another directory"
        )
    others = [one.path for one in found[:-1] if one.step == last.step]
    if others:
        raise InvalidStateError(
            f"{root} holds no step of ringstow's, and several checkpoints of other programs for "
            f"step {last.step}, such as {others[-1]}: load one of them, as in "
            f"ringstow.load({last.path!r}), or move the others away"
        )
    return last


def _left(path: str, name: str) -> Left | None:
    is_directory = os.path.isdir(path)
    stem, ending = (name, "") if is_directory else os.path.splitext(name)
    stem = stem.removesuffix(".ckpt")  # of Lightning's directories
    if not is_directory and ending not in _native.TORCH_ENDINGS:
        return None
    is_dcp = is_directory and os.path.isfile(os.path.join(path, ".metadata"))
    # Only a checkpoint has that file, whatever its name.
    match = _STEP.fullmatch(stem) or (_NUMBER.search(stem) if is_dcp else None)
    if match is None and not (is_dcp or ending == ".ckpt" or _WORDS.search(stem)):
        return None
    kind = _native.foreign_kind(path)
    if kind in (None, "hf", "safetensors") or (match is None and is_directory and not is_dcp):
        return None
    if kind == "torch" and not _is_complete(path):
        return None
    return Left(path, str(kind), int(match[1]) if match else None)


def _is_complete(path: str) -> bool:
    from ringstow._foreign import _torch_file  # slow import

    try:
        _torch_file.is_zip(path)
    except Exception as error:
        _log.warning("passing over %s: %s", path, error)
        return False
    return True
