"""Copies of checkpoints in object stores and other directories."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._arguments import StrPath, directory_to_read, of_checkpoint
from ringstow._core._config import native_json
from ringstow._reports import _done_callbacks
from ringstow._reports._progress import Progress

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._reports._io_reports import PromotionReport


@dataclasses.dataclass(frozen=True)
class How:
    """How to copy; `promote` explains most fields. The native side takes them in this order."""

    rate: int = 0
    uploads: int = 4
    part_bytes: int = 16 << 20
    replace_older: bool = False
    refuse_link: bool = False
    """Whether a link at the place's last name is refused: what it leads to is not the run's."""
    replicas: bool = True
    patience: float = 180


def promote(
    path: StrPath,
    to: StrPath,
    *,
    rate: int = How.rate,
    uploads: int = How.uploads,
    part_bytes: int = How.part_bytes,
    replace_older: bool = How.replace_older,
    replicas: bool = How.replicas,
    patience: float = How.patience,
    config: Config | None = None,
) -> PromotionReport:
    """Copy a checkpoint to an object store, or to another directory, such as one on a shared disk.

    Compares each block with its checksum on the way, and creates the manifest last, so that nobody
    sees half of a checkpoint. After a failure or a kill, the same call goes on where it was. Holds
    no GIL, and takes ``uploads * part_bytes`` of memory, 1 GiB at most, none of it from the saves'
    pool.

    A store's credentials come from the environment, as the store's own programs take them, or from
    the machine's role: docs/tiers.md.

    Args:
        path: the checkpoint's directory.
        to: where it is to be: ``/shared/run/step-1000``, ``s3://bucket/run/step-1000``,
            ``gs://...`` or ``az://...``. It is loaded by this path or URL.
        rate: bytes a second at most; 0 for no limit.
        uploads: parts that are sent at the same time, 1 to 64.
        part_bytes: bytes of a part, 5 MiB to 256 MiB.
        replace_older: replace a checkpoint there that was committed earlier than this one, by
            one request; its shards are removed after that.
        replicas: of a checkpoint of nodes that share no directory, also send files of other nodes,
            as far as this node has copies. Each node sends its own, and the last one commits.
        patience: seconds to go on while a store does not answer, which a warning tells. The
            error then says so, and the same call goes on where it was.
        config: the settings of reading; None means the defaults.

    Returns:
        The report: which bytes were sent, and which were there already.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: a file is damaged; nothing is committed there.
        BusyError: the same promotion is in progress on this host, or a save to that directory.
        InvalidStateError: ``to`` is in the checkpoint's directory, or is the one that it is in, or
            holds other checkpoints or files.
        FileExistsError: another checkpoint is there, and is not to be replaced.
        OSError: what the store or the system says.
    """
    where, there = of_checkpoint(path), directory_to_read(to)
    how = How(
        rate=rate,
        uploads=uploads,
        part_bytes=part_bytes,
        replace_older=replace_older,
        replicas=replicas,
        patience=patience,
    )
    with _done_callbacks.failing("promotion", where, to=there):
        report = sent(where, there, how=how, config=config)
    tell(report)
    return report


def sent(path: str, to: str, *, how: How, config: Config | None) -> PromotionReport:
    """Copy a checkpoint as `promote` does, for callers that tell by themselves how it ended."""
    from ringstow._reports._io_reports import PromotionReport

    options = dataclasses.astuple(how)
    with Progress(f"sending {os.path.basename(path)}") as progress:
        done = _native.promote(path, to, options, native_json(config), progress=progress.advance)
    return PromotionReport.from_json(done)


def copied(path: str, to: str, *, copying: _native.Copying, is_new: bool) -> PromotionReport | None:
    """Copy a step to a tier of its run; return None if a rule has removed it here meanwhile."""
    from ringstow._reports._io_reports import PromotionReport

    with Progress(f"sending {os.path.basename(path)}") as progress:
        done = copying.send(path, is_new, os.path.dirname(to), progress.advance)
    return None if done is None else PromotionReport.from_json(done)


def tell(report: PromotionReport) -> None:
    """Tell the callbacks of a copy that went well."""
    _done_callbacks.tell(
        _done_callbacks.Outcome(
            kind="promotion", path=report.path, step=report.step, to=report.to, report=report
        )
    )


def tell_failure(path: str, to: str, error: BaseException) -> None:
    """Tell the callbacks of a copy that failed."""
    _done_callbacks.tell(_done_callbacks.Outcome(kind="promotion", path=path, to=to, error=error))
