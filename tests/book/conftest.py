"""Shared by the tests of the book: where things are, and a site that is built once."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.page import calculator

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "book" / "site", ROOT / "book"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

SAMPLE = Path(__file__).parent / "fixtures" / "00_sample.ipynb"
SOURCES = ("notebooks/*.ipynb", "book/**/*", "benchmarks/records/*.json", "_config.yml", "_toc.yml")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture
def sample() -> dict:
    """A small chapter in the book's conventions; the test may change it."""
    return copy.deepcopy(json.loads(SAMPLE.read_text(encoding="utf-8")))


def newest_source() -> float:
    files = (path for pattern in SOURCES for path in ROOT.glob(pattern))
    return max(
        path.stat().st_mtime for path in files if path.is_file() and "__pycache__" not in path.parts
    )


@pytest.fixture(scope="session")
def site() -> Path:
    """`_build/html`, built again when it is older than its sources."""
    html = ROOT / "_build" / "html"
    front = html / "index.html"
    if not front.exists() or front.stat().st_mtime < newest_source():
        build = [sys.executable, str(ROOT / "book" / "site" / "build.py")]
        done = subprocess.run(build, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return html


@pytest.fixture(scope="module")
def chromium():
    """A browser for a module's tests, which are skipped where there is none."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no Chromium: set CHROMIUM or install one of {BROWSERS}")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def html_of():
    """`html_of(show)` is the text/html of the calculator that `show()` displays."""

    def shown_by(show):
        shown = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calculator, "display", lambda bundle, raw: shown.append(bundle))
            show()
        return shown.pop()["text/html"]

    return shown_by


@pytest.fixture
def open_page(chromium):
    """Open a page with this body; at the end no script may have failed or asked the network."""
    opened, trouble = [], []

    def open_(body, style="", **options):
        page = chromium.new_page(**{"viewport": {"width": 900, "height": 700}, **options})
        opened.append(page)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: trouble.append(request.url))
        page.set_content(
            "<!doctype html><html lang=en><title>Page</title>"
            f"<style>{style}</style><main><h1>Page</h1>{body}</main>"
        )
        return page

    yield open_
    for page in opened:
        page.close()
    assert trouble == []
