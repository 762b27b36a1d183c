"""The directories of tags, and the file ``latest`` that names the newest."""

from __future__ import annotations

import os
import re

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import NoCheckpointError
from ringstow.integrations import _rename_when_complete

STATES = "_states.pt"
"""The suffix of all files that DeepSpeed saves in a tag's directory."""
_LATEST = "latest"


def publish(part: str, final: str) -> None:
    """Rename a complete tag, keeping the files that the user put into an older one."""
    _rename_when_complete.keep_others(final, part, lambda name: name.endswith(STATES))
    _rename_when_complete.complete(part, final)


def name_latest(save_dir: str, tag: str) -> None:
    """Write a tag's name to ``latest``, durably and atomically."""
    latest = os.path.join(save_dir, _LATEST)
    # Another engine of the program may write ``latest`` in the same directory.
    with _rename_when_complete.kept(f"{latest}-{tag}") as new:
        with _files.fresh(new) as stream:
            stream.write(tag.encode(errors="surrogateescape"))
        _files.sync(new)
        os.rename(new, latest)
    _native.sync_dir(save_dir)


def to_load(load_dir: str, tag: str | None) -> str | None:
    """Return the tag to load; None if ``latest`` does not exist.

    Raises:
        NoCheckpointError: the tag does not exist.
    """
    named = os.path.join(load_dir, _LATEST)
    if tag is None:
        if not os.path.isfile(named):
            return None
        with _files.reading(named) as stream:
            tag = stream.read().decode(errors="surrogateescape").strip()
    final = os.path.abspath(os.path.join(load_dir, str(tag)))
    if not os.path.lexists(final) and os.path.lexists(_rename_when_complete.replaced(final)):
        _rename_when_complete.recover(
            os.path.dirname(final), re.compile(re.escape(os.path.basename(final)))
        )
    if not os.path.isdir(final):
        raise NoCheckpointError(f"{final} is not there; {named} or the caller names it")
    return str(tag)
