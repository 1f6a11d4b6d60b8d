"""Section addresses: the ASCII label comes first, so that both languages share every #fragment."""

from __future__ import annotations

from docutils import nodes


def label_first(app, doctree) -> None:
    """Hook, before tables of contents are made: a section's written label becomes its id."""
    for section in doctree.findall(nodes.section):
        written = [
            doctree.nameids[name]
            for name in section["names"]
            if doctree.nametypes.get(name) and doctree.nameids.get(name) in section["ids"]
        ]
        section["ids"].sort(key=lambda name: name not in written)


def setup(app) -> None:
    app.connect("doctree-read", label_first, priority=100)
