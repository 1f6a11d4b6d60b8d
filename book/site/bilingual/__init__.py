"""Sphinx extension: one set of bilingual sources, one site per language."""

from __future__ import annotations

from . import anchors, assets, language, notebooks, pages, repository, search, strings, switch

VERSION = "1"


def setup(app) -> dict:
    """Each concern is a module of its own; the hooks' order is by their priorities."""
    for part in (strings, language, anchors, search, switch, repository, notebooks, pages, assets):
        part.setup(app)
    return {
        "version": VERSION,
        "env_version": VERSION,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
