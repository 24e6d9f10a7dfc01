"""Pictures: what they say is there, what they draw are the numbers given, and a grey print can be read."""

import sys
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

from course_lib import plots
from course_lib.losses import token_weights
from course_lib.tree import build_tree


@pytest.fixture(autouse=True)
def close_figures():
    before = dict(plt.rcParams)
    yield
    plt.close("all")
    plt.rcParams.update(before)


def lightness(colour):
    """CIE L*, 0 to 100."""
    y = plots.luminance(colour)
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def overlaps(figure):
    """Pairs of texts inside one axes whose boxes overlap on the rendered page."""
    figure.canvas.draw()
    found = []
    for ax in figure.axes:
        boxes = [(t.get_text(), t.get_window_extent().padded(-1)) for t in ax.texts if t.get_text()]
        found += [(a[0], b[0]) for i, a in enumerate(boxes) for b in boxes[:i] if a[1].overlaps(b[1])]
    return found


def outside(figure):
    """Texts that stick out of the figure."""
    figure.canvas.draw()
    page = figure.bbox.padded(1)
    shown = [t for ax in figure.axes for t in [*ax.texts, ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label]]
    boxes = [(t.get_text(), t.get_window_extent()) for t in shown if t.get_text()]
    return [name for name, b in boxes if b.x0 < page.x0 or b.x1 > page.x1 or b.y0 < page.y0 or b.y1 > page.y1]


def check_page(figure):
    assert overlaps(figure) == []
    assert outside(figure) == []
    width, _ = figure.get_size_inches() * figure.dpi
    assert width <= 910


def test_palette_is_distinct_in_grey_and_legible_on_white():
    levels = sorted(lightness(c) for c in plots.CYCLE)
    assert all(b - a >= 6 for a, b in pairwise(levels))
    assert all((1.05 / (plots.luminance(c) + 0.05)) >= 2.5 for c in plots.CYCLE)
    assert len(set(map(str, plots.DASHES))) == len(plots.CYCLE)


@pytest.mark.parametrize(
    "matrix",
    [
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],  # deuteranopia, Machado et al. 2009
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],  # protanopia
    ],
)
def test_palette_is_distinct_to_colour_blind_readers(matrix):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

    def seen(colour):
        linear = np.array([c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)])
        x, y, z = to_xyz @ np.clip(np.array(matrix) @ linear, 0, 1)
        f = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x / 0.9505, y, z / 1.089)]
        return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

    colours = [seen(c) for c in plots.CYCLE]
    assert min(np.linalg.norm(a - b) for i, a in enumerate(colours) for b in colours[:i]) > 10


def test_the_sign_of_an_advantage_shows_in_grey():
    good, bad = plots.ADVANTAGE(1.0), plots.ADVANTAGE(0.0)
    assert lightness(bad[:3]) - lightness(good[:3]) > 25


def test_course_style_is_used_and_left_alone():
    plt.rcdefaults()
    plots.variance_bars({"a": 1.0, "b": 0.5})
    assert plt.rcParams["axes.spines.top"] is True
    plots.use_course_style()
    assert plt.rcParams["axes.spines.top"] is False and plt.rcParams["figure.facecolor"] == "#FFFFFF"


def test_token_strip_colours_by_mask_and_advantage():
    ax = plots.token_strip(
        [["Q", "search", "found", "right"], ["Q", "wrong"]], [[0, 1, 0, 1], [0, 1]], torch.tensor([0.5, -0.5]),
        labels=["y1", "y2"], title="One number a response",
    )  # fmt: skip
    assert ax.get_title(loc="left") == "One number a response"
    hatched = [p.get_hatch() is not None for p in ax.patches]
    assert hatched == [True, False, True, False, True, False]
    good, bad = ax.patches[1].get_facecolor(), ax.patches[5].get_facecolor()
    assert good == plots.ADVANTAGE(1.0) and bad == plots.ADVANTAGE(0.0)
    assert "A = +0.50" in texts(ax.figure) and "A = −0.50" in texts(ax.figure)
    check_page(ax.figure)


def test_token_strip_takes_token_advantages_and_wraps():
    words = [f"word{i}" for i in range(40)]
    ax = plots.token_strip([words], [[1] * 40], [[0.1 * (i - 20) for i in range(40)]])
    assert len({round(p.get_y(), 6) for p in ax.patches}) > 2
    assert ax.patches[0].get_facecolor() == plots.ADVANTAGE(0.0)
    assert ax.patches[20].get_facecolor() == plots.ADVANTAGE(0.5)
    check_page(ax.figure)


