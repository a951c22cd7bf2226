"""The search page, and the reference of the API: HTML files with inlined styles and scripts, and their content security policies."""

from quiver.retrieval.serving.page.assembly import content_security_policy, page_html
from quiver.retrieval.serving.page.reference import reference_html, reference_policy

__all__ = ["content_security_policy", "page_html", "reference_html", "reference_policy"]
