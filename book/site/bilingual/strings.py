"""Words of the interface: our .po files compiled into the build folder and given to Sphinx."""

from __future__ import annotations

from pathlib import Path

from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po

LOCALE = Path(__file__).parent / "locale"


def compile_catalogs(target: Path) -> list[str]:
    """Write every `locale/xx/LC_MESSAGES/name.po` as `.mo` below `target`; return the names."""
    names = set()
    for source in sorted(LOCALE.glob("*/LC_MESSAGES/*.po")):
        compiled = target / source.relative_to(LOCALE).with_suffix(".mo")
        compiled.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as text, compiled.open("wb") as binary:
            write_mo(binary, read_po(text, locale=source.parts[-3]))
        names.add(source.stem)
    return sorted(names)


def drop_english_label(app, pagename, templatename, context, doctree) -> None:
    """Hook: myst-nb names every folded cell in English only; its visible text names it better."""
    if "body" in context:
        context["body"] = context["body"].replace(' aria-label="Toggle hidden content"', "")


def setup(app) -> None:
    app.connect("html-page-context", drop_english_label)
    target = Path(app.doctreedir) / "locale"
    for name in compile_catalogs(target):
        app.add_message_catalog(name, str(target))
