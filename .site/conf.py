"""Sphinx's configuration; ``build.py`` gathers the pages first."""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["CUATTN_ROOT"])

import cuattn

project, author, release = "cuattn", "the cuattn authors", cuattn.__version__
project_copyright = "the cuattn authors, Apache-2.0"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "myst_parser"]
root_doc = "index"
templates_path = [str(Path(__file__).parent / "templates")]

html_theme = "pydata_sphinx_theme"
html_title = "cuattn"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 6,
}
html_context = {"default_mode": "auto"}
html_sidebars = {"index": [], "search": []}
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

autosummary_generate = True
default_role = "autolink"
highlight_language = "text"
autodoc_typehints = "none"
toc_object_entries_show_parents = "hide"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# References to names of our own must lead somewhere; those of other libraries would need the network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"^(?!cuattn).*")]

# What masks are to backends, not to users.
PROTOCOL = {
    "arrays_on", "as_columns", "bind", "cuda", "device", "fields", "fits", "generated", "hidden", "instance", "joined",
    "layout", "on_device", "parts", "patterns", "reach", "shown", "source", "states",
}  # fmt: skip


def skip(app, what, name, value, skipped, options):
    """Leave out what a class has from elsewhere, numbers of fields, and the masks' protocol with the backends."""
    del app, what, options
    module = getattr(value, "__module__", None) or getattr(getattr(value, "fget", None), "__module__", "") or ""
    ours = module.startswith("cuattn")
    return True if name.startswith("_") or name in PROTOCOL or not ours else skipped


def setup(app):
    """Connect what this file defines."""
    app.connect("autodoc-skip-member", skip)
