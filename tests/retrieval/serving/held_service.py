"""A service whose model waits until a file exists: INDEX FILE LIMITS. Tests of shutting down run it as a process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from quiver.retrieval.serving.schemas import Limits
from quiver.retrieval.serving.server import Address, run_service
from quiver.retrieval.serving.service import open_service


def main() -> None:
    folder, file, limits = sys.argv[1:]
    service = open_service({"held": Path(folder)}, limits=Limits(**json.loads(limits)), workers=1)
    model = service.indexes[0].current.model
    encode = model.encode_texts

    def held(*arguments: object, **options: object) -> object:
        while not Path(file).exists():
            time.sleep(0.01)
        return encode(*arguments, **options)

    model.encode_texts = held
    run_service(service, Address(port=0, drain_delay=3), started=say)


def say(url: str) -> None:
    sys.stdout.write(json.dumps({"url": url}, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
