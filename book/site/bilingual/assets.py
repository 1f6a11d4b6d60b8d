"""What a page loads: MathJax from this site, and no script or style the page does not use."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

# MathJax in the parts that `_config.yml` loads: its one file adds a menu of 100 KB gzipped.
MATHJAX_PARTS = (
    "startup.js",
    "core.js",
    "input/tex.js",
    "input/tex/extensions",
    "output/chtml.js",
    "output/chtml/fonts",
    "a11y/assistive-mml.js",
)
# A file whose name holds the key is loaded only where the page's body holds one of the values.
NEEDED_BY = {
    "thebe": (),
    "sphinx-thebe": (),
    "togglebutton": (),
    "design-tabs": ("sd-tab-set",),
    "sphinx-design": ('class="sd-', " sd-"),
    "clipboard": ("highlight",),
    "copybutton": ("highlight",),
    # Sphinx adds it to a page whose chapters have formulas, too: to the home page of every book.
    "mathjax": ('class="math',),
}
# Inline scripts that belong to the files above.
INLINE_OF = {
    "THEBE_JS_URL": (),
    "toggleHint": (),
    "togglebuttonSelector": (),
    "toggleOpenOnPrint": (),
    "window.MathJax": NEEDED_BY["mathjax"],
}
# What the theme ships of Font Awesome; icons.py draws the few icons that the pages show.
UNUSED = ("scripts/fontawesome.js", "scripts/fontawesome.js.LICENSE.txt", "vendor/fontawesome")
ICON_RULES = re.compile(r'(?:\.fa-[\w-]+:(?:before|after),?)+\{content:"[^"]*"\}')
ICON_FONTS = re.compile(r"@font-face\{[^{}]*fontawesome[^{}]*\}")


def mathjax_source() -> Path:
    """The folder of the PyPI package `sphinx-mathjax-offline` that holds MathJax."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise ValueError("MathJax: expected the package sphinx-mathjax-offline to be installed")
    return Path(spec.origin).parent / "static" / "mathjax"


def copy_mathjax(static: Path) -> None:
    """Copy the 1.6 MB of MathJax that the pages use (the package holds 24 MB)."""
    source, target = mathjax_source(), static / "mathjax"
    for part in MATHJAX_PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / part, target / part)


def is_needed(asset, body: str) -> bool:
    """Does this page need this script or style sheet?"""
    name = str(getattr(asset, "filename", asset) or "")
    inline = str(getattr(asset, "attributes", {}).get("body", ""))
    known = [words for key, words in NEEDED_BY.items() if key in name]
    known += [words for key, words in INLINE_OF.items() if key in inline]
    return all(any(word in body for word in words) for words in known)


def drop_unneeded(app, pagename, templatename, context, doctree) -> None:
    """Hook, after all others have added their files."""
    body = context.get("body", "")
    for kind in ("script_files", "css_files"):
        context[kind] = [asset for asset in context[kind] if is_needed(asset, body)]


def without_icons(css: str) -> str:
    """The theme's style sheet without Font Awesome's 2,000 rules: 65 → 45 KB gzipped."""
    return ICON_FONTS.sub("", ICON_RULES.sub("", css))


def drop_font_awesome(static: Path) -> None:
    """Take the icon font out of what is published, so that no page can load it."""
    for name in UNUSED:
        if (static / name).is_dir():
            shutil.rmtree(static / name)
        else:
            (static / name).unlink(missing_ok=True)
    for path in static.glob("styles/*.css"):
        path.write_text(without_icons(path.read_text(encoding="utf-8")), encoding="utf-8")


def finish(app, exception) -> None:
    """Hook: put MathJax beside the pages, take away what no page loads."""
    if exception is None and app.builder.format == "html":
        static = Path(app.outdir) / "_static"
        copy_mathjax(static)
        drop_font_awesome(static)
        shutil.rmtree(static / "locales", ignore_errors=True)  # the theme's catalogs, used above
        for path in static.rglob("*.map"):  # for the theme's developers: 3 MB a language
            path.unlink()


def setup(app) -> None:
    app.connect("html-page-context", drop_unneeded, priority=900)
    app.connect("build-finished", finish)
