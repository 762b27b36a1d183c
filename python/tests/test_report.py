"""Config and reports pass between Python and Rust as JSON, also between versions."""

import dataclasses
import json

import fake_native
import numpy as np
import pytest

import ringstow
from ringstow import Config, Fallback, LoadReport, PromotionReport, SaveReport, VerifyReport

COUNTS = {"path": "/run/a", "files": 1, "tensors": 2, "seconds": 0.5, "problem": None}
VERIFIED = {**COUNTS, "blocks": 1, "read_bytes": 9000, **fake_native.MOVED}
DAMAGE = {"file": "/a", "offset": 8, "bytes": 4, "what": "crc", "expected": "0", "got": "1"}
DAMAGE |= {"tensors": ["w"]}


def of_json(kind, fields, **others):
    return kind.from_json(json.dumps({**fields, "fallbacks": [], **others}))


def test_config_has_the_fields_and_defaults_of_the_rust_side_and_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().engine = "uring"
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
        "share_reads": "auto",
        "trace": None,
    }


def test_save_report_has_fallbacks_and_times():
    report = SaveReport.from_json(json.dumps(fake_native.save_report("/a", 2, 5)))
    assert (report.tensors, report.tensor_bytes, report.file_bytes) == (2, 5, 5)
    assert report.fallbacks == (
        Fallback(kind="io_mode", wanted="uring", got="fake", reason="a stand-in", remedy="none"),
    )
    assert report.seconds.total == 0.5
    assert report.gb_per_s == pytest.approx(5 / 1e9 / 0.5)


def test_damage_is_read_and_is_not_ok():
    report = of_json(VerifyReport, VERIFIED, damage=[DAMAGE])
    assert not report.ok
    assert report.damage[0].offset == 8
    assert report.damaged_tensors == ("w",)


def test_load_reports_add_up():
    one = LoadReport.from_json(
        json.dumps(fake_native.load_report("/a", 2, 1) | {"cached_bytes": 1})
    )
    both = one.followed_by(one)
    assert (both.tensors, both.tensor_bytes, both.seconds.total) == (4, 2, 1.0)
    assert both.cached_bytes == 2


def on_gpus(nbytes, *, pinned=True, **fields):
    report = {**fake_native.load_report("/a", 2, 1), "device_bytes": nbytes, "pinned": pinned}
    return LoadReport.from_json(json.dumps(report | fields))


def test_report_text_mentions_gpu_copies():
    report = on_gpus(10**9)
    assert report.device_gb_per_s == pytest.approx(2)
    assert str(report).splitlines()[0].endswith("(GPU: 1 GB at 2 GB/s, pinned memory)")
    assert "pageable memory" in str(on_gpus(10**9, pinned=False))
    assert on_gpus(0, pinned=None).device_gb_per_s is None
    assert "GPU" not in str(on_gpus(0, pinned=None))


def test_reports_of_saves_and_loads_have_the_step(tmp_path):
    state = {"a": np.arange(3)}
    saves = [
        ringstow.save(state, tmp_path / "a", step=7),
        ringstow.save_async(state, tmp_path / "b", step=7).result(),
        ringstow.load_into(state, tmp_path / "a"),
    ]
    assert [report.step for report in saves] == [7, 7, 7]
    for name, report in zip("aba", saves, strict=True):
        assert f"{tmp_path}/{name}, step 7: " in str(report)
    assert ringstow.save(state, tmp_path / "c").step is None


def test_text_of_a_report_is_a_line_and_its_repr_has_all_fields():
    mode = {"engine": "uring", "direct": True, "fixed_buffers": 64, "step": 7}
    saved = of_json(SaveReport, fake_native.save_report("/run/a", 2, 3_410_000_000), **mode)
    loaded = of_json(LoadReport, fake_native.load_report("/run/a", 2, 3_410_000_000), **mode)
    line = "/run/a, step 7: 3.41 GB in 500 ms (6.82 GB/s, io_uring, fixed buffers, O_DIRECT)"
    assert (str(saved), f"{loaded}") == (line, f"loaded {line}")
    for report in (saved, loaded):
        for field in dataclasses.fields(report):
            assert f"{field.name}={getattr(report, field.name)!r}" in repr(report)


def test_text_of_a_report_has_a_second_line_for_what_to_look_at():
    fallback = {"kind": "io_mode", "wanted": "O_DIRECT", "got": "page cache"}
    fallback |= {"reason": "tmpfs", "remedy": "a disk"}
    fields = fake_native.load_report("/run/a", 2, 1)
    lost = {"name": "w", "file": "/run/a/x", "offset": 1, "why": "crc"}
    report = of_json(LoadReport, fields, verified=False, damaged=[lost], fallbacks=[fallback] * 3)
    report = dataclasses.replace(report, missing=("a", "b"))
    assert str(report).split("\n")[1:] == [
        "  1 damaged and not loaded, 2 missing in the checkpoint; no checksum was compared; "
        "page cache in place of O_DIRECT: tmpfs; a disk (2 more in .fallbacks)"
    ]


def test_texts_of_other_reports_are_lines_too():
    intact = of_json(VerifyReport, VERIFIED, damage=[])
    assert str(intact) == "/run/a: intact, 9.00 kB read in 500 ms"
    damaged = of_json(VerifyReport, VERIFIED, damage=[DAMAGE])
    assert str(damaged) == "/run/a: DAMAGED, 1 of 2 tensors, 9.00 kB read in 500 ms"
    sent = {"to": "s3://b/a", "file_bytes": 9000, "sent_bytes": 5000, "was_there": False}
    promoted = of_json(PromotionReport, {**COUNTS, **sent, **fake_native.MOVED})
    assert str(promoted) == "/run/a to s3://b/a: 5.00 kB of 9.00 kB sent in 500 ms"


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        *((True, True, True), (True, False, False), (None, True, True), (False, None, False)),
        (None, None, None),
    ],
)
def test_summed_loads_are_pinned_if_all_gpu_loads_are(one, other, both):
    together = on_gpus(1, pinned=one).followed_by(on_gpus(2, pinned=other))
    assert together.pinned is both
    assert together.device_bytes == 3


def test_summed_loads_list_every_fallback_once():
    other = {"kind": "pinned_memory", "wanted": "pinned", "got": "pageable"}
    other |= {"reason": "a stand-in", "remedy": "none"}
    one = on_gpus(1)
    both = one.followed_by(on_gpus(1, fallbacks=[*fake_native.MOVED["fallbacks"], other]))
    assert both.fallbacks == (*one.fallbacks, Fallback(**other))
