import re
from html.parser import HTMLParser

import pytest

from helpers.page import decisions
from helpers.page.decisions import Advice, Question, Section, Words


def words(text):
    return Words(f"{text} 中", f"{text} en")


def end(name, *sections):
    return Advice(
        words(name), words(f"confirm {name}"), f"do({name!r})\n", words("price"), sections
    )


@pytest.fixture
def tree():
    """Two questions; the second answer of the first leads to what the second question offers."""
    shared = end("shared", Section(words("somewhere"), "a-label"), Section(words("chapter 99")))
    second = Question(
        words("second?"), ((words("a < b"), shared), (words("b"), end("last"))), words("look `x`")
    )
    return Question(words("first?"), ((words("one"), second), (words("two"), shared)))


@pytest.fixture
def bundle(monkeypatch):
    """What `decision_tree` hands to the notebook."""
    shown = []
    monkeypatch.setattr(decisions, "display", lambda data, raw: shown.append(data))

    def make(tree):
        decisions.decision_tree(tree)
        return shown.pop()

    return make


class Outline(HTMLParser):
    """The text of each paragraph, with its depth in nested lists; the markup must be balanced."""

    def __init__(self, html):
        super().__init__()
        self.lines, self.open = [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("p", "pre"):
            self.lines.append([self.open.count("ul"), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"p", "pre"} & {*self.open}:
            self.lines[-1][1] += data


def english(html):
    part = re.search("<!--en-->(.*?)<!--/en-->", html, re.DOTALL)[1]
    return [(depth, text) for depth, text in Outline(part).lines]


def test_without_a_script_it_is_a_nested_list(tree, bundle):
    assert english(bundle(tree)["text/html"]) == [
        (0, "first? en"),
        (1, "one en"),
        (1, "second? en"),
        (1, "look x en"),
        (2, "a < b en"),
        (2, "shared en"),
        (2, "To confirm confirm shared en"),
        (2, "What to do"),
        (2, "do('shared')"),
        (2, "The price price en"),
        (2, "Read on somewhere en · chapter 99 en"),
        (2, "b en"),
        (2, "last en"),
        (2, "To confirm confirm last en"),
        (2, "What to do"),
        (2, "do('last')"),
        (2, "The price price en"),
        (1, "two en"),
        (1, "Continue as elsewhere in this tree: shared en"),
    ]


def test_one_output_with_both_languages_apart(tree, bundle):
    shown = bundle(tree)
    html = shown["text/html"]
    assert shown["text/plain"] == "<decision tree: first? en 2 endings>"
    assert html.count("<!--zh-->") == html.count("<!--/zh-->") == 1
    chinese = re.search("<!--zh-->(.*?)<!--/zh-->", html, re.DOTALL)[1]
    assert "怎样确认" in chinese and " en" not in chinese
    assert 'lang="zh"' in chinese
    assert "[[" not in html
    assert not any(word in html for word in ("http:", "https:", "src=", "href", "@import"))
    assert bundle(tree) == shown


def test_it_speaks_the_one_language_of_an_exported_notebook(tree, bundle, monkeypatch):
    monkeypatch.setenv("PYTORCH_BOOK_LANG", "zh")
    html = bundle(tree)["text/html"]
    assert "first? 中" in html
    assert "first? en" not in html


def test_markup_is_escaped_and_backticks_are_code(tree, bundle):
    html = bundle(tree)["text/html"]
    assert "a &lt; b en" in html
    assert "look <code>x</code> en" in html
    assert '<a data-label="a-label">somewhere en</a> · chapter 99 en' in html


def test_every_end_is_listed_once(tree):
    assert [one.name.en for one in decisions.advice(tree)] == ["shared en", "last en"]


WRITTEN = """
questions:
  start:
    ask: {zh: 问, en: ask}
    answers:
    - {to: more, zh: 甲, en: a}
    - {to: end, zh: 乙, en: b}
  more:
    ask: {zh: 再问, en: ask again}
    how: {zh: 看, en: look}
    answers:
    - {to: end, zh: 丙, en: c}
advice:
  end:
    name: {zh: 名, en: name}
    confirm: {zh: 确认, en: confirm}
    recipe: |
      one
      two
    price: {zh: 价, en: price}
    sections:
    - {label: a-b, zh: 节, en: section}
    - {zh: 章, en: chapter}
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "tree.yml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_tree_is_read_from_its_file(written):
    last = Advice(
        Words("名", "name"),
        Words("确认", "confirm"),
        "one\ntwo\n",
        Words("价", "price"),
        (Section(Words("节", "section"), "a-b"), Section(Words("章", "chapter"))),
    )
    more = Question(Words("再问", "ask again"), ((Words("丙", "c"), last),), Words("看", "look"))
    start = Question(Words("问", "ask"), ((Words("甲", "a"), more), (Words("乙", "b"), last)))
    read = decisions.read_tree(written(WRITTEN))
    assert read == start
    assert read.answers[1][1] is read.answers[0][1].answers[0][1]


def test_a_name_that_is_not_there_is_refused(written):
    with pytest.raises(ValueError, match="tree.yml: no question or advice is called 'and'"):
        decisions.read_tree(written(WRITTEN.replace("to: end, zh: 丙", "to: and, zh: 丙")))


def test_what_no_answer_leads_to_is_refused(written):
    with pytest.raises(ValueError, match=r"tree.yml: no answer leads to \['more'\]"):
        decisions.read_tree(written(WRITTEN.replace("to: more", "to: end")))
