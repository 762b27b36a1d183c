"""Files by torch.save, mapped into memory: unused parts are not read.

torch's own unpickler for weights reads them, which runs no code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tarfile
import warnings
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from ringstow._core import _files
from ringstow._core._config import Config
from ringstow._core._errors import CorruptCheckpointError, InvalidStateError, UnsupportedError
from ringstow._foreign._pickles import REMEDY, reading, refuse_pointer, unpickled
from ringstow._state.tensors import _torch

if TYPE_CHECKING:
    import torch

# The first bytes of files by torch.save: a zip archive; before torch 1.6 a pickled number.
_ZIP = b"PK\x03\x04"
_OLD = (b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L\n.")
_HEAD_BYTES = 512
# How many members of a tar archive to read.
_MEMBERS_MAX = 16
# Bytes to checksum at once.
_PIECE = 16 << 20


class Files:
    """Reads files, and verifies each tensor on demand."""

    def __init__(self, *, allow_pickle: bool, verify: bool = True, config: str = "") -> None:
        self.allow_pickle = allow_pickle
        self.config = config or Config().to_json()
        """The configuration of native reads, as JSON."""
        self._verify = verify
        self._sums: dict[int, Checksums] = {}
        """Checksums by the address of a tensor's storage."""
        self.has_checksums = True
        """Whether every file that was read has checksums."""

    def read(self, path: str) -> Any:
        """Return the contents of a file. Its tensors are views of the mapped file.

        Raises:
            UnsupportedError: a value can only be unpickled, which needs ``allow_pickle``.
            CorruptCheckpointError: the file is damaged.
            InvalidStateError: torch.save did not write it.
            OSError: the system refused.
        """
        mapped = is_zip(path)
        if not (mapped or self.allow_pickle) and tarfile.is_tarfile(path):
            raise UnsupportedError(
                f"{path} is a tar archive by torch before 0.1.10, which only pickle reads: if you "
                "trust who wrote it, pass allow_pickle=True (--allow-pickle)"
            )
        if not mapped:
            self.has_checksums = False
            warnings.warn(
                f"{path} is in the format of torch before 1.6: it can't be mapped, and is loaded "
                "into memory at once",
                stacklevel=2,
            )
        with reading(path, "it"):
            value = unpickled(path, allow_pickle=self.allow_pickle, mmap=mapped)
        if mapped and self._verify:
            sums = Checksums(path)
            for storage in _storages(value):
                self._sums[storage] = sums
        return value

    def check(self, tensor: torch.Tensor) -> None:
        """Verify the bytes that a tensor is a view of, once.

        Raises:
            CorruptCheckpointError: the bytes are damaged.
        """
        sums = self._sums.get(tensor.untyped_storage().data_ptr())
        if sums is not None:
            sums.verify(tensor)


def _storages(value: Any) -> set[int]:
    """Return the addresses of all storages in a value, which may refer to itself."""
    found: set[int] = set()
    seen: set[int] = set()
    pending = [value]
    while pending:
        one = pending.pop()
        if _torch.is_tensor(one):
            if one.layout is sys.modules["torch"].strided:
                found.add(one.untyped_storage().data_ptr())
            continue
        if id(one) in seen:
            continue
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            pending += one
        elif type(one).__module__ in ("types", "argparse"):  # namespaces
            pending += vars(one).values()
        else:
            continue
        seen.add(id(one))
    return found


def is_zip(path: str) -> bool:
    """Return whether torch.save wrote a file as a zip archive, not in its older format.

    Raises:
        CorruptCheckpointError: the file is empty, zeroed or truncated.
        InvalidStateError: the first bytes are not torch.save's.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidStateError(f"{path} is not a regular file: give a file by torch.save")
    with _files.reading(path) as file:
        head = file.read(_HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
    if not head:
        raise _damaged(path, "is empty")
    if not head.strip(b"\0"):
        raise _damaged(path, f"begins with {len(head)} zeros, as a file whose writer was cut off")
    if head.startswith(_ZIP):
        with reading(path, "it"):
            if zipfile.is_zipfile(path):
                return True
        what = f"is cut short: of a file by torch.save its {size} bytes are the beginning only"
        raise _damaged(path, f"{what}, without the list of what is in it")
    if any(begin.startswith(head) for begin in (_ZIP, b"\x80\x02" + _OLD[0])):
        raise _damaged(path, f"is cut short, to {size} bytes")
    if head[257:262] == b"ustar":
        _check_tar(path)
        return False
    # The number comes after the pickle's protocol and frame.
    if not any(begin in head[:32] for begin in _OLD):
        refuse_pointer(path)
        raise InvalidStateError(
            f"{path} was not written by torch.save, or its beginning is overwritten: it begins "
            f"with {head[:8]!r}, and neither as a zip archive does nor as torch's older format. "
            "Give a file by torch.save, or the directory of a checkpoint of another kind"
        )
    return False


def _check_tar(path: str) -> None:
    """Refuse a tar archive that torch has not written (torch before 0.1.10 wrote tar archives)."""
    names: list[str] = []
    with (
        _files.reading(path) as file,
        contextlib.suppress(tarfile.TarError),
        tarfile.open(fileobj=file, mode="r:") as archive,
    ):
        while len(names) < _MEMBERS_MAX and (member := archive.next()) is not None:
            names.append(member.name)
    if not {"storages", "tensors", "pickle"} <= {*names}:
        held = ", ".join(names[:5]) or "nothing"
        raise InvalidStateError(
            f"{path} is a tar archive, and not by torch.save: it holds {held}. Unpack it by "
            "tar -xf, and give what is in it"
        )


def _damaged(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} {what}; {REMEDY}", file=path)


def check_zip(path: str) -> None:
    """Verify all checksums that torch.save wrote; torch does not verify a mapped file."""
    with reading(path, "it"), _files.reading(path) as file, zipfile.ZipFile(file) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise _differs(path, f"the checksum of {bad} is not that which torch.save recorded")


def _differs(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: {what}; take another copy, or pass verify=False (--no-verify) if it was written "
        "without checksums",
        file=path,
    )


class Checksums:
    """The checksums of one file's tensors; each storage is verified once, on demand."""

    def __init__(self, path: str) -> None:
        """Read the list of checksums, and verify everything except the tensors.

        Raises:
            CorruptCheckpointError: bytes differ from their checksums.
        """
        self._path = path
        self._verified: set[int] = set()
        with reading(path, "it"), _files.reading(path) as file, zipfile.ZipFile(file) as archive:
            self._known = {(one.file_size, one.CRC) for one in archive.infolist()}
            for one in archive.infolist():
                if one.filename.endswith("/data.pkl"):
                    archive.read(one)

    def verify(self, tensor: torch.Tensor) -> None:
        """Verify the storage of a tensor.

        Raises:
            CorruptCheckpointError: its checksum is not among the checksums in the file.
        """
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._verified:
            return
        found = 0
        for at in range(0, size, _PIECE):
            piece = (ctypes.c_char * min(_PIECE, size - at)).from_address(address + at)
            found = zlib.crc32(piece, found)
        if (size, found) not in self._known:
            raise _differs(
                self._path,
                f"the {size} bytes of a tensor have a checksum that torch.save did not record",
            )
        self._verified.add(address)
