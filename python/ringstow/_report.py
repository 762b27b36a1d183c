"""What a save, load or verification did, built from the native side's JSON.

Fields that this version does not know are kept in ``extra``; ones that are absent keep their
default: the two sides may be of different versions.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Self


class _FromJson:
    """Builds a dataclass from a JSON object, whatever the object has too much or too little."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build one from the native side's JSON text."""
        return cls.from_object(json.loads(text))

    @classmethod
    def from_object(cls, values: dict[str, Any]) -> Self:
        """Build one from a parsed JSON object."""
        known = {field.name for field in dataclasses.fields(cls)} - {"extra"}  # type: ignore[arg-type]
        fields = {name: value for name, value in values.items() if name in known}
        for name, part in (("fallbacks", Fallback), ("damage", Damage)):
            if name in fields:
                fields[name] = tuple(part.from_object(item) for item in fields[name] or ())
        extra = {name: value for name, value in values.items() if name not in known}
        return cls(**{**fields, "extra": extra})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback(_FromJson):
    """A faster way that was not taken: what, why, and how to mend it."""

    what: str = ""
    why: str = ""
    remedy: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage(_FromJson):
    """One damaged place: the file, the byte offset in it, what was recorded and what was found."""

    file: str = ""
    offset: int = 0
    what: str = ""
    expected: str = ""
    got: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport(_FromJson):
    """What a save did. Sizes in bytes, times in seconds from the start of the save."""

    path: str = ""
    tensors: int = 0
    """Tensors stored; ones that share memory count once."""
    bytes: int = 0
    """Bytes of tensor data."""
    files: int = 0
    engine: str = ""
    direct: bool = False
    fixed: bool = False
    pool_bytes: int = 0
    seconds: float = 0.0
    """Until the checkpoint was committed."""
    seconds_staged: float = 0.0
    """Until the last byte had left its tensor."""
    fallbacks: tuple[Fallback, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport(_FromJson):
    """What a load did. Sizes in bytes, times in seconds."""

    path: str = ""
    tensors: int = 0
    bytes: int = 0
    """Bytes of tensor data handed out."""
    bytes_read: int = 0
    """Bytes read from files, whole blocks where they are verified."""
    engine: str = ""
    direct: bool = False
    fixed: bool = False
    verified: bool = False
    seconds: float = 0.0
    fallbacks: tuple[Fallback, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def followed_by(self, other: LoadReport) -> LoadReport:
        """Return the report of this load and then the other, as one."""
        return dataclasses.replace(
            self,
            tensors=self.tensors + other.tensors,
            bytes=self.bytes + other.bytes,
            bytes_read=self.bytes_read + other.bytes_read,
            seconds=self.seconds + other.seconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport(_FromJson):
    """What a verification found. ``ok`` is True when ``damage`` is empty."""

    path: str = ""
    ok: bool = False
    files: int = 0
    blocks: int = 0
    bytes: int = 0
    """Bytes read and compared with their checksums."""
    seconds: float = 0.0
    damage: tuple[Damage, ...] = ()
    extra: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a save has come, in bytes of files: staged, written, and in all."""

    staged: int
    written: int
    total: int
