"""Draw speed.svg, the chart of README.md, from the medians in docs/benchmarks.md (machines A and D).

Usage: python docs/images/speed.py
"""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

# What was measured -> the other library's time divided by Quiver's: median, lowest, highest.
RATIOS = {
    "encode 16 documents of 256 tokens\nModernBERT-base, transformers (A)": (2.10, 2.09, 2.23),
    "encode 1 document of 8,192 tokens\nModernBERT-base, transformers (A)": (2.90, 2.75, 2.94),
    "encode SciFact\nMiniLM, sentence-transformers (D)": (1.84, 1.68, 2.00),
    "train a bi-encoder (MNRL)\nMiniLM, sentence-transformers (D)": (2.25, 1.72, 2.81),
    "train a ColBERT\nMiniLM, PyLate (D)": (2.15, 1.76, 2.57),
}


def main() -> None:
    """Write speed.svg beside this file."""
    mpl.rcParams.update({"svg.hashsalt": "quiver", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.5, 3.4))
    for place, (median, low, high) in enumerate(RATIOS.values()):
        axes.barh(place, median, height=0.6, color="#3b6ea5")
        axes.plot([low, high], [place, place], color="#1d3550", linewidth=2)
        axes.text(high + 0.06, place, f"{median:.2f}x", va="center")
    axes.axvline(1, color="#777777", linewidth=1)
    axes.set_yticks(range(len(RATIOS)), RATIOS)
    axes.invert_yaxis()
    axes.set_xlim(0, 3.5)
    axes.set_xlabel("time of the other library / time of Quiver, two CPU cores (1 = equal)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("speed.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
