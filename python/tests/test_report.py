"""Config and reports cross the language border as JSON, between versions too."""

from __future__ import annotations

import dataclasses
import json

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


def test_reports_take_what_they_know_and_keep_the_rest():
    fallback = {"what": "io_uring", "why": "EPERM", "remedy": "allow it", "errno": 1}
    report = SaveReport.from_json(json.dumps({"bytes": 5, "fallbacks": [fallback], "new": [1]}))
    assert report.bytes == 5
    assert report.fallbacks == (
        Fallback(what="io_uring", why="EPERM", remedy="allow it", extra={"errno": 1}),
    )
    assert report.extra == {"new": [1]}
    assert report.seconds == 0.0


def test_damage_is_parsed():
    damage = {"file": "/a", "offset": 8, "what": "crc32 of block 0", "expected": "0", "got": "1"}
    report = VerifyReport.from_json(json.dumps({"ok": False, "damage": [damage]}))
    assert report.damage[0].offset == 8


def test_load_reports_add_up():
    both = LoadReport(bytes=1, tensors=2).followed_by(LoadReport(bytes=10, tensors=20))
    assert (both.bytes, both.tensors) == (11, 22)
