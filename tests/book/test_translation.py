"""Both languages say the same, and the gate that holds it can fail."""

import pytest
from bilingual import pairing
from bilingual.pairing import Pair

TERMS = [{"en": "stride", "zh": "步长", "never": ["步幅"]}]
GOOD_ZH = """(tensors-views)=
## 视图不复制数据

`x.T` 有 2 个步长，见 {ref}`下一节 <tensors-next>` 与 [文档](https://example.org/a)，$x_i = 1$。

- 一
- 二
"""
GOOD_EN = """(tensors-views)=
## A view copies nothing

`x.T` has 2 strides; see {ref}`the next section <tensors-next>`, the
[documentation](https://example.org/a) and $x_i=1$.

- one
- two
"""


def pair(zh: str = GOOD_ZH, en: str = GOOD_EN) -> Pair:
    return Pair("notebooks/02_tensors.ipynb", "cell a", zh, en)


def test_the_book_agrees(root):
    found = pairing.problems(root)
    assert not found, "\n" + "\n".join(found)


def test_a_good_pair_passes_every_rule():
    for name, rule in pairing.PAIR_RULES.items():
        assert rule(pair()) == [], name
    assert pairing.chinese_rules(GOOD_ZH, TERMS) == []


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("escapes", "- one", "- $QK^\top$"),
        ("headings", "## A view", "### A view"),
        ("labels", "(tensors-views)=", "(tensors-view)="),
        ("labelled", "(tensors-views)=\n", ""),
        ("code", "`x.T`", "`x.mT`"),
        ("code", "`x.T`", "x.T"),
        ("fences", "- one", "```python\nx = 1\n```\n\n- one"),
        ("formulas", "$x_i=1$", "$x_j=1$"),
        ("links", "https://example.org/a", "https://example.org/b"),
        ("roles", "<tensors-next>", "<tensors-last>"),
        ("roles", "{ref}", "{doc}"),
        ("numbers", "has 2 strides", "has 3 strides"),
        ("numbers", "has 2 strides", "has 2 strides in 16 GB"),
        ("items", "- two\n", ""),
        ("items", "- one\n- two", "1. one\n2. two"),
        ("directives", "- one", ":::{note}\nA note.\n:::\n\n- one"),
        ("pitfalls", "- one", "> **Pitfall: that.** Fails.\n\n- one"),
    ],
)
def test_each_rule_fails_when_one_side_drifts(rule, old, new):
    assert old in GOOD_EN
    assert pairing.PAIR_RULES[rule](pair(en=GOOD_EN.replace(old, new)))


def test_a_diagram_has_a_file_for_each_language():
    zh, en = "![链条](../book/figures/zh/chain.svg)", "![Chain](../book/figures/en/chain.svg)"
    assert pairing.PAIR_RULES["links"](pair(zh, en)) == []
    assert pairing.PAIR_RULES["links"](pair(zh, en.replace("chain", "ring")))


def test_an_empty_side_fails():
    assert pairing.PAIR_RULES["empty"](pair(en=" \n"))


@pytest.mark.parametrize(
    ("zh", "en"),
    [
        ("6 万张图", "60,000 images"),
        ("两个张量", "two tensors"),
        ("2 个张量", "two tensors"),
        ("两次", "2 times"),
        ("二十分之一", "20 times sooner"),
        ("一百零五", "105"),
        ("准确率 99.5%", "99.5% accuracy"),
        ("二维", "2-D"),
        ("省 60–70%", "saves 60–70%"),
        ("`float32` 占 4 字节", "`float32` takes 4 bytes"),
    ],
)
def test_the_same_number_in_other_words_passes(zh, en):
    assert pairing.same_numbers(pair(zh, en)) == []


