"""The course's pictures: one style, a small vocabulary, data in and a matplotlib object out.

Colour-blind readers can tell the palette apart, and its lightness differs step by step, so that a grey print
still reads; lines differ in dash as well. Figures have a solid light background and stay legible in a dark
notebook.
"""

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import matplotlib.pyplot as plt
import numpy as np
import torch
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from course_lib.losses import clipped_surrogate
from course_lib.tree import TokenTree

P, R = ParamSpec("P"), TypeVar("R")

NAVY, VERMILION, TEAL, PURPLE, AMBER = "#0B3C6F", "#C8500A", "#1B9E8A", "#8A3F8F", "#D99100"
INK, GREY, PALE = "#222222", "#6B6B6B", "#E9E9E6"
MONO = "DejaVu Sans Mono"
CYCLE = (NAVY, VERMILION, TEAL, PURPLE, AMBER)
DASHES = ("-", "--", "-.", (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))

# Amber is worse than expected, blue better. The blue end is darker, so a grey print shows the sign too.
ADVANTAGE = LinearSegmentedColormap.from_list("advantage", ["#E0A030", "#F6E3BC", "#FFFFFF", "#A9C8E8", "#1F5FA8"])
WEIGHT = LinearSegmentedColormap.from_list("weight", ["#FFFFFF", "#BBD6E8", "#4C8FBF", "#0B3C6F"])

STYLE = {
    "figure.figsize": (8.0, 3.6),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "#FFFFFF",
    "savefig.facecolor": "#FFFFFF",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "axes.facecolor": "#FFFFFF",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E0",
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "hatch.linewidth": 0.6,
    "axes.prop_cycle": cycler(color=CYCLE) + cycler(linestyle=DASHES),
}


def use_course_style() -> None:
    """Draw everything from here on in the course's style, your own figures included."""
    plt.rcParams.update(STYLE)


def _styled(function: Callable[P, R]) -> Callable[P, R]:
    """Draw in the course's style whatever the caller's settings are."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with plt.rc_context(STYLE):
            result = function(*args, **kwargs)
            interactive = plt.isinteractive()
        # A notebook's backend turns this on with the first figure; rc_context would turn it off again, and later
        # figures would not be shown.
        plt.interactive(interactive)
        return result

    return wrapped


def _numbers(values) -> np.ndarray:
    """A list, array or tensor (on any device, with or without gradient) as float64."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=float)


def _signed(value: float, form: str = "+.2f") -> str:
    """A number with a real minus sign; 0 without a sign."""
    return format(value, form).replace("-", "−") if abs(value) > 1e-12 else "0"


def _axes(ax: Axes | None, width: float = 8.0, height: float = 3.6) -> Axes:
    return plt.subplots(figsize=(width, height))[1] if ax is None else ax


def _heading(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, weight="bold")


def _readable_on(colour) -> str:
    """Black or white, whichever contrasts more with `colour`."""
    return "#FFFFFF" if luminance(colour) < 0.36 else INK


