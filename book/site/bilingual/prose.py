"""Prose taken apart: what of a Markdown text must be the same in both languages."""

from __future__ import annotations

import re
from collections import Counter

CJK = "\u3400-\u9fff\uf900-\ufaff"
FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,}).*?^[ \t]*(?:`{3,}|~{3,})[ \t]*$", re.M | re.S)
DIRECTIVE = re.compile(r"^[ \t]*(?:`{3,}|~{3,}|:{3,})\{([\w-]+)\}", re.M)
LABEL = re.compile(r"^\(([\w-]+)\)=[ \t]*$", re.M)
HEADING = re.compile(r"^(#{1,6})[ \t]+\S", re.M)
ROLE = re.compile(r"\{([\w:-]+)\}`([^`]+)`")
CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?!\s)([^$\n]+?)(?<!\s)\$", re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
ITEM = re.compile(r"^[ \t>]*(?:([-*+])|(\d+)[.)])[ \t]+", re.M)
NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(\d[\d,]*(?:\.\d+)?)\s*(万|亿|million\b|thousand\b)?")
SCALE = {"万": 10**4, "亿": 10**8, "million": 10**6, "thousand": 10**3, "": 1}
ENGLISH_NUMBERS = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve".split(),
        range(13),
        strict=True,
    )
) | {"once": 1, "first": 1, "twice": 2, "second": 2, "half": 2, "third": 3, "fourth": 4}
CHINESE_DIGITS = dict(zip("零一二三四五六七八九", range(10), strict=True)) | {"两": 2, "半": 2}
CHINESE_UNITS = {"十": 10, "百": 100, "千": 1000}


def without_fences(text: str) -> str:
    """The text without fenced code blocks and directives' bodies."""
    return FENCE.sub("", text)


def labels(text: str) -> list[str]:
    return LABEL.findall(text)


def headings(text: str) -> list[int]:
    """Levels of the headings, in order."""
    return [len(mark) for mark in HEADING.findall(without_fences(text))]


def unlabelled(text: str) -> list[str]:
    """Headings without a label on the line above."""
    lines = without_fences(text).split("\n")
    return [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if HEADING.match(line) and not LABEL.match(before)
    ]


def roles(text: str) -> Counter:
    """Roles by name and target; the text that a role shows may differ."""
    found = []
    for name, content in ROLE.findall(without_fences(text)):
        target = re.search(r"<([^>]+)>\s*$", content)
        found.append((name, target[1] if target else content.strip()))
    return Counter(found)


def code(text: str) -> Counter:
    """Inline code spans."""
    text = FORMULA.sub("", ROLE.sub("", without_fences(text)))
    return Counter(span.strip() for _, span in CODE.findall(text))


def fences(text: str) -> list[str]:
    """Fenced code blocks (not directives) without their comments, which are translated."""
    found = [block.strip() for block in FENCE.findall(text) if not DIRECTIVE.match(block)]
    return [re.sub(r"[ \t]+#.*", "", block) for block in found]


def directives(text: str) -> list[str]:
    return DIRECTIVE.findall(text)


def formulas(text: str) -> Counter:
    r"""Formulas without white space; words inside `\text{…}` may differ."""
    text = CODE.sub("", ROLE.sub("", without_fences(text)))
    found = ["".join(match).strip() for match in FORMULA.findall(text)]
    return Counter(re.sub(r"\s+", "", re.sub(r"\\text\{[^}]*\}", r"\\text", one)) for one in found)


def links(text: str) -> Counter:
    """Targets of links and images; a diagram has one file for each language, of the same name."""
    found = LINK.findall(CODE.sub("", without_fences(text)))
    return Counter(re.sub(r"book/figures/(?:zh|en)/", "book/figures/", target) for target in found)


def items(text: str) -> tuple[int, int]:
    """How many bullets and numbered items."""
    found = ITEM.findall(without_fences(text))
    return sum(bool(bullet) for bullet, _ in found), sum(bool(number) for _, number in found)


def pitfalls(text: str) -> int:
    """How many blockquotes open with the word for a pitfall."""
    return len(re.findall(r"^> \*\*(?:Pitfall|陷阱)", text, re.M))


def words_only(text: str) -> str:
    """Prose alone: no code, formula, role, label, link target or list number."""
    text = LABEL.sub("", without_fences(text))
    text = CODE.sub(" ", FORMULA.sub(" ", ROLE.sub(" ", text)))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"<[^>]+>|https?://\S+", " ", text)
    return re.sub(r"^([ \t>]*)\d+[.)][ \t]", r"\1", text, flags=re.M)


def numbers(text: str) -> Counter:
    """Numbers in Arabic digits: `10,000`, `1 万` and `10 thousand` are the same."""
    found = Counter()
    for digits, scale in NUMBER.findall(words_only(text)):
        found[float(digits.replace(",", "").rstrip(".")) * SCALE[scale]] += 1
    return found


def chinese_number(text: str) -> int:
    """二十一 → 21."""
    total, digit = 0, 0
    for letter in text:
        if letter in CHINESE_UNITS:
            total, digit = total + (digit or 1) * CHINESE_UNITS[letter], 0
        else:
            digit = CHINESE_DIGITS[letter]
    return total + digit


def spelled_numbers(text: str) -> Counter:
    """Small numbers written as words, English or Chinese."""
    text = words_only(text).lower()
    english = (ENGLISH_NUMBERS.get(word) for word in re.findall(r"[a-z]+", text))
    letters = "".join([*CHINESE_DIGITS, *CHINESE_UNITS])
    chinese = (chinese_number(run) for run in re.findall(f"[{letters}]+", text))
    return Counter(float(n) for n in (*english, *chinese) if n is not None)
