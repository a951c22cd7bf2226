"""The error class for mistakes that the user can correct: in a file, an option, a checkpoint or a recipe.

The command line turns it into one line on standard error and exit status 2; every other exception is a bug and
keeps its traceback. It lives in the lowest package so that every layer can raise it.
"""

from __future__ import annotations


class InputError(ValueError):
    """Invalid input from the caller; the message says what is wrong, where, and what to do.

    Example:
        >>> try:
        ...     raise InputError("corpus.csv:7: the field 'id' is blank")
        ... except ValueError as error:
        ...     print(error)
        corpus.csv:7: the field 'id' is blank
    """
