"""The built site in a real browser: mouse, keyboard, both languages, light, dark, a phone, paper.

What can differ from page to page is looked at on every page, in one visit to each of them. What one
script, style or template does for all pages is tried on one page of each kind.
"""

import functools
import gzip
import http.server
import re
import threading
from pathlib import Path
from urllib.parse import quote, unquote, urlparse

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.browser
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
CHAPTER = "02_tensors" if "02_tensors" in CHAPTERS else CHAPTERS[0]
HOME = "book/index.html"
PAGES = [f"book/{path.stem}.html" for path in sorted((ROOT / "book").glob("*.md"))]
PAGES += [f"notebooks/{stem}.html" for stem in CHAPTERS] + ["search.html"]
KINDS = [HOME, "book/claims.html", f"notebooks/{CHAPTER}.html"]

LIMITS = {HOME: 200_000}  # gzipped bytes of a first visit
LIMIT = 750_000
COLUMNS = 88  # of code, as wide as ruff lets a cell be
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 800}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """As a server answers a first visit: nothing may be kept from the page before."""

    def end_headers(self):
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *args):
        """Say nothing: a test run's output is for findings."""


@pytest.fixture(scope="module")
def address(chromium, site):
    """The site on a free port of this machine."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Reader:
    """A page, what it asked for, and everything that went wrong on it."""

    def __init__(self, page, address: str):
        self.page, self.address, self.trouble, self.asked = page, address, [], []
        page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        page.on("console", self.console)
        page.on("request", self.request)
        page.on("response", self.response)

    def console(self, message) -> None:
        if message.type == "error":
            self.trouble.append(f"console: {message.text}")

    def request(self, request) -> None:
        if request.url.startswith(self.address):
            self.asked.append(request.url)
        elif not request.url.startswith(("data:", "blob:", "file:")):
            self.trouble.append(f"another host: {request.url}")

    def response(self, response) -> None:
        if response.status >= 400:
            self.trouble.append(f"{response.status}: {response.url}")

    def open(self, path: str):
        """Open a page and wait until it is whole: formulas set, fonts there."""
        self.asked.clear()
        self.page.goto(f"{self.address}/{path}")
        self.page.evaluate("window.MathJax?.startup?.promise?.then(() => true)")
        self.page.evaluate("document.fonts.ready.then(() => true)")
        return self.page

    def open_plain(self, path: str):
        """Open a page in a browser without scripts."""
        self.page.goto(f"{self.address}/{path}")
        return self.page


def start(chromium, address: str, **options) -> Reader:
    context = chromium.new_context(**{"viewport": DESK, **options})
    return Reader(context.new_page(), address)


@pytest.fixture
def read(chromium, address):
    """Open pages as one reader; at the end nothing may have gone wrong."""
    readers = []

    def open_(**options) -> Reader:
        readers.append(start(chromium, address, **options))
        return readers[-1]

    yield open_
    trouble = [line for reader in readers for line in reader.trouble]
    for reader in readers:
        reader.page.context.close()
    assert not trouble, "\n".join(trouble)


# -- every page, in one visit ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def visitor(chromium, address):
    """One reader who goes through all pages: a new window for each would cost a second."""
    reader = start(chromium, address, color_scheme="light")
    yield reader
    reader.page.context.close()


@functools.cache
def sent(path: Path) -> int:
    """Bytes of a file as a server sends it: compressed where that makes it smaller."""
    content = path.read_bytes()
    return min(len(content), len(gzip.compress(content)))


def weight(asked: list[str], site: Path) -> dict[str, int]:
    """What a first visit loaded, heaviest first: address on the site → bytes."""
    paths = {unquote(urlparse(url).path).lstrip("/") for url in asked}
    sizes = {path: sent(site / path) for path in paths}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


# Lines that are short enough and yet do not fit; and where an error message is cut.
TOO_NARROW = """(columns) => {
  const width = (line) => [...line].reduce((n, c) => n + (c > "\\u2e80" ? 2 : 1), 0);
  const longest = (pre) => Math.max(...pre.textContent.split("\\n").map(width));
  const cut = (pre) => pre.scrollWidth > pre.clientWidth + 1;
  const of = (selector) => [...document.querySelectorAll(selector)].filter(cut);
  return [
    ...of(".cell_input pre").filter((pre) => longest(pre) <= columns),
    ...of(".output.traceback pre"),
  ].map((pre) => pre.textContent.trim().slice(0, 60));
}"""

# Every value of every slider: what it shows must change, and every picture must be one.
SLIDERS = """async () => {
  const wrong = [];
  for (const figure of document.querySelectorAll("figure.explore")) {
    const image = figure.querySelector("img"), pictures = new Set();
    const alt = image.getAttribute("alt") || "";
    if (!alt || alt.startsWith("interactive")) wrong.push(`alternative text: ${alt}`);
    for (const slider of figure.querySelectorAll("input")) {
      const texts = new Set();
      for (let value = 0; value <= +slider.max; value++) {
        slider.value = value;
        slider.dispatchEvent(new Event("input"));
        texts.add(slider.nextElementSibling.textContent);
        pictures.add(image.src);
      }
      if (texts.size !== +slider.max + 1) wrong.push(`${alt}: values ${[...texts]}`);
    }
    if (pictures.size < 2) wrong.push(`${alt}: one picture only`);
    for (const source of pictures) {
      const picture = new Image();
      picture.src = source;
      await picture.decode().catch(() => wrong.push(`${alt}: no picture ${source.slice(0, 60)}`));
    }
  }
  return wrong;
}"""
BROKEN = "all => all.filter(i => i.complete && !i.naturalWidth && i.loading !== 'lazy').length"
RED = "mjx-merror, [data-mjx-error], mjx-container [style*='color: red']"

# What folded cells are called by default, without a word on what is inside.
SAID = "all => all.map((one) => one.innerText.trim().replace(/ (source|output|content)s?$/, ''))"
NOT_IN_A_BOX = """[...document.querySelectorAll("article figure img")]
    .filter((one) => !one.closest(".picture")).map((one) => one.alt)"""

# A color belongs to a kind of token, not to a word, and a row of a table is like the one above it:
# one of each kind is enough for axe, which would look at each of 5,000 words for itself. The folded
# is unfolded: axe does not see what is hidden.
PREPARE = """() => {
  const seen = new Set();
  for (const table of document.querySelectorAll("tbody")) {
    const shapes = new Set();
    for (const row of [...table.rows]) {
      const shape = row.innerHTML.replace(/>[^<]+/g, ">").replace(/ (id|href)="[^"]*"/g, "");
      if (shapes.has(shape)) row.remove();
      shapes.add(shape);
    }
  }
  for (const token of document.querySelectorAll("pre span[class]:not(:has(*))")) {
    const inside = token.closest(".output, .cell_input") || token.closest("pre").parentElement;
    const kind = [inside.className, token.parentElement.className, token.className].join("|");
    if (seen.has(kind)) token.replaceWith(token.textContent);
    seen.add(kind);
  }
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
}"""
SETTLED = """() => Promise.allSettled(document.getAnimations()
    .filter((one) => one.effect.getComputedTiming().endTime < 1e4).map((one) => one.finished))"""


def violations(page, *rules: str) -> dict[str, list[str]]:
    """axe-core's findings: rule → elements; WCAG 2.1 AA and good practice, or only these rules."""
    from axe_playwright_python.sync_playwright import Axe

    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
    only = {"type": "rule", "values": rules} if rules else {"type": "tag", "values": tags}
    options = {"runOnly": only, "preload": False, "resultTypes": ["violations"]}
    # A color on its way to another has no contrast of its own; what never ends stays as it is.
    page.evaluate(SETTLED)
    found = Axe().run(page, options=options).response
    return {
        one["id"]: [node["html"][:200] + " " + str(node["any"][:1])[:300] for node in one["nodes"]]
        for one in found["violations"]
    }


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("path", PAGES)
def test_every_page(visitor, site, language, path):
    """Whole, light, readable, accessible in both themes, and no wider than a phone."""
    visitor.trouble.clear()
    page = visitor.open(f"{language}/{path}")
    loaded = weight(visitor.asked, site)

    assert bool(page.locator(".math").count()) == bool(page.locator("mjx-container").count())
    assert page.locator(RED).count() == 0
    assert page.eval_on_selector_all("article img", BROKEN) == 0
    assert sum(loaded.values()) <= LIMITS.get(path, LIMIT), loaded
    assert not [name for name in loaded if "fontawesome" in name]
    assert page.evaluate(TOO_NARROW, COLUMNS) == []
    assert page.evaluate(SLIDERS) == []
    assert not {"展开单元格", "Show code cell"} & set(page.eval_on_selector_all("summary", SAID))
    assert page.evaluate(NOT_IN_A_BOX) == []

    page.evaluate(PREPARE)
    assert violations(page) == {}
    # A theme changes colors alone.
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    assert violations(page, "color-contrast") == {}

    page.set_viewport_size(PHONE)
    width = page.evaluate("document.documentElement.scrollWidth")
    page.set_viewport_size(DESK)  # before it can fail: the next page has the same window
    assert width <= PHONE["width"]
    assert not visitor.trouble, "\n".join(visitor.trouble)


