"""A power supply that is cut: what was not synced is lost, wholly, partly, or not at all.

It works below every class of this package, at the system calls of the process: a disk that syncs too little loses data here as well.

Files and folders are nodes, as in a file system. Content is durable as it was at the last ``sync_file``. A change of names (a file made,
linked, renamed or removed) is durable once a folder that it touches is synced; of the others each one is lost or kept by chance, whatever
came after it. What POSIX allows to happen, happens.
"""

from __future__ import annotations

import builtins
import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class PowerCutError(BaseException):
    """The power is gone; not an Exception, so that nobody handles it."""


@dataclass(eq=False)
class Node:
    """A file or folder.

    Attributes:
        names: The durable names in a folder; None for a file.
        content: The durable content of a file; None before the first sync.
        last: The content at the time when the last name of a file was removed; None while it has one.
    """

    names: dict[str, Node] | None = None
    content: bytes | None = None
    last: bytes | None = None


class Step(NamedTuple):
    """A name that a folder gets, or loses if it is still that of the node."""

    folder: Node
    name: str
    node: Node
    present: bool


@dataclass(frozen=True)
class Change:
    """Steps that happen together or not at all, and that no sync has made durable yet."""

    steps: tuple[Step, ...]

    def apply(self) -> None:
        """Make it durable."""
        for folder, name, node, present in self.steps:
            names = folder.names if folder.names is not None else {}
            if present:
                names[name] = node
            elif names.get(name) is node:
                del names[name]

    def on(self, twin: Callable[[Node], Node]) -> Change:
        """The same change of other nodes."""
        return Change(tuple(Step(twin(step.folder), step.name, twin(step.node), step.present) for step in self.steps))


