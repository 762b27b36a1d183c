"""Ready-made callbacks of `ringstow.on_done` for TensorBoard, Prometheus and OpenTelemetry.

Each function returns a listener, whose ``remove()`` ends the reports, and imports the client
library only when called.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringstow._reports._done_callbacks import Kind, Listener, Outcome, on_done
from ringstow._reports._io_reports import SaveReport, bytes_of, seconds_of

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client import CollectorRegistry
    from torch.utils.tensorboard import SummaryWriter

# Upper bounds of the histogram buckets, in seconds: from a small save to one on a slow disk.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
# Upper bounds of the histogram buckets, in bytes: from 64 MiB to 1 TiB.
_SIZES = tuple(float(1 << power) for power in range(26, 42, 2))
_KINDS: tuple[Kind, ...] = ("save", "load", "promotion")
_ASKED: tuple[Kind, ...] = (*_KINDS, "skip")


def tensorboard(writer: SummaryWriter) -> Listener:
    """Write scalars for each save, load and promotion, at its step.

    ``ringstow/save/seconds``, ``gb_per_s``, ``bytes``, ``blocked_seconds``, ``pool_bytes`` (the
    staging memory) and ``failures``, and the same for ``load`` and ``promotion`` (a copy to a
    tier), without ``blocked_seconds`` and ``pool_bytes``. ``failures`` counts the failures so far,
    and ``ringstow/save/skipped`` the steps that ``on_busy="skip"`` has skipped.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``.
            The scalar's step is the step of the save. If the outcome has none, it is the previous
            outcome's step, or the count of outcomes of this kind.
    """
    counts = {kind: itertools.count(1) for kind in _ASKED}
    failures = dict.fromkeys(_KINDS, 0)
    steps: dict[Kind, int] = {}
    write: Callable[[str, float, int], object] = writer.add_scalar

    def report(outcome: Outcome) -> None:
        kind, number = outcome.kind, next(counts[outcome.kind])
        if kind == "skip":
            write("ringstow/save/skipped", float(number), outcome.step or number)
            return
        failures[kind] += outcome.error is not None
        scalars = {"failures": float(failures[kind])}
        if outcome.report is not None:
            scalars |= {
                "seconds": seconds_of(outcome.report),
                "gb_per_s": bytes_of(outcome.report) / 1e9 / max(seconds_of(outcome.report), 1e-9),
                "bytes": float(bytes_of(outcome.report)),
            }
        if (blocked := _blocked(outcome)) is not None:
            scalars["blocked_seconds"] = blocked
        if isinstance(outcome.report, SaveReport):
            scalars["pool_bytes"] = float(outcome.report.pool_bytes)
        if outcome.step is not None:
            steps[kind] = outcome.step
        step = steps.get(kind, number)  # a copy that failed does not know its step
        for name, value in scalars.items():
            write(f"ringstow/{kind}/{name}", value, step)

    return on_done(report, kinds=_ASKED)


def prometheus(registry: CollectorRegistry | None = None) -> Listener:
    """Count and time saves, loads and promotions as metrics of prometheus_client.

    ===================================== ========= ==================================
    ``ringstow_saves_total``              counter   by ``result``: ``ok`` or ``failed``
    ``ringstow_save_bytes_total``         counter   bytes written
    ``ringstow_save_seconds``             histogram duration of each save
    ``ringstow_save_blocked_seconds``     histogram seconds for which training waited
    ``ringstow_save_pool_bytes``          gauge     staging memory of the last save
    ``ringstow_saves_skipped_total``      counter   skipped by ``on_busy="skip"``
    ``ringstow_last_save_timestamp_seconds`` gauge  Unix time of the last success
    ===================================== ========= ==================================

    The same for loads and for promotions (copies to a tier), as ``ringstow_loads_total``,
    ``ringstow_promotions_total`` and so on, without the three that only saves have.

    Args:
        registry: where to register the metrics; None means the default registry.

    Raises:
        ValueError: the registry already has these metrics.
    """
    try:
        import prometheus_client as client
    except ImportError as error:
        error.add_note("pip install prometheus-client")
        raise

    to = client.REGISTRY if registry is None else registry
    count, nbytes, seconds, last = {}, {}, {}, {}
    for kind, what in (("save", "written"), ("load", "read"), ("promotion", "sent")):
        of, name = f"{kind}s of checkpoints", f"ringstow_{kind}"
        count[kind] = client.Counter(f"{name}s", f"Number of {of}.", ["result"], registry=to)
        for result in ("ok", "failed"):
            count[kind].labels(result)  # a rate needs the zero before the first failure
        nbytes[kind] = client.Counter(f"{name}_bytes", f"Bytes {what} by {of}.", registry=to)
        seconds[kind] = client.Histogram(
            f"{name}_seconds", f"Seconds of {of}.", buckets=_BUCKETS, registry=to
        )
        last[kind] = client.Gauge(
            f"ringstow_last_{kind}_timestamp_seconds",
            f"Unix time at which the last of the {of} succeeded.",
            registry=to,
        )
    pool = client.Gauge(
        "ringstow_save_pool_bytes", "Staging memory of the last save in bytes.", registry=to
    )
    skipped = client.Counter(
        "ringstow_saves_skipped",
        "Number of steps that were not saved, since the previous save was in progress.",
        registry=to,
    )
    waited = client.Histogram(
        "ringstow_save_blocked_seconds",
        "Seconds for which training waited for saves of checkpoints.",
        buckets=_BUCKETS,
        registry=to,
    )

    def report(outcome: Outcome) -> None:
        kind = outcome.kind
        if kind == "skip":
            skipped.inc()
            return
        count[kind].labels("ok" if outcome.error is None else "failed").inc()
        if outcome.report is not None:
            nbytes[kind].inc(bytes_of(outcome.report))
            seconds[kind].observe(seconds_of(outcome.report))
            last[kind].set(time.time())
        if (blocked := _blocked(outcome)) is not None:
            waited.observe(blocked)
        if isinstance(outcome.report, SaveReport):
            pool.set(outcome.report.pool_bytes)

    return on_done(report, kinds=_ASKED)


def opentelemetry(meter_provider: MeterProvider | None = None) -> Listener:
    """Record saves, loads and promotions with instruments of OpenTelemetry's meter ``ringstow``.

    ``ringstow.saves`` (counter; failures have the attribute ``error.type``),
    ``ringstow.save.duration`` (histogram, s), ``ringstow.save.io`` (counter, By),
    ``ringstow.save.blocked.duration`` (histogram, s: how long training waited),
    ``ringstow.save.pool`` (histogram, By: staging memory) and ``ringstow.saves.skipped`` (counter:
    steps skipped by ``on_busy="skip"``); the same for loads and promotions (copies to a tier),
    without the last three.

    Args:
        meter_provider: the provider of the meter; None means the global provider.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        error.add_note("pip install opentelemetry-api, and an SDK")
        raise

    from ringstow import _native

    provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
    meter = provider.get_meter("ringstow", _native.__version__)

    def histogram(name: str, what: str) -> Any:
        buckets = {"explicit_bucket_boundaries_advisory": _BUCKETS}
        return meter.create_histogram(f"ringstow.{name}", "s", what, **buckets)

    count, nbytes, seconds = {}, {}, {}
    for kind in _KINDS:
        count[kind] = meter.create_counter(f"ringstow.{kind}s", f"{{{kind}}}", f"{kind}s ended.")
        nbytes[kind] = meter.create_counter(f"ringstow.{kind}.io", "By", f"Bytes of {kind}s.")
        seconds[kind] = histogram(f"{kind}.duration", f"Time of a {kind}.")
    waited = histogram("save.blocked.duration", "Time for which training waited for a save.")
    sizes = {"explicit_bucket_boundaries_advisory": _SIZES}
    pool = meter.create_histogram("ringstow.save.pool", "By", "Staging memory of a save.", **sizes)
    skipped = meter.create_counter("ringstow.saves.skipped", "{save}", "saves left out.")

    def report(outcome: Outcome) -> None:
        kind, error = outcome.kind, outcome.error
        if kind == "skip":
            skipped.add(1)
            return
        count[kind].add(1, {} if error is None else {"error.type": type(error).__name__})
        if outcome.report is not None:
            nbytes[kind].add(bytes_of(outcome.report))
            seconds[kind].record(seconds_of(outcome.report))
        if (blocked := _blocked(outcome)) is not None:
            waited.record(blocked)
        if isinstance(outcome.report, SaveReport):
            pool.record(outcome.report.pool_bytes)

    return on_done(report, kinds=_ASKED)


def _blocked(outcome: Outcome) -> float | None:
    """Return how long training waited for a save; None if unknown."""
    return outcome.report.blocked_seconds if isinstance(outcome.report, SaveReport) else None
