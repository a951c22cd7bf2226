"""Errors of damaged indexes, as types of their own: programs can tell damage from a wrong path."""

from __future__ import annotations

import errno
from pathlib import Path

from quiver.encoder.errors import InputError

# What says that a file is not there or has been spoilt. Any other error may pass, as a missing permission or too many open files do.
_SPOILT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class DamagedIndexError(InputError):
    """A file of an index is missing, cut short or changed; the message names it. ``quiver index repair`` says what can be kept."""


class LostTextError(InputError):
    """The text of a document was lost to damage, and a repair has kept the document without it."""


def unreadable(path: Path, error: OSError) -> InputError:
    """The error to raise where a file cannot be read: damage only where the file is at fault, since repair replaces what is damaged."""
    if error.errno in _SPOILT:
        return DamagedIndexError(f"{path}: cannot be read ({error.strerror}); the index is damaged, run quiver index repair")
    if error.errno in _TOO_MANY:
        return InputError(f"{path}: cannot be read ({error.strerror}); raise the limit, such as with ulimit -n 4096")
    return InputError(f"{path}: cannot be read ({error.strerror})")


def missing_file(path: Path) -> DamagedIndexError:
    """The error where a committed state lacks a file."""
    return DamagedIndexError(f"{path}: missing; the index is damaged: quiver index repair keeps the rest")
