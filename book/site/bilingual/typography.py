"""Line breaks: a Chinese line does not begin with the punctuation that belongs to a formula."""

from __future__ import annotations

from docutils import nodes

CLOSING = "，。；：、！？）」』”’,.;:!?)"


def tie_punctuation(app, doctree) -> None:
    """Hook: put a formula and the closing punctuation after it into one span that does not break.

    MathJax draws a formula as a box of its own, after which a browser may break the line even
    where the next character is a full stop; a word joiner between the two does not prevent it.
    """
    for formula in list(doctree.findall(nodes.math)):
        at = formula.parent.index(formula)
        after = formula.parent[at + 1] if at + 1 < len(formula.parent) else None
        if not isinstance(after, nodes.Text) or not after or after[0] not in CLOSING:
            continue
        parent = formula.parent
        tied = nodes.inline(classes=["tied"])
        parent.replace(formula, tied)
        tied += [formula, nodes.Text(after[0])]
        parent.replace(after, nodes.Text(after[1:]))


def setup(app) -> None:
    app.connect("doctree-read", tie_punctuation)
