"""Loss curves: from a run's log to a PNG that shows every metric, and what happens where it cannot."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from watch_cases import toy_trainer

from trimode_vlm.training import curves
from trimode_vlm.training.callbacks import LogFile, LossCurves


@pytest.fixture
def needs_matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


def write_log(folder: Path, steps: int, every: int = 1, alpha: float = 0.3) -> None:
    records: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        record = {"step": step, "ar_loss": 4 * math.exp(-step / 50) + 0.1, "learning_rate": 1e-3 * (1 - step / steps)}
        record |= {
            "ar_accuracy": 1 - math.exp(-step / 50),
            "tokens_per_sec": 1000.0 + step % 7,
            "grad_norm": 1 + 9 / step,
        }
        if alpha:
            record |= {"diff_loss": 5 * math.exp(-step / 60) + step % 3, "masked_accuracy": step / steps}
            record["mask_ratio"] = 0.5
        records.append(record)
        if step % 50 == 0:
            records.append({"step": step, "eval_loss": 3.0, "eval_ar_loss": 2.0})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "log.jsonl").write_text(text + '{"step": 9999, "ar_lo')


def drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Axis label -> legend text -> (x, y) of what plot_curves draws, read from the figure itself."""
    from matplotlib.figure import Figure

    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or savefig(self, *a, **k))
    assert curves.plot_curves(folder) == folder / "curves.png"
    (figure,) = figures
    return {
        axis.get_ylabel(): {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
            for line in axis.get_lines()
            if not line.get_label().startswith("_")
        }
        for axis in figure.axes
    }


def test_every_metric_stands_in_its_panel(tmp_path, monkeypatch, needs_matplotlib):
    write_log(tmp_path, 50)
    panels = drawn(tmp_path, monkeypatch)
    assert {label: set(lines) for label, lines in panels.items()} == {
        "loss": {"AR", "diffusion", "evaluation", "evaluation, AR"},
        "share of tokens": {"masked accuracy", "AR accuracy", "mask ratio"},
        "tokens per second": {"tokens/s"},
        "learning rate": {"learning rate"},
        "gradient norm": {"gradient norm"},
    }
    steps, values = panels["loss"]["AR"]
    assert steps == list(range(1, 51)) and values[0] == pytest.approx(4 * math.exp(-1 / 50) + 0.1)
    assert panels["loss"]["evaluation"] == ([50], [3.0])
    picture = Image.open(tmp_path / "curves.png")
    assert picture.format == "PNG" and min(picture.size) > 800 and len(picture.convert("RGB").getcolors(1 << 24)) > 50


def test_long_curves_are_smoothed_over_their_faint_points(tmp_path, monkeypatch, needs_matplotlib):
    write_log(tmp_path, 1000)
    steps, values = drawn(tmp_path, monkeypatch)["loss"]["diffusion"]
    raw = curves.series(curves.read_log(tmp_path / "log.jsonl"), "diff_loss")[1]
    assert len(steps) == 1000 and max(abs(a - b) for a, b in zip(values, raw, strict=True)) > 0.5
    jumps = [max(abs(b - a) for a, b in zip(curve[500:], curve[501:], strict=False)) for curve in (raw, values)]
    assert jumps[1] < jumps[0] / 5


def test_smoothing_neither_lags_nor_bends_at_the_ends():
    assert curves.smoothed([3.0] * 200) == pytest.approx([3.0] * 200)
    line = [float(i) for i in range(200)]
    assert curves.smoothed(line) == pytest.approx(line), "a steady course is neither shifted nor bent at its ends"


def test_a_curve_over_many_decades_has_a_logarithmic_axis_and_stays_above_zero(tmp_path, monkeypatch, needs_matplotlib):
    records = [{"step": step, "ar_loss": 10 * 0.8**step * (100 if step == 50 else 1)} for step in range(1, 101)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = drawn(tmp_path, monkeypatch)["loss"]["AR"][1]
    assert min(values) > 0 and values[-1] == pytest.approx(10 * 0.8**100, rel=1e-6)
    assert values[46] == pytest.approx(10 * 0.8**47, rel=1e-6), "three steps before the spike nothing is lifted"


def test_metrics_that_were_not_logged_leave_their_panel_empty(tmp_path, monkeypatch, needs_matplotlib):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "ar_loss": 2.0, "grad_norm": null}\n')
    panels = drawn(tmp_path, monkeypatch)
    assert set(panels["loss"]) == {"AR"} and not panels["gradient norm"] and not panels["tokens per second"]


def test_a_run_draws_its_curves_at_the_end(tmp_path, capsys, needs_matplotlib):
    toy_trainer(tmp_path, [LogFile(tmp_path), LossCurves(tmp_path)], eval_strategy="steps", eval_steps=3).train()
    assert f"loss curves: {tmp_path / 'curves.png'}" in capsys.readouterr().err
    assert Image.open(tmp_path / "curves.png").format == "PNG"


def test_without_matplotlib_it_is_one_line_and_no_crash(tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    toy_trainer(tmp_path, [LogFile(tmp_path), LossCurves(tmp_path)]).train()
    found = [line for line in capsys.readouterr().err.splitlines() if "matplotlib" in line]
    assert found == ["no loss curves: matplotlib is not installed (pip install 'trimode-vlm[train]')"]
    assert not (tmp_path / "curves.png").exists()
    assert curves.main([str(tmp_path)]) == 1 and "pip install" in capsys.readouterr().err


def test_the_command_draws_a_folder_and_refuses_an_empty_one(tmp_path, capsys, needs_matplotlib):
    write_log(tmp_path, 10)
    assert curves.main([str(tmp_path)]) == 0 and capsys.readouterr().out.strip() == str(tmp_path / "curves.png")
    assert curves.main([str(tmp_path / "nowhere")]) == 1
    assert "no logged step" in capsys.readouterr().err
    assert curves.main([]) == 2


def test_drawing_leaves_pyplot_and_its_display_alone(tmp_path, needs_matplotlib):
    write_log(tmp_path, 10)
    code = (
        "import sys; from pathlib import Path; from trimode_vlm.training.curves import plot_curves; "
        "plot_curves(Path(sys.argv[1])); print('matplotlib.pyplot' in sys.modules)"
    )
    root = str(Path(__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
