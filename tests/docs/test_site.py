"""The site: each public name is in the reference; in a browser no page scrolls sideways, and the search finds names."""

import contextlib
import functools
import http.server
import importlib.util
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import funccoll as fc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"desktop": 1280, "phone": 390}
pytestmark = pytest.mark.covers("site")


@pytest.fixture(scope="module")
def reference_pages():
    spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "reference_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docstrings():
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_name_is_in_the_reference(reference_pages):
    assert reference_pages.described() == {*fc.__all__, "profiling", "torch"}


def test_the_reference_has_every_command_and_variable(reference_pages, tmp_path):
    reference_pages.write(tmp_path)
    text = (tmp_path / "command_line.md").read_text()
    assert all(f"## `funccoll {name}`" in text for name in ("run", "doctor", "tune", "schedule", "explain", "profile"))
    assert "FUNCCOLL_TIMEOUT" in (tmp_path / "environment.md").read_text()
    assert "funccoll.errors.ProgramMismatch" in (tmp_path / "errors.md").read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sum `x` over *all* | axes.", r"Sum ``x`` over \*all* | axes."),
        ("The `P`s of `x`.", r"The ``P``\ s of ``x``."),
        ("Returns x_ and _y.", r"Returns x\_ and _y."),
        ("First.\n\n    x = f(*args)\n\nLast.", "First.\n\n.. code-block:: python\n\n    x = f(*args)\n\nLast."),
        ("Args:\n    x: An array.\n\n        More of *it*.", "Args:\n    x: An array.\n\n        More of \\*it\\*."),
        ("Example:\n    >>> f(*x)", "Example:\n    >>> f(*x)"),
        (">>> f(*x)\n1", ">>> f(*x)\n1"),
    ],
)
def test_markdown_of_docstrings_is_taken_literally(docstrings, text, expected):
    assert "\n".join(docstrings.converted(text.split("\n"))) == expected


# ---------------------------------------------------------------- in a browser


@contextlib.contextmanager
def served(folder):
    """The address at which a folder is served."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("sphinx", "playwright"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the site needs {package}: pip install 'funccoll[docs]' playwright")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("_build"))
    (folder / "notebooks").symlink_to(ROOT / "notebooks")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", folder / "docs", folder / "html"], capture_output=True, text=True, check=True
    )
    assert built.stderr.replace("\x1b[39;49;00m", "").strip() == ""
    with served(folder / "html") as address:
        yield folder / "html", address


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_pages_in_a_browser(site):
    from playwright.sync_api import sync_playwright

    folder, address = site
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html") if "_modules" not in path.parts)
    assert len(names) > 50
    wrong, elsewhere = [], set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for screen, width in WIDTHS.items():
            page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
            page.on("request", lambda r: None if r.url.startswith((address, "data:")) else elsewhere.add(r.url))
            page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
            for name in names:
                page.goto(f"{address}/{name}")
                beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                if beyond > 0:
                    wrong.append(f"{name} is {beyond} pixels too wide on a {screen}")
        page.goto(f"{address}/search.html?q=reduce_scatter")
        page.wait_for_selector("ul.search li a")
        found = page.locator("ul.search li a").all_inner_texts()
        browser.close()
    assert wrong == []
    assert elsewhere == set()
    assert any("reduce_scatter" in text or "Collectives" in text for text in found)
