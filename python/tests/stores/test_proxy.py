"""Each fault does what it says, to requests of a real server and to no others."""

from __future__ import annotations

import http.client
import http.server
import threading
import time
import urllib.parse

import pytest

from stores.client import Client, Refused
from stores.faults import (
    Corrupt,
    CutRequest,
    CutResponse,
    Delay,
    Hold,
    LoseAnswer,
    Refuse,
    SlowDown,
    Throttle,
)

BROKEN = (OSError, http.client.HTTPException)
DATA = bytes(range(256)) * 1200


@pytest.fixture
def through(bucket, proxy):
    """Return a function that makes a request of the bucket through the proxy."""
    client = Client(proxy.url)

    def request(method, key="", body=b"", headers=None, **query):
        return client.request(method, f"/{bucket.name}/{key}", body, headers, **query)

    return request


def in_thread(function, *args):
    """Start a function in a thread; return the thread and the list that its outcome goes to."""
    outcome = []

    def run():
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_requests_pass_unchanged_and_are_logged(bucket, proxy, through):
    through("PUT", "a/b c", DATA, {"x-amz-meta-color": "red"})
    answer = through("GET", "a/b c", headers={"Range": "bytes=1-70000"})
    assert (answer.status, answer.body) == (206, DATA[1:70001])
    assert bucket.get("a/b c") == DATA
    put, get = proxy.requests()
    assert (put.method, put.path, put.up, put.status) == (
        "PUT",
        f"/{bucket.name}/a/b c",
        len(DATA),
        200,
    )
    assert (get.range, get.up, get.down, get.status) == (range(1, 70001), 0, 70000, 206)
    assert put.headers["x-amz-meta-color"] == "red"


def test_query_and_target_are_decoded(bucket, proxy, through):
    upload = through("POST", "k", uploads="").all("UploadId")[0]
    through("PUT", "k", b"x", partNumber=1, uploadId=upload)
    began, part = proxy.requests()
    assert began.target == f"/{bucket.name}/k?uploads"
    assert part.query == {"partNumber": "1", "uploadId": upload}
    assert proxy.requests("PUT", r"partNumber=1\b") == [part]
    assert proxy.requests("GET") == proxy.requests(target="nothing") == []


@pytest.mark.parametrize(
    ("header", "wanted"),
    [("bytes=5-", range(5, 2**63 - 1)), ("bytes=-7", range(-7, 0)), ("bytes=0-0", range(0, 1))],
)
def test_ranges_are_parsed(bucket, proxy, through, header, wanted):
    bucket.put("k", DATA)
    through("GET", "k", headers={"Range": header})
    assert proxy.requests()[0].range == wanted


def test_a_connection_serves_several_requests(bucket, proxy, through):
    bucket.put("k", DATA)
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(proxy.url).netloc, timeout=60)
    proxy.on(SlowDown(), times=1)
    for status in 503, 403:  # it is not signed
        connection.request("GET", f"/{bucket.name}/k")
        response = connection.getresponse()
        response.read()
        assert response.status == status
        assert connection.sock is not None
    connection.close()


def test_head_and_empty_answers_pass(bucket, proxy, through):
    bucket.put("k", DATA)
    assert through("HEAD", "k").headers["content-length"] == str(len(DATA))
    assert through("DELETE", "k").status == 204
    assert not bucket.has("k")


def test_chunked_bodies_pass_both_ways(bucket, proxy):
    with Chunked() as server, type(proxy)(server.url) as front:
        where = urllib.parse.urlsplit(front.url).netloc
        connection = http.client.HTTPConnection(where, timeout=60)
        pieces = iter([DATA, b"end"])
        connection.request("PUT", "/k", pieces, encode_chunked=True)
        assert connection.getresponse().read() == DATA + b"end"
        connection.close()
        (put,) = front.requests()
        assert put.up == put.down == len(DATA) + 3


def test_rules_match_method_target_and_count(proxy, through):
    proxy.on(SlowDown(), "PUT", "/b$", skip=1, times=2)
    through("PUT", "a", b"1")
    through("PUT", "b", b"1")
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            through("PUT", "b", b"2")
        assert (refused.value.status, refused.value.code) == (503, "SlowDown")
    through("GET", "b")
    assert through("PUT", "b", b"3").status == 200


def test_a_rule_without_times_takes_all_until_cleared(bucket, proxy, through):
    bucket.put("k", DATA)
    proxy.on(Refuse(500, "InternalError"), times=None)
    for _ in range(3):
        with pytest.raises(Refused, match="500 InternalError"):
            through("GET", "k")
    proxy.clear()
    assert through("GET", "k").body == DATA


def test_refused_requests_do_not_reach_the_server(bucket, proxy, through):
    fault = proxy.on(SlowDown())
    with pytest.raises(Refused):
        through("PUT", "k", DATA)
    assert not bucket.has("k")
    (put,) = proxy.requests()
    assert (put.fault, put.status, put.up) == (fault, None, 0)


