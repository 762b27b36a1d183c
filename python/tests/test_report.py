"""Config and reports pass between Python and Rust as JSON, also between versions."""

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
        "nice": 0,
        "io_priority": "normal",
        "write_rate": 0,
        "engine": "auto",
        "direct": "auto",
        "fixed": "auto",
        "shard_bytes": 0,
        "files": 1,
        "stripe": [],
        "recycle": False,
        "tiers": [],
        "promotion_rate": 0,
        "trace": None,
    }


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().engine = "uring"  # type: ignore[misc]


def test_save_report_has_fallbacks_and_times():
    report = SaveReport.from_json(json.dumps(fake_native.save_report("/a", 2, 5)))
    assert (report.tensors, report.tensor_bytes, report.file_bytes) == (2, 5, 5)
    assert report.fallbacks == (
        Fallback(wanted="uring", got="fake", reason="a stand-in", remedy="none"),
    )
    assert report.seconds.total == 0.5
    assert report.gb_per_s == pytest.approx(5 / 1e9 / 0.5)


def test_damage_is_read_and_is_not_ok():
    damage = {
        "file": "/a",
        "offset": 8,
        "bytes": 4,
        "what": "crc32 of checksum chunk 0",
        "expected": "0",
        "got": "1",
        "tensors": ["w"],
    }
    counts = {"path": "/", "files": 1, "blocks": 1, "tensors": 2, "read_bytes": 9, "seconds": 0.1}
    text = json.dumps({**counts, **fake_native.MOVED, "damage": [damage], "problem": None})
    report = VerifyReport.from_json(text)
    assert not report.ok
    assert report.damage[0].offset == 8
    assert report.damaged_tensors == ("w",)


def test_load_reports_add_up():
    one = LoadReport.from_json(json.dumps(fake_native.load_report("/a", 2, 1)))
    both = one.followed_by(one)
    assert (both.tensors, both.tensor_bytes, both.seconds.total) == (4, 2, 1.0)


def on_gpus(nbytes, *, pinned=True, **fields):
    report = fake_native.load_report("/a", 2, 1)
    return LoadReport.from_json(
        json.dumps({**report, "device_bytes": nbytes, "pinned": pinned, **fields})
    )


def test_report_text_mentions_gpu_copies():
    report = on_gpus(10**9)
    assert report.device_gb_per_s == pytest.approx(2)
    assert str(report).endswith("(GPU: 1 GB at 2 GB/s, pinned memory)")
    assert "pageable memory" in str(on_gpus(10**9, pinned=False))
    assert on_gpus(0, pinned=None).device_gb_per_s is None
    assert str(on_gpus(0, pinned=None)) == repr(on_gpus(0, pinned=None))


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (True, True, True),
        (True, False, False),
        (None, True, True),
        (False, None, False),
        (None, None, None),
    ],
)
def test_summed_loads_are_pinned_if_all_gpu_loads_are(one, other, both):
    together = on_gpus(1, pinned=one).followed_by(on_gpus(2, pinned=other))
    assert together.pinned is both
    assert together.device_bytes == 3


def test_summed_loads_list_every_fallback_once():
    other = {"wanted": "pinned", "got": "pageable", "reason": "a stand-in", "remedy": "none"}
    one = on_gpus(1)
    both = one.followed_by(on_gpus(1, fallbacks=[*fake_native.MOVED["fallbacks"], other]))
    assert both.fallbacks == (*one.fallbacks, Fallback(**other))
