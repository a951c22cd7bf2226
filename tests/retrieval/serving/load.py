"""Put load on a service: URL SECONDS CONNECTIONS. Each connection sends its next query after the last answer; prints measurements.

Run as a process of its own by tests, so that asking takes nothing from answering but its share of the machine.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import httpx
import numpy as np

WORDS = ["sea", "bird", "wing", "river", "stone", "granite", "deep", "wide", "fly", "swim", "salt", "light", "night", "forest", "snow"]


async def ask(client: httpx.AsyncClient, seed: int, end: float, taken: list[float], errors: list[str]) -> None:
    draw = random.Random(seed)
    while time.monotonic() < end:
        body = {"query": " ".join(draw.choices(WORDS, k=draw.randint(1, 8))), "k": 10}
        begun = time.perf_counter()
        try:
            answer = await client.post("/v1/search", json=body)
            if answer.status_code != 200 or len(answer.json()["hits"]) != 10:
                errors.append(f"{answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            errors.append(repr(error))
        taken.append(time.perf_counter() - begun)


async def main() -> None:
    url, seconds, connections = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    taken: list[float] = []
    errors: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await ask(client, 0, time.monotonic() + 0.5, [], errors)  # connections and caches are warm then
        end = time.monotonic() + seconds
        await asyncio.gather(*(ask(client, seed, end, taken, errors) for seed in range(connections)))
    p50, p99 = np.percentile(taken, [50, 99]) * 1000
    found = {"requests": len(taken), "errors": errors[:5], "p50": p50, "p99": p99, "max": max(taken) * 1000}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
