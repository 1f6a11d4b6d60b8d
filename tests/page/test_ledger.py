import pytest

from helpers.page import ledger

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
    assert bundle["text/plain"] == "M99 · `Water` is <wet> · holds under conditions: 3 of 4 drops"
    html = bundle["text/html"]
    assert (
        "<!--zh-->" in html
        and "4 滴中有 3 滴" in html
        and "<code>Water</code> is &lt;wet&gt;" in html
    )


def test_the_saying_comes_first_then_the_verdict_then_what_was_measured(shown):
    ledger.result("M99", "false", wet=3, total=4)
    english = shown[0]["text/html"].split("<!--en-->")[1]
    order = ["The claim M99", "is &lt;wet&gt;", "does not hold", "Measured", "3 of 4 drops"]
    places = [english.index(words) for words in order]
    assert places == sorted(places)


def test_a_source_is_not_called_a_measurement(shown, monkeypatch):
    monkeypatch.setattr(ledger, "claims", lambda: {"M99": {**CLAIMS["M99"], "source": True}})
    ledger.result("M99", "false", wet=3, total=4)
    html = shown[0]["text/html"]
    assert "Source: " in html and "来源：" in html
    assert "Measured" not in html and "实测" not in html


def test_one_language_where_the_notebook_has_one(shown, monkeypatch):
    monkeypatch.setenv("PYTORCH_BOOK_LANG", "zh")
    ledger.result("M99", "holds", wet=3, total=4)
    assert shown[0]["text/plain"] == "M99 · 水是<湿>的 · 成立：4 滴中有 3 滴"
    assert "drops" not in shown[0]["text/html"] and "滴" in shown[0]["text/html"]
    monkeypatch.setenv("PYTORCH_BOOK_LANG", "fr")
    with pytest.raises(ValueError, match="expected PYTORCH_BOOK_LANG to be zh or en, got 'fr'"):
        ledger.result("M99", "holds", wet=3, total=4)


def test_without_a_record_it_says_how_to_make_one(shown):
    ledger.result("M99", "not-recorded")
    assert shown[0]["text/plain"].startswith(
        "M99 · `Water` is <wet> · not recorded yet: nobody has recorded this yet;"
    )
    assert "<code>make measure NAME=test</code>" in shown[0]["text/html"]
    assert "Measured" not in shown[0]["text/html"]
    assert "实测：" not in shown[0]["text/html"]
    assert shown[0][ledger.MIME]["values"] == {}


def test_a_value_without_a_record_says_so_in_each_language(shown):
    ledger.result("M99", "holds", wet=3, total=None)
    assert shown[0]["text/plain"] == "M99 · `Water` is <wet> · holds: 3 of not recorded yet drops"
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
