"""Icons as inline SVG: the theme names them by Font Awesome's classes, whose files weigh 700 KB.

The drawings are the book's own: a grid of 24, lines of 2.
"""

from __future__ import annotations

import re

CLASSES = re.compile(
    r'<(i|span) class="(?P<classes>[^"]*\bfa-(?:solid|regular|brands)\s+fa-(?P<name>[\w-]+)[^"]*)"'
    r"(?P<attributes>[^>]*)></\1>"
)
TITLE = re.compile(r'\btitle="([^"]*)"')
MODE = re.compile(r'data-mode="\w+"')

DRAWINGS = {
    "angle-left": '<path d="M15 5l-7 7 7 7"/>',
    "angle-right": '<path d="M9 5l7 7-7 7"/>',
    "arrow-up": '<path d="M12 20V4M5 11l7-7 7 7"/>',
    "bars": '<path d="M4 6h16M4 12h16M4 18h16"/>',
    "circle-half-stroke": '<circle cx="12" cy="12" r="9"/>'
    '<path d="M12 3a9 9 0 0 1 0 18z" fill="currentColor"/>',
    "circle-question": '<circle cx="12" cy="12" r="9"/>'
    '<path d="M9.5 9.5a2.5 2.5 0 1 1 3.6 2.2c-.8.4-1.1.9-1.1 1.8M12 17h.01"/>',
    "download": '<path d="M12 4v11M7 11l5 5 5-5M5 20h14"/>',
    "git-alt": '<circle cx="6" cy="6" r="2.5"/><circle cx="6" cy="18" r="2.5"/>'
    '<circle cx="18" cy="8" r="2.5"/><path d="M6 8.5v7M18 10.5c0 4-6 3-10 6"/>',
    "list": '<path d="M9 6h11M9 12h11M9 18h11M4 6h.01M4 12h.01M4 18h.01"/>',
    "magnifying-glass": '<circle cx="11" cy="11" r="7"/><path d="M16.5 16.5L21 21"/>',
    "moon": '<path d="M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"/>',
    "pencil": '<path d="M4 20l1-4L16 5l3 3L8 19zM14 7l3 3"/>',
    "play": '<path d="M7 4l13 8-13 8z"/>',
    "sun": '<circle cx="12" cy="12" r="4"/><path d="M12 2v2M12 20v2M2 12h2M20 12h2'
    'M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4"/>',
}


def drawn(match: re.Match) -> str:
    """One `<i class="fa-solid fa-sun …">` as an SVG that keeps what the theme's CSS asks for."""
    name = match["name"]
    if name not in DRAWINGS:
        raise ValueError(f"icon {name!r}: expected one of {sorted(DRAWINGS)}; draw it in icons.py")
    kept = [word for word in match["classes"].split() if not word.startswith("fa-")]
    title = TITLE.search(match["attributes"])
    mode = MODE.search(match["attributes"])
    return (
        f'<svg class="{" ".join(["icon", *kept])}" {mode[0] if mode else ""} viewBox="0 0 24 24" '
        'width="1em" height="1em" aria-hidden="true" focusable="false" fill="none" '
        'stroke="currentColor" stroke-width="2" stroke-linecap="round" stroke-linejoin="round">'
        f"{f'<title>{title[1]}</title>' if title else ''}{DRAWINGS[name]}</svg>"
    )


def inline(html: str) -> str:
    """A page's HTML with every icon drawn in its place."""
    return CLASSES.sub(drawn, html)


def offer(app, pagename, templatename, context, doctree) -> None:
    """Hook: layout.html passes what the theme has made through `draw_icons`."""
    context["draw_icons"] = inline


def setup(app) -> None:
    app.connect("html-page-context", offer)
