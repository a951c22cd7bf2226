"""Configuration of the documentation site. Build it with ``sphinx-build -W --keep-going docs build/site``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Quiver"
copyright = "the Quiver authors"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
exclude_patterns = ["images"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # `generated` turns notebooks into Markdown
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
default_role = "code"
smartquotes = False
suppress_warnings = ["misc.highlighting_failure"]

autodoc_default_options = {
    "members": True,
    "inherited-members": "object,tuple,dict,Module,BaseModel,Schema,TextSchema,ValueError,Exception,BaseException,Protocol,Sequence",
    "member-order": "bysource",
}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "Quiver"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
