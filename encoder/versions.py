"""Versions of installed packages, for records of runs, reports and ``quiver doctor``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed.

    Args:
        distribution: Name on the package index (``faiss-cpu``), which may differ from the import name (``faiss``).

    Example:
        >>> installed_version("no-such-distribution") is None
        True
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
