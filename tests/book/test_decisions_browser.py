"""The decision tree for out of memory in a real browser: one question at a time, and back."""

import re

import pytest

from helpers.page import decisions
from helpers.pictures import memory_savings

pytestmark = pytest.mark.browser
SHOWN = ".decisions__ask:visible, .decisions__name:visible"


@pytest.fixture
def html(monkeypatch):
    """The tree in one language, as a page of the book holds it."""
    shown = []
    monkeypatch.setattr(decisions, "display", lambda bundle, raw: shown.append(bundle["text/html"]))

    def make(language="en"):
        memory_savings.out_of_memory_tree()
        other = "en" if language == "zh" else "zh"
        return re.sub(f"<!--{other}-->.*?<!--/{other}-->", "", shown.pop(), flags=re.DOTALL)

    return make


def questions(page):
    """The questions and the advice that a reader sees, from top to bottom."""
    return page.locator(SHOWN).all_inner_texts()


def answer(page, text):
    page.get_by_role("button", name=text, exact=False).locator("visible=true").first.click()


def answers(page):
    return page.locator(".decisions__answer button >> visible=true").count()


def test_one_question_at_a_time(open_page, html):
    page = open_page(html())
    assert questions(page) == ["When does the error occur?"]
    everything = answers(page)
    assert everything == 10
    answer(page, "After many training steps")
    assert len(questions(page)) == 2
    assert answers(page) == 1 + 3
    answer(page, "grows from step to step")
    assert questions(page)[-1] == "Something is never freed"
    assert answers(page) == 2
    assert page.locator("pre >> visible=true").count() == 1


def test_an_answer_can_be_taken_back(open_page, html):
    page = open_page(html())
    answer(page, "After many training steps")
    answer(page, "grows from step to step")
    answer(page, "grows from step to step")  # takes it back
    assert answers(page) == 1 + 3
    answer(page, "grows from step to step")
    answer(page, "After many training steps")  # takes both back
    assert questions(page) == ["When does the error occur?"]
    assert answers(page) == 10
    answer(page, "After many training steps")
    assert answers(page) == 1 + 3  # the answer below was forgotten


def walk(page, depth=0):
    """Follow every path; yield the last line of each and how many answers it took."""
    open_now = page.locator(".decisions__answer button[aria-expanded=false] >> visible=true")
    count = open_now.count()
    if not count:
        yield page.locator(SHOWN).last.inner_text(), depth
        return
    labels = [one.locator("span").first.inner_text() for one in open_now.all()]
    for number in range(count):
        button = open_now.nth(number)
        button.click()
        yield from walk(page, depth + 1)
        taken = page.locator(".decisions__answer button[aria-expanded=true] >> visible=true")
        taken.nth(depth).click()
    assert [one.locator("span").first.inner_text() for one in open_now.all()] == labels


def test_every_path_ends_in_an_advice(open_page, html):
    page = open_page(html())
    found = list(walk(page))
    tree = decisions.read_tree(memory_savings.OUT_OF_MEMORY)
    expected = {one.name.en.replace("`", "") for one in decisions.advice(tree)}
    assert {name for name, _ in found} == expected
    assert len(found) > len(expected)  # some can be reached in several ways
    assert max(depth for _, depth in found) <= 6


def test_by_keyboard(open_page, html):
    page = open_page(html())
    page.get_by_role("button").first.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.className") == "decisions__ask"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.evaluate("() => document.activeElement.className") == "decisions__name"
    assert questions(page)[-1] == "Something is never freed"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert answers(page) == 1 + 3
    assert page.evaluate("() => document.activeElement.ariaExpanded") == "false"


def test_everything_is_there_without_a_script(open_page, html):
    page = open_page(html(), java_script_enabled=False)
    assert page.locator("pre >> visible=true").count() == 22
    assert page.get_by_role("button").count() == 0
    assert page.locator(".decisions__same >> visible=true").count() == 3


def test_everything_is_on_paper_once(open_page, html):
    page = open_page(html())
    answer(page, "Only with some batches")
    page.emulate_media(media="print")
    assert page.locator("pre >> visible=true").count() == 22
    assert page.locator(".decisions__same >> visible=true").count() == 3
    assert page.locator("small >> visible=true").count() == 0
    page.emulate_media(media="screen")
    assert page.locator("pre >> visible=true").count() == 1


def test_both_languages_side_by_side(open_page, html):
    """In Jupyter both are there, one below the other, and each has a path of its own."""
    page = open_page(html("zh") + html("en"))
    answer(page, "After many training steps")
    assert len(questions(page)) == 3
    assert page.locator(".decisions[lang=zh] li[data-open]").count() == 0


def test_the_script_finds_its_place_where_the_page_moved_it(open_page, html):
    markup, script = re.search(r"(.*)<script>(.*)</script>", html(), re.DOTALL).groups()
    page = open_page(markup)
    page.add_script_tag(content=script)
    assert answers(page) == 10


def test_no_name_leaks(open_page, html):
    names = "() => Object.getOwnPropertyNames(window)"
    empty = open_page("").evaluate(names)
    assert set(open_page(html()).evaluate(names)) == set(empty)


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize(("paper", "ink"), [("#ffffff", "#222832"), ("#121212", "#ced6dd")])
def test_accessible_in_both_languages_and_themes(open_page, html, language, paper, ink):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(html(language), f"body {{ background: {paper}; color: {ink} }}")
    for number in (1, 0, 1):
        page.locator("button[aria-expanded=false] >> visible=true").nth(number).click()
    assert [v["id"] for v in axe.run(page).response["violations"]] == []


@pytest.mark.parametrize("language", ["zh", "en"])
@pytest.mark.parametrize("width", [320, 375, 1280])
def test_it_fits_the_window(open_page, html, width, language):
    page = open_page(html(language), viewport={"width": width, "height": 700})
    frame = page.locator(".decisions").bounding_box()
    for _ in walk(page):
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        for pre in page.locator("pre >> visible=true").all():
            box = pre.bounding_box()
            assert box["x"] + box["width"] <= frame["x"] + frame["width"]
    heights = [b.bounding_box()["height"] for b in page.locator("button >> visible=true").all()]
    assert min(heights) >= 44
