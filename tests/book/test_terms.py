"""Terms are explained before they are used, and the finder of both can fail."""

import pytest
from bilingual import pages, pairing, terms

TERMS = [
    {"en": "tensor", "zh": "张量"},
    {"en": "leaf tensor", "zh": "叶子张量"},
    {"en": "matrix", "zh": "矩阵", "plural": "matrices"},
    {"en": "batch", "zh": "批次"},
    {"en": "view", "zh": "视图", "everyday": ["en"]},
    {"en": "contiguous", "zh": "连续", "everyday": ["zh"]},
    {"en": "layer", "zh": "层"},
    {"en": "rank (number of dimensions)", "zh": "阶", "everyday": ["en"]},
    {"en": "rank (process)", "zh": "rank（进程编号）", "keep": True, "everyday": ["en"]},
    {"en": "kernel (of a convolution)", "zh": "卷积核"},
    {"en": "kernel (compute)", "zh": "内核；首次出现写作内核（kernel）"},
]


def chapter(*cells: tuple[str, str]) -> dict:
    """A notebook of prose: (Chinese, English) for each pair."""
    notebook = []
    for pair in cells:
        for tag, text in zip(("zh", "en"), pair, strict=True):
            cell = {"cell_type": "markdown", "metadata": {"tags": [tag]}, "source": text}
            notebook.append(cell)
    return {"cells": notebook}


def section(label: str, zh: str, en: str, level: int = 2) -> tuple[str, str]:
    return tuple(f"({label})=\n{'#' * level} …\n\n{text}" for text in (zh, en))


def texts(**chapters: dict) -> dict[str, list[terms.Passage]]:
    """The passages of a book of these chapters, in this order."""
    found = {"zh": [], "en": []}
    for order, (stem, notebook) in enumerate(chapters.items()):
        for tag in found:
            found[tag] += terms.passages(notebook, stem, tag, start=1000 * order)
    return found


EXPLAINS = section("a-tensor", "这叫**张量**（tensor）。", "This is a **tensor**.")


def early(*before: tuple[str, str]) -> list[str]:
    """What is found when these cells stand between a chapter's opening and the explanation."""
    cells = [section("ch-a", "开篇", "Opening", 1), *before, EXPLAINS]
    return terms.early_uses(TERMS, texts(a=chapter(*cells)))


# ---- the book


def test_the_book_explains_its_terms_first(root):
    found = terms.problems(root)
    assert not found, "\n" + "\n".join(found)


def test_every_chapter_is_read_once_and_in_order(root):
    order = terms.reading_order(root)
    assert len(set(order)) == len(order)
    assert {f"{stem}.ipynb" for stem in order} == {p.name for p in root.glob("notebooks/*.ipynb")}


def test_the_glossary_s_rows_are_one_word_each(root):
    rows = pairing.read_terms(root)
    keys = {"en", "zh", "group", "keep", "never", "plural", "everyday"}
    for row in rows:
        assert row.keys() <= keys, row
        assert " / " not in row["en"] and "／" not in terms.base(row["zh"]), row
        assert set(row.get("everyday", [])) <= {"zh", "en"}, row
        for tag in ("zh", "en"):
            assert terms.word(row, tag), row
    pairs = [(terms.word(row, "en"), terms.word(row, "zh")) for row in rows]
    assert len(set(pairs)) == len(pairs)


# ---- where a term is explained


def test_the_first_mark_counts():
    again = section("b-again", "又见**张量**。", "Again a **tensor**.")
    found = terms.introductions(TERMS, texts(a=chapter(EXPLAINS), b=chapter(again)))
    assert {TERMS[row]["en"]: (p.chapter, p.label) for row, p in found.items()} == {
        "tensor": ("a", "a-tensor")
    }


@pytest.mark.parametrize(
    ("zh", "en", "row"),
    [
        ("**叶子张量**", "**leaf tensors**", 1),
        ("**矩阵**（matrix）", "**Matrices** are tables.", 2),
        ("**批次**", "**batches**", 3),
        ("**rank**（进程编号）", "**rank**", 8),
        ("**阶**", "**rank**", 7),
        ("**卷积核**", "**kernel**", 9),
        ("**内核**", "**kernel**", 10),
    ],
)
def test_a_mark_has_the_glossary_s_form(zh, en, row):
    found = texts(a=chapter(section("a-x", zh, en)))
    assert list(terms.introductions(TERMS, found)) == [row]
    assert terms.one_sided(TERMS, found) == []


