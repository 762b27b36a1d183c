"""An Accelerator's checkpoints on disk: their paths, and which are complete or replaceable."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable
from typing import NamedTuple

from ringstow._core import _files
from ringstow._core._errors import FormatError, InvalidStateError, UnsupportedError
from ringstow.integrations import _rename_when_complete

NAMES = re.compile(r"checkpoint_(\d+)")
MARK = "accelerate.json"
HOOKS = ".hooks"
"""The directory in which save hooks write until the tensors are committed."""
_FORMAT = 1
# Files that ringstow writes itself.
_OURS = re.compile(r"manifest\.json|\.metadata|\.ringstow-lock|rank\d+-\d+\.safetensors")
# Files that the stock Accelerator writes.
_STOCK = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.(bin|safetensors)"
    r"|scaler\.pt|(random_states|custom_checkpoint)_\d+\.pkl|(pytorch_model_fsdp|optimizer)_\d+"
    r"|pytorch_model_fsdp(_\d+)?\.bin|.*_rank\d+\.bin"
)


class Mark(NamedTuple):
    """The contents of the mark, a file beside a checkpoint's manifest."""

    ranks: int
    """How many ranks saved it."""
    is_sharded: bool
    counts: dict[str, int]
    """How many models, optimizers and so on the checkpoint holds."""
    files: list[str]
    """Names of the files that save hooks wrote, at the top of the directory."""

    def write(self, folder: str) -> None:
        """Write the file into a directory."""
        with _files.fresh(os.path.join(folder, MARK)) as stream:
            stream.write(json.dumps({"format": _FORMAT, **self._asdict()}, indent=1).encode())


def mark_of(path: str) -> Mark | None:
    """Return the mark of a checkpoint; None if `RingstowAccelerator` did not save it.

    Raises:
        FormatError: the mark is damaged, or not ringstow's.
        UnsupportedError: a newer version wrote it.
    """
    file = os.path.join(path, MARK)
    try:
        with _files.reading(file) as stream:
            said = json.load(stream)
        if said.pop("format") > _FORMAT:
            raise UnsupportedError(f"a newer version of ringstow wrote {path}: update ringstow")
        return Mark(**said)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{file} is not what ringstow writes: {error}", path=path) from error


def is_stock(path: str) -> bool:
    """Return whether a directory has a file of the stock Accelerator's checkpoints."""
    return any(_STOCK.fullmatch(name) for name in os.listdir(path))


def numbered(root: str) -> list[str]:
    """Return the directories ``checkpoint_N`` in a directory, by number."""
    if not os.path.isdir(root):
        return []
    found = [
        (int(name.group(1)), entry.path)
        for entry in os.scandir(root)
        if (name := NAMES.fullmatch(entry.name)) and entry.is_dir()
    ]
    return [path for _, path in sorted(found)]


def next_number(root: str) -> int:
    """Return the number after the highest checkpoint in a directory."""
    found = numbered(root)
    return int(os.path.basename(found[-1]).rpartition("_")[2]) + 1 if found else 0


def newest(root: str, objects: int) -> tuple[str | None, list[str]]:
    """Return the newest complete checkpoint, and newer ones that are not complete.

    Args:
        root: the directory of the checkpoints.
        objects: how many objects are registered for checkpointing.
    """
    halves: list[str] = []
    for path in reversed(numbered(root)):
        if _is_complete(path, objects):
            return path, halves
        halves.append(path)
    return None, halves


def stale(newest: str, limit: int | None) -> list[str]:
    """Return the checkpoints that are over the limit; never the newest."""
    if limit is None:
        return []
    found = numbered(os.path.dirname(newest))
    others = [path for path in found if path != newest]
    return others[: max(0, len(found) - max(limit, 1))]


def to_load(path: str) -> str | None:
    """Return the directory of the checkpoint for a path; None if there is none.

    A process that was killed while it replaced the checkpoint may have left it under another name.
    """
    if os.path.isdir(path):
        return path
    older = _rename_when_complete.replaced(os.path.abspath(path))
    return older if os.path.isdir(older) and not os.path.lexists(path) else None


def check_replaced(path: str) -> None:
    """Refuse to replace anything other than a checkpoint.

    Raises:
        InvalidStateError: the path is a link or a file, or the directory holds other files.
    """
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        raise InvalidStateError(
            f"{path} is a link or a file. A save replaces the whole directory: name a directory"
        )
    mark = mark_of(path)
    if mark is None:
        others = _others(path, _STOCK, ())
    else:
        others = _others(path, _OURS, (*mark.files, MARK))
    if others:
        raise InvalidStateError(
            f"{path} holds other files than a checkpoint: {', '.join(others[:10])}. A save "
            "replaces the whole directory: name a directory of its own, or write such files in a "
            "hook of register_save_state_pre_hook"
        )


def hooks_files(part: str) -> list[str]:
    """Return the names of the files that save hooks wrote.

    Raises:
        InvalidStateError: a name is one of ringstow's.
    """
    names = sorted(os.listdir(os.path.join(part, HOOKS)))
    taken = [name for name in names if _OURS.fullmatch(name) or name == MARK]
    if taken:
        raise InvalidStateError(
            f"a save hook wrote {', '.join(taken)}, which ringstow writes itself: give the hook's "
            "files other names, or a directory"
        )
    return names


def seal(part: str) -> None:
    """Move the files of hooks beside the tensors, after the commit.

    A save refuses a directory with other programs' safetensors files, which hooks may write.
    """
    folder = os.path.join(part, HOOKS)
    for name in os.listdir(folder):
        os.rename(os.path.join(folder, name), os.path.join(part, name))
    os.rmdir(folder)


def _others(path: str, names: re.Pattern[str], more: Iterable[str]) -> list[str]:
    return sorted(
        name for name in set(os.listdir(path)).difference(more) if not names.fullmatch(name)
    )


def _is_complete(path: str, objects: int) -> bool:
    """Return whether a save has ended; the stock Accelerator writes these files last."""
    if mark_of(path) is not None:
        return True
    last = ["random_states_0.pkl"]
    last += [f"custom_checkpoint_{number}.pkl" for number in range(objects)]
    return all(_is_zip(os.path.join(path, name)) for name in last)


def _is_zip(path: str) -> bool:
    try:
        with _files.reading(path) as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False
