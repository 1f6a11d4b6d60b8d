"""What a page loads: MathJax from this site, and no script or style the page does not use."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

MATHJAX_PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2", "input/tex/extensions")
# A file whose name holds the key is loaded only where the page's body holds one of the values.
NEEDED_BY = {
    "thebe": (),
    "sphinx-thebe": (),
    "togglebutton": (),
    "design-tabs": ("sd-tab-set",),
    "sphinx-design": ('class="sd-', " sd-"),
    "clipboard": ("highlight",),
    "copybutton": ("highlight",),
}
# Inline scripts that belong to the files above.
INLINE_OF = ("THEBE_JS_URL", "toggleHint", "togglebuttonSelector", "toggleOpenOnPrint")


def mathjax_source() -> Path:
    """The folder of the PyPI package `sphinx-mathjax-offline` that holds MathJax."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise ValueError("MathJax: expected the package sphinx-mathjax-offline to be installed")
    return Path(spec.origin).parent / "static" / "mathjax"


def copy_mathjax(static: Path) -> None:
    """Copy the 2 MB of MathJax that the pages use (the package holds 24 MB)."""
    source, target = mathjax_source(), static / "mathjax"
    for part in MATHJAX_PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / part, target / part)


def is_needed(asset, body: str) -> bool:
    """Does this page need this script or style sheet?"""
    name = str(getattr(asset, "filename", asset) or "")
    inline = str(getattr(asset, "attributes", {}).get("body", ""))
    if any(word in inline for word in INLINE_OF):
        return False
    for key, words in NEEDED_BY.items():
        if key in name:
            return any(word in body for word in words)
    return True


def drop_unneeded(app, pagename, templatename, context, doctree) -> None:
    """Hook, after all others have added their files."""
    body = context.get("body", "")
    for kind in ("script_files", "css_files"):
        context[kind] = [asset for asset in context[kind] if is_needed(asset, body)]


def finish(app, exception) -> None:
    """Hook: put MathJax beside the pages, take away what no page loads."""
    if exception is None and app.builder.format == "html":
        static = Path(app.outdir) / "_static"
        copy_mathjax(static)
        shutil.rmtree(static / "locales", ignore_errors=True)  # the theme's catalogs, used above


def setup(app) -> None:
    app.connect("html-page-context", drop_unneeded, priority=900)
    app.connect("build-finished", finish)