@pytest.mark.parametrize(
    ("zh", "en"),
    [
        ("张量", "tensor"),
        ("**张量。**", "**Tensors.**"),
        ("`**张量**`", "`**tensor**`"),
        ("**很多张量**", "**many tensors**"),
        ("```\n**张量**\n```", "```\n**tensor**\n```"),
    ],
)
def test_other_text_is_no_mark(zh, en):
    found = texts(a=chapter(section("a-x", zh, en)))
    assert terms.introductions(TERMS, found) == {}
    assert terms.one_sided(TERMS, found) == []


@pytest.mark.parametrize(
    ("zh", "en", "message"),
    [
        ("**张量**", "tensor", "zh marks **张量**, en does not mark tensor"),
        ("张量", "**tensor**", "en marks **tensor**, zh does not mark 张量"),
        ("内核", "**kernel**", "en marks **kernel**, zh does not mark 内核 or 卷积核"),
    ],
)
def test_a_mark_in_one_language_is_found(zh, en, message):
    (found,) = terms.one_sided(TERMS, texts(a=chapter(section("a-x", zh, en))))
    assert found == f"notebooks/a.ipynb, a-x: {message}"


def test_marks_in_different_sections_are_found():
    cells = [section("a-x", "**张量**", "Text."), section("a-y", "文字", "**tensor**")]
    found = texts(a=chapter(*cells))
    assert terms.introductions(TERMS, found) == {}
    assert len(terms.one_sided(TERMS, found)) == 2


# ---- a term that is used too early


@pytest.mark.parametrize(
    ("zh", "en", "languages"),
    [
        ("文字", "A tensor.", ["en"]),
        ("文字", "Two Tensors.", ["en"]),
        ("文字", "The tensor's shape", ["en"]),
        ("一个张量。", "Text.", ["zh"]),
        ("很多张量并行", "Text", ["zh"]),
        ("[张量](https://example.org)", "[tensor](https://example.org)", ["zh", "en"]),
    ],
)
def test_an_early_use_is_found(zh, en, languages):
    found = early(section("a-early", zh, en))
    assert [line.split(": ")[1][:2] for line in found] == languages
    assert all("a-early" in line and "before a-tensor (a)" in line for line in found)


@pytest.mark.parametrize(
    ("zh", "en"),
    [
        ("函数 `tensor` 与 `张量`", "the function `tensor`"),
        ("公式 $tensor$", "a formula $tensor$"),
        ("见 {ref}`张量 <a-tensor>`", "see {ref}`the tensor <a-tensor>`"),
        ("[链接](https://example.org/tensor)", "[a link](https://example.org/tensor)"),
        ("一个叶子张量", "a leaf tensor"),  # the longer term, which no section explains
        ("一段文字", "tensorboard, a subtensor, in tensor_1, a tensor-like thing"),
        ("```\n张量\n```", "```\ntensor\n```"),
    ],
)
def test_what_is_no_use(zh, en):
    assert early(section("a-early", zh, en)) == []


def test_the_opening_names_what_the_chapter_will_teach():
    opening = section("ch-a", "你能创建张量。", "You can make a tensor.", 1)
    assert terms.early_uses(TERMS, texts(a=chapter(opening, EXPLAINS))) == []
    motive = ("先看一个张量。", "Look at a tensor first.")
    found = terms.early_uses(TERMS, texts(a=chapter(opening, motive, EXPLAINS)))
    assert len(found) == 2 and all("ch-a" in line for line in found)


def test_the_opening_names_nothing_of_later_chapters():
    opening = section("ch-a", "你能创建张量。", "You can make a tensor.", 1)
    assert len(terms.early_uses(TERMS, texts(a=chapter(opening), b=chapter(EXPLAINS)))) == 2


def test_a_section_may_name_a_term_before_it_marks_it():
    late = section("a-tensor", "张量是什么？**张量**是……", "What is a tensor? A **tensor** is …")
    assert terms.early_uses(TERMS, texts(a=chapter(late))) == []


