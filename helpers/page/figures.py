"""Every chapter: figures that move without a kernel."""

import base64
import html
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import matplotlib
from IPython.display import display
from matplotlib.figure import Figure

from helpers.pictures.draw import STYLE


def explore(
    draw: Callable[..., None], *, size: tuple[float, float] = (6.4, 3.2), **values: Sequence[Any]
) -> None:
    """Show `draw(ax, name=value, …)` with one slider for each of `values`.

    One output, three forms: a live widget (JupyterLab, Colab), pre-rendered frames under HTML
    sliders (the built page: mouse and keyboard, no kernel), the first frame as PNG (print).
    Every combination is rendered, so keep the product of the lengths at 40 or less.
    """
    grid = [dict(zip(values, v, strict=True)) for v in itertools.product(*values.values())]
    if not 1 < len(grid) <= 40:
        raise ValueError(f"expected 2 to 40 frames, got {len(grid)} from {list(values)}")
    frames = [_render(draw, point, size, "svg") for point in grid]
    png = _render(draw, grid[0], size, "png")
    text = "; ".join(f"{name} = {', '.join(map(_show, vs))}" for name, vs in values.items())
    bundle = {
        "text/plain": f"<interactive figure: {text}>",
        "text/html": _html(frames, values, text),
        "image/png": base64.b64encode(png).decode(),
        "application/vnd.jupyter.widget-view+json": {
            "version_major": 2,
            "version_minor": 0,
            "model_id": _widget(frames, values).model_id,
        },
    }
    display(bundle, raw=True)


def _render(draw: Callable, point: dict[str, Any], size: tuple[float, float], kind: str) -> bytes:
    out = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)  # not pyplot: the notebook's own figures stay as they are
        draw(figure.subplots(), **point)
        figure.savefig(out, format=kind, metadata={"Date" if kind == "svg" else "Software": None})
    if kind == "png":
        return out.getvalue()
    # enough for the eye, and it repeats where the last bits of a float do not
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue().decode(), flags=re.DOTALL)
    svg = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.4g}", svg)
    return re.sub(r"\s*\n\s*", "\n", svg).encode()


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _image(frame: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(frame).decode()


SCRIPT = """(function () {
  var f = document.currentScript.parentNode, q = f.querySelectorAll("input"), F = %s, V = %s;
  function show() {
    var k = 0;
    q.forEach(function (s, i) {
      k = k * V[i].length + +s.value;
      s.nextElementSibling.textContent = V[i][+s.value];
      s.setAttribute("aria-valuetext", V[i][+s.value]);
    });
    f.querySelector("img").src = F[k];
  }
  q.forEach(function (s) { s.addEventListener("input", show); });
})();"""


def _html(frames: list[bytes], values: dict[str, Sequence[Any]], text: str) -> str:
    images = [_image(frame) for frame in frames]
    shown = [[_show(v) for v in vs] for vs in values.values()]
    sliders = "".join(
        f'<label><code>{name}</code> <input type="range" min="0" max="{len(vs) - 1}" value="0" '
        f'step="1" aria-label="{name}" aria-valuetext="{vs[0]}"><output>{vs[0]}</output></label>'
        for name, vs in zip(values, shown, strict=True)
    )
    script = SCRIPT % (json.dumps(images), json.dumps(shown))
    image = f'<img alt="{html.escape(f"interactive figure: {text}")}" src="{images[0]}">'
    return f'<figure class="explore">{image}{sliders}<script>{script}</script></figure>'


def _widget(frames: list[bytes], values: dict[str, Sequence[Any]]) -> ipywidgets.Widget:
    picture = ipywidgets.HTML()
    sliders = [
        ipywidgets.SelectionSlider(options=[(_show(v), i) for i, v in enumerate(vs)], description=n)
        for n, vs in values.items()
    ]

    def show(_change: Any = None) -> None:
        k = 0
        for slider, vs in zip(sliders, values.values(), strict=True):
            k = k * len(vs) + slider.value
        picture.value = f'<img style="max-width:100%" src="{_image(frames[k])}">'

    for slider in sliders:
        slider.observe(show, "value")
    show()
    return ipywidgets.VBox([*sliders, picture])
