"""The error class for mistakes that the user can correct: in a file, an option, a checkpoint or a recipe.

The command line prints it as one line on standard error and exits with status 2. Every other exception is a defect of Quiver and keeps its
traceback. The class is in the lowest package so that every layer can raise it.
"""

from __future__ import annotations


class InputError(ValueError):
    """An input is invalid; the message says what is wrong, where, and how to correct it."""
