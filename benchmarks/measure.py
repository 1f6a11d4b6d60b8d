"""Measure NAME on this machine and write records/NAME.DEVICE.json with its provenance.

    python benchmarks/measure.py mnist               # on the accelerator if there is one
    python benchmarks/measure.py training --device cpu

A benchmark is a module beside this file with `measure(device) -> helpers.page.records.Record`.
Commit your code first: a record knows the commit it was made from, and one made from code that
is not committed is marked as such and refused by the tests.
"""

import argparse
import importlib
import re
import sys
from pathlib import Path

from helpers import environment
from helpers.page import records

HERE = Path(__file__).parent


def label(device) -> str:
    """The part of a record's file name that says where: ``cpu``, ``h200``, ``mps``."""
    if device.type == "cuda":
        return re.sub(r"nvidia|geforce|[^a-z0-9]", "", environment.device_name(device).lower())
    return device.type


def main() -> None:
    names = sorted(p.stem for p in HERE.glob("*.py") if p.stem != "measure")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=names)
    parser.add_argument("--device", help="cpu, cuda, mps; default: the accelerator if there is one")
    arguments = parser.parse_args()
    device = environment.pick_device(arguments.device)
    sys.path.insert(0, str(HERE))
    record = importlib.import_module(arguments.name).measure(device)
    path = records.save(record, label(device))
    print(f"wrote {path.relative_to(HERE.parent)}: {len(record.rows)} rows, {record.caption()}")


if __name__ == "__main__":
    main()
