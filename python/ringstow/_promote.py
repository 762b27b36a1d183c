"""Copies of checkpoints in object stores."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._arguments import StrPath, object_url, of_checkpoint
from ringstow._config import native_json
from ringstow._errors import InvalidStateError
from ringstow._progress import Progress

if TYPE_CHECKING:
    from ringstow._config import Config
    from ringstow._report import PromotionReport


def promote(
    path: StrPath,
    to: str,
    *,
    rate: int = 0,
    uploads: int = 4,
    part_bytes: int = 16 << 20,
    replace_older: bool = False,
    replicas: bool = True,
    config: Config | None = None,
) -> PromotionReport:
    """Copy a checkpoint to an object store, where it is loaded by its URL.

    Compares each block with its checksum on the way, and creates the manifest last, so that nobody
    sees half of a checkpoint. After a failure or a kill, the same call goes on where it was. Holds
    no GIL, and takes ``uploads * part_bytes`` of memory, none of it from the saves' pool.

    Credentials come from the environment, as the store's own programs take them, or from the
    machine's role: docs/tiers.md.

    Args:
        path: the checkpoint's directory.
        to: the URL: ``s3://bucket/run/step-1000``, ``gs://...`` or ``az://...``.
        rate: bytes a second at most; 0 for no limit.
        uploads: parts that are sent at the same time, 1 to 64.
        part_bytes: bytes of a part, 5 MiB to 256 MiB.
        replace_older: replace a checkpoint at the URL that was committed earlier than this one, by
            one request; its shards are removed after that.
        replicas: of a checkpoint of nodes that share no directory, also send files of other nodes,
            as far as this node has copies. Each node sends its own, and the last one commits.
        config: the settings of reading; None means the defaults.

    Returns:
        The report: which bytes were sent, and which were there already.

    Raises:
        IncompleteCheckpointError: the directory holds no committed checkpoint.
        CorruptCheckpointError: a file is damaged; nothing is committed at the URL.
        BusyError: the same promotion is in progress on this host.
        InvalidStateError: ``to`` is not the URL of an object store.
        FileExistsError: another checkpoint is at the URL, and is not to be replaced.
        OSError: what the store or the system says.
    """
    from ringstow._report import PromotionReport

    url = object_url(to)
    if url is None:
        raise InvalidStateError(
            f"{to} is not the URL of an object store (s3://, gs://, az://): copy a checkpoint to a "
            "directory with `cp -a`"
        )
    where, how = of_checkpoint(path), (rate, uploads, part_bytes, replace_older, replicas)
    with Progress(f"sending {os.path.basename(where)}") as progress:
        report = _native.promote(where, url, how, native_json(config), progress=progress.advance)
    return PromotionReport.from_json(report)
