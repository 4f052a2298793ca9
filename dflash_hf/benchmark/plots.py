"""PNG plots of a report: speed-up bars, acceptance by position, time shares (needs matplotlib)."""

import os
from pathlib import Path

from .report import Report

# Blue, orange and green of Okabe and Ito's palette, which colour-blind readers can tell apart.
SHARES = {"prefill": "#999999", "drafting": "#e69f00", "verifying": "#56b4e9", "other": "#dddddd"}
OURS, PEER = "#0072b2", "#b0b0b0"
OWN_LOOP = ("constant", "coupled", "adaptive")
MARKERS = "osD^vPX*<>"


def draw(report: Report, folder: str | os.PathLike, prefix: str = "bench") -> list[Path]:
    """Draw `<prefix>-speedup.png`, `<prefix>-acceptance.png` and `<prefix>-time.png`; return their paths.

    A plot that has nothing to show (no method offered a draft, say) is left out.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.

    Example:
        >>> draw(report, "plots")                                                              # doctest: +SKIP
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'Plots need matplotlib: pip install "dflash-hf[bench]" (in a clone: ".[bench]")'
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary, paths = report.summary(), []
    compared = {name: row for name, row in summary.items() if row["ratio"] is not None and name != "plain"}
    timed = {name: row["shares"] for name, row in summary.items() if None not in row["shares"].values()}
    accepting = {name: row for name, row in summary.items() if row["acceptance_by_position"]}

    def save(figure, name: str) -> None:
        path = folder / f"{prefix}-{name}.png"
        temporary = path.with_name(path.name + ".part")
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
        temporary.replace(path)
        plt.close(figure)
        paths.append(path)

    if compared:
        figure, axes = plt.subplots(figsize=(7, 0.4 * len(compared) + 1.2))
        ratios = [row["ratio"] for row in compared.values()]
        values = [ratio["value"] for ratio in ratios]
        errors = [[r["value"] - r["low"] for r in ratios], [r["high"] - r["value"] for r in ratios]]
        errors = [[max(error, 0) for error in side] for side in errors]  # rounding may put a bound past the ratio
        colors = [OURS if name.split()[0] in OWN_LOOP else PEER for name in compared]
        axes.barh(list(compared), values, xerr=errors, color=colors, capsize=3, height=0.7)
        for y, ratio in enumerate(ratios):
            text = f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            axes.text(1.02, y, text, transform=axes.get_yaxis_transform(), va="center")
        axes.axvline(1, color="black", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s over plain generate(), median and 95% interval (blue: dflash-hf)")
        save(figure, "speedup")
    if accepting:
        figure, axes = plt.subplots(figsize=(7, 4))
        for number, (name, row) in enumerate(accepting.items()):
            shares = row["acceptance_by_position"]
            # Methods often lie on each other: later lines and marks are smaller and leave the earlier ones visible.
            size = 1 + 2 * (len(accepting) - number) / len(accepting)
            style = {"linewidth": size, "markersize": 3 * size, "marker": MARKERS[number % len(MARKERS)]}
            axes.plot(range(1, len(shares) + 1), shares, label=name, alpha=0.8, **style)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axes.set(xlabel="position of the draft", ylabel="accepted, of the cycles that offered it", ylim=(-0.02, 1.02))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        save(figure, "acceptance")
    if timed:
        figure, axes = plt.subplots(figsize=(7, 0.4 * len(timed) + 1.2))
        left = [0.0] * len(timed)
        for share, color in SHARES.items():
            widths = [shares[share] for shares in timed.values()]
            axes.barh(list(timed), widths, left=left, label=share, color=color, height=0.7)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="share of the time", xlim=(0, 1))
        axes.legend(ncols=len(SHARES), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
        save(figure, "time")
    return paths
