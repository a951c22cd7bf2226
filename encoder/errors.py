"""The one error class for what the user can put right: a file, an option, a checkpoint, a recipe.

The command line turns it into one line on standard error and exit status 2; everything else is a failure of ours and
keeps its traceback. It lives in the lowest package so that every layer can raise it.
"""

from __future__ import annotations


class InputError(ValueError):
    """Something the caller gave cannot be used; the message says what, where, and what to do about it."""
