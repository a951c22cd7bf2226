"""Prometheus metrics of the service."""

from __future__ import annotations

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# Buckets in seconds; fine enough to tell p50 and p99 of searches apart, which take milliseconds.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64)

CONTENT_TYPE: str = prometheus_client.CONTENT_TYPE_LATEST  # media type of `Metrics.text`


class Metrics:
    """Metrics of one service, in a registry of its own; the attributes say in their helps what they count or measure."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("quiver_requests", "Number of requests.", ("route", "method", "status"), registry=registry)
        self.seconds = Histogram("quiver_request_seconds", "Duration of requests.", ("route",), buckets=_SECONDS, registry=registry)
        self.open = Gauge("quiver_open_requests", "Number of running requests.", registry=registry)
        self.stages = Histogram(
            "quiver_stage_seconds", "Duration of the stages of a batch.", ("retriever", "stage"), buckets=_SECONDS, registry=registry
        )
        self.batches = Histogram(
            "quiver_batch_queries", "Number of queries per batch.", ("retriever",), buckets=_QUERIES, registry=registry
        )
        self.queue = Gauge("quiver_queue_queries", "Number of waiting queries.", ("retriever",), registry=registry)
        self.generation = Gauge("quiver_generation", "Generation of the index in use.", ("retriever",), registry=registry)
        self.documents = Gauge("quiver_documents", "Number of documents of the index in use.", ("retriever",), registry=registry)
        self.reloads = Counter("quiver_reloads", "Number of switches to another generation.", ("retriever", "outcome"), registry=registry)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        content: bytes = prometheus_client.generate_latest(self._registry)
        return content
