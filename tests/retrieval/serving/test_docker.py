"""The Dockerfile: that it names what exists, and, where Docker runs, that its image serves an index."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import typer.main

from quiver.cli.main import app
from tests.retrieval.serving.conftest import REPOSITORY

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: keyword and the rest of the line."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def test_the_dockerfile_copies_what_exists_and_all_packages() -> None:
    copied = [word for keyword, rest in instructions() if keyword == "COPY" and not rest.startswith("--from") for word in rest.split()[:-1]]
    assert all((REPOSITORY / each).exists() for each in copied)
    assert set(PROJECT["tool"]["setuptools"]["package-dir"].values()) <= set(copied)
    assert {"README.md", *PROJECT["project"]["license-files"]} <= set(copied)
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    assert sent == set(copied)
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", dict(instructions())["RUN"] + " ".join(rest for _, rest in instructions()))[:1]
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_commands_of_the_image_parse_and_do_not_run_as_root() -> None:
    last = max(number for number, (keyword, _) in enumerate(instructions()) if keyword == "FROM")
    final: dict[str, str] = {}
    for keyword, rest in instructions()[last:]:
        final[keyword] = rest
    assert final["USER"] not in ("root", "0")
    assert json.loads(final["ENTRYPOINT"]) == ["quiver"]
    name, *arguments = json.loads(final["CMD"])
    top: Any = typer.main.get_command(app)
    command = top.get_command(top.context_class(top), name)
    given = command.make_context(name, list(arguments), resilient_parsing=False).params
    assert (list(given["indexes"]), given["listen_host"], str(given["listen_port"])) == (["/index"], "0.0.0.0", final["EXPOSE"])
    python, option, code = json.loads(final["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, option) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert f":{final['EXPOSE']}/healthz" in code


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()
