"""Tracebacks: the lines of the cell and the message stay in sight, the libraries' lines are folded.

A page without scripts shows everything: `static/book.js` folds.
"""

from __future__ import annotations

import html
import itertools
import re

from .language import of

BLOCK = re.compile(
    r'(<div class="output traceback [^"]*">)'
    r'<div class="highlight"><pre><span></span>(.*?)</pre></div>',
    re.S,
)
MARKUP = re.compile(r"<[^>]*>")
HEADING = re.compile(r"(\S+)\s+Traceback \(most recent call last\)")
FRAME = re.compile(r"Cell In\[|File ")
IN_SIGHT = 20  # lines above the message
FEW = 4  # lines that are not worth a fold
REST = {"zh": "调用栈的其余 {} 行", "en": "The other {} lines of the traceback"}


def parts(lines: list[str]) -> tuple[int, int] | None:
    """Where the fold begins and where it ends, which is where the message begins."""
    heading = next((n for n in reversed(range(len(lines))) if HEADING.match(lines[n])), None)
    if heading is None:
        return None
    name = HEADING.match(lines[heading])[1]
    below = range(heading + 1, len(lines))
    end = next((n for n in below if f"{lines[n]}:".startswith(f"{name}:")), None)
    if end is None:
        return None
    frames = [n for n in range(end) if FRAME.match(lines[n])]
    for first, after in itertools.pairwise([*frames, end]):
        too_long = after > IN_SIGHT and first != frames[0]
        if not lines[first].startswith("Cell") or too_long:
            return (first if end - first > FEW else end), end
    return end, end


def block(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f'<div class="highlight"><pre><span></span>{text}\n</pre></div>'


def fold(body: str, tag: str) -> str:
    """A page's body, in which each traceback is in two or three pieces."""

    def pieces(match: re.Match) -> str:
        marked = match[2].split("\n")  # Pygments leaves no element open at the end of a line
        found = parts([html.unescape(MARKUP.sub("", line)) for line in marked])
        if found is None:
            return match[0]
        begin, end = found
        written = [block(marked[:begin])]
        if begin < end:
            rest = marked[begin:end]
            while not rest[-1]:
                rest.pop()
            name = REST[tag].format(len(rest))
            written.append(
                f'<details class="frames" open><summary>{name}</summary>{block(rest)}</details>'
            )
        written.append(block(marked[end:]).replace("<pre>", '<pre class="message">', 1))
        return match[1] + "".join(written)

    return BLOCK.sub(pieces, body)


def fold_page(app, pagename, templatename, context, doctree) -> None:
    """Hook: fold the tracebacks of a page."""
    if "body" in context:
        context["body"] = fold(context["body"], of(app).tag)


def setup(app) -> None:
    app.connect("html-page-context", fold_page)
