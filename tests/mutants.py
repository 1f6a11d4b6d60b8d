"""Plant mistakes, one at a time, and see whether the module's own tests notice.

    python tests/mutants.py                  # all of tests/mutants.yml, minutes long
    python tests/mutants.py training data    # those of some modules

Each mistake is one a person could make: a step left out, a comparison turned round, a device
forgotten. `old` must stand exactly once in the file, so that a mistake never quietly disappears
when the code moves on. What survives must be explained there (`survives: why`); the script fails on
a survivor without a reason, on a reason that is no longer needed, and below 95 % caught.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import yaml

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ROOT / "tests" / "mutants.yml"
GOAL = 0.95
KEYS = {"old", "new", "tests", "survives", "why"}


def planted(modules: Iterable[str] = ()) -> list[dict]:
    """Return the mistakes of `modules`, or all; ValueError for one that does not fit the code."""
    listed = yaml.safe_load(PLANTED.read_text(encoding="utf-8"))
    found = []
    for file, mistakes in listed.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        for number, mistake in enumerate(mistakes, 1):
            name = f"{file}#{number}"
            unknown = set(mistake) - KEYS
            if unknown or not {"old", "new"} <= set(mistake):
                raise ValueError(f"{name}: expected old, new and maybe {KEYS}, got {set(mistake)}")
            count = source.count(mistake["old"])
            if count != 1:
                raise ValueError(
                    f"{name}: expected {mistake['old']!r} once in the file, got {count}"
                )
            found.append({"name": name, "file": file, "tests": tests_of(file)} | mistake)
    wanted = set(modules)
    unknown = wanted - {Path(m["file"]).stem for m in found}
    if unknown:
        raise ValueError(
            f"expected modules with mistakes, such as 'serving', got {sorted(unknown)}"
        )
    return [m for m in found if not wanted or Path(m["file"]).stem in wanted]


def tests_of(file: str) -> str:
    """The tests that answer for a module: helpers/page/ledger.py -> tests/page/test_ledger.py."""
    path = Path(file)
    folder = Path("tests", *path.parts[1:-1])
    return str(folder / f"test_{path.stem}.py")


def survives(mistake: dict, copy: Path) -> bool:
    """Plant `mistake` in the checkout at `copy`, run its tests, take it out again."""
    path = copy / mistake["file"]
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mistake["old"], mistake["new"]), encoding="utf-8")
    tests = mistake["tests"].split()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # edits within a second look alike to the cache
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:  # it hangs: that is noticed, too
        return False
    finally:
        path.write_text(whole, encoding="utf-8")
    if done.returncode not in (0, 1, 2):  # 1: a test fails, 2: the module cannot be imported
        raise RuntimeError(f"{mistake['name']}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.returncode == 0


def checkout(folder: Path) -> Path:
    """A copy of the working tree without what is built or ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)  # records ask git for the commit
    as_somebody = ["-c", "user.name=-", "-c", "user.email=-"]
    subprocess.run(["git", "add", "-A"], cwd=folder, check=True)
    subprocess.run(["git", *as_somebody, "commit", "-qm", "-"], cwd=folder, check=True)
    return folder


def report(mistake: dict, alive: bool) -> str:
    """One line: what was planted, whether it was caught, and why not."""
    reason = mistake.get("survives")
    if alive:
        verdict = f"SURVIVES: {reason if reason else 'NO REASON GIVEN'}"
    elif reason:
        verdict = "caught, although a reason says that it survives"
    else:
        verdict = "caught"
    first_line = mistake["old"].strip().splitlines()[0]
    return f"{mistake['name']}: {mistake.get('why', first_line)}: {verdict}"


def main() -> int:
    """Plant all, print one line each and the score; 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    mistakes, start = planted(arguments.modules), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.workers) as pool:
        copies: Queue[Path] = Queue()
        for number in range(arguments.workers):
            folder = Path(scratch, str(number))
            folder.mkdir()
            copies.put(checkout(folder))

        def judge(mistake: dict) -> bool:
            copy = copies.get()
            try:
                return survives(mistake, copy)
            finally:
                copies.put(copy)

        wrong, caught = 0, 0
        for mistake, alive in zip(mistakes, pool.map(judge, mistakes), strict=True):
            as_said = alive == ("survives" in mistake)
            wrong += not as_said
            caught += not alive
            print(report(mistake, alive), flush=True)  # as they come: all of them take long

    share = caught / len(mistakes)
    minutes = (time.monotonic() - start) / 60
    print(
        f"{caught} of {len(mistakes)} caught ({share:.1%}), {wrong} not as said, {minutes:.1f} min"
    )
    return int(wrong > 0 or (share < GOAL and not arguments.modules))


if __name__ == "__main__":
    sys.exit(main())
