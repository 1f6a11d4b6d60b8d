"""Every chapter: a claim of the book and what this notebook measured for it."""

import html
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from IPython.display import display

MIME = "application/vnd.pytorch-book.claim+json"
CLAIMS = Path(__file__).resolve().parents[1] / "book" / "claims.yml"
VERDICTS = {
    "holds": ("holds", "成立"),
    "holds-if": ("holds if …", "有条件成立"),
    "false": ("false", "不成立"),
    "not-recorded": ("not recorded yet", "尚无实测记录"),
}
MISSING = {
    "en": "`make measure NAME={stem}` on a machine with a GPU writes the record behind this line",
    "zh": "在有 GPU 的机器上运行 `make measure NAME={stem}`，写出记录，这一行才有结果",
}


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
    display(
        {
            MIME: {"id": claim_id, "verdict": verdict, "values": values},
            "text/plain": f"{claim_id} · {VERDICTS[verdict][0]} · {text['en']}",
            "text/html": _html(claim_id, verdict, entry["claim"], text),
        },
        raw=True,
    )


def _html(claim_id: str, verdict: str, claim: dict[str, str], text: dict[str, str]) -> str:
    """Both languages, each between comments: the site keeps one of them."""
    parts = []
    for lang, word in zip(("zh", "en"), reversed(VERDICTS[verdict]), strict=True):
        colon = "：" if lang == "zh" else ": "
        parts.append(
            f'<!--{lang}--><p lang="{lang}"><strong>{claim_id}</strong> {_code(claim[lang])}<br>'
            f'<span class="claim__verdict">{word}</span>{colon}{_code(text[lang])}</p>'
            f"<!--/{lang}-->"
        )
    return f'<div class="claim claim--{verdict}">{"".join(parts)}</div>'


def _code(text: str) -> str:
    """Escape for HTML; `x` in backticks becomes code."""
    return re.sub("`(.+?)`", r"<code>\1</code>", html.escape(text))
