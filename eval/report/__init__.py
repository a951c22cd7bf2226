"""Reports: blocks of text, tables and figures, rendered to Markdown, HTML and LaTeX."""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
