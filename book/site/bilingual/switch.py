"""The header's language switch: the same page, the same section, in the other language."""

from __future__ import annotations

from pathlib import Path

from .language import LANGUAGES, of


def is_twin_build(app) -> bool:
    """Plain `jupyter-book build .` has one language and so no switch."""
    return app.builder.name == "html" and Path(app.outdir).name in LANGUAGES


def twins(page: str, root: str, here: str) -> list[dict]:
    """Links to this page in each language; `root` is the relative path to this build's top."""
    return [
        {
            "href": f"{root}../{language.tag}/{page}",
            "label": language.label,
            "hreflang": language.hreflang,
            "tag": language.tag,
            "current": language.tag == here,
        }
        for language in LANGUAGES.values()
    ]


def add_links(app, pagename, templatename, context, doctree) -> None:
    """Hook: links for the header's switch and for search engines."""
    context["twins"] = []
    if not is_twin_build(app):
        return
    root = context["pathto"]("", 1).rstrip("/")
    root = "" if root in (".", "") else root + "/"
    context["twins"] = twins(app.builder.get_target_uri(pagename), root, of(app).tag)
    context["metatags"] = context.get("metatags", "") + "".join(
        f'\n<link rel="alternate" hreflang="{twin["hreflang"]}" href="{twin["href"]}" />'
        for twin in context["twins"]
    )


def setup(app) -> None:
    app.connect("html-page-context", add_links, priority=600)
