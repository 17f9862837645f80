# SPDX-License-Identifier: Apache-2.0
"""plot.py REPORT.json OUT.svg: bandwidth over size and latency over batch, of each lane."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "peers"  # the same report gives the same file
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

LANES = {"host": "one host", "tcp": "TCP, loopback"}


def size_name(size, _=None):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{int(size // unit)} {name}"
    return f"{int(size)} B"


def transfers(report, lane, **want):
    for row in report["rows"]:
        if row["kind"] == "transfer" and row["lane"] == lane and row.get("gbps"):
            if all(row[key] == value for key, value in want.items()):
                yield row


def draw(axes, rows, over, value, style):
    lines = {}
    for row in rows:
        lines.setdefault(row["peer"], []).append((row[over], row[value]))
    for peer, points in lines.items():
        axes.plot(*zip(*sorted(points)), label=peer, **style[peer])


def styles(report):
    peers = dict.fromkeys(row["peer"] for row in report["rows"])
    colours, found = plt.get_cmap("tab10").colors, {}
    for i, peer in enumerate(peers):
        ours = peer.startswith("sluice")
        found[peer] = {"color": colours[i % 10], "marker": "o" if ours else "s", "markersize": 4,
                       "linestyle": "-" if ours else "--", "linewidth": 2 if ours else 1.3}
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


def main(report_file, picture):
    with open(report_file) as f:
        report = json.load(f)
    lanes = [lane for lane in LANES if any(True for _ in transfers(report, lane))]
    if not lanes:
        sys.exit("the report has no transfers")
    style = styles(report)
    figure, grid = plt.subplots(len(lanes), 3, figsize=(16, 4.6 * len(lanes)), squeeze=False, layout="constrained")
    for panels, lane in zip(grid, lanes):
        for axes, op in zip(panels, ("write", "read")):
            draw(axes, largest(transfers(report, lane, op=op, adjacent=False)), "size", "gbps", style)
            axes.set(title=f"{LANES[lane]}: {op}, up to 64 scattered pieces", xlabel="size of a piece", ylabel="GB/s", xscale="log", yscale="log")
            axes.xaxis.set_major_formatter(FuncFormatter(size_name))
            axes.set_xticks(sorted({row["size"] for row in transfers(report, lane)}), minor=False)
            axes.minorticks_off()
        draw(panels[2], transfers(report, lane, op="write", adjacent=False, size=656), "batch", "p50_us", style)
        panels[2].set(title=f"{LANES[lane]}: write, 656 B, scattered", xlabel="pieces of an operation", ylabel="p50, µs", xscale="log", yscale="log")
        for axes in panels:
            axes.grid(True, which="major", alpha=0.3)
        panels[0].legend(fontsize=8)
    m = report["machine"]
    busy = m["load_before"] > m["processors"] / 4
    figure.suptitle(f"{m['processor']}, {m['processors']} processors, {report['begun'][:10]}" + (", busy: indicative" if busy else ""), fontsize=10)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
