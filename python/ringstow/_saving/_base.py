"""The base of a save: an earlier checkpoint whose unchanged files are linked, not written again."""

from __future__ import annotations

import dataclasses

from ringstow._core._arguments import StrPath, absolute

Native = tuple[str | None, bool, bool]
"""A base as the native side takes it: path, whether it is optional, whether files are linked."""


@dataclasses.dataclass(frozen=True)
class Base:
    """The earlier checkpoint whose unchanged files a save links, and how.

    ``base="run/step-900"`` in a save is short for ``base=Base("run/step-900")``.
    """

    path: StrPath | None = None
    """The checkpoint; None for a first save, which only stores the hashes for the next one."""
    optional: bool = False
    """Whether to write everything if the base can't be opened; the report then says why."""
    rewrite: bool = False
    """Whether to write all files, so that the checkpoint shares none with another one."""


def native(base: StrPath | Base | None) -> Native | None:
    """Return a base for the native side.

    Raises:
        InvalidStateError: the path is a URL.
        TypeError, ValueError: the base is not a path.
    """
    if base is None:
        return None
    if not isinstance(base, Base):
        base = Base(base)
    path = None if base.path is None else absolute(base.path)
    return path, base.optional, not base.rewrite
