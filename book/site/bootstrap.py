# Makes `helpers` importable: in a clone of the book it does nothing; elsewhere (Colab, an empty
# folder) it clones the book and installs only the packages that are missing. What the book's
# helpers show is then in the language of this notebook.
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tomllib

os.environ["PYTORCH_BOOK_LANG"] = "@LANGUAGE@"
if importlib.util.find_spec("helpers") is None:
    repository = os.environ.get("PYTORCH_BOOK_REPO") or "@REPOSITORY@"
    if not repository:
        raise ValueError(
            "`helpers` is not importable and this notebook knows no repository: "
            "set the environment variable PYTORCH_BOOK_REPO to the book's git address."
        )
    clone = pathlib.Path("pytorch-book").resolve()
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", repository, clone], check=True)
    project = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    missing = []
    extra = project.get("optional-dependencies", {}).get("@CHAPTER@", [])
    for requirement in project["dependencies"] + extra:
        try:
            importlib.metadata.version(re.match(r"[\w.-]+", requirement)[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
    sys.path.insert(0, str(clone))
    importlib.invalidate_caches()
