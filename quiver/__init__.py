"""Train, index, search and evaluate text retrievers.

The public names are listed in ``__init__.pyi`` and imported on first use: ``import quiver`` loads neither torch nor faiss.

Example:
    >>> import quiver
    >>> "BiEncoder" in dir(quiver), "build_index" in dir(quiver)
    (True, True)
"""

from quiver.encoder.environment import attach_stub

_import, __dir__, _names = attach_stub(__name__, __file__)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name, or read the version of the installed distribution."""
    if name == "__version__":
        from importlib.metadata import version

        return version("quiver-retrieval")
    found: object = _import(name)
    return found