def test_token_tree_has_a_box_a_path_and_counts_every_token_once():
    tree = build_tree([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 6, 7], [1, 2, 8, 9, 5]])
    words = ["What", " is", " 7", " + 12", " 1", " 2", ".", " 3", "?", " x"]
    written = tree.positions == 4
    written |= tree.positions == 5
    ax = plots.token_tree(tree, words[: len(tree.tokens)], written, title="10 tokens run instead of 21")
    assert [text for text in texts(ax.figure) if "hatched" not in text] == [
        "What is\n2 tokens", " 7 + 12\n2 tokens", " 1", " 2. · 2", "× 2", " 3? · 2", " x",
    ]  # fmt: skip
    assert [p.get_hatch() is None for p in ax.patches] == [False, False, True, True, False, True]
    spans = [(round(p.get_y(), 2), round(p.get_y() + p.get_height(), 2)) for p in ax.patches]
    assert spans[:2] == [(0.06, 2.94), (0.06, 1.94)] and spans[-1] == (2.06, 2.94)
    check_page(ax.figure)


def test_token_tree_shortens_its_texts_until_they_fit():
    rows = [[*range(40), 50 + p, 60, *(100 * p + 10 * d + k for d in range(6)), 7] for p in range(3) for k in range(2)]
    rows += [[*rows[0][:44], 9, 9, 9], [*rows[0][:45], 8, 8]]
    tree = build_tree(rows)
    words = [f" word{t}" for t in tree.tokens.tolist()]
    ax = plots.token_tree(tree, words, tree.positions >= 42, title="t")
    check_page(ax.figure)
    inside = [t for t in ax.texts if not t.get_text().startswith(("×", "hatched"))]
    for box, text in zip(ax.patches, inside, strict=True):
        frame, words = box.get_window_extent().padded(1), text.get_window_extent()
        assert frame.x0 <= words.x0 and words.x1 <= frame.x1, text.get_text()


def test_token_tree_of_a_real_size_fits_the_page():
    prompts = [[*range(40), 100 + p, *range(40, 60)] for p in range(3)]
    rows = [[*prompt, 200, 201 + k, 300 + k, 400] for prompt in prompts for k in range(4)]
    tree = build_tree(rows)
    word = {100: "18 - 5", 101: "7 + 12", 102: "20 - 11", 200: " ", 400: "."}
    ax = plots.token_tree(tree, [word.get(t, f"{t}") for t in tree.tokens.tolist()], tree.positions >= 61, title="t")
    assert "␣\n1 token" in texts(ax.figure)
    check_page(ax.figure)


@pytest.mark.filterwarnings("error")
def test_any_text_a_model_may_sample_can_be_drawn():
    odd = ["$a$ $b$", "日本", "🙂", "\x00\t", "a\nb", "\u202e", "\ud800"]
    ax = plots.token_strip([odd], [[1] * len(odd)])
    ax.figure.canvas.draw()
    assert "□□" in texts(ax.figure) and "$a$ $b$" in texts(ax.figure) and "a↵b" in texts(ax.figure)
    tree = build_tree([[1, i] for i in range(len(odd))])
    plots.token_tree(tree, ["x", *odd], [0] + [1] * len(odd)).figure.canvas.draw()


def test_group_bars_show_rewards_means_and_advantages():
    rewards = [1.0, 0, 0, 0, 1, 1, 1, 0]
    advantages = [1.73, -0.58, -0.58, -0.58, 0.58, 0.58, 0.58, -1.73]
    figure = plots.group_bars(rewards, advantages, group_ids=["hard"] * 4 + ["easy"] * 4)
    top, bottom = figure.axes
    assert [p.get_height() for p in top.patches] == rewards
    assert [p.get_height() for p in bottom.patches] == advantages
    assert "hard · mean 0.25" in texts(figure) and "easy · mean 0.75" in texts(figure)
    assert top.get_ylabel() == "reward r" and bottom.get_ylabel() == "advantage A"
    check_page(figure)


def test_group_bars_put_scattered_groups_together():
    figure = plots.group_bars([1.0, 5.0, 3.0], [0.1, 0.2, 0.3], group_ids=[7, 8, 7])
    assert [p.get_height() for p in figure.axes[0].patches] == [1.0, 3.0, 5.0]
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["0", "2", "1"]


