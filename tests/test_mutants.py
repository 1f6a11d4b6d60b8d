"""The planted mistakes fit the code they are planted in. (That tests notice them: weekly.)"""

import pytest

from tests import mutants


def test_there_are_enough_and_each_fits_its_module():
    found = mutants.planted()
    assert len(found) >= 150
    for mistake in found:
        assert mistake["old"] != mistake["new"], mistake["name"]
        for path in mistake["tests"].split():
            assert (mutants.ROOT / path).exists(), mistake["name"]


def test_modules_can_be_chosen():
    files = {mistake["file"] for mistake in mutants.planted(["data", "ledger"])}
    assert files == {"helpers/data.py", "helpers/page/ledger.py"}
    with pytest.raises(ValueError, match=r"such as 'serving', got \['helpers/serving.py'\]"):
        mutants.planted(["data", "helpers/serving.py"])


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ('{old: "nowhere to be found", new: x}', "expected 'nowhere to be found' once in the file"),
        ('{old: "import math", fresh: x}', "expected old, new and maybe"),
    ],
)
def test_a_mistake_that_does_not_fit_is_refused(mistake, message, tmp_path, monkeypatch):
    listed = tmp_path / "mutants.yml"
    listed.write_text(f"helpers/schedules.py:\n- {mistake}\n", encoding="utf-8")
    monkeypatch.setattr(mutants, "PLANTED", listed)
    with pytest.raises(ValueError, match=message):
        mutants.planted()


def test_a_module_is_answered_for_by_the_test_of_its_name():
    assert mutants.tests_of("helpers/data.py") == "tests/test_data.py"
    assert mutants.tests_of("helpers/page/ledger.py") == "tests/page/test_ledger.py"


def test_a_planted_mistake_is_noticed_and_taken_out_again(tmp_path):
    """On a project of one module and one test."""
    for folder in ("helpers", "tests"):
        (tmp_path / folder).mkdir()
    module = tmp_path / "helpers" / "twice.py"
    module.write_text("def twice(x):\n    return 2 * x  # two\n", encoding="utf-8")
    test = "from helpers.twice import twice\n\n\ndef test():\n    assert twice(3) == 6\n"
    (tmp_path / "tests" / "test_twice.py").write_text(test, encoding="utf-8")
    common = {"name": "twice", "file": "helpers/twice.py", "tests": "tests/test_twice.py"}
    assert not mutants.survives(common | {"old": "2 * x", "new": "3 * x"}, tmp_path)
    assert mutants.survives(common | {"old": "# two", "new": "# too"}, tmp_path)
    assert "return 2 * x  # two" in module.read_text(encoding="utf-8")