def test_the_accessibility_check_can_fail(chromium):
    page = chromium.new_page()
    words = '<span class="k">faint</span> <span class="k">faint</span>'
    page.set_content(f'<pre style="color:#ccc;background:#fff">{words}</pre><img src="data:,">')
    page.evaluate(PREPARE)
    found = violations(page)
    assert {"color-contrast", "image-alt"} <= found.keys()
    assert page.locator("span").count() == 1  # of two tokens of a kind
    page.close()


def test_the_slider_check_can_fail(chromium):
    page = chromium.new_page()
    page.set_content(
        '<figure class="explore"><img alt="x" src="data:,"><input type="range" max="2">'
        "<output>1</output></figure>"
    )
    assert len(page.evaluate(SLIDERS)) == 3
    page.close()


def test_the_width_check_can_fail(chromium):
    page = chromium.new_page()
    page.set_content(
        f'<div style="width:200px" class="cell_input"><pre style="overflow:auto">{"x" * 88}</pre>'
        f'<pre style="overflow:auto">{"x" * 89}</pre></div>'
    )
    assert page.evaluate(TOO_NARROW, COLUMNS) == ["x" * 60]
    page.close()


@pytest.mark.parametrize("path", KINDS)
def test_a_phone_is_accessible_too(read, path):
    """Other buttons are in the header there."""
    page = read(viewport=PHONE, color_scheme="light").open(f"zh/{path}")
    page.evaluate(PREPARE)
    assert violations(page) == {}