@pytest.mark.parametrize("equal", [[0.0, 0.0], [1.0, 1.0]])
def test_group_bars_of_a_group_without_signal(equal):
    check_page(plots.group_bars(equal, [0.0, 0.0]))


@pytest.mark.parametrize("band", ["interval", "range"])
def test_learning_curve_draws_mean_and_band_and_says_which(band):
    values = np.array([[0.0, 0.2, 0.5], [0.0, 0.4, 0.9], [0.0, 0.3, 0.7]])
    ax = plots.learning_curve({"GRPO": values}, band=band, title="It learns")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), values.mean(axis=0))
    margin = 1.96 * values[:, 2].std(ddof=1) / 3**0.5
    highest = ax.collections[0].get_paths()[0].vertices[:, 1].max()
    assert highest == pytest.approx(0.9 if band == "range" else 0.7 + margin)
    what = "95 % interval of the mean" if band == "interval" else "smallest to largest"
    assert {f"line: mean of 3 seeds · band: {what}", "GRPO"} <= set(texts(ax.figure))
    check_page(ax.figure)


def test_learning_curve_labels_keep_apart():
    ax = plots.learning_curve({name: [0.0, 1.0 - 0.001 * i] for i, name in enumerate("abcde")})
    assert texts(ax.figure) == list("abcde")
    check_page(ax.figure)


def test_learning_curve_rejects_an_unknown_band():
    with pytest.raises(ValueError, match="band: expected"):
        plots.learning_curve({"a": [1.0]}, band="std")


def test_spread_keeps_order_and_distance():
    placed = plots._spread([5.0, 1.0, 1.1, 1.05, 4.9], gap=0.5)
    assert np.argsort(placed).tolist() == [1, 3, 2, 4, 0]
    assert (np.diff(np.sort(placed)) >= 0.5 - 1e-9).all()
    assert plots._spread([0.0, 3.0], gap=1.0).tolist() == [0.0, 3.0]


