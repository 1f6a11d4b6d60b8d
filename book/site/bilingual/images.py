"""Pictures: plots as WebP, the same pixels in 40 % of the bytes; each in a box that can scroll."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

from PIL import Image

HASH = r"[0-9a-f]{64}"  # MyST-NB names the picture of an output by what is in it
PLOT = re.compile(rf"(_images/{HASH})\.png")
PICTURE = re.compile(r"(<(?:figure\b[^>]*|p)>\s*)(<img\b[^>]*>)")
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


def framed(body: str) -> str:
    """The pictures of figures and those that are a paragraph, each in a box that can scroll."""
    return PICTURE.sub(r'\1<span class="picture">\2</span>', body)


def link(app, pagename, templatename, context, doctree) -> None:
    """Hook: pages show the WebP that `convert` will write, and every picture in its box."""
    if "body" in context:
        context["body"] = framed(PLOT.sub(r"\1.webp", context["body"]))


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
