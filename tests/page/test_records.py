import json

import pytest
import torch

from helpers.environment import versions
from helpers.page import records

GOOD = {
    "device": "a chip", "torch": "2", "python": "3", "commit": "abc", "dirty": False,
    "command": "x", "date": "2026-01-02T03:04Z", "repeats": 3, "clock": "wall",
}  # fmt: skip


def record(**change):
    fields = {
        "name": "demo",
        "provenance": GOOD,
        "units": {"size": "count", "time": "ms"},
        "rows": [{"size": 1, "time": [1.0, 2.0, 3.0]}, {"size": 2, "time": [2.0, 2.0, 4.0]}],
    }
    return records.Record(**{**fields, **change})


def test_save_and_load_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    path = records.save(record(), "chip")
    assert path == tmp_path / "demo.chip.json" and list(tmp_path.iterdir()) == [path]
    assert records.load("demo", "chip") == record()
    assert records.load("demo", "other") is None
    assert len(path.read_text().splitlines()) > 10 and json.loads(path.read_text())["rows"]


def test_the_latest_record_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    records.save(record(provenance={**GOOD, "date": "2026-03-01T00:00Z"}), "cpu")
    assert records.on_gpu("demo") is None
    for chip, month in {"old": "01", "new": "02"}.items():
        records.save(record(provenance={**GOOD, "device": chip, "date": f"2026-{month}-01"}), chip)
    assert records.on_gpu("demo").provenance["device"] == "new"
    assert records.on_gpu("dem") is None


def test_caption_and_column():
    assert record().caption() == "recorded on a chip, torch 2, 2026-01-02, commit abc"
    assert record().column("size") == [1, 2]
    with pytest.raises(ValueError, match=r"no column 'x' in \['size', 'time'\]"):
        record().column("x")


def test_incomplete_records_are_refused():
    with pytest.raises(ValueError, match=r"lacks provenance \['commit'\]"):
        record(provenance={k: v for k, v in GOOD.items() if k != "commit"})
    with pytest.raises(ValueError, match=r"expected columns \['size', 'time'\], got \['size'\]"):
        record(rows=[{"size": 1}])
    with pytest.raises(ValueError, match=r"time not ascending: \[3.0, 2.0, 1.0\]"):
        record(rows=[{"size": 1, "time": [3.0, 2.0, 1.0]}])


def test_provenance_is_of_this_process():
    p = records.provenance(versions(torch.device("cpu")), repeats=5, clock="wall")
    assert set(records.PROVENANCE) <= set(p)
    assert p["torch"] == torch.__version__ and len(p["commit"]) >= 7
    assert p["command"].startswith("python benchmarks/")


FILES = sorted(records.FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_committed_records(path):
    """Complete, clean, in order, and physically possible."""
    name, device, _ = path.name.split(".")
    got = records.load(name, device)
    assert got.rows and got.provenance["dirty"] is False
    assert all(got.units.values())
    for column, unit in got.units.items():
        for value in got.column(column):
            numbers = [v for v in (value if isinstance(value, list) else [value])]
            numbers = [v for v in numbers if isinstance(v, (int, float))]
            assert all(v >= 0 for v in numbers), (column, value)
            if unit == "fraction":
                assert all(v <= 1 for v in numbers), (column, value)
            if unit in ("ms", "s", "us"):
                assert all(v > 0 for v in numbers), (column, value)


def test_there_are_records():
    assert FILES
