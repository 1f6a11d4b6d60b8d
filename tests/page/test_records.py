import json

import pytest
import torch
import yaml

from helpers import timing
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


def test_a_record_is_json_with_a_row_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    odd = record(provenance={**GOOD, "command": '"rows": []', "summary": {"a": [1, 2]}})
    text = records.save(odd, "chip").read_text(encoding="utf-8")
    assert records.load("demo", "chip") == odd and json.loads(text)["provenance"]
    rows = [line.strip().rstrip(",") for line in text.splitlines() if '"size": ' in line]
    assert [json.loads(row) for row in rows[1:]] == odd.rows  # after the line of its unit


@pytest.mark.parametrize("path", sorted(records.FOLDER.glob("*.json")), ids=lambda p: p.name)
def test_saving_a_committed_record_again_changes_nothing(path, tmp_path, monkeypatch):
    name, device, _ = path.name.split(".")
    again = records.load(name, device)
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert records.save(again, device).read_text("utf-8") == path.read_text("utf-8")


def test_the_latest_record_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    records.save(record(provenance={**GOOD, "date": "2026-03-01T00:00Z"}), "cpu")
    assert records.latest_gpu("demo") is None
    for chip, month in {"old": "01", "new": "02"}.items():
        records.save(record(provenance={**GOOD, "device": chip, "date": f"2026-{month}-01"}), chip)
    assert records.latest_gpu("demo").provenance["device"] == "new"
    assert records.latest_gpu("dem") is None


def test_caption_and_column():
    assert record().caption() == "recorded on a chip, torch 2, 2026-01-02, commit abc"
    assert record().origin() == "a chip, torch 2, 2026-01-02, commit abc"
    assert record().column("size") == [1, 2]
    with pytest.raises(ValueError, match=r"no column 'x' in \['size', 'time'\]"):
        record().column("x")


def test_a_record_in_words():
    rows = [("a", [1.0, 2.0, 3.0], 8), ("b", [1.0, 1.5, 2.0], 4), ("a", [3.0] * 3, 4)]
    rows = [{"mode": mode, "time": time, "peak": peak} for mode, time, peak in rows]
    made = record(rows=rows, units={"mode": "name", "time": "ms", "peak": "MiB"})
    assert made.summary("time", by="mode") == "a chip, ms: a 2–3; b 1.5"
    assert made.summary("peak", by="mode") == "a chip, MiB: a 4–8; b 4"
    assert made.summary("time", by="mode", peak=4) == "a chip, ms: b 1.5; a 3"
    with pytest.raises(ValueError, match=r"record 'demo': no row where {'mode': 'c'}"):
        made.summary("time", by="mode", mode="c")


def test_a_record_that_was_just_measured_reads_like_one_from_a_file(tmp_path, monkeypatch):
    """Its quantiles are not lists yet."""
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    fresh = record(rows=[{"size": 1, "time": timing.Quantiles(1.0, 2.0, 4.0)}])
    records.save(fresh, "chip")
    assert records.load("demo", "chip").rows == [{"size": 1, "time": [1.0, 2.0, 4.0]}]
    assert fresh.summary("time", by="size") == records.load("demo", "chip").summary("time", "size")
    with pytest.raises(ValueError, match=r"time not ascending: \[3.0, 2.0, 1.0\]"):
        record(rows=[{"size": 1, "time": timing.Quantiles(3.0, 2.0, 1.0)}])


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


# No record is faster than its device

PEAKS = yaml.safe_load((records.FOLDER.parent / "peaks.yml").read_text(encoding="utf-8"))


def peak(record, kind: str, on_cpu: bool) -> float:
    """The most of `kind`, ``bytes`` or a dtype, that the record's device does in a second."""
    if on_cpu:
        cycles = PEAKS["cpu"]["clock"] * int(record.provenance["threads"])
        return cycles * (PEAKS["cpu"]["bytes"] if kind == "bytes" else PEAKS["cpu"]["flops"][kind])
    device = record.provenance["device"]
    assert device in PEAKS, f"benchmarks/peaks.yml has no data sheet of {device!r}"
    return PEAKS[device]["bandwidth"] if kind == "bytes" else PEAKS[device]["flops"][kind]


def work(record, row: dict) -> dict[str, float]:
    """What a row says was done in each of its times: bytes, and FLOPs under their dtype."""
    dtype = row.get("dtype", "float32")
    if record.name == "tensors":  # a product of [n, n]
        return {dtype: 2 * row["n"] ** 3, "bytes": 3 * 4 * row["n"] ** 2}
    return {dtype: row.get("flops", row.get("flop", 0)), "bytes": row.get("bytes", 0)}


