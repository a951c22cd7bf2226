"""How much one request, and all requests together, may ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the service refuses to go beyond.

    Attributes:
        k: Hits a query.
        explained: Hits a query that are explained.
        query_characters: Characters of a query.
        filter_characters: Characters of a condition of a filter; they are read by expressions whose time grows with their square or faster.
        conditions: Conditions of a filter.
        batch: Queries of a request.
        hits: Hits of a request, over all its queries.
        documents: Documents that a request adds or deletes.
        body_bytes: Bytes of a request's body.
        queue: Queries that wait for a retriever; further ones are refused at once.
        connections: Connections that are open at a time.
        seconds: From when a request has been read until it is answered.
        write_seconds: The same for one that adds or deletes.
        lock_seconds: Within ``write_seconds``, for another process that writes to the index to finish.
        read_seconds: For a client to send its header, and again its body; and to take a part of the answer.
    """

    k: int = 1000
    explained: int = 20
    query_characters: int = 8192
    filter_characters: int = 400
    conditions: int = 8
    batch: int = 64
    hits: int = 2000
    documents: int = 100
    body_bytes: int = 1 << 20
    queue: int = 256
    connections: int = 1000
    seconds: float = 10.0
    write_seconds: float = 300.0
    lock_seconds: float = 30.0
    read_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Refuse limits that let nothing through.

        Raises:
            ValueError: One is not above 0.
        """
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be > 0, got {value}")
