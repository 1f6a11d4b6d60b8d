"""Sphinx extension: one set of bilingual sources, one site per language."""

from __future__ import annotations

from . import (
    anchors,
    assets,
    icons,
    images,
    language,
    links,
    notebooks,
    pages,
    repository,
    search,
    strings,
    switch,
    tracebacks,
    typography,
)

VERSION = "4"
PARTS = (
    strings,
    language,
    anchors,
    search,
    switch,
    repository,
    notebooks,
    pages,
    links,
    icons,
    images,
    tracebacks,
    typography,
    assets,
)


def setup(app) -> dict:
    """Each concern is a module of its own; README.md lists the hooks in their order."""
    for part in PARTS:
        part.setup(app)
    return {
        "version": VERSION,
        "env_version": VERSION,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