def test_a_line_for_each_chapter_and_language():
    twice = [section(f"a-{n}", "张量", "A tensor") for n in (1, 2)]
    found = terms.early_uses(TERMS, texts(a=chapter(*twice), b=chapter(*twice, EXPLAINS)))
    assert len(found) == 4


def test_captions_are_read():
    figure = {
        "cell_type": "code",
        "source": "",
        "metadata": {"bilingual": {"zh": {"caption": "张量"}, "en": {"caption": "A tensor"}}},
    }
    notebook = chapter(section("a-early", "图", "Figure"), EXPLAINS)
    notebook["cells"].insert(2, figure)
    assert len(terms.early_uses(TERMS, texts(a=notebook))) == 2


def test_everyday_words_are_tested_in_the_other_language():
    explains = section("a-x", "**视图**与**连续**", "A **view**, **contiguous**")
    before = section("a-early", "视图与连续", "A view, contiguous")
    found = terms.early_uses(TERMS, texts(a=chapter(section("ch-a", "", "", 1), before, explains)))
    assert ["视图" in found[0], "contiguous" in found[1], len(found)] == [True, True, 2]


def test_one_chinese_character_is_no_use():
    explains = section("a-x", "**层**", "A **layer**")
    before = section("a-early", "分层", "Strata")
    opening = section("ch-a", "…", "…", 1)
    assert terms.early_uses(TERMS, texts(a=chapter(opening, before, explains))) == []


def test_a_word_of_two_terms_is_known_from_the_first_on():
    first = section("a-conv", "**卷积核**", "A **kernel**")
    use = section("a-use", "卷积核", "A kernel")
    second = section("a-gpu", "**内核**", "A **kernel**")
    assert terms.early_uses(TERMS, texts(a=chapter(first, use, second))) == []


# ---- sections that may be skipped

DEEPER = section("a-deeper", "**张量**", "A **tensor**")
USE = section("a-use", "张量", "A tensor")


def test_what_is_explained_on_the_side_is_not_known_afterwards():
    found = terms.early_uses(TERMS, texts(a=chapter(DEEPER, USE)))
    assert len(found) == 2
    assert all("explained only on the side, in a-deeper" in line for line in found)


def test_the_side_may_use_what_comes_later():
    opening = section("ch-a", "…", "…", 1)
    for label in ("a-x-deeper", "a-reading"):
        side = section(label, "张量", "A tensor")
        below = section("a-below", "张量", "A tensor", 3)
        assert terms.early_uses(TERMS, texts(a=chapter(opening, side, below, EXPLAINS))) == []
        beside = section("a-beside", "张量", "A tensor")
        assert len(terms.early_uses(TERMS, texts(a=chapter(side, beside, EXPLAINS)))) == 2


def test_the_main_line_counts_before_the_side():
    found = terms.introductions(TERMS, texts(a=chapter(DEEPER, EXPLAINS)))
    assert found[0].label == "a-tensor"


# ---- the page and the report


def test_the_page_is_sorted_in_the_alphabet_of_its_language():
    cells = [
        section("a-view", "**视图**", "A **view**"),
        section("a-leaf", "**叶子张量**", "A **leaf tensor**"),
        section("a-rank", "**rank**", "A **rank**"),
        section("a-kernel", "**内核**", "A **kernel**"),
    ]
    found = texts(**{"07_a": chapter(*cells)})
    table = pages.explained_table(TERMS, found, "en")
    first = [line[4:] for line in table if line.startswith("* - ")]
    assert first == ["English", "kernel (compute)", "leaf tensor", "rank (process)", "view"]
    assert "  - 7 · {ref}`a-leaf`" in table
    table = pages.explained_table(TERMS, found, "zh")
    first = [line[4:] for line in table if line.startswith("* - ")]
    assert first == ["中文", "rank（进程编号）", "内核", "视图", "叶子张量"]
    assert pages.explained_table(TERMS, {"zh": [], "en": []}, "en") == []


def test_the_report_names_what_is_not_marked(root):
    lines = terms.report(root)
    assert len(lines) == len(pairing.read_terms(root))
    assert any(line.endswith(": not marked") for line in lines)
