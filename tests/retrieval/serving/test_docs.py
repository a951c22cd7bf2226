"""docs/serving.md: every curl runs against a service as the page starts it, and every operation of the API has one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.retrieval.serving.conftest import REPOSITORY, TOKEN, Indexes, httpx

PAGE = REPOSITORY / "docs" / "serving.md"


def calls() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("curl ")]


@pytest.mark.slow
def test_every_call_of_the_page_runs_and_every_operation_has_one(indexes: Indexes, serving: Any, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    shutil.copytree(indexes.dense, tmp_path / "dense")
    with serving(f"dense={tmp_path / 'dense'}", f"colbert={indexes.colbert}", "--fuse", "bm25", "--token-file", token) as child:
        called = set()
        for call in calls():
            method = match[1] if (match := re.search(r"-X ([A-Z]+)", call)) else "POST" if " -d " in call else "GET"
            called.add((method, re.search(r"localhost:8080([^'?]*)", call)[1]))  # type: ignore[index]
            command = call.replace("http://localhost:8080", child.url).replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
            environment = {"TOKEN": TOKEN, "PATH": "/usr/bin:/bin"}
            done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{call}\n{done.stdout}\n{done.stderr}"
            if "/v1/" in call or "rerank" in call or "embed" in call:
                assert json.loads(done.stdout)
        paths = httpx.get(f"{child.url}/openapi.json").json()["paths"]
        operations = [(method.upper(), re.sub(r"\\{\w+\\}", ".+", re.escape(path))) for path in paths for method in paths[path]]
        missing = [each for each in operations if not any(each[0] == method and re.fullmatch(each[1], path) for method, path in called)]
        assert missing == []
