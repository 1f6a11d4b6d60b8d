"""The pages that introduce the book promise what is there, and the same everywhere."""

import re

import pytest
import yaml
from bilingual.language import blocks
from bilingual.terms import reading_order

PYTHONS = re.compile(r"3\.(\d\d)\s?(?:–|to)\s?3\.(\d\d)")


def page(root, tag: str) -> str:
    """The front page in one language."""
    text = (root / "book" / "index.md").read_text(encoding="utf-8")
    return "\n".join(block for tags, block, _ in blocks(text) if tag in tags)


@pytest.mark.parametrize("tag", ["zh", "en"])
def test_the_front_page_lists_every_chapter(root, tag):
    rows = re.findall(r"^\| \{doc\}`\.\./notebooks/(\w+)` \| ([^|]*) \|", page(root, tag), re.M)
    assert [stem for stem, _ in rows] == reading_order(root)
    for _, code in rows:
        for path in re.findall(r"`(helpers/[\w./]+)`", code):
            assert (root / path).exists(), path


def test_no_chapter_is_missing(root):
    numbers = sorted({int(stem[:2]) for stem in reading_order(root)})
    assert numbers == list(range(21))


def test_python_s_versions_are_the_same_everywhere(root):
    said = {
        name: set(PYTHONS.findall((root / name).read_text(encoding="utf-8")))
        for name in ("README.md", "README.zh.md", "book/index.md", "Makefile", "pyproject.toml")
    }
    assert len(set.union(*said.values())) == 1 and all(said.values()), said
    ((oldest, newest),) = set.union(*said.values())
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">=3.{oldest}"' in project
    jobs = yaml.safe_load((root / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{oldest}", f"3.{newest}"]


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_what_the_readme_names_is_there(root, name):
    text = (root / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:book|helpers|tests|benchmarks|\.ci|\.github)/[\w./-]*)`", text)
    named += [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert len(named) > 8
    missing = [path for path in named if not (root / path).exists()]
    assert not missing
