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
    """The options of a copy; see `promote`. The native side takes them in this order."""

    rate: int = 0
    uploads: int = 4
    part_bytes: int = 16 << 20
    replace_older: bool = False
    refuse_link: bool = False
    """Whether to refuse a link as the last part of the path: its target is not the run's."""
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

    Verifies each checksum on the way, and creates the manifest last, so that readers never see an
    incomplete checkpoint. After a failure or a kill, the same call continues where it stopped.
    Releases the GIL, and uses ``uploads * part_bytes`` of memory, 1 GiB at most, none of it from
    the saves' pool.

    Credentials come from the environment variables of the store's own programs, or from the
    machine's role: docs/tiers.md.

    Args:
        path: the checkpoint's directory.
        to: the path or URL of the copy: ``/shared/run/step-1000``, ``s3://bucket/run/step-1000``,
            ``gs://...`` or ``az://...``. Loads take the same.
        rate: maximum bytes a second; 0 for no limit.
        uploads: parts that are sent at the same time, 1 to 64.
        part_bytes: bytes of a part, 5 MiB to 256 MiB.
        replace_older: replace a checkpoint at ``to`` that was committed earlier than this one, by
            one request; then remove its shards.
        replicas: for a checkpoint of nodes that share no directory: also send this node's copies of
            other nodes' files. Each node sends its own files, and the last one commits.
        patience: seconds to retry while a store does not answer; a warning says so. After that it
            raises, and the same call continues where it stopped.
        config: the settings for reads; None means the defaults.

    Returns:
        The report: how many bytes were sent, and how many existed there already.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: a file is damaged; nothing is committed at ``to``.
        BusyError: the same promotion is in progress on this host, or a save to that directory.
        InvalidStateError: ``to`` is inside the checkpoint's directory, or is its parent, or holds
            other checkpoints or files.
        FileExistsError: ``to`` holds another checkpoint, and ``replace_older`` does not allow to
            replace it.
        OSError: the store or the system refused.
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
    """Copy a checkpoint as `promote` does, without calling the callbacks."""
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
    """Report a successful copy to the callbacks."""
    _done_callbacks.tell(
        _done_callbacks.Outcome(
            kind="promotion", path=report.path, step=report.step, to=report.to, report=report
        )
    )


def tell_failure(path: str, to: str, error: BaseException) -> None:
    """Report a failed copy to the callbacks."""
    _done_callbacks.tell(_done_callbacks.Outcome(kind="promotion", path=path, to=to, error=error))
