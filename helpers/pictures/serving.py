"""Chapter 18, drawn: the time of a batch, requests on their way through the batcher."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from helpers.pictures.draw import BLUE, GRAY, GREEN, ORANGE


def draw_curve(ax: Axes, times: Mapping[int, Sequence[float]]) -> None:
    """Draw milliseconds against batch size, and what each sample costs.

    times: batch size -> p20, median, p80 of one call of the model.
    """
    sizes = list(times)
    medians = [times[size][1] for size in sizes]
    low = [times[size][1] - times[size][0] for size in sizes]
    high = [times[size][2] - times[size][1] for size in sizes]
    ax.errorbar(sizes, medians, yerr=[low, high], color=BLUE, marker="o", label="the whole batch")
    each = [median / size for size, median in zip(sizes, medians, strict=True)]
    ax.plot(sizes, each, color=ORANGE, marker="s", label="each sample in it")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, sizes)
    ax.set_xlabel("samples in the batch")
    ax.set_ylabel("ms")
    ax.legend(frameon=False)


def draw_requests(
    ax: Axes,
    arrivals: Sequence[float],
    latencies: Sequence[float],
    sizes: Sequence[int],
    *,
    until: float,
    title: str,
) -> None:
    """Draw each request as a line from its arrival to its answer, batches in turning colors.

    arrivals, latencies: in seconds, as `queueing.simulate` takes and returns them.
    """
    first, lines = 0, []
    for number, size in enumerate(sizes):
        color = (BLUE, ORANGE, GREEN)[number % 3]
        for request in range(first, first + size):
            if arrivals[request] <= until:
                start, end = arrivals[request], arrivals[request] + latencies[request]
                lines.append((request, 1e3 * start, 1e3 * end, color))
        first += size
    rows, starts, ends, colors = zip(*lines, strict=True)
    ax.hlines(rows, starts, ends, colors=colors, lw=1.6)
    ax.scatter(ends, rows, s=6, c=colors)
    ax.set_xlim(0, 1e3 * until)
    ax.set_xlabel("ms")
    ax.set_ylabel("request")
    ax.set_title(title, fontsize=10, color=GRAY)
