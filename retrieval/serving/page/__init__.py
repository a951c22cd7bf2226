"""The search page: an HTML file with inlined style and scripts, and its content security policy."""

from quiver.retrieval.serving.page.assembly import content_security_policy, page_html

__all__ = ["content_security_policy", "page_html"]
