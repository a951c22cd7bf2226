"""The search page: one HTML file with its own style and script, and the policy that it keeps to."""

from quiver.retrieval.serving.page.assembly import content_security_policy, page_html

__all__ = ["content_security_policy", "page_html"]
