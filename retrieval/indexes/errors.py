"""What is wrong with an index on the disk, as its own type, so that a program can tell damage from a mistyped path."""

from __future__ import annotations

from encoder.errors import InputError


class DamagedIndexError(InputError):
    """A file of an index is missing, cut short or changed; the message names it. ``quiver index repair`` says what can be kept."""