def test_variance_bars_are_logarithmic_and_compare_with_the_first():
    ax = plots.variance_bars({"none": 1.0, "mean": 0.1, "worse": 2.0}, title="Ten times less")
    assert ax.get_xscale() == "log"
    assert texts(ax.figure) == ["1", "0.1  (÷ 10)", "2  (× 2)"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["none", "mean", "worse"]
    check_page(ax.figure)
    with pytest.raises(ValueError, match="variances: a log axis"):
        plots.variance_bars({"none": 1.0, "perfect": 0.0})


@pytest.mark.parametrize("options", [{}, {"clip_high": 0.28}, {"clip_high": 0.28, "dual_clip": 3.0}])
def test_clip_plane_draws_the_surrogate_and_its_derivative(options):
    figure = plots.clip_plane(**options)
    low, high, dual = 0.8, 1 + options.get("clip_high", 0.2), options.get("dual_clip", np.inf)
    for column, advantage in enumerate((1.0, -1.0)):
        ratio, value = figure.axes[column].lines[1].get_data()
        expected = np.minimum(ratio * advantage, np.clip(ratio, low, high) * advantage)
        expected = expected if advantage > 0 else np.maximum(expected, -dual)
        np.testing.assert_allclose(value, expected, atol=1e-12)
        slope = figure.axes[2 + column].lines[0].get_ydata()
        flat = ratio > high if advantage > 0 else (ratio < low) | (ratio > dual)
        drawn = np.isfinite(slope)
        np.testing.assert_allclose(slope[drawn], np.where(flat, 0, advantage)[drawn], atol=1e-9)
        assert drawn.mean() > 0.99
    check_page(figure)


def test_weight_heatmap_prints_what_each_response_gets():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    modes = ("token-mean", "sequence-mean", "sequence-sum", "fixed-length")
    figure = plots.weight_heatmap({m: token_weights(mask, m, max_length=6) for m in modes}, labels=["short", "long"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == list(modes)
    sums = [[t.get_text() for t in ax.texts if t.get_text().startswith("Σ")] for ax in figure.axes]
    assert sums == [["Σ = 0.25", "Σ = 0.75"], ["Σ = 0.5", "Σ = 0.5"], ["Σ = 1", "Σ = 3"], ["Σ = 0.17", "Σ = 0.5"]]
    assert [len(ax.patches) for ax in figure.axes] == [8] * 4
    check_page(figure)


@pytest.mark.parametrize("current", [None, 0, 4, 8, 10])
def test_course_map_points_out_one_lesson(current):
    figure = plots.course_map(current)
    boxes = [patch for patch in figure.axes[0].patches if hasattr(patch, "get_boxstyle")]
    assert len(boxes) == 11
    dark = [k for k, box in enumerate(boxes) if plots.luminance(box.get_facecolor()[:3]) < 0.1]
    assert dark == ([] if current is None else [current])
    check_page(figure)


def test_course_map_takes_a_name_and_rejects_what_is_not_a_lesson():
    assert plots.course_map("03").axes[0].get_title(loc="left") == "Lesson 03 of 10: baselines"
    with pytest.raises(ValueError, match="current: expected a lesson"):
        plots.course_map(11)


def test_live_curve_only_collects_outside_a_notebook(capsys):
    with plots.LiveCurve(("J", "entropy"), title="Learning", total=3) as live:
        for step in range(4):
            live.update(step, {"J": step / 4, "other": 1.0} | ({"entropy": 2.0} if step else {}))
    assert live.values == {"J": [0.0, 0.25, 0.5, 0.75], "entropy": [2.0] * 3}
    assert live.steps["entropy"] == [1.0, 2.0, 3.0]
    assert capsys.readouterr().out == "" and plt.get_fignums() == []
    figure = live.figure()
    assert figure.axes[0].get_title(loc="left") == "J = 0.75"
    check_page(figure)


def test_live_curve_updates_one_display_in_a_notebook(monkeypatch):
    shown = []

    class Handle:
        def update(self, image):
            shown.append(("update", image))

    def display(image, display_id):
        shown.append(("display", image))
        return Handle()

    monkeypatch.setattr(plots, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    with plots.LiveCurve(("J",), every=0.0) as live:
        live.update(0, {"J": 0.1})
        live.update(1, {"J": 0.2})
    assert [kind for kind, _ in shown] == ["display", "update", "update"]
    assert shown[-1][1].data.startswith(b"\x89PNG") and shown[-1][1].alt.endswith("J against step")
    assert plt.get_fignums() == []


def test_live_curve_needs_no_ipython(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert plots._in_notebook() is False


def test_a_picture_leaves_interactive_mode_as_its_backend_set_it():
    before = plt.isinteractive()
    try:
        plots._styled(plt.ion)()
        assert plt.isinteractive()
        plots._styled(plt.ioff)()
        assert not plt.isinteractive()
    finally:
        plt.interactive(before)


def test_knobs_become_sliders_in_a_notebook_and_one_picture_where_it_is_stored(monkeypatch):
    drawn, sliders = [], {}

    def interact(draw, **given):
        sliders.update(given)
        assert draw(**{name: slider.value for name, slider in given.items()}) is None

    monkeypatch.setattr("ipywidgets.interact", interact)
    monkeypatch.setattr(plots, "_in_notebook", lambda: True)
    monkeypatch.setenv("COURSE_STORED", "1")
    plots.turn(lambda power: drawn.append(power) or "figure", power=(0.0, 3.0, 0.5, 1.0))
    assert drawn == [1.0] and not sliders
    monkeypatch.delenv("COURSE_STORED")
    plots.turn(lambda power: drawn.append(power) or "figure", power=(0.0, 3.0, 0.5, 2.0))
    assert drawn == [1.0, 2.0]
    assert (sliders["power"].min, sliders["power"].max, sliders["power"].step) == (0.0, 3.0, 0.5)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    plots.turn(lambda power: drawn.append(power), power=(0.0, 3.0, 0.5, 3.0))
    assert drawn[-1] == 3.0
    with pytest.raises(ValueError, match="power: expected a first value"):
        plots.turn(drawn.append, power=(0.0, 3.0, 0.5, 4.0))


def test_data_may_be_tensors_with_gradients():
    values = torch.tensor([0.1, 0.2], requires_grad=True)
    plots.learning_curve({"a": values})
    plots.group_bars(values, values)
    plots.weight_heatmap({"m": values[None]})
    plots.token_strip([["a", "b"]], [[1, 1]], values[None])
    plots.token_strip([["a", "b"], ["c"]], torch.ones(2, 2), values)
