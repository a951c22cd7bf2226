"""Errors of damaged indexes. They have their own types, so that programs can distinguish damage from a wrong path."""

from __future__ import annotations

import errno
from pathlib import Path

from quiver.encoder.errors import InputError

# Errors that mean that a file is missing or damaged. Other errors, such as missing permissions or too many open files, may be temporary.
_SPOILT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class DamagedIndexError(InputError):
    """A file of an index is missing, truncated or changed; the message names it. ``quiver index repair`` reports what can be kept."""


class LostTextError(InputError):
    """The text of a document was lost to damage; a repair kept the document without it."""


def unreadable(path: Path, error: OSError) -> InputError:
    """Convert an error from reading a file: only missing or damaged files count as index damage, because repair replaces damaged files."""
    if error.errno in _SPOILT:
        return DamagedIndexError(f"{path}: cannot be read ({error.strerror}); the index is damaged, run quiver index repair")
    if error.errno in _TOO_MANY:
        return InputError(f"{path}: cannot be read ({error.strerror}); raise the limit, such as with ulimit -n 4096")
    return InputError(f"{path}: cannot be read ({error.strerror})")


def missing_file(path: Path) -> DamagedIndexError:
    """Error for a file that is missing from a committed state."""
    return DamagedIndexError(f"{path}: missing; the index is damaged: quiver index repair keeps the rest")
