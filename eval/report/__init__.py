"""Reports: blocks of text, tables and figures, rendered to Markdown, HTML and LaTeX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
