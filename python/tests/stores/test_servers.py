"""What the servers do, as far as the tests of tiers rely on it, and where they differ from S3."""

from __future__ import annotations

import base64
import contextlib
import http.client
import pathlib
import socket
import subprocess
import sys
import zlib

import pytest

from stores import servers
from stores.client import Client, Refused
from stores.faults import CutRequest

PART = 5 << 20  # the least that S3 takes for all parts but the last
CREATE = {"If-None-Match": "*"}


@pytest.fixture
def upload(each_bucket):
    """Return the id of a multipart upload of ``m``."""
    return each_bucket.request("POST", "m", uploads="").all("UploadId")[0]


@pytest.fixture
def put_part(each_bucket, upload):
    """Return a function that uploads a part and returns its ETag."""

    def put(number, body, **headers):
        query = {"partNumber": number, "uploadId": upload}
        return each_bucket.request("PUT", "m", body, headers, **query).headers["etag"]

    return put


@pytest.fixture
def complete(each_bucket, upload):
    """Return a function that completes the upload from the parts' ETags."""

    def post(*etags, headers=None):
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
            for number, etag in enumerate(etags, start=1)
        )
        xml = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        return each_bucket.request("POST", "m", xml, headers, uploadId=upload)

    return post


def test_create_only_puts_keep_what_is_there(each_bucket):
    each_bucket.request("PUT", "k", b"first", CREATE)
    with pytest.raises(Refused, match="412 PreconditionFailed"):
        each_bucket.request("PUT", "k", b"second", CREATE)
    assert each_bucket.get("k") == b"first"


def test_an_upload_is_seen_once_it_is_complete(each_bucket, upload, put_part, complete):
    etags = put_part(1, b"a" * PART), put_part(2, b"end")
    assert not each_bucket.has("m")
    assert each_bucket.uploads() == {upload: "m"}
    listed = each_bucket.request("GET", "m", uploadId=upload)
    # s3s-fs lists parts in any order.
    assert set(zip(listed.all("PartNumber"), listed.all("Size"), strict=True)) == {
        ("1", str(PART)),
        ("2", "3"),
    }
    complete(*etags)
    assert each_bucket.get("m") == b"a" * PART + b"end"
    assert each_bucket.uploads() == {}


def test_create_only_completions_keep_what_is_there(each_bucket, upload, put_part, complete):
    each_bucket.put("m", b"first")
    etag = put_part(1, b"second")
    with pytest.raises(Refused, match="412 PreconditionFailed"):
        complete(etag, headers=CREATE)
    assert each_bucket.get("m") == b"first"
    assert each_bucket.uploads() == {upload: "m"}


def test_an_aborted_upload_is_gone(each_bucket, upload, put_part):
    put_part(1, b"x")
    each_bucket.request("DELETE", "m", uploadId=upload)
    assert each_bucket.uploads() == {}
    # s3s-fs says AccessDenied where S3 says NoSuchUpload.
    with pytest.raises(Refused, match="403 AccessDenied|404 NoSuchUpload"):
        each_bucket.request("DELETE", "m", uploadId=upload)


def test_a_part_that_is_cut_keeps_the_part_before(each_bucket, upload, put_part, complete, proxy):
    etag = put_part(1, b"whole")
    proxy.on(CutRequest(100_000))
    query = {"partNumber": 1, "uploadId": upload}
    with pytest.raises((OSError, http.client.HTTPException)):
        Client(proxy.url).request("PUT", f"/{each_bucket.name}/m", b"x" * PART, **query)
    complete(etag)
    assert each_bucket.get("m") == b"whole"


@pytest.mark.parametrize(
    ("header", "wanted"), [("2-4", b"234"), ("7-", b"789"), ("-3", b"789"), ("8-20", b"89")]
)
def test_ranges_are_read(each_bucket, header, wanted):
    each_bucket.put("k", b"0123456789")
    answer = each_bucket.request("GET", "k", headers={"Range": f"bytes={header}"})
    assert (answer.status, answer.body) == (206, wanted)


def test_listings_have_all_keys_of_the_prefix(each_bucket):
    for key in "a/2", "a/1/x", "b", "ab":
        each_bucket.put(key, b"")
    assert each_bucket.keys("a/") == ["a/1/x", "a/2"]
    assert each_bucket.keys() == ["a/1/x", "a/2", "ab", "b"]
    each_bucket.delete("a/2")
    assert not each_bucket.has("a/2")


def test_s3s_refuses_a_put_with_a_wrong_checksum(bucket):
    right = base64.b64encode(zlib.crc32(b"hello").to_bytes(4, "big")).decode()
    bucket.put("k", b"hello", **{"x-amz-checksum-crc32": right})
    with pytest.raises(Refused, match="400 BadDigest"):
        bucket.put("k", b"Hello", **{"x-amz-checksum-crc32": right})


def test_s3s_wants_a_signature(bucket):
    connection = http.client.HTTPConnection(bucket.server.url.removeprefix("http://"), timeout=60)
    connection.request("GET", f"/{bucket.name}/k")
    assert connection.getresponse().status == 403
    connection.close()


def test_a_stopped_server_answers_no_more(tmp_path, s3s):
    with servers.s3s(tmp_path, "key", "secret") as server:
        pass
    with pytest.raises(ConnectionRefusedError):
        Client(server.url).request("GET", "/")


def test_a_server_ends_when_its_starter_is_killed(tmp_path, s3s):
    code = "from stores import servers; import pathlib, sys; "
    code += "print(servers.s3s(pathlib.Path(sys.argv[1]), 'k', 's').url, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    here = pathlib.Path(__file__).parents[1]
    starter = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=here, **pipes)
    host, port = starter.stdout.readline().strip().removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        starter.kill()
        starter.communicate()
        # A server that has not accepted the connection yet resets it.
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_a_server_that_cannot_start_says_why(tmp_path, s3s):
    with pytest.raises(RuntimeError, match="(?s)s3s ended at once: .*No such file"):
        servers.s3s(tmp_path / "nowhere", "key", "secret")