@pytest.mark.parametrize(
    ("zh", "en"), [("6 万", "6,000"), ("3 轮", "five epochs"), ("1.5 倍", "1.6×"), ("无", "10")]
)
def test_other_numbers_fail(zh, en):
    assert pairing.same_numbers(pair(zh, en))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("卷积的步幅是 2。", "步长"),
        ("您应该看到它。", "您"),
        ("众所周知，它很快。", "众所周知"),
        ("让我们来看一看。", "让我们来"),
        ("下一行`x.T`是视图。", "space"),
        ("见{ref}`下一节 <a>`。", "space"),
        ("这里有[文档](https://example.org)可看。", "space"),
        ("张量tensor是数组。", "typography"),
        ("张量是数组, 它有形状。", "typography"),
    ],
)
def test_each_rule_for_chinese_can_fail(text, word):
    assert any(word in line for line in pairing.chinese_rules(text, TERMS))


def test_code_is_exempt_from_rules_for_chinese():
    assert pairing.chinese_rules("函数 `步幅` 不算。", TERMS) == []


def markdown(key, language, text="文字"):
    return (key, language, text)


def test_lonely_cells_are_named():
    cells = [("a", "zh", "文字"), ("b", "code", ""), ("c", "en", "Text")]
    found = pairing.cell_pairs("x.ipynb", cells)[1]
    assert len(found) == 2
    assert "a: zh without" in found[0]
    assert "c: en without" in found[1]


def test_order_of_twins_matters():
    assert pairing.cell_pairs("x.ipynb", [("a", "en", "Text"), ("b", "zh", "文字")])[1]


def test_untagged_chinese_is_a_problem():
    assert pairing.cell_pairs("x.ipynb", [("a", None, "中文")])[1]
    assert not pairing.cell_pairs("x.ipynb", [("a", None, "$$x$$")])[1]


def test_the_sample_pairs_prose_captions_and_alt_texts(sample):
    pairs, found = pairing.notebook_pairs("x.ipynb", sample)
    assert found == []
    assert sum(one.key.endswith(" caption") for one in pairs) == 2
    assert sum(one.key.endswith(" alt") for one in pairs) == 2


def test_the_sample_passes_every_rule(sample, root):
    terms = pairing.read_terms(root)
    for one in pairing.notebook_pairs("x.ipynb", sample)[0]:
        found = [line for rule in pairing.PAIR_RULES.values() for line in rule(one)]
        assert found + pairing.chinese_rules(one.zh, terms) == [], one.key


def test_a_caption_in_one_language_fails(sample):
    figure = next(cell for cell in sample["cells"] if "bilingual" in cell["metadata"])
    del figure["metadata"]["bilingual"]["en"]["caption"]
    pairs, _ = pairing.notebook_pairs("x.ipynb", sample)
    assert any(pairing.both_there(one) for one in pairs)


def test_pages_pair_their_blocks():
    page = '+++ {"tags": ["zh"]}\n\n文字\n\n+++ {"tags": ["en"]}\n\nText\n\n+++\n\n$$x$$\n'
    pairs, found = pairing.page_pairs("book/x.md", page)
    assert [one.key for one in pairs] == ["block 1"]
    assert found == []


@pytest.mark.parametrize(
    ("zh", "en", "words"),
    [
        ("文字一", "Text", "only the Chinese changed"),
        ("文字", "Text one", "only the English changed"),
        ("文字一", "Text one", "both sides changed"),
    ],
)
def test_a_moved_side_fails_and_says_what_to_run(zh, en, words):
    lock = pairing.lock_entries([pair("文字", "Text")])
    (found,) = pairing.lock_problems([pair(zh, en)], lock)
    assert words in found
    assert "cell a" in found
    assert "author.py review" in found


def test_the_lock_file_knows_new_gone_and_unchanged_pairs():
    lock = pairing.lock_entries([pair()])
    assert pairing.lock_problems([pair()], lock) == []
    assert "not reviewed yet" in pairing.lock_problems([pair()], {})[0]
    assert "still has cell a" in pairing.lock_problems([], lock)[0]


def test_a_label_stands_once_in_the_book():
    assert pairing.duplicate_labels([pair(), pair()])
    assert not pairing.duplicate_labels([pair()])
