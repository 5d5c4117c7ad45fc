"""How Sphinx builds these pages: ``nox -s docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pictures

from polyattn import __version__

project = "polyattn"
release = version = __version__
copyright = "the polyattn developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "mathml"]
html_math_renderer = "mathml"
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = f"polyattn {release}"
html_static_path = ["_pictures", "style"]
html_css_files = ["formulas.css", "pages.css"]
pygments_dark_style = "github-dark"
html_copy_source = False

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings say what is taken, with shapes
autodoc_member_order = "bysource"
napoleon_numpy_docstring, napoleon_google_docstring = True, False
napoleon_use_rtype = False
suppress_warnings = ["ref.python"]  # a shape like (q, k, v) in a docstring names no object

pictures.draw(Path(__file__).parent / "_pictures")