@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_line_of_88_columns_fits(read, language):
    """Whatever the chapters' own lines are."""
    page = read().open(f"{language}/notebooks/{CHAPTER}.html")
    page.evaluate("document.querySelector('.cell_input pre').textContent = 'm'.repeat(88)")
    assert page.evaluate(TOO_NARROW, COLUMNS) == []


MAKE_DEEPER = """() => {
  const section = document.querySelectorAll("article section section[id]")[2];
  const width = document.querySelector("section > p").getBoundingClientRect().width;
  const link = document.querySelector(`.page-toc a[href="#${section.id}"]`);
  section.id += "-deeper";
  link.setAttribute("href", "#" + section.id);
  const style = (element, part) => getComputedStyle(element, part).borderLeftStyle;
  const beside = section.querySelector(":scope > p").getBoundingClientRect().width;
  return [style(section), style(link, "::before"), Math.abs(width - beside) < 1];
}"""


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_section_going_deeper_is_marked(read, viewport):
    """By the end of its label, beside the text and in the contents; its text is as wide as any."""
    page = read(viewport=viewport).open(f"zh/notebooks/{CHAPTER}.html")
    assert page.evaluate(MAKE_DEEPER) == ["dotted", "dotted", True]
    overflow = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overflow) <= 0


# -- the theme -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "chosen", "theme"),
    [
        ("dark", None, "dark"),
        ("light", None, "light"),
        ("dark", "light", "light"),
        ("light", "dark", "dark"),
        ("dark", "auto", "dark"),
    ],
)
def test_the_theme_is_there_before_any_script_has_come(read, system, chosen, theme):
    """No script file arrives here, and yet the first thing painted has its colors."""
    reader = read(color_scheme=system)
    reader.page.route("**/*.js*", lambda route: route.fulfill(body=""))
    if chosen:
        stored = f"localStorage.setItem('mode', '{chosen}'); localStorage.setItem('theme', 'light')"
        reader.page.add_init_script(stored)
    page = reader.open(f"zh/{HOME}")
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 18, 18)"
    assert dark == (theme == "dark")
    reader.trouble.clear()  # inline scripts miss the files