STATED = {"copy_gb_per_s": ("bytes", 1e9), "matmul_tflop_per_s": ("bfloat16", 1e12)}


def rates(record, label: str):
    """Each rate that a record states or implies: where, of what, in B/s or FLOP/s, on a CPU?"""
    for key, (kind, unit) in STATED.items():
        if key in record.provenance:
            yield key, kind, record.provenance[key] * unit, label == "cpu"
    for number, row in enumerate(record.rows):
        for column, unit in record.units.items():
            # how long the host needs to launch a kernel says nothing about the device
            timed = unit == "ms" and not column.endswith(("_host", "_launch"))
            if timed and row[column] is not None:
                fastest = row[column][0] if isinstance(row[column], list) else row[column]
                for kind, amount in work(record, row).items():
                    on_cpu = label == "cpu" or column.startswith("cpu")
                    yield f"row {number}, {column}", kind, amount / fastest * 1e3, on_cpu


def impossible(record, label: str) -> list[str]:
    """The rates of a record that its device cannot reach."""
    found = []
    for where, kind, rate, on_cpu in rates(record, label):
        most = peak(record, kind, on_cpu)
        if rate >= most:
            found.append(f"{where}: {rate:.3g} of {kind} a second, at most {most:.3g}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_no_record_is_faster_than_its_device(path):
    name, device, _ = path.name.split(".")
    found = impossible(records.load(name, device), device)
    assert not found, "\n".join(found)


def test_every_data_sheet_has_its_source():
    for device, sheet in PEAKS.items():
        assert "https://" in sheet["source"], device
        numbers = [v for v in sheet.values() if not isinstance(v, (str, dict))]
        numbers += sheet["flops"].values()
        assert all(isinstance(v, (int, float)) and v > 0 for v in numbers), device


H100 = {**GOOD, "device": "NVIDIA H100 80GB HBM3"}
UNITS = {"dtype": "name", "bytes": "B", "flops": "count", "time": "ms", "time_host": "ms"}


def row(ms, bytes=0.0, flops=0.0, dtype="float32"):
    times = {"time": [ms, 2 * ms, 2 * ms], "time_host": [1e-9] * 3}
    return {"dtype": dtype, "bytes": bytes, "flops": flops} | times


@pytest.mark.parametrize(
    ("label", "provenance", "rows", "words"),
    [
        ("h100", H100, [row(1.0, bytes=3.3e9)], None),
        ("h100", H100, [row(1.0, bytes=3.4e9)], "row 0, time: 3.4e+12 of bytes a second, at most"),
        ("h100", H100, [row(1.0, flops=66e9)], None),
        ("h100", H100, [row(1.0, flops=68e9)], "of float32 a second, at most 6.7e+13"),
        ("h100", H100, [row(1.0, flops=980e9, dtype="bfloat16")], None),
        ("h100", H100, [row(1.0), row(1.0, flops=990e9, dtype="bfloat16")], "row 1, time: 9.9e"),
        ("h100", {**H100, "copy_gb_per_s": 3300.0}, [row(1.0)], None),
        ("h100", {**H100, "copy_gb_per_s": 3400.0}, [row(1.0)], "copy_gb_per_s: 3.4e"),
        ("h100", {**H100, "matmul_tflop_per_s": 990.0}, [row(1.0)], "matmul_tflop_per_s: 9.9e"),
        ("cpu", {**GOOD, "threads": "1"}, [row(1.0, flops=390e6)], None),
        ("cpu", {**GOOD, "threads": "1"}, [row(1.0, flops=400e6)], "of float32 a second"),
        ("cpu", {**GOOD, "threads": "2"}, [row(1.0, flops=400e6)], None),
        ("cpu", {**GOOD, "threads": "1"}, [row(1.0, bytes=1.2e9)], "of bytes a second"),
    ],
)
def test_an_impossible_record_is_noticed(label, provenance, rows, words):
    found = impossible(record(provenance=provenance, rows=rows, units=UNITS), label)
    if words is None:
        assert found == []
    else:
        assert len(found) == 1 and words in found[0]


@pytest.mark.parametrize("name", ["profiling", "tensors"])
def test_a_committed_record_a_thousand_times_as_fast_is_noticed(name):
    made = records.load(name, "cpu")
    for one in made.rows:
        for column, unit in made.units.items():
            if unit == "ms" and isinstance(one[column], list):
                one[column] = [value / 1000 for value in one[column]]
    assert impossible(made, "cpu")


def test_a_device_without_a_data_sheet_is_named():
    with pytest.raises(AssertionError, match="has no data sheet of 'a chip'"):
        impossible(record(rows=[row(1.0, flops=1.0)], units=UNITS), "chip")
