"""`ringstow doctor` checks whether copies can go to each tier."""

import json
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer

import numpy as np
import pytest
from comparing.sink import Sink
from stores.fixtures import s3_environment

import ringstow


class Overwriting(Sink):
    """A store that ignores ``If-None-Match``, and so replaces an object that exists."""

    def do_PUT(self) -> None:
        del self.headers["If-None-Match"]
        super().do_PUT()


def doctor(run, *tiers):
    """Return the checks of the tiers, and the exit code."""
    done = program(run, "--json", *(word for tier in tiers for word in ("--tier", str(tier))))
    checks = json.loads(done.stdout)["checks"]
    return [check for check in checks if check["name"].startswith("tier ")], done.returncode


def program(*words):
    command = [sys.executable, "-m", "ringstow", "doctor", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def serve(kind, monkeypatch):
    """Serve a store that keeps nothing."""
    kind = type("Fresh", (kind,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in s3_environment(f"http://127.0.0.1:{server.server_address[1]}").items():
        monkeypatch.setenv(name, value)
    return server, kind


@pytest.mark.parametrize("each_place", ["s3s", "moto", "azurite"], indirect=True)
def test_store_that_takes_copies_is_ok_and_stays_as_it_was(each_place, tmp_path):
    [check], code = doctor(tmp_path, f"{each_place.url}/run")
    assert (check["status"], code) == ("ok", 0), check
    assert each_place.keys() == []
    assert not each_place.has_unfinished()


def test_bucket_that_is_not_there_fails(bucket, tmp_path):
    tier = "s3://no-such-bucket-here/run"
    [check], code = doctor(tmp_path, tier)
    assert (check["status"], code) == ("fail", 1), check
    assert check["name"] == f"tier {tier}"
    assert "check URL, endpoint and credentials" in check["remedy"]


def test_wrong_key_fails_and_is_not_shown(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")
    [check], code = doctor(tmp_path, f"{bucket.url}/run")
    assert (check["status"], code) == ("fail", 1), check
    assert "wrong-and-secret" not in json.dumps(check)


def test_store_that_ignores_conditions_is_warned_of(monkeypatch, tmp_path):
    server, kind = serve(Overwriting, monkeypatch)
    [check], code = doctor(tmp_path, "s3://bucket/run")
    server.shutdown()
    assert (check["status"], code) == ("warn", 0), check
    assert "If-None-Match" in check["found"]
    assert kind.objects == {}


def test_tiers_of_the_environment_are_tried(monkeypatch, tmp_path):
    tier = tmp_path / "tier"
    monkeypatch.setenv("RINGSTOW_TIERS", str(tier))
    [check], code = doctor(tmp_path / "run")
    assert (check["name"], check["status"], code) == (f"tier {tier}", "warn", 0)
    assert "on the same file system as" in check["found"]
    assert list(tmp_path.iterdir()) == []


def test_tier_that_is_named_twice_is_refused(tmp_path):
    done = program(tmp_path, "--tier", "relative", "--tier", "relative")
    assert done.returncode == 2
    assert "relative" in done.stderr


def test_server_of_store_speed_takes_a_promotion(monkeypatch, tmp_path):
    server, kind = serve(Sink, monkeypatch)
    ringstow.save({"w": np.ones(24 << 20, np.uint8)}, tmp_path / "step-1")
    report = ringstow.promote(tmp_path / "step-1", "s3://bucket/step-1")
    server.shutdown()
    assert report.sent_bytes > 24 << 20
    assert "bucket/step-1/manifest.json" in kind.objects


def test_missing_key_is_told(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ENDPOINT_URL", "AWS_METADATA_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    [check], code = doctor(tmp_path, "s3://bucket/run")
    assert (check["status"], code) == ("fail", 1), check
    assert check["remedy"].startswith("set AWS_ACCESS_KEY_ID")