@pytest.mark.parametrize("after", [0, 1, 100_000])
def test_a_cut_request_stores_nothing(bucket, proxy, through, after):
    proxy.on(CutRequest(after))
    with pytest.raises(BROKEN):
        through("PUT", "k", DATA)
    assert proxy.requests()[0].up == after
    through("PUT", "other", DATA)
    assert bucket.keys() == ["other"]


@pytest.mark.parametrize("after", [0, 1, 100_000])
def test_a_cut_response_ends_after_so_many_bytes(bucket, proxy, through, after):
    bucket.put("k", DATA)
    proxy.on(CutResponse(after))
    with pytest.raises(http.client.IncompleteRead) as broken:
        through("GET", "k")
    assert broken.value.partial == DATA[:after]
    assert proxy.requests()[0].down == after


def test_a_lost_answer_was_carried_out(bucket, proxy, through):
    proxy.on(LoseAnswer())
    with pytest.raises(BROKEN):
        through("PUT", "k", DATA)
    assert bucket.get("k") == DATA
    assert (proxy.requests()[0].status, proxy.requests()[0].down) == (200, 0)


def test_one_bit_of_a_response_is_flipped(bucket, proxy, through):
    bucket.put("k", DATA)
    proxy.on(Corrupt(70_000))
    got = through("GET", "k").body
    assert [i for i, (a, b) in enumerate(zip(got, DATA, strict=True)) if a != b] == [70_000]
    assert through("GET", "k").body == bucket.get("k") == DATA


def test_one_bit_of_a_request_is_flipped(bucket, proxy, through):
    proxy.on(Corrupt(70_000, request=True))
    through("PUT", "k", DATA)
    bucket.flip("k", 70_000)
    assert bucket.get("k") == DATA


def test_a_held_request_waits_before_the_server_until_released(bucket, proxy, through):
    hold = proxy.on(Hold())
    thread, outcome = in_thread(through, "PUT", "k", DATA)
    hold.wait()
    assert not bucket.has("k")
    hold.release()
    thread.join(60)
    assert outcome[0].status == 200
    assert bucket.get("k") == DATA


def test_a_held_answer_waits_after_the_server(bucket, proxy, through):
    hold = proxy.on(Hold(answer=True))
    thread, outcome = in_thread(through, "PUT", "k", DATA)
    hold.wait()
    assert bucket.get("k") == DATA
    assert outcome == []
    hold.release()
    thread.join(60)
    assert outcome[0].status == 200


def test_what_is_held_for_ever_ends_with_the_proxy(proxy, through):
    hold = proxy.on(Hold(), times=None)
    thread, outcome = in_thread(through, "GET", "k")
    hold.wait()
    proxy.stop()
    thread.join(60)
    assert isinstance(outcome[0], BROKEN)


def test_held_request_that_is_cut_never_arrives(bucket, proxy, through):
    hold = proxy.on(Hold())
    thread, outcome = in_thread(through, "PUT", "k", DATA)
    hold.wait()
    hold.release(cut=True)
    thread.join(60)
    assert isinstance(outcome[0], BROKEN)
    proxy.settle()
    assert not bucket.has("k")


def test_settle_waits_for_what_clients_have_sent(bucket, proxy, through):
    hold = proxy.on(Hold())
    thread, _ = in_thread(through, "PUT", "k", DATA)
    hold.wait()
    with pytest.raises(TimeoutError):
        proxy.settle(timeout_s=0)
    hold.release()
    proxy.settle()
    assert bucket.get("k") == DATA
    thread.join(60)


def test_wait_returns_once_requests_have_begun(proxy, through):
    proxy.on(Hold(), times=None)
    for key in "ab":
        in_thread(through, "GET", key)
    assert len(proxy.wait(2, "GET")) == 2
    with pytest.raises(TimeoutError, match="fewer than 1 requests PUT"):
        proxy.wait(1, "PUT", timeout_s=0)


def test_a_delay_lasts_at_least_so_long(proxy, through):
    proxy.on(Delay(0.2))
    start = time.monotonic()
    through("PUT", "k")
    assert time.monotonic() - start >= 0.2


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_throttle_is_never_faster_than_its_rate(bucket, proxy, through, method):
    bucket.put("k", DATA)
    proxy.on(Throttle(4 * len(DATA)), method)
    start = time.monotonic()
    through(method, "k", DATA if method == "PUT" else b"")
    assert time.monotonic() - start >= 0.25
    assert bucket.get("k") == DATA


def test_a_server_that_is_gone_closes_the_connection(bucket, proxy):
    with Chunked() as server:
        front = type(proxy)(server.url)
    with front, pytest.raises(BROKEN):
        Client(front.url).request("GET", "/k")


class Chunked:
    """A server that sends a request's body back, chunked. Use it as a context."""

    def __init__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self):
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for piece in body[:1000], body[1000:]:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
