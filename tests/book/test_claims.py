"""Every claim of the book has one result, and both languages can state it."""

import string
from collections import Counter
from pathlib import Path

import pytest
import yaml
from bilingual import pairing
from bilingual.language import read_notebook
from bilingual.pages import VERDICTS, results

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "book" / "claims.yml"
CLAIMS = (yaml.safe_load(PATH.read_text(encoding="utf-8")) or {}) if PATH.exists() else {}
FOUND = {
    path.stem: results(read_notebook(path)) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
}


def fields(template: str) -> Counter:
    return Counter(name for _, name, _, _ in string.Formatter().parse(template) if name)


def unmatched(claims: dict, found: dict[str, list[dict]]) -> list[str]:
    """Claims without exactly one result in their chapter, and results without a claim."""
    counts = Counter((stem, one["id"]) for stem, ones in found.items() for one in ones)
    wanted = Counter((entry["chapter"], name) for name, entry in claims.items())
    return [
        f"{stem}: {name} has {counts[stem, name]} results, expected {wanted[stem, name]}"
        for stem, name in sorted(counts.keys() | wanted.keys())
        if counts[stem, name] != wanted[stem, name]
    ]


def test_each_claim_has_one_result_in_its_chapter():
    found = unmatched(CLAIMS, FOUND)
    assert not found, "\n".join(found)


def test_a_missing_a_second_and_an_unknown_result_are_found():
    claims = {"M02": {"chapter": "02_tensors"}}
    one = {"id": "M02"}
    assert unmatched(claims, {"02_tensors": [one]}) == []
    assert unmatched(claims, {"02_tensors": []})
    assert unmatched(claims, {"02_tensors": [one, one]})
    assert unmatched(claims, {"02_tensors": [one, {"id": "M99"}]})
    assert unmatched(claims, {"07_mnist": [one]})


@pytest.mark.parametrize("name", CLAIMS)
def test_both_languages_state_the_same_claim(name):
    entry = CLAIMS[name]
    for kind in ("claim", "result"):
        zh, en = entry[kind]["zh"], entry[kind]["en"]
        assert fields(zh).keys() == fields(en).keys()
        pair = pairing.Pair("book/claims.yml", f"{name} {kind}", zh, en)
        found = [line for rule in pairing.PAIR_RULES.values() for line in rule(pair)]
        found += pairing.chinese_rules(zh, pairing.read_terms(ROOT))
        assert not found, f"{pair.place}: {found}"


@pytest.mark.parametrize(
    "one", [one for ones in FOUND.values() for one in ones], ids=lambda one: one["id"]
)
def test_results_fill_their_templates(one):
    assert one["verdict"] in VERDICTS
    templates = CLAIMS[one["id"]]["result"]
    if one["values"] or one["verdict"] != "not-recorded":
        assert set(one["values"]) == set(fields(templates["en"]))
