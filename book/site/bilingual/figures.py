"""Captions and alt text: a figure cell's `bilingual` metadata put into its outputs."""

from __future__ import annotations

import base64
import html
import re
from urllib.parse import quote

from markdown_it import MarkdownIt

from . import images

INLINE = MarkdownIt("commonmark")
IMG = re.compile(r"<img\b[^>]*>")
SVG = re.compile(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)")
READABLE = " /:;=,.()-_!*?@$+[]{}|~^"  # beside letters and digits; safe in HTML, JSON and a URL
ALT = re.compile(r"""\balt=("[^"]*"|'[^']*')""")


def localise(cell: dict, tag: str) -> None:
    """Give every figure output of a code cell this language's caption and alt text."""
    words = cell["metadata"].get("bilingual", {}).get(tag)
    if not words:
        return
    caption, alt = words.get("caption", ""), words.get("alt", "")
    bundles = [out["data"] for out in cell.get("outputs", []) if "data" in out]
    sliders = [data for data in bundles if is_explore(data)]
    for data in sliders:
        data["text/html"] = explore("".join(data["text/html"]), caption, alt)
    images = [data for data in bundles if "image/png" in data and "text/html" not in data]
    if sliders or not images:
        return  # the slider figure holds its own caption
    if len(images) < len(bundles):  # MyST-NB would put the caption under the other outputs, too
        for data in images:
            source = f"data:image/png;base64,{''.join(data['image/png']).strip()}"
            figure = f'<figure class="align-center"><img src="{source}"></figure>'
            data["text/html"] = explore(figure, caption, alt)
        return
    mystnb = cell["metadata"].setdefault("mystnb", {})
    mystnb["figure"] = {**mystnb.get("figure", {}), "caption": caption}
    mystnb["image"] = {**mystnb.get("image", {}), "alt": alt}


def is_explore(data: dict) -> bool:
    """Is this output bundle a figure with a slider?"""
    return 'class="explore"' in "".join(data.get("text/html", ""))


def explore(markup: str, caption: str, alt: str) -> str:
    """A figure in HTML with this language's alt text and, at its end, its caption."""
    if alt:
        markup = IMG.sub(lambda tag: with_alt(tag[0], alt), markup, count=1)
    if caption:
        figcaption = f"<figcaption>{INLINE.renderInline(caption)}</figcaption>"
        head, end, tail = markup.rpartition("</figure>")
        if not end:
            raise ValueError('explore output: expected <figure class="explore">…</figure>')
        markup = head + figcaption + end + tail
    return markup


def lighten(cell: dict) -> None:
    """Write the frames of a cell's sliders as text: a page that a server compresses loses 70 KB.

    What repeats from frame to frame repeats in text; in base64 no compressor finds it.
    """
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "text/html" in data:
            data["text/html"] = images.inline(SVG.sub(as_text, "".join(data["text/html"])))


def as_text(match: re.Match) -> str:
    """One SVG's data address, percent-encoded instead of base64."""
    return "data:image/svg+xml," + quote(base64.b64decode(match[1]), safe=READABLE)


def with_alt(tag: str, alt: str) -> str:
    """An `<img>` tag with this alt text in place of its own."""
    value = f'alt="{html.escape(alt, quote=True)}"'
    if ALT.search(tag):
        return ALT.sub(lambda _: value, tag, count=1)
    return tag.replace("<img", f"<img {value}", 1)
