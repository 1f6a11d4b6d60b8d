"""The built site in a real browser: mouse, keyboard, both languages, light, dark, a phone."""

import functools
import http.server
import os
import re
import shutil
import threading
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium: set CHROMIUM or install {NAMES}"),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PAGES = [f"book/{path.stem}.html" for path in sorted((ROOT / "book").glob("*.md"))]
PAGES += [f"notebooks/{stem}.html" for stem in CHAPTERS] + ["search.html"]
# Of the theme, not of the book: nothing else may be here.
KNOWN_VIOLATIONS = {
    "label-content-name-mismatch": "the theme's search button shows its shortcut beside its name",
    "region": "the theme's logo stands outside the page's landmarks",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Say nothing: a test run's output is for findings."""


@pytest.fixture(scope="module")
def address(site):
    """The site on a free port of this machine."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Reader:
    """A page, and everything that went wrong on it."""

    def __init__(self, page, address: str):
        self.page, self.address, self.trouble = page, address, []
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("console", self.console)
        page.on("request", self.request)
        page.on("response", self.response)

    def console(self, message) -> None:
        if message.type == "error":
            self.trouble.append(f"console: {message.text}")

    def request(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:", "file:")):
            self.trouble.append(f"another host: {request.url}")

    def response(self, response) -> None:
        if response.status >= 400:
            self.trouble.append(f"{response.status}: {response.url}")

    def open(self, path: str):
        self.page.goto(f"{self.address}/{path}")
        return self.page


@pytest.fixture
def read(chromium, address):
    """Open pages as one reader; at the end nothing may have gone wrong."""
    readers = []

    def start(**options) -> Reader:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        readers.append(Reader(context.new_page(), address))
        return readers[-1]

    yield start
    trouble = [line for reader in readers for line in reader.trouble]
    for reader in readers:
        reader.page.context.close()
    assert not trouble, "\n".join(trouble)


def press_switch(page) -> None:
    """A real click; Playwright's own `click` would scroll the page to the sticky header first."""
    box = page.locator(".language-switch__link").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


@pytest.mark.parametrize("stem", CHAPTERS)
def test_the_switch_goes_to_the_same_section_both_ways(read, stem):
    page = read().open(f"zh/notebooks/{stem}.html")
    ids = page.eval_on_selector_all("article section section[id]", "all => all.map(s => s.id)")
    assert ids
    wanted = ids[len(ids) // 2]
    for language in ("en", "zh"):
        page.evaluate(f"document.getElementById('{wanted}').scrollIntoView()")
        press_switch(page)
        page.wait_for_url(f"**/{language}/notebooks/{stem}.html#{wanted}")
        assert page.evaluate("document.documentElement.lang").startswith(language)
        page.wait_for_function(
            f"Math.abs(document.getElementById('{wanted}').getBoundingClientRect().top) < 400"
        )


def test_the_switch_at_the_top_goes_to_the_top(read):
    page = read().open("en/book/index.html")
    page.click(".language-switch__link")
    page.wait_for_url("**/zh/book/index.html")


@pytest.mark.parametrize(
    ("language", "query", "expected"),
    [
        ("zh", "张量", "notebooks/02_tensors.html"),
        ("zh", "广播", "book/glossary.html"),
        ("zh", "梯度累积", "book/glossary.html"),
        ("zh", "手写数字", "book/index.html"),
        ("zh", "broadcast", "book/glossary.html"),
        ("zh", "PyTorch实测", "book/index.html"),
        ("en", "broadcast", "book/glossary.html"),
        ("en", "claims", "book/claims.html"),
    ],
)
def test_search_finds_the_page(read, language, query, expected):
    page = read().open(f"{language}/search.html?q={query}")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function("!document.querySelector('#search-progress')?.textContent?.trim()")
    found = page.eval_on_selector_all("#search-results li a", "all => all.map(a => a.pathname)")
    assert any(path.endswith(f"/{language}/{expected}") for path in found), found


def test_search_finds_nothing_for_nonsense(read):
    page = read().open("zh/search.html?q=犇犇犇犇")
    page.wait_for_selector(".search-summary:not(:empty)")
    page.wait_for_timeout(500)
    assert page.locator("#search-results li").count() == 0


@pytest.mark.parametrize("stem", CHAPTERS)
def test_sliders_move_by_mouse_and_by_keyboard(read, stem):
    page = read().open(f"zh/notebooks/{stem}.html")
    figures = page.locator("figure.explore")
    assert figures.count() >= 1
    for number in range(figures.count()):
        figure = figures.nth(number)
        slider, image, shown = (figure.locator(tag).first for tag in ("input", "img", "output"))
        state = [(image.get_attribute("src"), shown.inner_text())]
        slider.focus()
        page.keyboard.press("ArrowRight")
        state.append((image.get_attribute("src"), shown.inner_text()))
        box = slider.bounding_box()
        slider.click(position={"x": box["width"] - 4, "y": box["height"] / 2})
        last = int(slider.get_attribute("max"))
        assert slider.input_value() == str(last)
        state.append((image.get_attribute("src"), shown.inner_text()))
        assert state[0] != state[1]
        assert last == 1 or state[1] != state[2]
        assert len(set(shown for _, shown in state)) == min(last + 1, 3)
        assert image.get_attribute("alt") and not image.get_attribute("alt").startswith(
            "interactive"
        )


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("path", PAGES)
def test_pages_are_whole(read, language, path):
    """No error, no other host, formulas set, figures loaded; nothing wider than a phone."""
    reader = read(viewport={"width": 375, "height": 800})
    page = reader.open(f"{language}/{path}")
    page.wait_for_load_state("networkidle")
    if page.locator(".math").count():
        page.wait_for_selector("mjx-container")
        assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
        assert page.locator("mjx-container [style*='color: red']").count() == 0
    broken = "all => all.filter(i => i.complete && !i.naturalWidth && i.loading !== 'lazy').length"
    assert page.eval_on_selector_all("article img", broken) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 375


@pytest.mark.parametrize("stem", CHAPTERS)
def test_solutions_unfold_and_fold(read, stem):
    page = read().open(f"zh/notebooks/{stem}.html")
    folded = page.locator(".tag_solution details")
    assert folded.count() >= 1
    code = folded.first.locator("pre").first
    assert not code.is_visible()
    for visible in (True, False):
        folded.first.locator("summary").click()
        assert code.is_visible() == visible
    assert "参考答案" in folded.first.locator("summary").inner_text()


def violations(page, *rules: str) -> dict[str, list[str]]:
    """axe-core's findings: rule → elements; WCAG 2.1 AA and good practice, or only these rules."""
    from axe_playwright_python.sync_playwright import Axe

    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
    only = {"type": "rule", "values": rules} if rules else {"type": "tag", "values": tags}
    options = {"runOnly": only, "preload": False, "resultTypes": ["violations"]}
    # A color on its way to another has no contrast of its own; what never ends stays as it is.
    page.evaluate("""() => Promise.allSettled(document.getAnimations()
        .filter(one => one.effect.getComputedTiming().endTime < 1e4).map(one => one.finished))""")
    found = Axe().run(page, options=options).response
    return {
        one["id"]: [node["html"][:200] + " " + str(node["any"][:1])[:300] for node in one["nodes"]]
        for one in found["violations"]
    }


CHECKED = ["book/index.html", "book/claims.html", "book/glossary.html"]
CHECKED += [f"notebooks/{stem}.html" for stem in sorted({*CHAPTERS[:1], *CHAPTERS[-1:]})]


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("path", CHECKED)
def test_accessible(read, language, path):
    """Every rule in the light theme; in the dark one what a theme changes, the contrast."""
    page = read(color_scheme="light").open(f"{language}/{path}")
    found = {k: v for k, v in violations(page).items() if k not in KNOWN_VIOLATIONS}
    assert not found, found
    page = read(color_scheme="dark").open(f"{language}/{path}")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert not violations(page, "color-contrast")


def test_the_accessibility_check_can_fail(chromium):
    page = chromium.new_page()
    page.set_content('<p style="color:#ccc;background:#fff">faint</p><img src="data:,">')
    assert {"color-contrast", "image-alt"} <= violations(page).keys()
    page.close()


@pytest.mark.parametrize(("locale", "language"), [("zh-CN", "zh"), ("en-US", "en"), ("fr", "en")])
def test_the_front_page_knows_the_visitors_language(read, locale, language):
    page = read(locale=locale).open("")
    page.wait_for_url(f"**/{language}/book/index.html")


def test_the_front_page_remembers_the_last_choice(read):
    reader = read(locale="zh-CN")
    reader.open("zh/book/index.html").click(".language-switch__link")
    reader.page.wait_for_url("**/en/book/index.html")
    reader.open("").wait_for_url("**/en/book/index.html")


def test_the_front_page_works_without_scripts(read):
    page = read(java_script_enabled=False).open("")
    page.click("text=中文")
    page.wait_for_url("**/zh/book/index.html")


def test_a_chapter_works_from_a_file(chromium, site):
    """From file:// as well: formulas, search box, and the chapter's notebook beside the page."""
    page = chromium.new_page()
    trouble = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.goto((site / "zh" / "notebooks" / "02_tensors.html").as_uri())
    link = page.locator("a[download]")
    target = urlparse(link.evaluate("a => a.href"))
    assert target.scheme == "file" and Path(target.path).exists()
    page.goto((site / "index.html").as_uri())
    page.wait_for_url(re.compile(r"/(zh|en)/book/index\.html$"))
    assert not trouble, trouble
    # A browser reads no second file from a file's script, so that results come without excerpts.
    page.goto((site / "zh" / "search.html").as_uri() + "?q=梯度累积")
    page.wait_for_selector("#search-results li a")
    page.close()


def test_the_download_button_gives_the_notebook(read):
    page = read().open("zh/notebooks/02_tensors.html")
    with page.expect_download() as download:
        page.click("a[download]")
    assert download.value.suggested_filename == "02_tensors.ipynb"
