# Installs what this notebook imports, where it is missing (Colab lacks mlxtend).
import importlib
import importlib.util
import subprocess
import sys

packages = ("torch", "matplotlib", "mlxtend")
missing = [package for package in packages if importlib.util.find_spec(package) is None]
if missing:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
    importlib.invalidate_caches()
