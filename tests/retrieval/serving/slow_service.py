"""A service whose model takes its time: INDEX SECONDS LIMITS. Run as a process of its own by tests of stopping."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from retrieval.serving.limits import Limits
from retrieval.serving.server import Address, run_service
from retrieval.serving.service import open_service


def main() -> None:
    folder, seconds, limits = sys.argv[1:]
    service = open_service({"slow": Path(folder)}, limits=Limits(**json.loads(limits)), workers=1)
    model = service.indexes[0].current.model
    encode = model.encode

    def slowly(*arguments: object, **options: object) -> object:
        time.sleep(float(seconds))
        return encode(*arguments, **options)

    model.encode = slowly
    run_service(service, Address(port=0, drain_delay=0.5), started=lambda url: print(json.dumps({"url": url}, indent=1), flush=True))


if __name__ == "__main__":
    main()
