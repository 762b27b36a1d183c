"""An S3 server on this machine, and the programs that copy a directory to it and back.

The server is s3s-fs (`make stores`), or one that drops what it gets (`sink.py`), over plain HTTP.
Programs find it by the variables ``AWS_*``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from comparing.environments import environment_of
from comparing.processes import CompareFailed

BUCKET = "speed"
_PROGRAM = Path(__file__).parent.parent.parent / "target" / "stores" / "bin" / "s3s-fs"
_KEYS = ("speed", "not-secret")
_CRT = """
import os, pathlib, sys
import botocore.session
from s3transfer.crt import (
    BotocoreCRTCredentialsWrapper, BotocoreCRTRequestSerializer, CRTTransferManager,
    create_s3_crt_client,
)
way, folder, bucket, prefix = sys.argv[1:]
folder, where = pathlib.Path(folder), os.environ["AWS_ENDPOINT_URL"]
session = botocore.session.Session()
keys = BotocoreCRTCredentialsWrapper(session.get_credentials()).to_crt_credentials_provider()
# boto3 itself takes it over TLS alone.
client = create_s3_crt_client("us-east-1", crt_credentials_provider=keys, use_ssl=False)
named = {"region_name": "us-east-1", "endpoint_url": where}
with CRTTransferManager(client, BotocoreCRTRequestSerializer(session, dict(named))) as manager:
    if way == "up":
        files = list(folder.iterdir())
        all_sent = [manager.upload(str(f), bucket, f"{prefix}/{f.name}") for f in files]
    else:
        folder.mkdir()
        listed = session.create_client("s3", **named).list_objects_v2(Bucket=bucket, Prefix=prefix)
        keys = [found["Key"] for found in listed["Contents"]]
        all_sent = [manager.download(bucket, k, str(folder / k.split("/")[-1])) for k in keys]
    for one in all_sent:
        one.result()
"""

_FSSPEC = """
import json, resource, sys, time
import ringstow
import torch.distributed.checkpoint as dcp
try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter
except ImportError:  # until PyTorch 2.12
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
folder, url = sys.argv[1:]
state = ringstow.load(folder)
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
before, began = cpu(), time.perf_counter()
dcp.save(state, storage_writer=FsspecWriter(url), no_dist=True)
print(json.dumps([time.perf_counter() - began, cpu() - before]))
"""

Copy = Callable[[Path, str], tuple[float, float] | None]
"""Copies a directory to a prefix of the bucket, or the other way round.

Returns seconds and CPU seconds if the copy alone is not all that it does.
"""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Run a server that keeps its objects in a folder; has one bucket, empty."""
    if not _PROGRAM.exists():
        raise CompareFailed("the S3 server is not installed: make stores")
    (folder / BUCKET).mkdir()
    keys = ["--access-key", _KEYS[0], "--secret-key", _KEYS[1]]
    command = [str(_PROGRAM), "--host", "127.0.0.1", "--port", "0", *keys, str(folder)]
    with _running(command, r"running (?:at|on) (http://[\d.:]+)"):
        yield


@contextlib.contextmanager
def dropping() -> Iterator[None]:
    """Run a server that drops what it gets."""
    with _running([sys.executable, str(Path(__file__).with_name("sink.py"))], r"(http://[\d.:]+)"):
        yield


@contextlib.contextmanager
def _running(command: list[str], says: str) -> Iterator[None]:
    """Run a server that prints its URL, and point the clients to it."""
    log = {**os.environ, "RUST_LOG": "error,s3s_fs=info"}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=log
    )
    try:
        assert server.stdout
        lines = (re.search(says, line) for line in server.stdout)
        url = next((found[1] for found in lines if found), None)
        if url is None:
            raise CompareFailed("the S3 server ended at once")
        os.environ.update(
            AWS_ACCESS_KEY_ID=_KEYS[0],
            AWS_SECRET_ACCESS_KEY=_KEYS[1],
            AWS_REGION="us-east-1",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_ENDPOINT_URL=url,
            AWS_ALLOW_HTTP="true",
            NO_PROXY="127.0.0.1",
        )
        yield
    finally:
        server.kill()
        server.wait()


def crt(way: str, log: Path) -> Copy:
    """Return Amazon's own native client (CRT), as boto3 drives it; installs both in .peers."""
    python = environment_of(("boto3[crt]",), log).python

    def copy(folder: Path, prefix: str) -> None:
        _run([python, "-c", _CRT, way, str(folder), BUCKET, prefix])

    return copy


def fsspec_writer(log: Path) -> Copy:
    """Return a save by torch's DCP straight to the store, of the tensors of a directory.

    Its start and the load of the tensors do not count.
    """
    python = environment_of(("s3fs",), log).python

    def save(folder: Path, prefix: str) -> tuple[float, float]:
        answer = _run([python, "-c", _FSSPEC, str(folder), f"s3://{BUCKET}/{prefix}"])
        seconds, cpu = json.loads(answer.splitlines()[-1])
        return seconds, cpu

    return save


def rclone() -> Copy | None:
    """Return uploads by rclone, with its own defaults; None without it.

    Its downloads from this server (rclone 1.60) never end.
    """
    program = shutil.which("rclone")
    if program is None:
        print("rclone is not installed: left out", file=sys.stderr)
        return None
    where = f":s3,provider=Other,env_auth=true,endpoint='{os.environ['AWS_ENDPOINT_URL']}'"

    def copy(folder: Path, prefix: str) -> None:
        there = f"{where}:{BUCKET}/{prefix}"
        _run([program, "copy", str(folder), there, "--config", os.devnull, "-q"])

    return copy


def clear(folder: Path) -> None:
    """Remove all objects of the server whose folder it is, if it keeps any."""
    bucket = folder / BUCKET
    for found in bucket.iterdir() if bucket.exists() else ():
        shutil.rmtree(found)


def _run(command: list[str]) -> str:
    # Over plain HTTP; rclone refuses to start with this one.
    environment = {name: text for name, text in os.environ.items() if name != "AWS_CA_BUNDLE"}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return done.stdout
