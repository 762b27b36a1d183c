"""The ready-made callbacks report to the real TensorBoard, Prometheus and OpenTelemetry."""

import importlib
import operator

import numpy as np
import pytest
from support import missing, python

import ringstow
from ringstow._saving._handle import skip

STATE = {"w": np.arange(1000.0)}


def needs(name):
    """Return a module that the extra ``test`` installs; skip the test without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing(f"{error}: pip install './python[test]'")


def run(at):
    """Save twice and load, copy once, and fail to save and to copy; return the four reports."""
    one = ringstow.save(STATE, at / "one", step=1000)
    two = ringstow.save_async(STATE, at / "two", step=2000).result()
    with pytest.raises(ringstow.InvalidStateError):
        ringstow.save({"f": open}, at / "three", step=3000)
    outcomes = []
    with ringstow.on_done(outcomes.append, kinds=["load", "promotion"]):
        ringstow.load(at / "two")
        sent = ringstow.promote(at / "two", at / "there" / "two")
        with pytest.raises(FileExistsError):
            ringstow.promote(at / "one", at / "there" / "two")
    loaded, promoted, failed = outcomes
    assert (promoted.report, promoted.to) == (sent, str(at / "there" / "two"))
    assert (failed.path, type(failed.error)) == (str(at / "one"), FileExistsError)
    assert sent.sent_bytes > 0
    skip(str(at / "four"), 4000, {}, str(at / "three"), is_first=True)
    return one, two, loaded.report, sent


def test_tensorboard_has_a_scalar_for_each_figure_at_the_step(at):
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(at / "logs") as writer, ringstow.monitoring.tensorboard(writer):
        one, two, loaded, sent = run(at)
    events = EventAccumulator(str(at / "logs"))
    events.Reload()

    def scalars(name):
        return [(event.step, event.value) for event in events.Scalars(f"ringstow/{name}")]

    def of_saves(figure):
        return [(step, pytest.approx(figure(r))) for step, r in ((1000, one), (2000, two))]

    assert scalars("save/seconds") == of_saves(lambda report: report.seconds.total)
    assert scalars("save/bytes") == of_saves(lambda report: report.file_bytes)
    for name in ("gb_per_s", "blocked_seconds", "pool_bytes"):
        assert scalars(f"save/{name}") == of_saves(operator.attrgetter(name))
    assert scalars("save/skipped") == [(4000, 1)]
    assert scalars("save/failures") == [(1000, 0), (2000, 0), (3000, 1)]
    assert scalars("load/seconds") == [(1, pytest.approx(loaded.seconds.total))]
    assert scalars("promotion/bytes") == [(2000, sent.sent_bytes)]
    assert scalars("promotion/failures") == [(2000, 0), (2000, 1)]  # one that failed has no step
    assert "ringstow/load/blocked_seconds" not in events.Tags()["scalars"]


def test_prometheus_counts_and_times(at):
    client = needs("prometheus_client")
    registry = client.CollectorRegistry()
    with ringstow.monitoring.prometheus(registry):
        assert registry.get_sample_value("ringstow_saves_total", {"result": "failed"}) == 0
        one, two, loaded, sent = run(at)

    def value(name, **labels):
        return registry.get_sample_value(f"ringstow_{name}", labels)

    totals = {("saves", "ok"): 2, ("saves", "failed"): 1, ("loads", "ok"): 1}
    totals |= {("promotions", "ok"): 1, ("promotions", "failed"): 1}
    assert {of: value(f"{of[0]}_total", result=of[1]) for of in totals} == totals
    assert value("promotion_bytes_total") == sent.sent_bytes
    assert value("promotion_seconds_sum") == pytest.approx(sent.seconds)
    assert value("save_bytes_total") == one.file_bytes + two.file_bytes
    assert value("load_bytes_total") == loaded.read_bytes
    assert value("save_seconds_count") == 2
    assert value("save_seconds_sum") == pytest.approx(one.seconds.total + two.seconds.total)
    blocked = one.blocked_seconds + two.blocked_seconds
    assert value("save_blocked_seconds_sum") == pytest.approx(blocked)
    assert value("save_pool_bytes") == two.pool_bytes > 0
    assert value("saves_skipped_total") == 1
    assert value("last_save_timestamp_seconds") >= value("saves_created", result="ok")


def test_prometheus_exposes_its_conventional_names():
    client = needs("prometheus_client")
    registry = client.CollectorRegistry()
    with ringstow.monitoring.prometheus(registry):
        text = client.generate_latest(registry).decode()
        with pytest.raises(ValueError, match="Duplicated"):
            ringstow.monitoring.prometheus(registry)
    kinds = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert kinds["ringstow_save_bytes_total"] == "counter"
    assert kinds["ringstow_save_seconds"] == "histogram"
    assert kinds["ringstow_last_load_timestamp_seconds"] == "gauge"


def test_opentelemetry_records_durations_bytes_and_errors(at):
    needs("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    with ringstow.monitoring.opentelemetry(MeterProvider([reader], shutdown_on_exit=False)):
        one, two, loaded, sent = run(at)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    assert (scope.scope.name, scope.scope.version) == ("ringstow", ringstow._native.__version__)
    metrics = {metric.name: metric for metric in scope.metrics}

    def points(name):
        return metrics[f"ringstow.{name}"].data.data_points

    ends = {tuple(point.attributes.items()): point.value for point in points("saves")}
    assert ends == {(): 2, (("error.type", "InvalidStateError"),): 1}
    (duration,) = points("save.duration")
    assert duration.count == 2
    assert duration.sum == pytest.approx(one.seconds.total + two.seconds.total)
    assert max(duration.explicit_bounds) == 1000
    assert points("save.io")[0].value == one.file_bytes + two.file_bytes
    assert points("load.io")[0].value == loaded.read_bytes
    assert points("promotion.io")[0].value == sent.sent_bytes
    blocked = one.blocked_seconds + two.blocked_seconds
    assert points("save.blocked.duration")[0].sum == pytest.approx(blocked)
    assert max(points("save.pool")[0].explicit_bounds) == 1 << 40
    assert points("save.pool")[0].max == max(one.pool_bytes, two.pool_bytes)
    assert points("saves.skipped")[0].value == 1
    assert metrics["ringstow.save.duration"].unit == "s"
    assert metrics["ringstow.save.io"].unit == "By"


def test_import_of_monitoring_imports_no_exporter():
    code = (
        "import sys, ringstow; ringstow.monitoring; "
        "print({'torch', 'tensorboard', 'prometheus_client', 'opentelemetry'} & set(sys.modules))"
    )
    assert python(code, check=True).stdout == "set()\n"
