"""A tab of a headless Chromium for tests of pages, driven over the pipe of its DevTools protocol, which needs no library.

Source: https://chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Where there is a browser; None where there is none."""

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
# The browser wants its two ends of the pipes as descriptors 3 and 4.
LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


class Browser:
    """One tab; what it logs and asks the network for is kept."""

    def __init__(self, executable: str, profile: Path) -> None:
        theirs, self._to = (_above_ten(end) for end in os.pipe())
        self._from, back = (_above_ten(end) for end in os.pipe())
        command = [sys.executable, "-c", LAUNCH, str(theirs), str(back), executable, *FLAGS.split(), f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(command, pass_fds=(theirs, back), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(back)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError):
            self.send("Browser.close")
        self._process.wait(timeout=10)
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            received = self._receive()
            if received.get("id") == self._number:
                assert "error" not in received, f"{method}: {received['error']}"
                result: dict[str, Any] = received["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = os.read(self._from, 1 << 20)
            if not block:
                raise OSError("the browser has gone")
            self._rest += block
        line, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, url: str, size: tuple[int, int], *, dark: bool = False, calm: bool = True) -> None:
        """Load a page afresh, at a size and in a scheme of colours."""
        width, height = size
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        wanted = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce" if calm else "no-preference"}
        self.send("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in wanted.items()])
        for each in ("about:blank", url):  # another fragment alone would not load the page again
            self.events.clear()
            self.send("Page.navigate", url=each)
            while not any(event["method"] == "Page.loadEventFired" for event in self.events):
                self._receive()

    def run(self, script: str) -> Any:
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 10) -> Any:
        """What a script says as soon as that is true."""
        end = time.monotonic() + seconds
        script = f"(found => found instanceof Node || found)({script})"
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}\n{self.run('document.body.innerText')[:2000]}"
            time.sleep(0.04)
        return value

    def type(self, text: str) -> None:
        for character in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=character)

    def press(self, *keys: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39}
        for key in keys:
            letter = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=codes.get(key, 0), **letter)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes.get(key, 0))

    def hover(self, selector: str) -> None:
        x, y = self.run(
            f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path) -> tuple[int, int]:
        """Write what the window shows and give its size, which is in the PNG's first block."""
        content = base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        file.write_bytes(content)
        assert content.startswith(b"\x89PNG")
        return struct.unpack(">II", content[16:24])

    def complaints(self) -> list[dict[str, Any]]:
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
        return [event for event in self.events if event["method"] in said]

    def requests(self) -> list[str]:
        return [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]


def _above_ten(descriptor: int) -> int:
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return copy
