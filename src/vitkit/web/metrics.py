"""What `/metrics` tells Prometheus. Labels come from fixed lists, never from what a client sends."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One registry per server, so that several can live in one process (as they do in tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry}
        labels = ["model", "worker"]
        self.requests = Counter("vitkit_requests", "Answers by route and status.", ["route", "status"], **own)
        self.seconds = Histogram("vitkit_request_seconds", "Time to answer.", ["route"], buckets=SECONDS, **own)
        self.batch_size = Histogram("vitkit_batch_size", "Jobs computed at once.", labels, buckets=SIZES, **own)
        self.batch_seconds = Histogram("vitkit_batch_seconds", "Time of a batch.", labels, buckets=SECONDS, **own)
        self.in_flight = Gauge("vitkit_in_flight", "Jobs between admission and answer.", labels, **own)
        self.shed = Counter("vitkit_shed", "Jobs refused because the queue was full.", labels, **own)
        self.dropped = Counter("vitkit_dropped", "Jobs given up before they were computed.", labels, **own)
        self.failed = Counter("vitkit_failed", "Jobs whose computation failed.", labels, **own)

    def of_worker(self, model: str, worker: str) -> WorkerMetrics:
        return WorkerMetrics(self, model, worker)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class WorkerMetrics:
    """The same for one worker of one model, with its labels filled in."""

    def __init__(self, all_: Metrics, model: str, worker: str) -> None:
        self.batch_size = all_.batch_size.labels(model, worker)
        self.batch_seconds = all_.batch_seconds.labels(model, worker)
        self.in_flight = all_.in_flight.labels(model, worker)
        self.shed = all_.shed.labels(model, worker)
        self.dropped = all_.dropped.labels(model, worker)
        self.failed = all_.failed.labels(model, worker)
