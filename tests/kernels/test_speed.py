import pytest

from helpers.kernels import speed
from helpers.page import ledger, records
from helpers.pictures import kernels as pictures
from tests.page.test_records import GOOD

TIMES = dict.fromkeys(speed.WHO)


def row(kernel, shape, dtype="bfloat16", name="forward", bytes=2000, flop=0, **times):
    times = TIMES | {who: [ms * 0.9, ms, ms * 1.1] for who, ms in times.items()}
    size = {"bytes": bytes, "flop": flop, "eager_peak": 6e9, "ours_peak": 2e9}
    return {"kernel": kernel, "pass": name, "dtype": dtype, "shape": shape} | times | size


@pytest.fixture
def record():
    rows = [
        row("gelu", "16x16", ours=1.0, eager=1.0, compile=1.0),
        row("gelu", "8192x8192", bytes=4_000_000, ours=2.0, eager=3.5, compile=2.03, liger=1.0),
        row("gelu", "8192x8192", "float32", bytes=8_000_000, ours=4.0, eager=9.0, compile=3.0),
        row("matmul", "4096x4096x4096", flop=9 * 10**9, ours=4.0, eager=3.0, compile=3.0),
        row("linear_cross_entropy", "8x8x8", name="both", ours=1.0, eager=1.0, compile=1.0),
    ]
    ceilings = {"copy_gb_per_s": 4.0, "matmul_tflop_per_s": 3.0}
    units = dict.fromkeys(rows[0], "ms")
    return records.Record("kernels", {**GOOD, **ceilings}, units, rows)


def test_the_share_is_of_the_tighter_ceiling(record):
    _, gelu, _, product, _ = record.rows
    assert speed.share(record, gelu, "ours") == pytest.approx(4e6 / 4e9 / 2e-3)
    assert speed.share(record, gelu, "liger") == pytest.approx(1.0)
    assert speed.share(record, product, "ours") == pytest.approx(9e9 / 3e12 / 4e-3)
    assert speed.share(record, product, "liger") is None


def test_the_largest_size_in_bfloat16(record):
    found = [(r["kernel"], r["pass"], r["shape"], r["dtype"]) for r in speed.largest(record)]
    assert found == [
        ("gelu", "forward", "8192x8192", "bfloat16"),
        ("matmul", "forward", "4096x4096x4096", "bfloat16"),
        ("linear_cross_entropy", "both", "8x8x8", "bfloat16"),
    ]


def test_what_the_claims_say(record, monkeypatch):
    """The record in words, put into the templates of book/claims.yml."""
    shown = []
    monkeypatch.setattr(ledger, "display", lambda bundle, raw: shown.append(bundle["text/plain"]))
    assert speed.gains(record) == {"matmul": "0.75×", "gelu": "1.75×"}
    counts = {"eager": "4/5", "compile": "3/5", "liger": "0/1", "cudnn": "0/0"}
    assert speed.score(record) == {"device": "a chip", **counts}
    assert speed.peaks(record, "8x8x8") == "6.00 GB, 2.00 GB" and speed.peaks(None, "") is None
    ledger.result("E39", "holds-if", product=1, fused=2, **speed.gains(record))
    ledger.result("M32", "holds-if", **speed.score(record))
    assert "0.75×" in shown[0] and "3/5" in shown[1]


def test_a_shape_that_was_not_measured(record):
    with pytest.raises(ValueError, match="no row of 'gelu' at '1x1' in the record of 'kernels'"):
        speed.find(record, "gelu", "1x1")


def test_the_picture_has_a_point_for_each_contender(record, ax):
    pictures.draw_shares(ax, record)
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "gelu, forward",
        "matmul, forward",
        "linear_cross_entropy, both",
    ]
    points = {line.get_label(): list(line.get_xdata()) for line in ax.get_lines()}
    assert points["ours"][:2] == pytest.approx([50.0, 75.0]) and len(points["liger"]) == 1
    assert "recorded on a chip" in ax.get_title(loc="left")