@dataclass
class PowerSupply:
    """Watches the system calls of this process that change files, lets them happen, and knows what would be left without power.

    ``with PowerSupply(folder):`` replaces the functions of ``os`` and ``io`` that pathlib and this package call. A sync is not passed on
    to the real disk, where it would only take time.

    Attributes:
        root: The folder that is watched; what is in it before counts as durable.
        fatal: The call at which the power is cut; 0 for never.
        calls: Calls so far that changed something in the folder, or made it durable.
    """

    root: Path
    fatal: int = 0
    calls: int = 0
    dead: bool = False
    nodes: dict[Path, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    inodes: dict[int, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        if not self.nodes:
            self._adopt(self.root)

    def __enter__(self) -> PowerSupply:
        self._patches = pytest.MonkeyPatch()
        for module, name in ((os, "open"), (io, "open"), (builtins, "open")):
            self._patches.setattr(module, name, self._opening(getattr(module, name)))
        for name in ("mkdir", "link", "unlink", "remove", "rmdir", "rename", "replace"):
            watch = getattr(self, "_" + {"remove": "unlink", "replace": "rename"}.get(name, name))
            self._patches.setattr(os, name, self._watched(getattr(os, name), watch))
        self._patches.setattr(os, "fsync", self._sync)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()

    def _adopt(self, path: Path) -> Node:
        if path.is_dir():
            node = Node(names={entry.name: self._adopt(entry) for entry in sorted(path.iterdir()) if entry.name != "LOCK"})
        else:
            node = Node(content=path.read_bytes())
        self._name(path, node)
        return node

    def _name(self, path: Path, node: Node) -> None:
        self.nodes[path] = node
        self.inodes[path.stat().st_ino] = node

    def _call(self) -> None:
        if self.dead:
            raise PowerCutError
        self.calls += 1
        if self.calls == self.fatal:
            self.dead = True
            raise PowerCutError

    def _change(self, *steps: tuple[Path, Node, bool]) -> None:
        self.pending.append(Change(tuple(Step(self.nodes[path.parent], path.name, node, present) for path, node, present in steps)))

    def _path(self, given: Any) -> Path | None:
        """The path of a file or folder that is watched. The lock holds no data."""
        if isinstance(given, int):
            return None
        path = Path.cwd() / os.fsdecode(given)
        return path if self.root in path.parents and path.name != "LOCK" else None

    def _opening(self, function: Any) -> Any:
        def opened(given: Any, *arguments: Any, **options: Any) -> Any:
            path = self._path(given)
            if path is None or os.path.lexists(path):  # of an old file only its name is known to be durable
                return function(given, *arguments, **options)
            self._call()
            file = function(given, *arguments, **options)
            if os.path.lexists(path):
                self._name(path, Node())
                self._change((path, self.nodes[path], True))
            return file

        return opened

    def _watched(self, function: Any, watch: Any) -> Any:
        def called(given: Any, *arguments: Any, **options: Any) -> Any:
            paths = [self._path(each) for each in (given, *arguments[:1])]
            if paths[0] is None or (watch == self._unlink and paths[0] not in self.nodes):
                return function(given, *arguments, **options)
            self._call()
            return watch(lambda: function(given, *arguments, **options), *(path for path in paths if path is not None))

        return called

    def _mkdir(self, function: Any, path: Path) -> None:
        function()
        self._name(path, Node(names={}))
        self._change((path, self.nodes[path], True))

    def _sync(self, descriptor: int) -> None:
        node = self.inodes.get(os.fstat(descriptor).st_ino)
        if node is None:  # above the folder
            return
        self._call()
        if node.names is None:
            node.content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            return
        later = []
        for change in self.pending:
            if any(step.folder is node for step in change.steps):
                change.apply()
            else:
                later.append(change)
        self.pending = later

    def _rename(self, function: Any, source: Path, target: Path) -> None:
        function()
        node = self.nodes[source]
        moved = {path: self.nodes.pop(path) for path in list(self.nodes) if path == source or source in path.parents}
        self.nodes |= {target / path.relative_to(source): each for path, each in moved.items()}
        self._change((source, node, False), (target, node, True))

    def _link(self, function: Any, source: Path, target: Path) -> None:
        function()
        self.nodes[target] = self.nodes[source]
        self._change((target, self.nodes[source], True))

    def _unlink(self, function: Any, path: Path) -> None:
        node = self.nodes.pop(path)
        if not any(other is node for other in self.nodes.values()):
            node.last = path.read_bytes()
            self.inodes.pop(path.stat().st_ino)  # another file may get the number
        function()
        self._change((path, node, False))

    def _rmdir(self, function: Any, path: Path) -> None:
        number = path.stat().st_ino
        function()
        self.inodes.pop(number)
        self._change((path, self.nodes.pop(path), False))

    def copy(self) -> PowerSupply:
        """The same knowledge of what is durable, to be cut in another way."""
        twins: dict[int, Node] = {}

        def twin(node: Node) -> Node:
            if id(node) not in twins:
                twins[id(node)] = made = Node(None, node.content, node.last)
                made.names = None if node.names is None else {name: twin(child) for name, child in node.names.items()}
            return twins[id(node)]

        nodes = {path: twin(node) for path, node in self.nodes.items()}
        return PowerSupply(self.root, nodes=nodes, pending=[change.on(twin) for change in self.pending])

    def after(self, target: Path, rng: random.Random, *, kept: float | Callable[[Change], bool]) -> int:
        """Write to another folder what is left after the power is cut now.

        Args:
            target: A folder to make.
            rng: Decides what happens to what was not synced.
            kept: The share of changes of names that survive although they were not synced, or which of them do.

        Returns:
            How many changes of names and contents of files were lost or spoilt.
        """
        survives = kept if callable(kept) else lambda change: rng.random() < kept
        lost = 0
        for change in self.pending:
            if survives(change):
                change.apply()
            else:
                lost += 1
        now = {id(node): path for path, node in self.nodes.items()}
        return lost + self._write(self.nodes[self.root], target, rng, now)

    def _write(self, node: Node, target: Path, rng: random.Random, now: dict[int, Path]) -> int:
        if node.names is not None:
            target.mkdir()
            return sum(self._write(child, target / name, rng, now) for name, child in node.names.items())
        if node.content is not None:
            target.write_bytes(node.content)
            return 0
        content = node.last if node.last is not None else read(now.get(id(node)))
        fates: list[Callable[[], bytes]] = [
            lambda: content,
            lambda: b"",
            lambda: content[: len(content) // 2],
            lambda: bytes(len(content)),
            lambda: content[:-1] + bytes([content[-1] ^ 1]) if content else b"",
        ]
        target.write_bytes(rng.choice(fates)())
        return 1


def read(path: Path | None) -> bytes:
    """The content of a file that may be gone."""
    return path.read_bytes() if path is not None and path.exists() else b""
