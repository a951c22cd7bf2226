"""Which version of a distribution is installed: manifests, reports and ``quiver doctor`` ask here and nowhere else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed.

    Args:
        distribution: Its name on the package index (``faiss-cpu``), which need not be the import name (``faiss``).

    Example:
        >>> installed_version("no-such-distribution") is None
        True
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