def test_without_scripts_a_page_is_light(read):
    page = read(color_scheme="dark", java_script_enabled=False).open(f"zh/{HOME}")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert page.locator(".logo__image >> visible=true").count() == 1


# -- keyboard --------------------------------------------------------------------------------------

RING = """(element) => {
  const style = getComputedStyle(element);
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
}"""


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_the_focus_is_seen_on_every_button(read, viewport):
    page = read(viewport=viewport).open(f"zh/notebooks/{CHAPTER}.html")
    page.keyboard.press("Tab")  # from now on the browser knows of a keyboard
    buttons = page.locator(
        ".bd-header-article :is(a, button):visible, .search-button-field:visible"
    )
    names = []
    for button in buttons.all():
        button.focus()
        names.append(button.get_attribute("aria-label") or button.inner_text())
        assert button.evaluate(RING), names[-1]
    assert len(names) >= 4, names


def test_the_theme_button_keeps_the_focus(read):
    page = read(color_scheme="light").open(f"zh/{HOME}")
    modes = []
    page.locator(".theme-switch-button").focus()
    for _ in range(3):
        page.keyboard.press("Enter")
        modes.append(page.evaluate("document.documentElement.dataset.mode"))
        assert page.evaluate("document.activeElement.matches('.theme-switch-button')")
    assert set(modes) == {"auto", "dark", "light"}


@pytest.mark.parametrize("button", [".primary-toggle", ".secondary-toggle"])
def test_a_menu_gives_the_focus_back(read, button):
    page = read(viewport=PHONE).open(f"zh/notebooks/{CHAPTER}.html")
    page.locator(button).focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert page.evaluate(f"document.activeElement.matches('{button}')")


# -- the language switch ---------------------------------------------------------------------------


def press_switch(page) -> None:
    """A real click; Playwright's own `click` would scroll the page to the sticky header first."""
    box = page.locator(".language-switch__link").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def sections(page) -> list[str]:
    return page.eval_on_selector_all("article section section[id]", "all => all.map(s => s.id)")