def luminance(colour) -> float:
    """Relative luminance of a colour, 0 black to 1 white: what a grey print keeps of it."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot([0.2126, 0.7152, 0.0722], channels))


def _spread(positions: Sequence[float], gap: float) -> np.ndarray:
    """Move label positions apart until neighbours are at least `gap` apart, keeping their order and centre."""
    positions = np.asarray(positions, dtype=float)
    order = np.argsort(positions, kind="stable")
    blocks: list[list[float]] = []  # each: [centre, how many labels]
    for value in positions[order]:
        blocks.append([value, 1])
        while len(blocks) > 1:
            (low, n), (high, m) = blocks[-2:]
            if high - low >= gap * (n + m) / 2:
                break
            blocks[-2:] = [[(low * n + high * m) / (n + m), n + m]]
    placed = [centre + gap * (k - (n - 1) / 2) for centre, n in blocks for k in range(n)]
    result = np.empty_like(positions)
    result[order] = placed
    return result


@_styled
def token_strip(
    tokens: Sequence[Sequence[str]],
    mask,
    advantages=None,
    *,
    labels: Sequence[str] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Token sequences as boxes: hatched where given, coloured by advantage where sampled.

    Args:
        tokens: token texts of each row; rows may differ in length; long rows wrap.
        mask: 1 where the policy produced the token, rows as long as those of `tokens` or padded.
        advantages: one a row or one a token; None colours trained tokens alike.
        labels: a name for each row.

    Example:
        >>> ax = token_strip([["Q", "search", "answer"]], [[0, 1, 1]], [0.5], title="Two trained tokens")
        >>> len(ax.patches)
        3
    """
    values = [None if advantages is None else _numbers(advantages[i]) for i in range(len(tokens))]
    limit = max((abs(v).max() for v in values if v is not None and v.size), default=0.0) or 1.0
    ax, y, widest = _axes(ax, height=1.0), 0.0, 40.0
    for i, row in enumerate(tokens):
        shown = [_printable(token) for token in row]
        places = _wrapped([len(text) + 1.6 for text in shown], width=84.0)
        for k, (text, (x, line)) in enumerate(zip(shown, places, strict=True)):
            value = None if values[i] is None else values[i] if values[i].ndim == 0 else values[i][k]
            _token_box(ax, text, x, y + 1.5 * line, bool(mask[i][k]), None if value is None else value / limit)
        if labels is not None:
            ax.text(-1.2, y + 0.55, labels[i], ha="right", va="center", fontsize=10)
        end, last = (places[-1][0] + len(shown[-1]) + 1.6, places[-1][1]) if row else (0.0, 0)
        if values[i] is not None and values[i].ndim == 0:
            note = f"A = {_signed(float(values[i]))}"
            ax.text(end + 0.6, y + 1.5 * last + 0.55, note, va="center", fontsize=10, weight="bold")
        widest = max([widest, *(x + len(text) + 1.6 for text, (x, _) in zip(shown, places, strict=True))])
        y += 1.5 * (last + 1) + 0.35
    key = "hatched: given, not trained" + (" · boxed: written by the policy" if advantages is None else "")
    if advantages is not None:
        key += " · blue: A > 0, made likelier · amber: A < 0, made less likely"
    ax.text(0, y + 0.15, key, fontsize=9, color=GREY, va="center")
    ax.set_xlim(0 if labels is None else -1.1 * max(map(len, labels)) - 2, widest + (1 if advantages is None else 12))
    ax.set_ylim(y + 0.55, -0.3)
    ax.set_axis_off()
    if title:
        ax.set_title(title)
    if len(ax.figure.axes) == 1:
        ax.figure.set_size_inches(8.2, 0.27 * (y + 0.85) + (0.45 if title else 0.1))
    return ax


def _printable(text: str) -> str:
    """`text` as the font can show it: what a model samples may hold any character."""
    return "".join(c if _has_glyph(c) else "□" for c in text.replace("\n", "↵"))


@cache
def _has_glyph(character: str) -> bool:
    return get_font(findfont(MONO)).get_char_index(ord(character)) != 0


def _wrapped(widths: Sequence[float], width: float) -> list[tuple[float, int]]:
    """Left edge and line of boxes laid side by side in lines of at most `width`."""
    x, line, places = 0.0, 0, []
    for step in widths:
        if x + step > width and x > 0:
            x, line = 0.0, line + 1
        places.append((x, line))
        x += step
    return places


