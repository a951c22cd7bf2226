"""The service: indexes searched over HTTP by several people at once, and the page on top; wants the extra ``serve``.

Nothing here is imported before `quiver serve` asks for it, so this file re-exports nothing.
"""
