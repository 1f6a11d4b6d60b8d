"""For all tests: what a fresh machine has to say must not appear in a chapter's first cell.

Matplotlib and IPython warn where the home folder cannot be written, or do not start, and Matplotlib
reports when it builds its list of fonts for the first time: all that happens here, before a kernel
starts.
"""

import os
import tempfile
from pathlib import Path


def writable(folder: Path) -> bool:
    """Try it: a mode tells root nothing, and a file system may forbid it to anybody."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


if not writable(Path.home()):
    HOME = tempfile.TemporaryDirectory(prefix="book-")  # removed with this process
    os.environ.setdefault("MPLCONFIGDIR", str(Path(HOME.name, "matplotlib")))
    os.environ.setdefault("IPYTHONDIR", str(Path(HOME.name, "ipython")))

# reads the environment, so only now; builds the list of fonts
import matplotlib.font_manager  # noqa: E402, F401
