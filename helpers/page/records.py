"""Every chapter: measurements kept as data, each with its provenance."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
PROVENANCE = ("device", "torch", "python", "commit", "dirty", "command", "date", "repeats", "clock")
TIMED = (list, tuple)  # p20, median, p80: a list as JSON has it, before that a `timing.Quantiles`


@dataclass(frozen=True)
class Record:
    """One measurement on one device.

    provenance: device, driver, versions, commit, command, date, repeats, clock.
    units: column -> unit. rows: one dict a row; a timed value is [p20, p50, p80].
    """

    name: str
    provenance: dict[str, Any]
    units: dict[str, str]
    rows: list[dict[str, Any]]

    def __post_init__(self):
        missing = [key for key in PROVENANCE if key not in self.provenance]
        if missing:
            raise ValueError(f"record {self.name!r} lacks provenance {missing}")
        for row in self.rows:
            if set(row) != set(self.units):
                expected, got = sorted(self.units), sorted(row)
                raise ValueError(f"record {self.name!r}: expected columns {expected}, got {got}")
            for column, value in row.items():
                if isinstance(value, TIMED) and list(value) != sorted(value):
                    raise ValueError(f"record {self.name!r}: {column} not ascending: {list(value)}")

    def caption(self) -> str:
        """Return the line that says where the numbers come from."""
        return f"recorded on {self.origin()}"

    def origin(self) -> str:
        """Return device, version, date and commit alone, for a claim in two languages."""
        p = self.provenance
        where = f"{p['device']}, torch {p['torch']}"
        when = f"{p['date'][:10]}, commit {p['commit']}"
        return f"{where}, {when}"

    def column(self, name: str) -> list[Any]:
        """Return one column, row by row."""
        if name not in self.units:
            raise ValueError(f"record {self.name!r}: no column {name!r} in {list(self.units)}")
        return [row[name] for row in self.rows]

    def summary(self, column: str, by: str, **where: Any) -> str:
        """Return `column` for each value of the column `by`, in words, the device and unit first.

        A timed value counts with its median; several rows give a range, ``default 0.9–3.4``.
        where: the rows that count, e.g. ``kind="planted"``. Raises ValueError when none does.
        """
        found: dict[Any, list[float]] = {}
        for row in self.rows:
            if all(row[key] == value for key, value in where.items()):
                value = row[column][1] if isinstance(row[column], TIMED) else row[column]
                found.setdefault(row[by], []).append(value)
        if not found:
            raise ValueError(f"record {self.name!r}: no row where {where}")

        parts = []
        for name, values in found.items():
            low, high = f"{min(values):.3g}", f"{max(values):.3g}"
            parts.append(f"{name} {low}" if low == high else f"{name} {low}–{high}")
        return f"{self.provenance['device']}, {self.units[column]}: " + "; ".join(parts)


def provenance(versions: dict[str, str], *, repeats: int, clock: str) -> dict[str, Any]:
    """Return the provenance of a measurement that starts now, in this process.

    versions: what `helpers.environment.versions(device)` says of the device and the software.
    """

    def git(*args: str) -> str:
        command = ["git", "-C", str(FOLDER.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    # records themselves may be uncommitted; what matters is the code that measures
    dirty = git("status", "--porcelain", "--", "../helpers", ".", ":!records")
    return {
        **versions,
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "dirty": bool(dirty),
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "repeats": repeats,
        "clock": clock,
    }


def save(record: Record, device: str) -> Path:
    """Write ``records/NAME.DEVICE.json`` atomically, a row a line; return its path."""
    path = FOLDER / f"{record.name}.{device}.json"
    part = path.with_suffix(".partial")
    part.write_text(_as_json(record), encoding="utf-8")
    os.replace(part, path)
    return path


def _as_json(record: Record) -> str:
    """JSON with a row a line: a diff shows what was measured anew, and nothing else."""
    fields = {"provenance": record.provenance, "units": record.units, "rows": []}
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in record.rows)
    text = json.dumps(fields, indent=1, ensure_ascii=False)
    return text.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n"


def load(name: str, device: str) -> Record | None:
    """Return the record of `name` on `device`, or None when it was not recorded there yet."""
    path = FOLDER / f"{name}.{device}.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    return Record(name, data["provenance"], data["units"], data["rows"])


def latest_gpu(name: str) -> Record | None:
    """Return the latest record of `name` that a GPU made, or None when there is none yet."""
    devices = {path.name.split(".")[1] for path in FOLDER.glob(f"{name}.*.json")} - {"cpu"}
    made = [load(name, device) for device in devices]
    return max(made, key=lambda record: record.provenance["date"], default=None)
