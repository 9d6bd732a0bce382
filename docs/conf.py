"""Settings of the site: `make docs` builds it, with warnings as errors and without a network.

Before each build `reference_pages.py` writes the pages of the reference from the code.
The tutorials are the notebooks, of which it takes copies: through links, Sphinx would find them outside of its folder.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402  (both stand beside this file)
import reference_pages  # noqa: E402

from funccoll import __version__  # noqa: E402

project, author, release = "funccoll", "the funccoll developers", __version__
html_title = f"funccoll {__version__}"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
default_role = "code"  # docstrings write code between single backticks, as Markdown does
copybutton_exclude = ".linenos, .gp, .go"

# Notebooks show what was stored when they were run; a test holds them to their code.
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # it would be loaded from the network
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]  # drawings have their form for JupyterLab, too

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True  # a field of a named tuple would have two entries
python_use_unqualified_type_names = True

reference_pages.write(HERE / "reference")
for file in (*(HERE.parent / "notebooks").glob("*.ipynb"), HERE.parent / "notebooks" / "digits.py"):
    shutil.copy2(file, HERE / "tutorials")
setup = docstrings.setup
