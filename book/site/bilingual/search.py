"""Chinese search without a dictionary: text and query are cut into the same pairs of characters.

Between Chinese and Latin both sides cut too, so `PyTorch张量` finds what `PyTorch 张量` finds.
"""

from __future__ import annotations

import re

import snowballstemmer
from sphinx.search.zh import SearchChinese

CJK = "\u3400-\u9fff\uf900-\ufaff"
RUNS = re.compile(f"[{CJK}]+|[^\\W{CJK}]+")


def pairs(run: str) -> list[str]:
    """反向传播 → 反向, 向传, 传播."""
    return [run[i : i + 2] for i in range(len(run) - 1)]


class BigramChinese(SearchChinese):
    """Index: single characters, pairs and Latin words. Query: pairs and Latin words."""

    js_splitter_code = """
var splitQuery = (query) => {
  const words = [];
  const runs = /[\\u3400-\\u9fff\\uf900-\\ufaff]+|[^\\u3400-\\u9fff\\uf900-\\ufaff]+/g;
  for (const part of query.split(/[^\\p{Letter}\\p{Number}_]+/gu)) {
    for (const run of part.match(runs) || []) {
      if (!/^[\\u3400-\\u9fff\\uf900-\\ufaff]/.test(run) || run.length < 3) words.push(run);
      else for (let i = 0; i + 1 < run.length; i++) words.push(run.slice(i, i + 2));
    }
  }
  return words;
};
"""

    def init(self, options: dict[str, str]) -> None:
        """The browser's stemmer is Porter's first; the base class takes his second."""
        self.stemmer = snowballstemmer.stemmer("porter")

    def split(self, text: str) -> list[str]:
        """Words of a page for the index."""
        words = []
        for run in RUNS.findall(text):
            words += [*run, *pairs(run)] if re.match(f"[{CJK}]", run) else [run]
        return words

    def stem(self, word: str) -> str:
        """As in the browser, which leaves words shorter than three letters alone."""
        word = word.lower()
        return self.stemmer.stemWord(word) if word.isascii() and len(word) > 2 else word

    def word_filter(self, word: str) -> bool:
        """Keep single Chinese characters, drop single letters and stop words."""
        return bool(re.match(f"[{CJK}]", word)) or (len(word) > 1 and word not in self.stopwords)


def setup(app) -> None:
    app.add_search_language(BigramChinese)
