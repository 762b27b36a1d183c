"""The base of a save: an earlier checkpoint whose unchanged files are linked, not written again."""

from __future__ import annotations

import dataclasses

from ringstow._core._arguments import StrPath, absolute

Native = tuple[str | None, bool, bool]
"""What the native side takes: the path, whether it is optional, whether its files are linked."""


@dataclasses.dataclass(frozen=True)
class Base:
    """Which earlier checkpoint a save takes over files from, and how.

    ``base="run/step-900"`` in a save is short for ``base=Base("run/step-900")``.
    """

    path: StrPath | None = None
    """The checkpoint; None for a first save, which only stores the hashes for the next one."""
    optional: bool = False
    """Whether a base that can't be opened is no error: everything is written, and the report says
    why."""
    rewrite: bool = False
    """Whether to write all files, so that the checkpoint shares none with another one."""


def native(base: StrPath | Base | None) -> Native | None:
    """Return a base as the native side takes it.

    Raises:
        InvalidStateError: the path is a URL.
        TypeError, ValueError: it is no path.
    """
    if base is None:
        return None
    if not isinstance(base, Base):
        base = Base(base)
    path = None if base.path is None else absolute(base.path)
    return path, base.optional, not base.rewrite
