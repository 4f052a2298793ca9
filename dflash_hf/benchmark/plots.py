"""PNG plots of a report: speed-up bars, acceptance by position, time shares (needs matplotlib)."""

import os
from pathlib import Path

from .report import Report

SHARES = ("prefill", "drafting", "verifying", "other")


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
        raise ModuleNotFoundError('Plots need matplotlib: pip install "dflash-hf[bench]"') from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary, paths = report.summary(), []
    drafted = {name: row for name, row in summary.items() if row["ratio"] is not None and name != "plain"}
    accepting = {name: row for name, row in summary.items() if row["acceptance_by_position"]}

    def save(figure, name: str) -> None:
        path = folder / f"{prefix}-{name}.png"
        temporary = path.with_name(path.name + ".part")
        figure.savefig(temporary, format="png", dpi=150, bbox_inches="tight")
        temporary.replace(path)
        plt.close(figure)
        paths.append(path)

    if drafted:
        figure, axes = plt.subplots(figsize=(7, 0.5 * len(drafted) + 1.4))
        values = [row["ratio"]["value"] for row in drafted.values()]
        errors = [
            [row["ratio"]["value"] - row["ratio"]["low"] for row in drafted.values()],
            [row["ratio"]["high"] - row["ratio"]["value"] for row in drafted.values()],
        ]
        axes.barh(list(drafted), values, xerr=[[max(e, 0) for e in side] for side in errors], capsize=3)
        axes.axvline(1, color="black", linewidth=1)
        axes.invert_yaxis()
        axes.set_xlabel("tokens/s over plain generate(), 95% interval")
        save(figure, "speedup")
    if accepting:
        figure, axes = plt.subplots(figsize=(7, 4))
        for name, row in accepting.items():
            shares = row["acceptance_by_position"]
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
        axes.set(xlabel="position of the draft", ylabel="accepted, of the cycles that offered it", ylim=(0, 1.02))
        axes.legend()
        save(figure, "acceptance")
    if summary:
        figure, axes = plt.subplots(figsize=(7, 0.5 * len(summary) + 1.4))
        left = [0.0] * len(summary)
        for share in SHARES:
            widths = [row["shares"][share] for row in summary.values()]
            axes.barh(list(summary), widths, left=left, label=share)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="share of the time", xlim=(0, 1))
        axes.legend(ncols=len(SHARES), loc="lower center", bbox_to_anchor=(0.5, 1))
        save(figure, "time")
    return paths
