"""Config and reports cross the language border as JSON, between versions too."""

from __future__ import annotations

import dataclasses
import json

import fake_native
import pytest

from ringstow import Config, Fallback, LoadReport, SaveReport, VerifyReport


def test_config_has_the_fields_and_defaults_of_the_rust_side():
    assert json.loads(Config().to_json()) == {
        "pool_bytes": 256 << 20,
        "block_bytes": 4 << 20,
        "queue_depth": 8,
        "fillers": 0,
        "engine": "auto",
        "direct": "auto",
        "fixed": "auto",
        "shard_bytes": 0,
    }


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().engine = "uring"  # type: ignore[misc]


def test_a_save_report_is_read_with_its_fallbacks_and_times():
    report = SaveReport.from_json(json.dumps(fake_native.save_report("/a", 2, 5)))
    assert (report.tensors, report.tensor_bytes, report.file_bytes) == (2, 5, 5)
    assert report.fallbacks == (
        Fallback(wanted="uring", got="fake", reason="a stand-in", remedy="none"),
    )
    assert report.seconds.total == 0.5
    assert report.gb_per_s == pytest.approx(5 / 1e9 / 0.5)


def test_damage_is_read_and_is_not_ok():
    damage = {"file": "/a", "offset": 8, "what": "crc32 of block 0", "expected": "0", "got": "1"}
    counts = {"path": "/", "files": 1, "blocks": 1, "read_bytes": 9, "seconds": 0.1}
    text = json.dumps({**counts, **fake_native.MOVED, "damage": [damage]})
    report = VerifyReport.from_json(text)
    assert not report.ok
    assert report.damage[0].offset == 8


def test_load_reports_add_up():
    one = LoadReport.from_json(json.dumps(fake_native.load_report("/a", 2, 1)))
    both = one.followed_by(one)
    assert (both.tensors, both.tensor_bytes, both.seconds.total) == (4, 2, 1.0)
