"""Where the book's repository is: from CI's environment or the git remote, never typed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEPLOYED = "gh-pages"  # the branch that holds the built site


@dataclass(frozen=True)
class Repository:
    """A repository on the web, with the addresses that the pages link to."""

    url: str
    branch: str

    @property
    def github(self) -> str | None:
        """`owner/name` on github.com, else None."""
        match = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", self.url)
        return match[1] if match else None

    def edit(self, path: str) -> str | None:
        return f"{self.url}/edit/{self.branch}/{path}" if self.github else None

    def issue(self, page: str) -> str | None:
        return f"{self.url}/issues/new?title={page}" if self.github else None

    def colab(self, path: str) -> str | None:
        """Colab opens notebooks of public GitHub repositories; the built ones are deployed."""
        base = "https://colab.research.google.com/github"
        return f"{base}/{self.github}/blob/{DEPLOYED}/{path}" if self.github else None


def web_address(remote: str) -> str | None:
    """A git remote as an https address without credentials; None when it is not on the web."""
    remote = remote.strip()
    ssh = re.fullmatch(r"(?:ssh://)?(?:[\w.-]+@)([\w.-]+)(?::\d+/|[:/])(.+)", remote)
    http = re.fullmatch(r"https?://(?:[^@/]*@)?([^/]+)/(.+)", remote)
    match = http or ssh
    if not match:
        return None
    return f"https://{match[1]}/{match[2].rstrip('/').removesuffix('.git')}"


def git(folder: Path, *command: str) -> str | None:
    """What a git command prints, None when it fails or there is no git."""
    try:
        done = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find(folder: Path, env: Mapping[str, str] = os.environ) -> Repository | None:
    """The repository this book is built from, None when neither CI nor git knows one."""
    branch = env.get("GITHUB_REF_NAME")
    if env.get("GITHUB_REPOSITORY"):
        server = env.get("GITHUB_SERVER_URL", "https://github.com")
        return Repository(f"{server}/{env['GITHUB_REPOSITORY']}", branch or "main")
    url = web_address(git(folder, "remote", "get-url", "origin") or "")
    if url is None:
        return None
    branch = branch or git(folder, "branch", "--show-current") or "main"
    return Repository(url, branch)


@cache
def current(folder: Path) -> Repository | None:
    """`find`, asked once a build."""
    return find(folder)


def add_links(app, pagename, templatename, context, doctree) -> None:
    """Hook: addresses for the header's repository, edit and issue buttons."""
    repository = context["repository"] = current(Path(app.srcdir))
    context["edit_url"] = None
    if repository and doctree is not None:
        source = Path(app.env.doc2path(pagename)).relative_to(app.srcdir)
        context["edit_url"] = repository.edit(source.as_posix())


def note_in_config(app, config) -> None:
    """Hook: another address is another configuration, so that all pages are written again."""
    config.bilingual_repository = str(current(Path(app.srcdir)))


def setup(app) -> None:
    app.add_config_value("bilingual_repository", "", "html")
    app.connect("config-inited", note_in_config)
    app.connect("html-page-context", add_links, priority=600)
