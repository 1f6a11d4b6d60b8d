"""Every chapter: a claim of the book and what this notebook measured for it."""

import html
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from IPython.display import display

MIME = "application/vnd.pytorch-book.claim+json"
CLAIMS = Path(__file__).resolve().parents[2] / "book" / "claims.yml"
VERDICTS = {
    "holds": ("holds", "成立"),
    "holds-if": ("holds under conditions", "有条件成立"),
    "false": ("does not hold", "不成立"),
    "not-recorded": ("not recorded yet", "尚无实测记录"),
}
MISSING = {
    "en": "nobody has recorded this yet; `make measure NAME={stem}` does",
    "zh": "还没有人测过；运行 `make measure NAME={stem}` 可以得到一份记录",
}
# What introduces the claim: E… are sayings that the book corrects, M… what it states itself.
LABELS = {"E": ("A common claim", "常见的说法"), "M": ("The claim", "论断")}
MEASURED = ("Measured", "实测")
SOURCE = ("Source", "来源")  # of a claim with `source: true`: read, not measured


@cache
def claims() -> dict[str, dict[str, Any]]:
    """Return ``book/claims.yml``: id -> {chapter, claim: {en, zh}, result: {en, zh}}."""
    if not CLAIMS.exists():
        raise FileNotFoundError(f"no {CLAIMS.name} beside the package; clone the whole repository")
    return yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))


def result(claim_id: str, verdict: str, **values: bool | int | float | str | None) -> None:
    """Show what was measured for a claim, as a visible line and as data for the claims page.

    claim_id: a key of ``book/claims.yml``; its `result` template says the values in each language,
    for None that there is no record yet. verdict: ``holds``, ``holds-if``, ``false``, or
    ``not-recorded``, which needs no values. Raises ValueError for an unknown id or verdict, for a
    value that is missing, and for one that the template does not use.
    """
    if claim_id not in claims():
        raise ValueError(f"unknown claim {claim_id!r}; expected one of {sorted(claims())}")
    if verdict not in VERDICTS:
        raise ValueError(f"unknown verdict {verdict!r}; expected one of {list(VERDICTS)}")
    entry = claims()[claim_id]
    unused = [name for name in values if f"{{{name}" not in entry["result"]["en"]]
    if unused:
        raise ValueError(f"{claim_id} has no place for {unused} in its result template")
    templates = MISSING if verdict == "not-recorded" else entry["result"]
    text = {}
    for lang, none in zip(("en", "zh"), VERDICTS["not-recorded"], strict=True):
        given = {k: none if v is None else v for k, v in values.items()}
        try:
            text[lang] = templates[lang].format(**given, stem=entry["chapter"][3:])
        except KeyError as missing:
            raise ValueError(
                f"{claim_id} needs the value {missing}; got {sorted(values)}"
            ) from None
    chosen = languages()
    plain = {
        "en": f"{claim_id} · {entry['claim']['en']} · {VERDICTS[verdict][0]}: {text['en']}",
        "zh": f"{claim_id} · {entry['claim']['zh']} · {VERDICTS[verdict][1]}：{text['zh']}",
    }
    display(
        {
            MIME: {"id": claim_id, "verdict": verdict, "values": values},
            "text/plain": plain["en" if "en" in chosen else "zh"],
            "text/html": _html(claim_id, verdict, entry, text, chosen),
        },
        raw=True,
    )


def languages() -> tuple[str, ...]:
    """Both, or the one of a notebook exported in one language: its first cell sets the variable."""
    chosen = os.environ.get("PYTORCH_BOOK_LANG", "")
    if chosen in ("zh", "en"):
        return (chosen,)
    if chosen:
        raise ValueError(f"expected PYTORCH_BOOK_LANG to be zh or en, got {chosen!r}")
    return ("zh", "en")


def _html(
    claim_id: str,
    verdict: str,
    entry: dict[str, Any],
    text: dict[str, str],
    languages: tuple[str, ...],
) -> str:
    """The saying, the verdict, what was measured; each language between comments for the site."""
    parts, claim = [], entry["claim"]
    found = SOURCE if entry.get("source", False) else MEASURED
    for lang in languages:
        at = ("en", "zh").index(lang)
        colon = "：" if lang == "zh" else ": "
        label = LABELS[claim_id[0]][at]
        measured = f'<span class="claim__label">{found[at]}{colon}</span>'
        if verdict == "not-recorded":
            measured = ""  # nothing was
        parts.append(
            f'<!--{lang}--><div lang="{lang}">'
            f'<p class="claim__saying"><span class="claim__label">{label} {claim_id}</span> '
            f"{_code(claim[lang])}</p>"
            f'<p class="claim__measured"><strong class="claim__verdict">{VERDICTS[verdict][at]}'
            f"</strong> {measured}{_code(text[lang])}</p></div><!--/{lang}-->"
        )
    return f'<div class="claim claim--{verdict}">{"".join(parts)}</div>'


def _code(text: str) -> str:
    """Escape for HTML; `x` in backticks becomes code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", html.escape(text))
