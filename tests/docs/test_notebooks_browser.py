"""The notebooks in JupyterLab, as a reader sees them: `make notebooks`, a real server, and a real browser.

FUNCCOLL_SCREENSHOTS=folder keeps a picture of each notebook. Written with Chromium 150, JupyterLab 4.6 and playwright 1.65.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import threading
import uuid
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.processes_left import VARIABLE, wait_until_gone

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).parents[2]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
# JupyterLab draws cells when they come into view, and asks about news; here all cells are there at once.
SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}
START_S, END_S = 240, 60

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="`make notebooks` runs in .venv"),
    pytest.mark.covers("notebooks"),
]
for package, reason in (
    ("jupyterlab", "the notebooks need: pip install 'funccoll[notebooks]'"),
    ("playwright", "the browser needs: pip install playwright"),
):
    if importlib.util.find_spec(package) is None:
        pytest.skip(reason, allow_module_level=True)


@contextlib.contextmanager
def server(folder, notebooks):
    """Address of a JupyterLab that `make notebooks` has started; at the end it and its kernels are gone."""
    mark = uuid.uuid4().hex
    for name, text in SETTINGS.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    places = {
        name: str(folder / name.lower())
        for name in ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    options = (
        f"--ServerApp.root_dir={notebooks} --ServerApp.port=0 --ServerApp.open_browser=False --allow-root "
        f"--LabApp.user_settings_dir={folder / 'settings'} --expose-app-in-browser"
    )
    environment = {**os.environ, **places, VARIABLE: mark, "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        ["make", "-s", "notebooks", f"LAB_OPTIONS={options}"],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(START_S, os.killpg, (process.pid, signal.SIGKILL))  # then what is read below ends
    watchdog.start()
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:[1-9]\d*/lab\?token=\w+", line):
                watchdog.cancel()
                reader = threading.Thread(target=process.stderr.read)  # a full pipe would stop the server
                reader.start()
                yield found[0]
                break
        else:
            pytest.fail(f"JupyterLab ended, or said nothing:\n{''.join(said)}")
    finally:
        watchdog.cancel()
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        wait_until_gone(mark)
        process.stderr.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    notebooks = folder / "notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    with server(folder, notebooks) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    with browser.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.trouble, page.elsewhere = [], []
        page.on("pageerror", lambda error: page.trouble.append(str(error)))
        page.on("request", lambda request: page.elsewhere.append(request.url) if elsewhere(request.url) else None)
        yield page


def elsewhere(url):
    parts = urlsplit(url)
    return parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1"


def open_notebook(page, lab, name):
    workspace = uuid.uuid4().hex  # else JupyterLab opens again what was open before
    page.goto(lab.replace("/lab?", f"/lab/workspaces/{workspace}/tree/{name}?"))
    page.locator(".jp-NotebookPanel:visible .jp-Notebook .jp-Cell").first.wait_for()


def command(page, name):
    page.evaluate("name => window.jupyterapp.commands.execute(name)", name)


def expected(notebook):
    """The number of outputs of each kind that JupyterLab is to show: the richest of each output."""
    kinds = Counter()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            rich = next((k for k in (PLOTLY, "text/html", "image/svg+xml", "image/png", "text/plain") if k in data), None)
            kinds["application/vnd.jupyter.stdout" if output.output_type == "stream" else rich] += 1
    return kinds


SHOWN = f"""() => {{
    const count = {{}};
    for (const output of document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')) {{
        const kind = output.dataset.mimeType ?? (output.classList.contains('jp-RenderedPlotly') ? '{PLOTLY}' : 'unknown');
        count[kind] = (count[kind] ?? 0) + 1;
    }}
    return count;
}}"""
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status"
# Which figures are drawn: images when they have a size, plotly's when there is more in them than a frame.
DRAWN = """() => {
    const wide = output => (output.querySelector('img')?.naturalWidth ?? 0) > 50;
    const all = (kind, is) => [...document.querySelectorAll('.jp-Notebook .' + kind)].map(is);
    return [
        ...all('jp-RenderedPlotly', output => wide(output) || output.querySelectorAll('.main-svg path').length > 3),
        ...all('jp-RenderedImage', wide),
        ...all('jp-RenderedSVG', output => output.getBoundingClientRect().height > 50),
    ];
}"""


def wait_for_outputs(page, notebook):
    """Wait until all outputs are there and all figures drawn; returns the number of figures."""
    kinds = dict(expected(notebook))
    from playwright.sync_api import TimeoutError

    figures = sum(n for kind, n in kinds.items() if kind in (PLOTLY, "image/svg+xml", "image/png"))
    complete = (
        f"([kinds, figures]) => {{ const shown = ({SHOWN})(), drawn = ({DRAWN})();"
        "return Object.entries(kinds).every(([kind, n]) => shown[kind] === n)"
        " && drawn.length === figures && drawn.every(x => x) }"
    )
    try:
        page.wait_for_function(complete, arg=[kinds, figures])
    except TimeoutError:
        keep(page, "incomplete")
        pytest.fail(f"wanted {kinds}, shown {page.evaluate(SHOWN)}, figures that are drawn: {page.evaluate(DRAWN)}")
    return figures


def make_interactive(page):
    """Move the mouse over each of plotly's figures: until then its extension shows the picture beside it in the file."""
    figures = page.locator(".jp-RenderedPlotly")
    for number in range(figures.count()):
        figure = figures.nth(number)
        if figure.locator("img.plot-img").is_visible():
            figure.locator("img.plot-img").dispatch_event("mouseenter")
        figure.locator(".plot-container .main-svg").first.wait_for()
    return figures.count()


def keep(page, name):
    """A picture of the whole notebook, where it is wanted."""
    if folder := os.environ.get("FUNCCOLL_SCREENSHOTS"):
        height = page.evaluate("document.querySelector('.jp-NotebookPanel .jp-WindowedPanel-outer').scrollHeight")
        page.set_viewport_size({"width": 1400, "height": min(16_000, int(height) + 200)})
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.screenshot(path=Path(folder) / f"{name}.png")


def check(page):
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    assert page.locator(".jp-mod-untrusted, .jp-RenderedText:has-text('Javascript Error')").count() == 0
    assert page.trouble == []
    assert page.elsewhere == [], "a page that loads something from elsewhere"


def read(path):
    import nbformat

    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_committed_appears(path, lab, page):
    """As after a clone: the outputs that are in the file, which JupyterLab does not trust."""
    notebook = read(path)
    open_notebook(page, lab, path.name)
    assert wait_for_outputs(page, notebook) >= 2
    keep(page, path.stem)
    assert make_interactive(page) == expected(notebook)[PLOTLY]
    wait_for_outputs(page, notebook)
    keep(page, f"{path.stem}_interactive")
    check(page)


def test_it_runs_in_the_browser(lab, page):
    """All cells of the first notebook, run from JupyterLab: nothing of what is committed is shown any more."""
    path = PATHS[0]
    notebook = read(path)
    open_notebook(page, lab, path.name)
    wait_for_outputs(page, notebook)
    page.wait_for_function(f"() => {KERNEL} === 'idle'")  # before that, cells are cleared and not run
    command(page, "notebook:clear-all-cell-outputs")
    page.wait_for_function(f"() => Object.keys(({SHOWN})()).length === 0")
    command(page, "notebook:run-all-cells")
    wait_for_outputs(page, notebook)
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert prompts == [f"[{n}]:" for n in range(1, len(prompts) + 1)]
    keep(page, f"{path.stem}_run")
    check(page)
