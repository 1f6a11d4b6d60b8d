"""Build the site: both languages side by side, and the page that sends a visitor to one of them.

python book/site/build.py        writes _build/html/{zh,en}, _build/html/index.html and 404.html
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "book" / "site"
BUILD = ROOT / "_build"
SPHINX_CODE = {"zh": "zh_CN", "en": "en"}


def extension_changed(doctrees: Path) -> bool:
    """Sphinx reads a source again when the source changes, not when our code does."""
    pickle = doctrees / "environment.pickle"
    code = (path.stat().st_mtime for path in SITE.glob("bilingual/**/*") if path.suffix != ".pyc")
    return not pickle.exists() or max(code) > pickle.stat().st_mtime


def prune(folder: Path) -> None:
    """Remove pages and notebooks whose source is gone."""
    for path in [*folder.glob("book/*.html"), *folder.glob("notebooks/*.*")]:
        source = ROOT / path.parent.name / path.stem
        if not any(source.with_suffix(suffix).exists() for suffix in (".md", ".ipynb")):
            path.unlink()


def build_language(tag: str) -> int:
    """One language in this process: Sphinx keeps its words in globals, two would mix."""
    from jupyter_book.sphinx import build_sphinx

    doctrees = BUILD / ".doctrees" / tag
    changed = extension_changed(doctrees)
    prune(BUILD / "html" / tag)
    result = build_sphinx(
        ROOT,
        BUILD / "html" / tag,
        noconfig=True,
        path_config=ROOT / "_config.yml",
        doctreedir=doctrees,
        freshenv=changed,
        force_all=changed,
        builder="html",
        quiet=True,
        warningiserror=True,
        keep_going=True,
        confoverrides={
            "language": SPHINX_CODE[tag],
            "external_toc_path": str(ROOT / "_toc.yml"),
            "latex_individualpages": False,
        },
    )
    return int(bool(result))


def check_sources() -> None:
    """Stop with the file's name when a chapter cannot be read, before Sphinx says it at length."""
    sys.path.insert(0, str(SITE))
    from bilingual.language import read_notebook

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        read_notebook(path)


def build_languages() -> list[str]:
    """Both languages in parallel; returns those that failed."""
    command = [sys.executable, str(Path(__file__)), "--language"]
    running = {tag: subprocess.Popen([*command, tag]) for tag in SPHINX_CODE}
    return [tag for tag, process in running.items() if process.wait() != 0]


def write_front() -> None:
    """The root page, the page for unknown addresses, and what they show."""
    html = BUILD / "html"
    for name in ("index.html", "404.html"):
        shutil.copyfile(SITE / "front" / name, html / name)
    for name in ("logo.svg", "favicon.svg"):
        shutil.copyfile(SITE / "static" / name, html / name)
    (html / ".nojekyll").touch()  # GitHub Pages would drop folders that begin with _
    for name in ("jupyter_execute", ".jupyter_cache"):  # working copies, not for readers
        shutil.rmtree(html / name, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--language", choices=SPHINX_CODE, help="build only this one, in place")
    language = parser.parse_args().language
    if language:
        return build_language(language)
    start = time.monotonic()
    try:
        check_sources()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = build_languages()
    if failed:
        print(f"error: the build of {' and '.join(failed)} failed, see above", file=sys.stderr)
        return 1
    write_front()
    seconds = time.monotonic() - start
    print(f"Built 中文 and English in {seconds:.0f} s. Open _build/html/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