def _token_box(ax: Axes, text: str, x: float, y: float, trained: bool, value: float | None) -> None:
    """One token; `value` is its advantage from −1 to 1."""
    face = PALE if not trained else "#CFE0F0" if value is None else ADVANTAGE((value + 1) / 2)
    edge, thick, hatch = (INK, 1.0, None) if trained else ("#B5B5B0", 0.6, "////")
    size = len(text) + 1.6
    ax.add_patch(Rectangle((x, y), size - 0.3, 1.1, facecolor=face, edgecolor=edge, linewidth=thick, hatch=hatch))
    ax.text(
        x + size / 2 - 0.15, y + 0.55, text, ha="center", va="center", family=MONO, fontsize=9.5,
        color=_readable_on(face) if trained else GREY, parse_math=False,
        bbox=None if trained else {"facecolor": PALE, "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip


@_styled
def token_tree(tree: TokenTree, texts: Sequence[str], written, *, title: str | None = None) -> Axes:
    """A token tree: sequences from top to bottom, their tokens from left to right, and what begins alike in one box.

    A box holds the tokens of one path between two forks. At the right, how many sequences end alike.

    Args:
        tree: as `build_tree` returns it.
        texts: (N,) the text of each node's token.
        written: (N,) 1 where the policy wrote the token, 0 where it was given.

    Example:
        >>> from course_lib.tree import build_tree
        >>> tree = build_tree([[5, 6, 7, 8], [5, 6, 9]])
        >>> ax = token_tree(tree, ["2", " + 2?", " it", " is 4", " 5"], [0, 0, 1, 1, 1])
        >>> [text.get_text() for text in ax.texts][:3]
        ['2 + 2?\\n2 tokens', ' it is 4 · 2', ' 5']
    """
    boxes = _chains(tree, [bool(w) for w in _numbers(written)])
    for longest in range(26, 5, -1):  # as much of each text as the page has room for
        labels, widths = [], [0.0] * (1 + max(level for _, level, *_ in boxes))
        for nodes, level, top, bottom in boxes:
            label = _shortened(_printable("".join(texts[node] for node in nodes)), longest)
            count = f"\n{len(nodes)} token{'s' * (len(nodes) > 1)}" if bottom - top > 1 else f" · {len(nodes)}"
            labels.append(label + count * (bottom - top > 1 or len(nodes) > 1))
            widths[level] = max(widths[level], max(map(len, labels[-1].split("\n"))) + 1.6)
        if sum(widths) <= 96:
            break
    ax, rows = _axes(None), max(bottom for *_, bottom in boxes)
    last = tree.paths.gather(1, (tree.paths >= 0).sum(1, keepdim=True) - 1)[:, 0].tolist()
    for label, (nodes, level, top, bottom) in zip(labels, boxes, strict=True):
        x, given = sum(widths[:level]), not bool(written[nodes[0]])
        ax.add_patch(
            Rectangle(
                (x, top + 0.06), widths[level] - 0.3, bottom - top - 0.12, facecolor=PALE if given else "#CFE0F0",
                edgecolor="#B5B5B0" if given else INK, linewidth=0.6 if given else 1.0, hatch="////" if given else None,
            )
        )  # fmt: skip
        ax.text(
            x + widths[level] / 2 - 0.15, (top + bottom) / 2, label, ha="center", va="center", family=MONO, fontsize=9,
            color=GREY if given else INK, parse_math=False,
            bbox={"facecolor": PALE, "edgecolor": "none", "pad": 0.8} if given else None,
        )  # fmt: skip
        if (same := last.count(nodes[-1])) > 1:
            ax.text(x + widths[level] + 0.1, (top + bottom) / 2, f"× {same}", va="center", fontsize=9, color=GREY)
    ax.set_xlim(-0.1, max(60.0, sum(widths) + 4))
    ax.set_ylim(rows + 0.9, -0.1)
    key = "hatched: given; boxed: written by the policy; number: tokens in the box; × n: n sequences end alike"
    ax.text(0, rows + 0.55, key, fontsize=9, color=GREY, va="center")
    ax.set_axis_off()
    if title:
        ax.set_title(title)
    ax.figure.set_size_inches(8.2, 0.27 * (rows + 1) + (0.45 if title else 0.1))
    return ax


def _chains(tree: TokenTree, written: Sequence[bool]) -> list[tuple[list[int], int, int, int]]:
    """(nodes, forks before them, first row, one past the last row) of each path between two forks; a row is a leaf."""
    parents, ends = tree.parents.tolist(), tree.ends.tolist()
    children = [0] * len(parents)
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    leaves = [0]  # leaves[i]: how many there are before node i
    for count in children:
        leaves.append(leaves[-1] + (count == 0))
    boxes: list[tuple[list[int], int, int, int]] = []
    box_of: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent >= 0 and children[parent] == 1 and written[parent] == written[node]:
            box_of[node] = box_of[parent]
            boxes[box_of[node]][0].append(node)
        else:
            level = 0 if parent < 0 else boxes[box_of[parent]][1] + 1
            box_of[node] = len(boxes)
            boxes.append(([node], level, leaves[node], leaves[ends[node]]))
    return boxes


def _shortened(text: str, width: int) -> str:
    """Its beginning and its end, where it is longer than `width`; a blank that one could not see as ␣."""
    if not text.strip():
        return "␣" * len(text)
    return text if len(text) <= width else f"{text[: (width - 2) // 2]}…{text[-((width - 1) // 2) :]}"


@_styled
def group_bars(rewards, advantages, *, group_ids: Sequence | None = None, title: str | None = None) -> Figure:
    """Rewards of a group above, the advantages they become below; a dashed line is each group's mean reward.

    Args:
        rewards: (N,).
        advantages: (N,).
        group_ids: (N,) which group each belongs to; None: one group. Bars are drawn group by group.

    Example:
        >>> figure = group_bars([1, 0, 0, 1], [1.0, -1.0, -1.0, 1.0])
        >>> len(figure.axes)
        2
    """
    rewards, advantages = _numbers(rewards), _numbers(advantages)
    ids = np.asarray(["" for _ in rewards] if group_ids is None else [str(g) for g in group_ids])
    names = list(dict.fromkeys(ids))
    order = np.concatenate([np.flatnonzero(ids == name) for name in names])
    x = np.concatenate([np.flatnonzero(ids[order] == name) + 0.9 * k for k, name in enumerate(names)])
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8.0, 4.0))
    top.bar(x, rewards[order], color="#B9B9B4", edgecolor=INK, linewidth=0.8)
    for name in names:
        inside = x[ids[order] == name]
        mean = rewards[ids == name].mean()
        top.hlines(mean, inside[0] - 0.5, inside[-1] + 0.5, color=VERMILION, linestyle="--")
        label = f"{name} · mean {mean:.2g}" if name else f"mean {mean:.2g}"
        top.text(
            inside.mean(),
            1.02,
            label,
            transform=top.get_xaxis_transform(),
            ha="center",
            color=VERMILION,
            fontsize=10,
        )
    shade = (advantages[order] / max(abs(advantages).max(), 1e-9) + 1) / 2
    bottom.bar(x, advantages[order], color=ADVANTAGE(shade), edgecolor=INK, linewidth=0.8)
    bottom.axhline(0, color=INK, linewidth=0.8)
    for axis, values, form in ((top, rewards, ".3g"), (bottom, advantages, "+.2f")):
        room = max(np.ptp(values), abs(values).max(), 1e-9)
        if len(x) <= 20:
            for place, value in zip(x, values[order], strict=True):
                side = "bottom" if value >= 0 else "top"
                text = _signed(value, form)
                axis.text(
                    place,
                    value + 0.03 * room * (1 if value >= 0 else -1),
                    text,
                    ha="center",
                    va=side,
                    fontsize=9,
                )
        axis.set_ylim(min(values.min(), 0) - 0.22 * room * (values.min() < 0), max(values.max(), 0) + 0.22 * room)
        axis.grid(axis="x", visible=False)
    top.set_ylabel("reward r")
    bottom.set_ylabel("advantage A")
    bottom.set_xticks(x if len(x) <= 20 else [], [str(i) for i in order] if len(x) <= 20 else [])
    bottom.set_xlabel("response i")
    bottom.set_xlim(x[0] - 0.8, x[-1] + 0.8)
    _heading(figure, title or "Rewards become advantages")
    return figure


