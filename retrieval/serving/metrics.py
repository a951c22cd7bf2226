"""What is counted and timed, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

# Seconds; a search takes milliseconds, and p50 and p99 are to be told apart.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_QUERIES = (1, 2, 4, 8, 16, 32, 64)

CONTENT_TYPE: str = prometheus_client.CONTENT_TYPE_LATEST
"""What `Metrics.text` is."""


class Metrics:
    """The measures of one service, which has a registry of its own.

    Attributes:
        requests: Requests answered, by route, method and status.
        seconds: Their duration, by route.
        open: Requests that are being handled.
        stages: Duration of a stage (encode, search) of a batch, by retriever.
        batches: Queries of a batch, by retriever.
        queue: Queries that wait, by retriever.
        generation: The committed state that answers, by retriever.
        documents: What it holds, by retriever.
        reloads: Changes of generation, by retriever and whether they worked.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter("quiver_requests", "Requests answered.", ("route", "method", "status"), registry=registry)
        self.seconds = Histogram("quiver_request_seconds", "Duration of a request.", ("route",), buckets=_SECONDS, registry=registry)
        self.open = Gauge("quiver_open_requests", "Requests that are being handled.", registry=registry)
        self.stages = Histogram(
            "quiver_stage_seconds", "Duration of a stage of a batch.", ("retriever", "stage"), buckets=_SECONDS, registry=registry
        )
        self.batches = Histogram("quiver_batch_queries", "Queries of a batch.", ("retriever",), buckets=_QUERIES, registry=registry)
        self.queue = Gauge("quiver_queue_queries", "Queries that wait.", ("retriever",), registry=registry)
        self.generation = Gauge("quiver_generation", "The generation of the index that answers.", ("retriever",), registry=registry)
        self.documents = Gauge("quiver_documents", "Documents of the index that answers.", ("retriever",), registry=registry)
        self.reloads = Counter("quiver_reloads", "Changes of generation.", ("retriever", "outcome"), registry=registry)

    def follow(self, retriever: str, *, queue: Callable[[], int], generation: Callable[[], int], documents: Callable[[], int]) -> None:
        """Ask for these whenever somebody looks."""
        self.queue.labels(retriever).set_function(queue)
        self.generation.labels(retriever).set_function(generation)
        self.documents.labels(retriever).set_function(documents)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        content: bytes = prometheus_client.generate_latest(self._registry)
        return content
