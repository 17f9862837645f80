# SPDX-License-Identifier: Apache-2.0
"""plot.py OUT: a report of package peers on standard input as a picture, of the kind that OUT's
ending says (svg, png): bandwidth over size and latency over batch, of each lane. Or a sweep of
sluice bench: bandwidth and latency over size.
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "sluice"  # the same report gives the same file
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

LANES = {"host": "One host", "tcp": "TCP over the loopback", "rdma": "RDMA", "file": "A file"}

# One line for each engine: of several settings of one the best, and of ours no drivers in Python,
# which the table has.
FAMILIES = {"nixl": "NIXL, best of its settings", "nixl-polled": "NIXL, best of its settings",
            "nixl-uring": "NIXL, best of its settings",
            "mooncake": "Mooncake"}
LEFT_OUT = {"sluice-python", "sluice-nixl"}
COLOURS = {"NIXL, best of its settings": "tab:orange", "Mooncake": "tab:green"}
OURS = ("tab:blue", "tab:cyan", "tab:purple")
SMALL = {"file": 4096}  # the size of the pieces that latency is drawn for; elsewhere 656


def size_name(size, _=None):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{int(size // unit)} {name}"
    return f"{int(size)} B"


def number(value, _=None):
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def transfers(report, lane, **want):
    for row in report["rows"]:
        if row["kind"] == "transfer" and row["lane"] == lane and row.get("gbps") and row[
            "peer"] not in LEFT_OUT:
            if all(row[key] == value for key, value in want.items()):
                yield row


def draw(axes, rows, over, value, best, style):
    lines = {}
    for row in rows:
        points = lines.setdefault(FAMILIES.get(row["peer"], row["peer"]), {})
        points[row[over]] = best(points.get(row[over], row[value]), row[value])
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points.items())), label=name, **style[name])


def styles(rows):
    """Ours are thick and blue, the others dashed, yardsticks grey and dotted."""
    found, ours = {}, iter(OURS * 2)
    for row in rows:
        name = FAMILIES.get(row["peer"], row["peer"])
        if name in found:
            continue
        if row.get("yardstick"):
            found[name] = {"color": "grey", "linestyle": ":", "marker": "^", "markersize": 4,
                           "linewidth": 1.2}
        elif row.get("ours"):
            found[name] = {"color": next(ours), "linestyle": "-", "marker": "o", "markersize": 5,
                           "linewidth": 2.2}
        else:
            found[name] = {"color": COLOURS.get(name, "tab:red"), "linestyle": "--", "marker": "s",
                           "markersize": 5, "linewidth": 1.8}
    return found


def largest(rows):
    """Of each peer and size the largest batch: 64, or what the memory holds."""
    best = {}
    for row in rows:
        if row["batch"] <= 64:
            key = row["peer"], row["size"]
            if key not in best or best[key]["batch"] < row["batch"]:
                best[key] = row
    return best.values()


def ruled(axes, title, ticks, tick_name, x, y):
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    axes.set_xticks(ticks, minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(tick_name))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    low, high = axes.get_ylim()
    if high / low > 100:
        axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(number))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", alpha=0.3)


def lane_row(panels, report, lane):
    style = styles(transfers(report, lane))
    for axes, op in zip(panels, ("write", "read")):
        rows = list(largest(transfers(report, lane, op=op, adjacent=False)))
        draw(axes, rows, "size", "gbps", max, style)
        ruled(axes, f"{LANES[lane]}: {op} (higher is better)",
              sorted({row["size"] for row in rows}), size_name,
              "size of each of up to 64 scattered pieces", "GB/s")
    small = SMALL.get(lane, 656)
    rows = list(transfers(report, lane, op="write", adjacent=False, size=small))
    draw(panels[2], rows, "batch", "p50_us", min, style)
    ruled(panels[2], f"{LANES[lane]}: write of {size_name(small)} each (lower is better)",
          sorted({row["batch"] for row in rows}),
          number, "scattered pieces of an operation", "p50 of an operation, µs")
    panels[0].legend(fontsize=8, loc="best", framealpha=0.6)


def peers(report):
    lanes = [lane for lane in LANES if any(True for _ in transfers(report, lane))]
    if not lanes:
        sys.exit("the report has no transfers")
    figure, grid = plt.subplots(len(lanes), 3, figsize=(16, 4.4 * len(lanes)), squeeze=False,
                                layout="constrained")
    for panels, lane in zip(grid, lanes):
        lane_row(panels, report, lane)
    m = report["machine"]
    title = f"{m['processor']}, {m['processors']} processors, {report['begun'][:10]}"
    if report.get("revision"):
        title += f", sluice at {report['revision']}"
    if m.get("indicative"):
        title += ": others used the machine, so these figures are indicative"
    return figure, title


def sweep(report):
    results = report["results"]
    figure, panels = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    sizes = [row["size"] for row in results]
    names = [[b["name"] for b in row["baselines"]] for row in results]
    ours = results[0]["backend"]
    for axes, value, title, y in (
            (panels[0], "gbps", "higher is better", "GB/s"),
            (panels[1], "p50_us", "lower is better", "p50 of an operation, µs")):
        axes.plot(sizes, [row[value] for row in results], label=ours, zorder=3, color=OURS[0],
                  marker="o", markersize=5, linewidth=2.2)
        for i, name in enumerate(dict.fromkeys(sum(names, [])), 1):
            points = [(row["size"], b[value]) for row in results for b in row["baselines"]
                      if b["name"] == name and b[value]]
            if points:
                axes.plot(*zip(*points), label=name, color=f"C{i}", linestyle="--", marker="s",
                          markersize=4, linewidth=1.4)
        ruled(axes, f"{ours}: {results[0]['op']} ({title})", sizes, size_name,
              "size of each piece", y)
    panels[0].legend(fontsize=8, loc="best", framealpha=0.6)
    return figure, report["title"]


def main(picture):
    report = json.load(sys.stdin)
    figure, title = sweep(report) if "results" in report else peers(report)
    figure.suptitle(title, fontsize=11)
    figure.savefig(picture, dpi=90, metadata={"Date": None} if picture.endswith(".svg") else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