@_styled
def learning_curve(
    runs: Mapping[str, object],
    *,
    x=None,
    band: str = "interval",
    xlabel: str = "step",
    ylabel: str = "J(θ)",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One line a name, labelled at its end; a band where there are several seeds, and a note of what it is.

    Args:
        runs: name to (steps,) values or (seeds, steps) values.
        x: (steps,); None: 0, 1, 2, …
        band: "interval", mean ± 1.96 standard errors over seeds, or "range", smallest to largest.

    Example:
        >>> ax = learning_curve({"GRPO": [[0.1, 0.4, 0.6], [0.1, 0.5, 0.8]]}, title="It learns")
        >>> ax.get_title(loc="left")
        'It learns'
    """
    if band not in ("interval", "range"):
        raise ValueError(f'band: expected "interval" or "range", got {band!r}')
    ax = _axes(ax)
    ends, colours, seeds = [], [], 1
    for name, values in runs.items():
        table = np.atleast_2d(_numbers(values))
        steps = np.arange(table.shape[1]) if x is None else _numbers(x)
        mean = table.mean(axis=0)
        (line,) = ax.plot(steps, mean, label=name)
        if len(table) > 1:
            seeds = max(seeds, len(table))
            margin = 1.96 * table.std(axis=0, ddof=1) / len(table) ** 0.5
            low, high = (mean - margin, mean + margin) if band == "interval" else (table.min(axis=0), table.max(axis=0))
            ax.fill_between(steps, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
        ends.append(mean[-1])
        colours.append(line.get_color())
    ax.margins(x=0)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    _label_ends(ax, list(runs), ends, colours)
    if seeds > 1:
        what = "95 % interval of the mean" if band == "interval" else "smallest to largest"
        ax.text(
            1,
            1.02,
            f"line: mean of {seeds} seeds · band: {what}",
            transform=ax.transAxes,
            ha="right",
            fontsize=9,
            color=GREY,
        )
    if title:
        ax.set_title(title, pad=18 if seeds > 1 else None)
    return ax


def _label_ends(ax: Axes, names: Sequence[str], ends: Sequence[float], colours: Sequence[str]) -> None:
    """Write each line's name beside its right end, moved apart where ends are close."""
    low, high = ax.get_ylim()
    height = ax.get_window_extent().height / ax.figure.dpi * 72 or 200  # points
    places = _spread(ends, gap=(high - low) * 13 / height)
    for name, place, colour in zip(names, places, colours, strict=True):
        ax.annotate(
            name, (1, place), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            color=colour, va="center", fontsize=10, weight="bold", annotation_clip=False,
        )  # fmt: skip


@_styled
def variance_bars(
    variances: Mapping[str, float],
    *,
    intervals: Mapping[str, float] | None = None,
    xlabel: str = "variance of the gradient estimate, E‖g − E g‖² (log scale)",
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Variances as horizontal bars on a log axis, each with its value and its ratio to the first.

    Args:
        variances: name to a positive value; the first is what others are compared with.
        intervals: name to the half-width of a 95 % interval, for values that were sampled.

    Example:
        >>> ax = variance_bars({"no baseline": 0.4, "leave-one-out": 0.1})
        >>> [text.get_text() for text in ax.texts]
        ['0.4', '0.1  (÷ 4)']
    """
    names, values = list(variances), _numbers(list(variances.values()))
    if (values <= 0).any():
        raise ValueError(f"variances: a log axis needs positive values, got {values.tolist()}")
    ax = _axes(ax, height=0.42 * len(names) + 1.3)
    errors = None if intervals is None else [intervals.get(name, 0.0) for name in names]
    rows = np.arange(len(names))
    ax.barh(
        rows,
        values,
        xerr=errors,
        height=0.62,
        color=[NAVY, *["#6FA3CE"] * (len(names) - 1)],
        ecolor=INK,
        capsize=3,
    )
    for row, value in zip(rows, values, strict=True):
        ratio = values[0] / value
        change = (
            "" if row == 0 or abs(ratio - 1) < 5e-3 else f"  (÷ {ratio:.3g})" if ratio > 1 else f"  (× {1 / ratio:.3g})"
        )
        margin = 0 if errors is None else errors[row]
        ax.annotate(
            f"{value:.3g}{change}",
            (value + margin, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    ax.set_xscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_major_formatter(plain)
    ax.xaxis.set_minor_formatter(plain if values.max() < 5 * values.min() else NullFormatter())
    span = values.max() / values.min()
    ax.set_xlim(values.min() / max(2, span**0.35), values.max() * max(2.2, span**0.3))
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(xlabel)
    if title:
        ax.set_title(title)
    return ax


@_styled
def clip_plane(
    *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, title: str | None = None
) -> Figure:
    """The clipped surrogate min(ρA, clip(ρ)A) against the ratio ρ: value above, gradient below, A > 0 and A < 0.

    Both are computed by `course_lib.losses.clipped_surrogate` and autograd. Grey: no gradient. Dotted: not clipped.

    Args:
        clip_low: ε_low in (0, 1).
        clip_high: ε_high.
        dual_clip: c, or None; with it the ratio's axis is logarithmic.

    Example:
        >>> len(clip_plane(clip_high=0.28).axes)
        4
    """
    low, high = 1 - clip_low, 1 + clip_high
    left, right = (low - 0.4, high + 0.4) if dual_clip is None else (low / 2.4, dual_clip * 2)
    left = max(left, 0.01)
    figure, grid = plt.subplots(2, 2, figsize=(8.2, 4.8), sharex=True, sharey="row")
    for (above, below), advantage, colour in zip(grid.T, (1.0, -1.0), (NAVY, VERMILION), strict=True):
        ratio, value, slope = _clipped(advantage, left, right, clip_low, clip_high, dual_clip)
        above.plot(ratio, advantage * ratio, color=GREY, linestyle=":", linewidth=1.4)
        above.plot(ratio, value, color=colour, linestyle="-")
        above.plot(1, advantage, "o", color=colour, markersize=6)
        above.annotate(
            "first step: ρ = 1",
            (1, advantage),
            xytext=(0, 14),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.5},
        )
        below.plot(ratio, np.where(np.diff(slope, append=slope[-1]) == 0, slope, np.nan), color=colour, linestyle="-")
        stop = dual_clip if dual_clip and advantage < 0 else right
        regions = list(zip((left, low, high), (low, high, stop), _REGIONS[advantage], strict=True))
        if stop < right:
            regions.append((stop, right, "beyond c:\nno gradient"))
        for start, end, text in regions:
            middle = (start + end) / 2 if dual_clip is None else (start * end) ** 0.5
            below.text(middle, -0.85 * advantage, text, ha="center", va="center", fontsize=8.5)
        for ax in (above, below):
            ax.fill_between(
                ratio, 0, 1, where=slope == 0, transform=ax.get_xaxis_transform(), color=PALE, linewidth=0, zorder=0
            )
            for edge in (low, high):
                ax.axvline(edge, color=GREY, linewidth=0.9, linestyle="--")
            ax.grid(visible=False)
        above.set_title("A > 0: better than expected" if advantage > 0 else "A < 0: worse than expected", fontsize=11)
        if dual_clip:
            below.set_xscale("log")
            below.xaxis.set_minor_formatter(NullFormatter())
        below.set_xticks([low, 1, high, *([dual_clip] if dual_clip else [])])
        below.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        below.minorticks_off()
        below.set_xlim(left, right)
        below.set_xlabel(r"ratio  $\rho=\pi_\theta\,/\,\pi_{\mathrm{old}}$" + (" (log scale)" if dual_clip else ""))
        below.set_ylim(-1.5, 1.5)
        below.set_yticks([-1, 0, 1])
    grid[0, 0].set_ylabel("value ÷ |A|")
    grid[1, 0].set_ylabel("gradient in ρ ÷ |A|")
    _heading(figure, title or "Clipping stops the gradient only where the ratio has gone far enough")
    return figure


_REGIONS = {
    1.0: ("fell by mistake:\npushed up", "pushed\nup", "far enough:\nno gradient"),
    -1.0: ("far enough:\nno gradient", "pushed\ndown", "rose by mistake:\npushed down"),
}


def _clipped(
    advantage: float, left: float, right: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ρ, value and derivative in ρ of the clipped surrogate, from the library's loss."""
    ratio = torch.linspace(left, right, 2001, dtype=torch.float64)
    log_ratio = ratio.log()[None].requires_grad_()
    loss = clipped_surrogate(
        log_ratio,
        torch.zeros_like(log_ratio),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones_like(log_ratio),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    (slope,) = torch.autograd.grad(-loss.sum(), log_ratio)
    return ratio.numpy(), -loss.detach()[0].numpy(), (slope[0] / ratio).numpy().round(12)


@_styled
def weight_heatmap(
    weights: Mapping[str, object], *, labels: Sequence[str] | None = None, title: str | None = None
) -> Figure:
    """The weight each token's loss gets, one panel a normalisation; at the right what each response gets in all.

    Args:
        weights: mode to (B, T) weights, 0 where there is no token, as `token_weights` returns them.
        labels: a name for each of the B responses.

    Example:
        >>> figure = weight_heatmap({"token-mean": [[0.25, 0.0, 0.0], [0.25, 0.25, 0.25]]}, labels=["short", "long"])
        >>> [text.get_text() for text in figure.axes[0].texts][-1]
        'Σ = 0.75'
    """
    tables = {mode: _numbers(table) for mode, table in weights.items()}
    rows, columns = next(iter(tables.values())).shape
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(8.0, 0.6 + len(tables) * (0.3 * rows + 0.36)), squeeze=False, sharex=True
    )
    for ax, (mode, table) in zip(axes[:, 0], tables.items(), strict=True):
        largest = table.max() or 1.0
        for i in range(rows):
            for t in np.flatnonzero(table[i]):
                face = WEIGHT(0.1 + 0.6 * table[i, t] / largest)
                ax.add_patch(Rectangle((t, i), 0.94, 0.88, facecolor=face, edgecolor=INK, linewidth=0.6))
                if columns <= 16:
                    ax.text(
                        t + 0.47,
                        i + 0.46,
                        _short(table[i, t]),
                        ha="center",
                        va="center",
                        fontsize=9,
                        color=_readable_on(face),
                    )
            ax.text(
                columns + 0.25,
                i + 0.46,
                f"Σ = {_short(table[i].sum())}",
                va="center",
                fontsize=10,
                weight="bold",
            )
        ax.set_xlim(-0.05, columns + 1.6)
        ax.set_ylim(rows, -0.06)
        ax.set_yticks(np.arange(rows) + 0.46, labels or [f"y{i + 1}" for i in range(rows)])
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
        ax.set_title(mode, fontsize=10.5, pad=3)
    axes[-1, 0].set_xlabel("token k →  (darkest: the panel's largest weight)", loc="left", fontsize=9, color=GREY)
    _heading(figure, title or "One weight a token: the loss normalisations")
    return figure


def _short(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.3g}"


LESSONS = (
    ("start here", "the map"),
    ("objectives", r"$J=\mathbb{E}[R]$"),
    ("REINFORCE", r"$R\,\nabla\log\pi$"),
    ("baselines", r"$A=R-b(x)$"),
    ("PPO clipping", r"$\min(\rho A,\ \mathrm{clip}(\rho)A)$"),
    ("GRPO", r"$A_i=(r_i-\bar r)\,/\,\mathrm{std}$"),
    ("in practice", "dead groups, drift"),
    ("agents", r"$\sum_j\nabla\log\pi(y_j|c_j)$"),
    ("stepwise GRPO", r"segments $(c_j, y_j)$"),
    ("fine-tune", "135 M, on a laptop"),
    ("capstone", "agents on a GPU"),
)


@_styled
def course_map(current: int | str | None = None) -> Figure:
    """Where a lesson sits: the eleven lessons with the one formula each adds.

    Args:
        current: number of the lesson to point out, 3 or "03"; None for none.

    Example:
        >>> course_map(3).axes[0].get_title(loc="left")
        'Lesson 03 of 10: baselines'
    """
    here = None if current is None else int(current)
    if here is not None and not 0 <= here < len(LESSONS):
        raise ValueError(f"current: expected a lesson from 0 to {len(LESSONS) - 1}, got {current!r}")
    figure, ax = plt.subplots(figsize=(8.2, 2.3))
    for k, (name, formula) in enumerate(LESSONS):
        x, y = (k % 6) * 1.42, -(k // 6) * 1.0
        now, before = k == here, here is not None and k < here
        face = NAVY if now else "#CFE0F0" if before else "#FFFFFF"
        ink = "#FFFFFF" if now else INK
        ax.add_patch(
            FancyBboxPatch(
                (x, y),
                1.26,
                0.66,
                boxstyle="round,pad=0.02,rounding_size=0.08",
                facecolor=face,
                edgecolor=NAVY,
                linewidth=1.2,
            )
        )
        ax.text(
            x + 0.63,
            y + 0.47,
            f"{k:02d} {name}",
            ha="center",
            va="center",
            fontsize=8.2 if len(name) < 13 else 7.7,
            weight="bold",
            color=ink,
        )
        ax.text(x + 0.63, y + 0.18, formula, ha="center", va="center", fontsize=8.5, color=ink)
        if k % 6 < 5 and k + 1 < len(LESSONS):
            ax.annotate("", (x + 1.41, y + 0.33), (x + 1.27, y + 0.33), arrowprops={"arrowstyle": "->", "color": GREY})
    ax.plot([7.73, 7.73, -0.12, -0.12], [-0.03, -0.17, -0.17, -0.2], color=GREY, linewidth=1.0, linestyle="-")
    ax.annotate("", (-0.12, -0.67), (-0.12, -0.16), arrowprops={"arrowstyle": "-", "color": GREY})
    ax.annotate("", (0.0, -0.67), (-0.13, -0.67), arrowprops={"arrowstyle": "->", "color": GREY})
    ax.set_xlim(-0.2, 8.42)
    ax.set_ylim(-1.08, 0.74)
    ax.set_axis_off()
    ax.set_title("The course" if here is None else f"Lesson {here:02d} of {len(LESSONS) - 1}: {LESSONS[here][0]}")
    return figure


class LiveCurve:
    """Curves that redraw while a loop runs; outside a notebook it only collects.

    In a notebook one picture is updated in place, and the last one stays in the stored output. Use it in a
    `with` block, or call `close()`, so that the last point is drawn.

    Args:
        names: which values of each update to draw, a panel each.
        title: above the panels.
        total: the last step, if known, to fix the horizontal axis.
        labels: name to axis label, where the name will not do.
        every: least number of seconds between two redraws.

    Example:
        >>> with LiveCurve(("J",), total=10) as live:
        ...     for step in range(11):
        ...         live.update(step, {"J": step / 10, "entropy": 1.0})
        >>> live.values["J"][-1]
        1.0
    """

    def __init__(
        self,
        names: Sequence[str] = ("J",),
        *,
        title: str = "",
        total: int | None = None,
        labels: Mapping[str, str] | None = None,
        every: float = 0.4,
    ):
        self.names, self.title, self.total, self.labels, self.every = (
            tuple(names),
            title,
            total,
            labels or {},
            every,
        )
        self.steps: dict[str, list[float]] = {name: [] for name in self.names}
        self.values: dict[str, list[float]] = {name: [] for name in self.names}
        self._handle, self._drawn = None, float("-inf")

    def __enter__(self) -> "LiveCurve":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def update(self, step: float, values: Mapping[str, float]) -> None:
        """Add a point to every curve that `values` has a value for."""
        for name in self.names:
            if values.get(name) is not None:
                self.steps[name].append(float(step))
                self.values[name].append(float(values[name]))
        if _in_notebook() and time.monotonic() - self._drawn >= self.every:
            self._show()

    def close(self) -> None:
        """Draw the final picture."""
        if _in_notebook() and any(self.values.values()):
            self._show()

    @_styled
    def figure(self) -> Figure:
        """The picture as it is now."""
        figure, axes = plt.subplots(1, len(self.names), figsize=(8.0, 2.9), squeeze=False)
        for ax, name, colour in zip(axes[0], self.names, CYCLE * len(self.names), strict=False):
            ax.plot(self.steps[name], self.values[name], color=colour, linestyle="-")
            if self.values[name]:
                ax.plot(self.steps[name][-1], self.values[name][-1], "o", color=colour, markersize=5)
            if self.total is not None:
                ax.set_xlim(0, self.total)
            ax.set_xlabel("step")
            now = f" = {self.values[name][-1]:.3g}" if self.values[name] else ""
            ax.set_title(self.labels.get(name, name) + now, fontsize=11, color=colour)
        if self.title:
            _heading(figure, self.title)
        return figure

    def _show(self) -> None:
        from IPython.display import Image, display

        figure = self.figure()
        picture = io.BytesIO()
        figure.savefig(picture, format="png", metadata={"Software": None})
        plt.close(figure)
        image = Image(picture.getvalue(), alt=f"{self.title or 'Live curve'}: {', '.join(self.names)} against step")
        if self._handle is None:
            self._handle = display(image, display_id=True)
        else:
            self._handle.update(image)
        self._drawn = time.monotonic()


def turn(draw: Callable[..., object], **knobs: tuple[float, float, float, float]) -> None:
    """A picture with a slider for each knob, drawn again whenever one is turned.

    A stored notebook keeps no sliders: where one is being stored (`tools/notebooks.py` sets COURSE_STORED), outside a
    notebook and without ipywidgets, the picture is drawn once.

    Args:
        draw: draws a figure, given the knobs' values by name.
        knobs: name to (lowest, highest, step, first value).

    Example:
        >>> turn(lambda power: print(f"drawn at {power}"), power=(0.0, 3.0, 0.5, 1.0))
        drawn at 1.0
    """
    for name, (low, high, _, first) in knobs.items():
        if not low <= first <= high:
            raise ValueError(f"{name}: expected a first value from {low} to {high}, got {first}")
    if _in_notebook() and "COURSE_STORED" not in os.environ:
        try:
            from ipywidgets import FloatSlider, interact
        except ImportError:
            pass
        else:
            sliders = {
                name: FloatSlider(first, min=low, max=high, step=step, continuous_update=False)
                for name, (low, high, step, first) in knobs.items()
            }

            def redraw(**values: float) -> None:
                draw(**values)  # its result is dropped: a returned figure would be shown a second time

            interact(redraw, **sliders)
            return
    draw(**{name: first for name, (_, _, _, first) in knobs.items()})


def _in_notebook() -> bool:
    """True in a Jupyter kernel, which can update what it has displayed."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
