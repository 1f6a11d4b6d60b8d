import pytest

from helpers import ledger

CLAIMS = {
    "M99": {
        "chapter": "99_test",
        "claim": {"en": "`Water` is <wet>", "zh": "水是<湿>的"},
        "result": {"en": "{wet} of {total} drops", "zh": "{total} 滴中有 {wet} 滴"},
    }
}


@pytest.fixture
def shown(monkeypatch):
    outputs = []
    monkeypatch.setattr(ledger, "claims", lambda: CLAIMS)
    monkeypatch.setattr(ledger, "display", lambda bundle, raw: outputs.append(bundle))
    return outputs


def test_result_is_a_line_and_data(shown):
    ledger.result("M99", "holds-if", wet=3, total=4)
    (bundle,) = shown
    assert bundle[ledger.MIME] == {
        "id": "M99",
        "verdict": "holds-if",
        "values": {"wet": 3, "total": 4},
    }
    assert bundle["text/plain"] == "M99 · holds if … · 3 of 4 drops"
    html = bundle["text/html"]
    assert (
        "<!--zh-->" in html
        and "4 滴中有 3 滴" in html
        and "<code>Water</code> is &lt;wet&gt;" in html
    )


def test_without_a_record_it_says_how_to_make_one(shown):
    ledger.result("M99", "not-recorded")
    assert shown[0]["text/plain"].startswith("M99 · not recorded yet · `make measure NAME=test` on")
    assert "<code>make measure NAME=test</code>" in shown[0]["text/html"]
    assert shown[0][ledger.MIME]["values"] == {}


def test_a_value_without_a_record_says_so_in_each_language(shown):
    ledger.result("M99", "holds", wet=3, total=None)
    assert shown[0]["text/plain"] == "M99 · holds · 3 of not recorded yet drops"
    assert "尚无实测记录 滴中有 3 滴" in shown[0]["text/html"]
    assert shown[0][ledger.MIME]["values"] == {"wet": 3, "total": None}


@pytest.mark.parametrize(
    ("arguments", "values", "message"),
    [
        (("M98", "holds"), {}, r"unknown claim 'M98'; expected one of \['M99'\]"),
        (("M99", "maybe"), {}, r"unknown verdict 'maybe'; expected one of \['holds'"),
        (("M99", "holds"), {"wet": 1}, r"M99 needs the value 'total'; got \['wet'\]"),
        (("M99", "holds"), {"wet": 1, "total": 2, "dry": 0}, r"M99 has no place for \['dry'\]"),
    ],
)
def test_errors(shown, arguments, values, message):
    with pytest.raises(ValueError, match=message):
        ledger.result(*arguments, **values)
    assert not shown


def test_missing_claims_file(monkeypatch, tmp_path):
    monkeypatch.setattr(ledger, "CLAIMS", tmp_path / "claims.yml")
    with pytest.raises(FileNotFoundError, match="clone the whole repository"):
        ledger.claims.__wrapped__()
