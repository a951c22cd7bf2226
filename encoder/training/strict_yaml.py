"""YAML in which nothing is guessed: scalars stay text, a key stands once, errors name the line.

YAML 1.1 reads ``8e-5`` as text but ``064`` as fifty-two, ``1:30`` as ninety, ``no`` as false and ``2024-01-01`` as a date.
Whoever knows the type a setting should have reads its text better, so here only null is told apart; lists, mappings,
anchors and merges work as ever. This module knows nothing of recipes.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from quiver.encoder.errors import InputError

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Text, null, lists and mappings; notes keys that are given twice instead of letting the last one win."""

    # Tags such as !!int or !!timestamp would bring the guessing back; None holds what refuses an unknown tag.
    yaml_constructors: ClassVar = {
        tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (f"{_TAG}null", f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # First character of a plain scalar -> tags it may have; what matches none is text.
        null = (f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"))
        self.yaml_implicit_resolvers = {"~": [null], "n": [null], "N": [null], "": [null], "<": [(f"{_TAG}merge", re.compile(r"<<\Z"))]}
        self.repeated: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # typeshed has a wrong type for the anchor
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                self.repeated.append(f"line {line}: the key {key.value!r} stands in line {lines[key.value]} already")
            elif isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return node


def parse_yaml(text: str) -> tuple[object, list[str]]:
    r"""One YAML document as text, None, lists and mappings, and a problem for each repeated key.

    Raises:
        InputError: The syntax is broken; the message begins with the line.

    Example:
        >>> parse_yaml("rate: 8e-5\nlimit: null")
        ({'rate': '8e-5', 'limit': None}, [])
    """
    try:
        loader = _Loader(text)
        document = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise InputError(f"{where}not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {str(error).splitlines()[0]}") from error
    return document, loader.repeated
