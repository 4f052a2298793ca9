"""Draws cycle.svg, the picture of docs/how-it-works.md: `python docs/img/cycle.py` (needs matplotlib).

Its own light card is part of the picture, so that it reads the same on light and dark pages.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, FAINT, CARD = "#23262d", "#6b7280", "#fbfaf7"
BLUE, ORANGE, VIOLET, GREEN, RED, GREY = "#2f6db3", "#d9731a", "#7452b8", "#2f8552", "#c0392b", "#9aa0aa"
WIDTH, HEIGHT = 13.0, 8.4
LEFT, SIZE, STEP = 4.75, 0.78, 0.98  # of the block's first token, of a token, from one to the next

# A block of six: the anchor, five drafts, and what the target would have said at each.
ANCHOR = "of"
DRAFTS = ["them", "are", "red", ".", "How"]
TARGET = ["them", "are", "red", ",", "so", "the"]
ACCEPTED = 3


def column(slot: int) -> float:
    return LEFT + slot * STEP


def box(ax, x, y, width, height, edge, face, line=1.4, style="-", round_=0.1):
    shape = f"round,pad=0,rounding_size={round_}"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, ec=edge, fc=face, lw=line, ls=style))


def say(ax, x, y, text, color=INK, size=9.6, **options):
    ax.text(x, y, text, ha="center", va="center", size=size, color=color, **options)


def token(ax, x, y, text, color, filled=True, faded=False, style="-"):
    face = color + "22" if filled else "#ffffff"
    box(ax, x, y, SIZE, 0.5, color + ("66" if faded else ""), face if not faded else "#ffffff", style=style)
    say(ax, x + SIZE / 2, y + 0.25, text, GREY if faded else INK, size=10.5)


def arrow(ax, start, end, color=INK, width=1.4, head=9):
    style = {"arrowstyle": "-|>", "mutation_scale": head, "color": color, "lw": width, "capstyle": "round"}
    ax.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def path(ax, points, color):
    """Straight pieces, the last one with a head."""
    ax.plot(*zip(*points[:-1], strict=True), color=color, lw=1.6, solid_capstyle="round")
    arrow(ax, points[-2], points[-1], color, width=1.6, head=11)


def step(ax, x, y, number, title, *lines):
    ax.add_patch(plt.Circle((x, y), 0.19, color=INK))
    say(ax, x, y - 0.01, str(number), "white", size=10.5, weight="bold")
    ax.text(x + 0.32, y, title, ha="left", va="center", size=11.5, color=INK, weight="bold")
    for i, line in enumerate(lines, 1):
        ax.text(x + 0.32, y - 0.27 * i, line, ha="left", va="center", size=9.6, color=FAINT)


def center(slot: int) -> float:
    return column(slot) + SIZE / 2


def draw(ax) -> None:
    box(ax, 0.05, 0.05, WIDTH - 0.1, HEIGHT - 0.1, "#d8d5cc", CARD, line=1.2, round_=0.25)
    block, drafter, drafts, target, chosen = 6.95, 5.1, 4.1, 2.1, 0.95  # heights
    right = column(5) + SIZE
    middle, notes, edge = (column(0) + right) / 2, right + 0.5, WIDTH - 0.35

    # The block, and the drafter's pass over it.
    step(ax, 0.5, block + 0.5, 1, "Block", "the newest token (the anchor), then", "mask tokens that one pass fills")
    token(ax, column(0), block, ANCHOR, ORANGE)
    for slot in range(1, 6):
        token(ax, column(slot), block, "mask", GREY, filled=False, style=(0, (3, 2)))
    for slot in range(6):
        arrow(ax, (center(slot), block - 0.05), (center(slot), drafter + 1.12), FAINT, width=1.0)
    box(ax, column(0) - 0.12, drafter, right - column(0) + 0.24, 1.08, VIOLET, VIOLET + "12", line=1.8)
    say(ax, middle, drafter + 0.72, "Drafter: a few layers, one pass", size=12, weight="bold")
    say(ax, middle, drafter + 0.33, "queries: block      keys and values: context features and block", FAINT)
    for slot in range(1, 6):
        arrow(ax, (center(slot), drafter - 0.03), (center(slot), drafts + 0.53), VIOLET, width=1.2)
    step(ax, notes, drafter + 0.78, 2, "Draft", "by the target's", "LM head")

    # The drafts, and the target's pass over them.
    token(ax, column(0), drafts, ANCHOR, ORANGE)
    for slot, text in enumerate(DRAFTS, 1):
        token(ax, column(slot), drafts, text, VIOLET)
        sign, color = ("\u2713", GREEN) if slot <= ACCEPTED else ("\u2717", RED) if slot == ACCEPTED + 1 else ("", INK)
        say(ax, center(slot) + 0.22, drafts - 0.2, sign, color, size=13)
    for slot in range(6):
        arrow(ax, (center(slot), drafts - 0.04), (center(slot), target + 1.5), FAINT, width=1.0)
    box(ax, 0.5, target, right - 0.5 + 0.12, 1.46, BLUE, BLUE + "0f", line=1.8)
    for i in range(3):
        y = target + 0.3 + 0.28 * i
        ax.plot([0.78, right - 0.1], [y, y], color=BLUE, lw=1.2, ls=(0, (1, 2)), alpha=0.55)
        for slot in range(ACCEPTED + 1):
            ax.plot(center(slot), y, "o", ms=6, color=BLUE)
    ax.text(0.78, target + 1.2, "Target: one pass over the block", va="center", size=12, color=INK, weight="bold")
    say(ax, 2.55, target + 0.58, "the text so far: cached", FAINT, bbox={"fc": "#f2f4f5", "ec": "none", "pad": 2})
    step(ax, notes, target + 1.16, 3, "Verify", "the longest prefix", "that the target", "agrees with")

    # What the target says, and what is committed.
    for slot in range(ACCEPTED + 1):
        arrow(ax, (center(slot), target - 0.03), (center(slot + 1) - 0.12, chosen + 0.53), FAINT, width=1.0)
    for slot, text in enumerate(TARGET, 1):
        kept, bonus = slot <= ACCEPTED, slot == ACCEPTED + 1
        token(ax, column(slot), chosen, text, GREEN if kept else ORANGE if bonus else GREY, faded=not (kept or bonus))
    start, end = column(1), column(4) + SIZE
    ax.plot([start, start, end, end], [chosen - 0.12, chosen - 0.22, chosen - 0.22, chosen - 0.12], color=INK, lw=1.2)
    say(ax, (start + end) / 2, chosen - 0.45, "committed in this cycle: 3 drafts and the bonus token", size=10)
    step(ax, 0.5, chosen + 0.3, 4, "Commit", "where a draft is refused, the", "target's own token: the bonus token")

    # Around again.
    from_, over = center(4) + 0.2, block + 0.8
    turn = [(from_, chosen + 0.5), (from_, chosen + 0.75), (edge, chosen + 0.75), (edge, over)]
    path(ax, [*turn, (center(0), over), (center(0), block + 0.53)], ORANGE)
    say(ax, middle + 0.5, over + 0.22, "the bonus token is the next anchor", ORANGE, size=10)

    # Context features of the text so far.
    shelf = drafter + 0.26
    for i in range(6):
        box(ax, 0.5 + 0.42 * i, shelf, 0.32, 0.56, BLUE, BLUE + "33", line=1.1, round_=0.06)
    arrow(ax, (3.1, shelf + 0.28), (column(0) - 0.17, shelf + 0.28), BLUE, width=2.0, head=13)
    say(ax, (3.1 + column(0) - 0.15) / 2, shelf + 0.5, "K, V", BLUE, size=10, weight="bold")
    path(ax, [(0.66, target + 1.5), (0.66, shelf - 0.06)], BLUE)
    step(ax, 1.1, drafts + 0.52, 5, "Context features", "hidden states of a few layers, for the",
         "committed tokens: RMSNorm($W_c$ [...])")  # fmt: skip


def main() -> None:
    plt.rcParams.update({"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "cycle"})
    figure = plt.figure(figsize=(WIDTH, HEIGHT))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    ax.axis("off")
    draw(ax)
    out = Path(__file__).with_name("cycle.svg")
    figure.savefig(out.with_suffix(".svg.new"), format="svg", transparent=True, metadata={"Date": None})
    out.with_suffix(".svg.new").replace(out)


if __name__ == "__main__":
    main()
