"""Links from an output into the book: `<a data-label="…">` gets the address of that section.

A notebook cannot know it. There, and in Colab, the anchor has no address and is plain text.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.util import logging

PLACE = re.compile(r'<a data-label="([\w-]+)">')
LOGGER = logging.getLogger(__name__)


def resolve(app, doctree, docname: str) -> None:
    """Hook: fill in the addresses; a label that no section has is a warning."""
    labels = app.env.get_domain("std").anonlabels

    def link(match: re.Match) -> str:
        if match[1] not in labels:
            LOGGER.warning("an output links to an unknown label: %s", match[1], location=docname)
            return match[0]
        target, anchor = labels[match[1]]
        page = app.builder.get_relative_uri(docname, target)
        return f'<a class="reference internal" href="{page}#{anchor}">'

    for raw in doctree.findall(nodes.raw):
        if "html" in raw.get("format", "").split() and "data-label=" in raw.astext():
            raw.children = [nodes.Text(PLACE.sub(link, raw.astext()))]


def setup(app) -> None:
    app.connect("doctree-resolved", resolve)