def test_the_switch_goes_to_the_same_section_both_ways(read):
    page = read().open(f"zh/notebooks/{CHAPTER}.html")
    ids = sections(page)
    wanted = ids[len(ids) // 2]
    for language in ("en", "zh"):
        page.evaluate(f"document.getElementById('{wanted}').scrollIntoView()")
        press_switch(page)
        page.wait_for_url(f"**/{language}/notebooks/{CHAPTER}.html#{wanted}")
        assert page.evaluate("document.documentElement.lang").startswith(language)
        page.wait_for_function(
            f"Math.abs(document.getElementById('{wanted}').getBoundingClientRect().top) < 400"
        )


@pytest.mark.parametrize(("below", "same"), [(-300, True), (5, True), (350, True), (700, False)])
def test_the_switch_takes_the_section_that_one_reads(read, below, same):
    """Its heading stands in the upper half, or above it, not always at the top."""
    page = read().open(f"zh/notebooks/{CHAPTER}.html")
    tall = """(all) => all.findIndex((one, n) => n > 2 && !one.querySelector("section") &&
        [one, all[n - 1]].every((each) => each.clientHeight > 1000))"""
    number = page.eval_on_selector_all("article section section[id]", tall)
    ids = sections(page)
    page.evaluate(f"""() => {{
        const top = document.getElementById("{ids[number]}").getBoundingClientRect().top;
        scrollBy({{ top: top - {below}, behavior: "instant" }});
    }}""")
    press_switch(page)
    page.wait_for_url(f"**/en/notebooks/{CHAPTER}.html#{ids[number if same else number - 1]}")


@pytest.mark.parametrize("path", KINDS)
def test_at_the_end_of_a_page_the_switch_takes_the_last_section(read, path):
    """It is too short to come up to the top, where the section that one reads is looked for."""
    page = read(viewport={"width": 1280, "height": 1000}).open(f"zh/{path}")
    last = sections(page)[-1]
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    page.wait_for_function("scrollY + innerHeight >= document.documentElement.scrollHeight - 2")
    press_switch(page)
    page.wait_for_url(f"**/en/{path}#{last}")


def test_the_switch_at_the_top_goes_to_the_top(read):
    page = read().open(f"en/{HOME}")
    page.click(".language-switch__link")
    page.wait_for_url(f"**/zh/{HOME}")


@pytest.mark.parametrize(("locale", "language"), [("zh-CN", "zh"), ("en-US", "en"), ("fr", "en")])
def test_the_front_page_knows_the_visitors_language(read, locale, language):
    reader = read(locale=locale)
    reader.page.goto(reader.address)
    reader.page.wait_for_url(f"**/{language}/{HOME}")


def test_latin_words_have_no_dots_on_a_chinese_page(read):
    """A citation's `<em>et al.</em>` is not Chinese, and so are all other `<em>` of the book."""
    page = read().open("zh/book/references.html")
    marks = page.eval_on_selector_all(
        "article em", "all => all.map((one) => getComputedStyle(one).textEmphasisStyle)"
    )
    assert set(marks) == {"none"}


@pytest.mark.parametrize(("language", "words"), [("zh", "搜索本书"), ("en", "Search this book")])
def test_the_search_dialog_speaks_the_language_and_names_no_key(read, language, words):
    page = read().open(f"{language}/{HOME}")
    page.click(".search-button-field")
    dialog = page.locator("#pst-search-dialog")
    for attribute in ("placeholder", "aria-label"):
        assert words in dialog.locator("input").get_attribute(attribute)
    assert not dialog.locator(".search-button__kbd-shortcut").is_visible()


# -- search ----------------------------------------------------------------------------------------

SHOWN = "all => all.map(a => a.getAttribute('href'))"


@pytest.mark.parametrize(
    ("language", "query", "expected"),
    [
        ("zh", "张量", "notebooks/02_tensors.html"),
        ("zh", "广播", "notebooks/02_tensors.html#tensors-broadcasting"),
        ("zh", "广播机制", "notebooks/02_tensors.html#tensors-broadcasting"),
        ("zh", "手写数字", "notebooks/07_mnist.html"),
        ("zh", "broadcast", "notebooks/02_tensors.html#tensors-broadcasting"),
        ("zh", "PyTorch实测", "book/index.html"),
        ("zh", "C++", "notebooks/13_kernels.html#kernels-cpp"),
        ("en", "broadcast", "notebooks/02_tensors.html#tensors-broadcasting"),
        ("en", "Workers", "notebooks/05_data.html#data-workers"),
        ("en", "claims", "book/claims.html"),
    ],
)
def test_search_finds_the_section(visitor, language, query, expected):
    """Among the first three, with the words marked in what is shown of it."""
    visitor.trouble.clear()
    page = visitor.open(f"{language}/search.html?q={quote(query)}")
    page.wait_for_selector("#search-results li a")
    found = page.eval_on_selector_all("#search-results li > a", SHOWN)
    assert expected in found[:3], found[:10]
    assert page.locator("#search-results li:first-child mark").count() >= 1
    assert not visitor.trouble, "\n".join(visitor.trouble)


def test_search_follows_the_keys_and_fetches_nothing(read):
    reader = read()
    page = reader.open("en/search.html?q=broad")
    reader.asked.clear()
    field = page.locator(".bd-search-container input")
    field.fill("learning rate <b>")
    first = page.locator("#search-results li:first-child")
    assert "learning rate" in first.inner_text().lower()
    assert page.evaluate("location.search") == "?q=learning+rate+%3Cb%3E"
    assert not [address for address in reader.asked if "favicon" not in address]
    first.locator("a").click()
    page.wait_for_url("**/notebooks/*.html#*")


@pytest.mark.parametrize(
    ("language", "words"), [("zh", "书里没有一节包含这些词。"), ("en", "No section of the book")]
)
def test_search_finds_nothing_for_nonsense(read, language, words):
    page = read().open(f"{language}/search.html?q=犇犇犇犇")
    page.wait_for_selector("#search-summary:not(:empty)")
    assert page.inner_text("#search-summary").startswith(words)
    assert page.locator("#search-results li").count() == 0


# -- sliders, folds, paper -------------------------------------------------------------------------


def test_sliders_move_by_mouse_and_by_keyboard(read):
    page = read().open(f"zh/notebooks/{CHAPTER}.html")
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


def test_solutions_unfold_and_fold(read):
    page = read().open(f"zh/notebooks/{CHAPTER}.html")
    folded = page.locator(".tag_solution details")
    assert folded.count() >= 1
    code = folded.first.locator("pre").first
    assert not code.is_visible()
    for visible in (True, False):
        folded.first.locator("summary").click()
        assert code.is_visible() == visible
    assert "参考答案" in folded.first.locator("summary").inner_text()


EVIDENCE = """() => {
  const box = '<div class="output text_html"><div class="claim claim--false">' +
    '<p class="claim__saying">saying</p><p class="claim__measured">measured</p></div></div>';
  document.querySelector("article section").insertAdjacentHTML("beforeend",
    '<div class="cell tag_evidence tag_hide-input container"><details class="admonition hide ' +
    'above-input"><summary><p class="collapsed admonition-title">How</p></summary>' +
    '<div class="cell_input"><pre>code()</pre></div></details>' +
    `<div class="cell_output">${box}</div></div>`);
}"""


def test_evidence_shows_its_box_first_and_its_code_as_a_small_line(read):
    page = read().open(f"zh/{HOME}")
    page.evaluate(EVIDENCE)
    box, summary = page.locator(".claim"), page.locator(".tag_evidence summary")
    assert not page.locator(".tag_evidence pre").is_visible()
    top, small = box.bounding_box(), summary.bounding_box()
    assert small["y"] >= top["y"] + top["height"]
    assert small["height"] <= 32 and small["width"] <= top["width"] / 3


# -- what is too wide for a phone ------------------------------------------------------------------


def test_on_a_phone_a_slider_s_value_stands_beside_its_name(read):
    page = read(viewport=PHONE).open("zh/notebooks/09_memory.html")
    label = page.locator("figure.explore label").first
    name, track, value = (label.locator(one).bounding_box() for one in ("code", "input", "output"))
    assert abs(name["y"] + name["height"] / 2 - value["y"] - value["height"] / 2) < 4
    assert track["y"] >= name["y"] + name["height"] and track["width"] > 250


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("kind", ["figure.explore", "figure:not(.explore)", "p"])
def test_on_a_phone_a_picture_scrolls_in_its_box(read, kind, language):
    """So wide that one can read it, by finger and by keyboard; the page stays where it is."""
    page = read(viewport=PHONE).open(f"{language}/notebooks/03_autograd.html")
    box = page.locator(f"{kind} > .picture.scrolls").first
    image = box.locator("img")
    natural = image.evaluate("one => one.naturalWidth")
    assert image.bounding_box()["width"] >= min(natural, 560)
    assert box.bounding_box()["width"] <= 335
    assert box.get_attribute("tabindex") == "0"  # this browser needs none, others do
    box.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.activeElement.scrollLeft > 0")
    assert page.evaluate("scrollX") == 0
    hint = box.evaluate("one => getComputedStyle(one, '::after').content")
    assert ("左右滑动" if language == "zh" else "sideways") in hint


@pytest.mark.parametrize(("language", "word"), [("zh", "左右滑动"), ("en", "sideways")])
def test_a_wide_table_says_that_it_scrolls(read, language, word):
    page = read(viewport=PHONE).open(f"{language}/book/records.html")
    page.wait_for_load_state("load")
    table = page.locator(".pst-scrollable-table-container").first
    assert table.get_attribute("tabindex") == "0"
    hint = "one => getComputedStyle(one, '::before').content"
    assert word in table.evaluate(hint)
    page.emulate_media(media="print")
    assert table.evaluate(hint) == "none"


def test_on_a_desk_a_picture_is_whole_and_no_stop_for_the_keyboard(read):
    page = read().open(f"zh/notebooks/{CHAPTER}.html")
    page.wait_for_load_state("load")
    scroll = "all => all.filter((one) => one.scrollWidth > one.clientWidth || one.tabIndex >= 0)"
    assert page.eval_on_selector_all(".picture", f"{scroll}.map((one) => one.innerHTML)") == []


def test_in_the_dark_the_colors_of_a_figure_stay_what_they_are_called(read):
    """Dimmed, all in the same measure: the theme's contrast turns orange into brown."""
    page = read(color_scheme="dark").open(f"zh/notebooks/{CHAPTER}.html")
    filters = "all => all.map((one) => getComputedStyle(one).filter)"
    assert set(page.eval_on_selector_all("article .picture img", filters)) == {"brightness(0.88)"}


# -- tracebacks ------------------------------------------------------------------------------------

LONG = "08_gradients"  # the first chapter with a traceback through PyTorch


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_long_traceback_unfolds_by_keyboard(read, viewport):
    page = read(viewport=viewport).open(f"zh/notebooks/{LONG}.html")
    block = page.locator(".output.traceback:has(details)").first
    rest, message = block.locator("details pre"), block.locator("pre.message")
    assert block.bounding_box()["height"] < 600
    assert message.is_visible() and not rest.is_visible()
    assert message.evaluate("one => one.scrollWidth <= one.clientWidth")
    assert "调用栈的其余" in block.locator("summary").inner_text()
    block.locator("summary").focus()
    assert block.locator("summary").evaluate(RING)
    page.keyboard.press("Enter")
    assert rest.is_visible()


def test_without_scripts_a_traceback_is_whole(read):
    page = read(java_script_enabled=False).open_plain(f"en/notebooks/{LONG}.html")
    folds = page.locator("details.frames")
    assert folds.count() >= 1
    assert all(fold.locator("pre").is_visible() for fold in folds.all())


def test_paper_shows_whole_tracebacks_and_whole_pictures(read):
    sheet = {"width": 500, "height": 700}  # A5
    page = read(viewport=sheet).open(f"zh/notebooks/{LONG}.html")
    page.emulate_media(media="print")
    folded = "all => all.filter((one) => !one.open).length"
    assert page.eval_on_selector_all("details.frames", folded) >= 1
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.eval_on_selector_all("details.frames", folded) == 0
    pictures = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert page.eval_on_selector_all(".picture", pictures) == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.eval_on_selector_all("details.frames", folded) >= 1


WIDE_FORMULA = """() => {
  const formula = document.querySelector("article p mjx-container:not([display])");
  const copies = Array.from({ length: 40 }, () => formula.firstElementChild.cloneNode(true));
  const before = getComputedStyle(formula).overflowX;
  const whole = document.createElement("mjx-math");
  formula.firstElementChild.replaceWith(whole);
  whole.style = "display: inline-block; white-space: nowrap";
  whole.append(...copies);
  dispatchEvent(new Event("resize"));
  const { clientWidth, scrollWidth, tabIndex } = formula;
  const block = formula.closest("p").clientWidth;
  whole.replaceChildren(copies[0]);
  dispatchEvent(new Event("resize"));
  return [before, clientWidth <= block, scrollWidth > clientWidth, tabIndex,
          formula.tabIndex, getComputedStyle(formula).overflowX];
}"""


def test_on_a_phone_a_wide_formula_in_the_text_scrolls(read):
    page = read(viewport=PHONE).open("zh/notebooks/03_autograd.html")
    page.wait_for_load_state("load")
    assert page.evaluate(WIDE_FORMULA) == ["visible", True, True, 0, -1, "visible"]


def test_on_a_phone_a_long_name_in_a_table_breaks_between_its_words(read):
    page = read(viewport=PHONE).open("zh/notebooks/08_gradients.html")
    name = page.locator("td code .pre", has_text="register_post_accumulate_grad_hook").first
    assert name.inner_text() == "register_post_accumulate_grad_hook"
    assert name.evaluate("one => one.getClientRects().length") >= 2


# What does not fit, what is not there, and what a browser cannot break across two sheets.
ON_PAPER = """() => {
  const of = (selector) => [...document.querySelectorAll("article " + selector)];
  const show = (element) => getComputedStyle(element);
  const clips = (element) => element.closest("article") && element.tagName !== "ARTICLE" &&
    (show(element).overflowX !== "visible" ? element : clips(element.parentElement));
  return {
    theme: document.documentElement.dataset.theme,
    title: show(of("h1")[0]).display,
    cut: of("pre, table").filter((one) => one.scrollWidth > one.clientWidth + 1).length,
    clipped: of("pre, table").map(clips).filter((one) => one && one.tagName).length,
    whole: of("table, pre, .cell, .cell_input").filter((one) => show(one).breakInside !== "auto")
      .length,
    folded: of(".tag_solution details").filter((one) => !one.open).length,
    faint: of(".tag_solution details[open] > *").filter((one) => show(one).opacity !== "1").length,
    sliders: of("figure.explore input").filter((one) => show(one).display !== "none").length,
    values: of("figure.explore output").filter((one) => one.offsetHeight === 0).length,
  };
}"""
PAPER = {"theme": "light", "title": "block", "cut": 0, "clipped": 0, "whole": 0, "folded": 0}
PAPER |= {"faint": 0, "sliders": 0, "values": 0}


@pytest.mark.parametrize("path", [*KINDS, "book/records.html"])
def test_paper_shows_everything_in_light_colors(read, path):
    sheet = {"width": 680, "height": 1000}  # A4 without margins, in CSS pixels
    page = read(viewport=sheet, color_scheme="dark").open(f"zh/{path}")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(ON_PAPER) == PAPER
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator("article .tag_solution details[open]").count() == 0


def test_a_printed_page_is_light_by_itself(read):
    """The browser announces that it prints; what the reader had unfolded stays so."""
    page = read(color_scheme="dark").open(f"zh/notebooks/{CHAPTER}.html")
    page.locator(".tag_solution details").first.evaluate("one => { one.open = true }")
    page.evaluate("""addEventListener("beforeprint", () => {
        window.seen = document.documentElement.dataset.theme; })""")
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("window.seen") == "light"
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator(".tag_solution details[open]").count() == 1


# -- the front page, files, downloads --------------------------------------------------------------


def test_the_front_page_remembers_the_last_choice(read):
    reader = read(locale="zh-CN")
    reader.open(f"zh/{HOME}").click(".language-switch__link")
    reader.page.wait_for_url(f"**/en/{HOME}")
    reader.page.goto(reader.address)
    reader.page.wait_for_url(f"**/en/{HOME}")


def test_the_front_page_works_without_scripts(read):
    reader = read(java_script_enabled=False)
    reader.page.goto(reader.address)
    reader.page.click("text=中文")
    reader.page.wait_for_url(f"**/zh/{HOME}")


def test_a_chapter_works_from_a_file(chromium, site):
    """From file:// as well: formulas, search box, and the chapter's notebook beside the page."""
    page = chromium.new_page()
    trouble = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.goto((site / "zh" / "notebooks" / f"{CHAPTER}.html").as_uri())
    page.wait_for_selector("mjx-container")
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
    page = read().open(f"zh/notebooks/{CHAPTER}.html")
    with page.expect_download() as download:
        page.click("a[download]")
    assert download.value.suggested_filename == f"{CHAPTER}.ipynb"
