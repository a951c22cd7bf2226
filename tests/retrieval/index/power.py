"""A disk whose power is cut: what was not synced is lost, wholly, partly, or not at all.

Files and folders are nodes, as in a file system. Content is durable as it was at the last ``sync_file``. A change of names (a file made,
linked, renamed or removed) is durable once a folder that it touches is synced; of the others each one is lost or kept by chance, whatever
came after it. What POSIX allows to happen, happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quiver.retrieval.index.files import RealDisk


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
class PowerDisk(RealDisk):
    """Does everything on the real disk, and knows what would be left of it.

    Attributes:
        root: The folder in which the index lies.
        fatal: The call at which the power is cut; 0 for never.
    """

    root: Path
    fatal: int = 0
    calls: int = 0
    dead: bool = False
    nodes: dict[Path, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        """What is there before counts as durable."""
        if not self.nodes:
            self._adopt(self.root)

    def _adopt(self, path: Path) -> Node:
        if path.is_dir():
            node = Node(names={entry.name: self._adopt(entry) for entry in sorted(path.iterdir()) if entry.name != "LOCK"})
        else:
            node = Node(content=path.read_bytes())
        self.nodes[path] = node
        return node

    def _call(self) -> None:
        if self.dead:
            raise PowerCutError
        self.calls += 1
        if self.calls == self.fatal:
            self.dead = True
            raise PowerCutError

    def _change(self, *steps: tuple[Path, Node, bool]) -> None:
        self.pending.append(Change(tuple(Step(self.nodes[path.parent], path.name, node, present) for path, node, present in steps)))

    def create(self, path: Path) -> Any:
        """See `Disk`."""
        self._call()
        file = super().create(path)
        self.nodes[path] = Node()
        self._change((path, self.nodes[path], True))
        return file

    def mkdir(self, path: Path) -> None:
        """See `Disk`."""
        self._call()
        super().mkdir(path)
        self.nodes[path] = Node(names={})
        self._change((path, self.nodes[path], True))

    def sync_file(self, path: Path) -> None:
        """See `Disk`."""
        self._call()
        self.nodes[path].content = path.read_bytes()

    def sync_folder(self, path: Path) -> None:
        """See `Disk`."""
        self._call()
        if path not in self.nodes:  # above the folder of the index
            return
        folder, later = self.nodes[path], []
        for change in self.pending:
            if any(step.folder is folder for step in change.steps):
                change.apply()
            else:
                later.append(change)
        self.pending = later

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        self._call()
        super().rename(source, target)
        node = self.nodes[source]
        moved = {path: self.nodes.pop(path) for path in list(self.nodes) if path == source or source in path.parents}
        self.nodes |= {target / path.relative_to(source): each for path, each in moved.items()}
        self._change((source, node, False), (target, node, True))

    def link(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        self._call()
        super().link(source, target)
        self.nodes[target] = self.nodes[source]
        self._change((target, self.nodes[source], True))

    def unlink(self, path: Path) -> None:
        """See `Disk`."""
        self._call()
        node = self.nodes.pop(path)
        if not any(other is node for other in self.nodes.values()):
            node.last = path.read_bytes()
        super().unlink(path)
        self._change((path, node, False))

    def rmdir(self, path: Path) -> None:
        """See `Disk`."""
        self._call()
        super().rmdir(path)
        self._change((path, self.nodes.pop(path), False))

    def copy(self) -> PowerDisk:
        """The same knowledge of what is durable, to be cut in another way."""
        twins: dict[int, Node] = {}

        def twin(node: Node) -> Node:
            if id(node) not in twins:
                twins[id(node)] = made = Node(None, node.content, node.last)
                made.names = None if node.names is None else {name: twin(child) for name, child in node.names.items()}
            return twins[id(node)]

        nodes = {path: twin(node) for path, node in self.nodes.items()}
        return PowerDisk(self.root, nodes=nodes, pending=[change.on(twin) for change in self.pending])

    def after(self, target: Path, rng: random.Random, *, kept: float) -> int:
        """Write to another folder what is left after the power is cut now.

        Args:
            target: A folder to make.
            rng: Decides what happens to what was not synced.
            kept: The share of changes of names that survive although they were not synced.

        Returns:
            How many changes of names and contents of files were lost or spoilt.
        """
        lost = 0
        for change in self.pending:
            if rng.random() < kept:
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
