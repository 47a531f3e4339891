"""Reports: every figure counted again from the sample lines, the page's text, structure and look in a browser."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimode_vlm.eval import published, report, report_html, report_plots, report_tables, tables

MODES = ("ar", "diffusion", "linear_spec")
SCRIPT = "<script>alert('x')</script> & <b>bold</b> `code` | pipe"
EVIL_TASK = "task_<i>1</i>"


def record(task: str, mode: str, index: int, rng: random.Random, **changes: Any) -> dict[str, Any]:
    """A sample line as a run writes it."""
    tokens = rng.choice([0, 1, 2, 5, 40, 100, 101, 150, 200, 201, 350])
    cycles = [] if mode != "linear_spec" else [rng.randint(1, 8) for _ in range(1 + tokens // 8)]
    decode = {"ar": max(0, tokens - 1), "diffusion": 1 + tokens // 3, "linear_spec": 2 * len(cycles)}[mode]
    score = rng.choice([0.0, 0.5, 1.0, 1.0])
    line = {
        **{"run": "model", "task": task, "mode": mode, "id": index, "image_from": index, "seed": None},
        **{
            "question": f"What is {index} <&> 1?",
            "prediction": SCRIPT if index == 1 else f"answer {index}",
            "gold": (["a", "b"], "a", "b")[index % 3],
        },
        **{"category": None, "metric": "anls", "metric_style": "strict", "score": score},
        **{"parsed": None if score == 0 and index % 3 == 0 else "a", "num_new_tokens": tokens, "nfe": decode + 1},
        **{"nfe_prefill": 1, "seconds": rng.uniform(0.1, 2), "seconds_to_first_token": rng.uniform(0.01, 0.2)},
        **{"finish_reason": rng.choice(["stop", "length"]), "accepted_lengths": cycles},
        "ids_hash": f"{index}" if index % 4 or mode == "ar" else f"{index} {mode}",
    }
    return line | changes


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Three tasks of different sizes in three modes, shuffled as shards may be, read back from JSON."""
    rng = random.Random(0)
    made = [record("chartqa", mode, i, rng, category=("human", "a|b <b>")[i % 2]) for mode in MODES for i in range(40)]
    made += [record("docvqa", mode, i, rng, metric="exact_match") for mode in MODES for i in range(15)]
    made += [record(EVIL_TASK, mode, i, rng, seed=9) for mode in MODES for i in range(7)]
    rng.shuffle(made)
    return [json.loads(json.dumps(line)) for line in made]


def settings(**changes: Any) -> dict[str, Any]:
    base = {"model": "some/<model>", "tasks": ["chartqa", "docvqa", EVIL_TASK], "modes": MODES, "buckets": (100, 200)}
    base |= {"workers": 1, "batch_size": 1, "seed": 3, "threshold": 0.9, "metric_style": "strict", "device": "cpu"}
    return base | changes


@pytest.fixture(scope="module")
def built(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return json.loads(json.dumps(report.build(settings(), lines)))


@pytest.fixture(scope="module")
def page(built: dict[str, Any]) -> str:
    return report_html.page(built)


def naive(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one cell by plain arithmetic, none of it the library's."""
    n = len(lines)
    scores = [line["score"] for line in lines]
    given = [1 if line["num_new_tokens"] else 0 for line in lines]
    tokens = sum(line["num_new_tokens"] for line in lines)
    decode = sum(line["nfe"] for line in lines) - n
    accepted = [k for line in lines for k in line["accepted_lengths"]]
    first = sorted(line["seconds_to_first_token"] for line in lines)
    seconds = math.fsum(line["seconds"] for line in lines)
    return {
        "num_samples": n,
        "score": math.fsum(scores) / n,
        "standard_error": statistics.stdev(scores) / math.sqrt(n) if n > 1 else None,
        "num_tokens": tokens,
        "num_forwards": decode + n,
        "tpf_decode": (tokens - sum(given)) / decode if decode else None,
        "tpf_end_to_end": tokens / (decode + n),
        "mean_accepted_length": sum(accepted) / len(accepted) if accepted else None,
        "seconds": seconds,
        "tokens_per_sec": tokens / seconds,
        "seconds_to_first_token": {"median": statistics.median(first), "p95": percentile(first, 0.95)},
    }


def percentile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        got = found[name]
        if isinstance(value, dict):
            assert_same(got, value)
        else:
            assert (got is None and value is None) or got == pytest.approx(value), name


def test_every_cell_is_what_the_lines_say(built: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    cells = 0
    for task, modes in built["tasks"].items():
        for mode, cell in modes.items():
            own = [line for line in lines if line["task"] == task and line["mode"] == mode]
            assert_same(cell, naive(own))
            assert cell["unparsed_rate"] == pytest.approx(sum(r["parsed"] is None for r in own) / len(own))
            reasons = [line["finish_reason"] for line in own]
            assert cell["finish_reasons"] == {reason: reasons.count(reason) for reason in set(reasons)}
            for bucket, least in (("all", 0), (">100", 101), (">200", 201)):
                long = [line for line in own if line["num_new_tokens"] >= least]
                if long:
                    assert_same(cell["buckets"][bucket], naive(long))
                assert cell["buckets"][bucket]["num_samples"] == len(long)
            cells += 1
    assert cells == 9


def test_pooled_means_categories_and_agreement(built: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    for mode in MODES:
        own = [line for line in lines if line["mode"] == mode]
        for bucket, least in (("all", 0), (">100", 101), (">200", 201)):
            assert_same(built["pooled"][mode][bucket], naive([r for r in own if r["num_new_tokens"] >= least]))
        means = [naive([r for r in own if r["task"] == task]) for task in built["settings"]["tasks"]]
        wanted = statistics.fmean(cell["score"] for cell in means)
        error = math.sqrt(sum(cell["standard_error"] ** 2 for cell in means)) / 3
        assert_same(built["mean_of_tasks"][mode], {"score": wanted, "standard_error": error, "num_tasks": 3})
        for category in ("human", "a|b <b>"):
            found = built["tasks"]["chartqa"][mode]["categories"][category]
            wanted_cell = naive([r for r in own if r["category"] == category])
            assert_same(found, {name: wanted_cell[name] for name in ("score", "standard_error", "num_samples")})
    for mode in MODES[1:]:
        differ = sum(line["mode"] == mode and line["id"] % 4 == 0 for line in lines)
        assert built["same_as_ar"][mode] == {"identical": 62 - differ, "of": 62}
        assert built["tasks"]["docvqa"][mode]["same_as_ar"] == {"identical": 11, "of": 15}
    assert built["tasks"]["docvqa"]["ar"]["same_as_ar"] is None
    golds = [json.dumps(line["gold"]) for line in lines if line["task"] == "docvqa" and line["mode"] == "ar"]
    assert built["baseline"]["docvqa"] == max(golds.count(gold) for gold in golds) / 15


def test_plots_show_what_the_lines_say(built: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    for mode in MODES:
        own = [line for line in lines if line["mode"] == mode]
        bins = built["tpf_by_length"][mode]
        assert sum(b["num_samples"] for b in bins) == sum(line["num_new_tokens"] > 0 for line in own)
        for b in bins:
            inside = [r for r in own if b["from"] <= r["num_new_tokens"] <= b["to"]]
            wanted = naive(inside)
            assert (b["num_samples"], b["tpf_decode"]) == (len(inside), pytest.approx(wanted["tpf_decode"]))
            assert b["mean_tokens"] == pytest.approx(wanted["num_tokens"] / len(inside))
            each = [tpf for r in inside if (tpf := naive([r])["tpf_decode"]) is not None]
            if each:
                assert b["quartiles"] == pytest.approx([percentile(sorted(each), 0.25), percentile(sorted(each), 0.75)])
    accepted = [n for line in lines for n in line["accepted_lengths"]]
    assert built["accepted_lengths"]["linear_spec"] == {str(n): accepted.count(n) for n in sorted(set(accepted))}
    assert built["accepted_lengths"]["ar"] == {}


def test_what_a_metric_reports_beside_its_score_is_shown() -> None:
    """POPE's F1 and MMStar's mean over categories, counted by hand."""
    rng = random.Random(4)
    answers = [("yes", "yes"), ("yes", "no"), ("no", "yes"), ("yes", "yes"), ("no", "no")]
    pope = [
        record("pope", "ar", i, rng, metric="yes_no", parsed=said, gold=gold, score=float(said == gold), category="all")
        for i, (said, gold) in enumerate(answers)
    ]
    stars = [("perception", 1.0), ("perception", 1.0), ("perception", 0.0), ("logic", 0.0)]
    star = [
        record("mmstar", "ar", i, rng, metric="multiple_choice", category=name, score=score, macro=True)
        for i, (name, score) in enumerate(stars)
    ]
    result = json.loads(json.dumps(report.build(settings(tasks=["pope", "mmstar"], modes=("ar",)), pope + star)))
    assert result["tasks"]["pope"]["ar"]["extra"]["f1"] == pytest.approx(2 * 2 / (3 + 3))
    assert result["tasks"]["mmstar"]["ar"]["score"] == pytest.approx((2 / 3 + 0) / 2)
    details = report_tables.details(result)
    assert re.search(r"\| yes_no \| precision 0\.667 ± 0\.\d{3}, recall 0\.667 ± [^|]*f1 0\.667 ± ", details)
    assert re.search(r"\| all \| 5 \| 0\.600 ± 0\.245; precision 0\.667", details)
    assert "_standard_error" not in details and "yes_ratio 0.600" in details


def test_edges_are_half_octaves() -> None:
    assert report_plots.EDGES[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert all(1 < b / a <= 2 for a, b in zip(report_plots.EDGES, report_plots.EDGES[1:], strict=False))


def test_tables_hold_the_cells(built: dict[str, Any]) -> None:
    text = report_tables.markdown(built)
    cell = built["tasks"]["chartqa"]["diffusion"]
    assert f"{cell['score']:.3f} ± {cell['standard_error']:.3f} | {cell['tpf_decode']:.2f}" in text
    assert "`ar` score" in text and "exact match" not in text and "**mean of tasks**" in text
    assert "metric style strict" in text and "Held-out seed 3" in text
    rates = [f"{100 * built['tasks']['chartqa'][mode]['unparsed_rate']:.1f}" for mode in MODES]
    assert f"`ar` / `diffusion` / `linear_spec`): chartqa {' / '.join(rates)} %, docvqa" in text
    details = report_tables.details(built)
    first = 1000 * built["tasks"]["docvqa"]["ar"]["seconds_to_first_token"]["p95"]
    assert f"| {first:,.0f} |" in details and "chartqa by category" in details and "a\\|b <b>" in details
    for table in [report_tables.cell_table(built), report_tables.bucket_table(built), report_tables.task_table(built)]:
        assert {len(row) for row in table.rows} == {len(table.head)}
        lines = tables.markdown(table.head, table.rows).splitlines()
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.head) + 1}


def test_seconds_of_a_batch_are_not_shown(lines: list[dict[str, Any]]) -> None:
    batched = report.build(settings(batch_size=8), lines)
    shown = report_tables.markdown(batched) + report_tables.details(batched)
    assert (
        "tokens/s" not in shown and "first token, median" not in shown and "tokens/s" not in report_html.page(batched)
    )


def test_samples_that_no_figure_holds_are_named(lines: list[dict[str, Any]]) -> None:
    counts = {"chartqa": 2500, "docvqa": 15, EVIL_TASK: 1_000_000}
    told = settings(num_examples=counts, skipped={"docvqa": {"ar": 2}})
    text = report_tables.markdown(report.build(told, lines))
    assert "Not all samples were asked: chartqa 40/2,500." in text
    assert "could not be read or answered, which are in no figure: docvqa `ar` 2." in text


def test_shown_samples_are_wrong_ones_first(lines: list[dict[str, Any]]) -> None:
    rng = random.Random(1)
    by_mode = {m: [record("t", m, i, rng, score=0.5 if i in (4, 6, 8) else 1.0) for i in range(10)] for m in MODES[:2]}
    assert [s["id"] for s in report.shown_samples(by_mode)] == [0, 4, 6]
    all_wrong = {m: [r | {"score": 0.2} for r in rows] for m, rows in by_mode.items()}
    assert [s["id"] for s in report.shown_samples(all_wrong)] == [0, 1, 2]
    long = {"ar": [record("t", "ar", 0, rng, prediction="x" * 5000)]}
    assert report.shown_samples(long)[0]["answers"]["ar"]["prediction"].endswith("… (3,000 more characters)")


def test_old_lines_without_the_new_fields_still_report(lines: list[dict[str, Any]]) -> None:
    new = ("category", "metric", "metric_style", "parsed", "seconds_to_first_token")
    old = [{name: value for name, value in line.items() if name not in new} for line in lines]
    told = {name: value for name, value in settings().items() if name not in ("metric_style", "device")}
    result = report.build(told, old)
    assert result["tasks"]["chartqa"]["ar"]["seconds_to_first_token"] is None
    assert "exact match" in report_tables.markdown(result) and report_html.page(result)


def test_a_report_of_one_short_answer(lines: list[dict[str, Any]]) -> None:
    """One sample, one token, no decode forward: ratios and errors are absent, not wrong."""
    only = record("chartqa", "ar", 0, random.Random(0), num_new_tokens=1, nfe=1, score=1.0)
    result = report.build(settings(tasks=["chartqa"], modes=("ar",)), [only])
    assert result["tasks"]["chartqa"]["ar"]["tpf_decode"] is None
    page = report_html.page(result)
    assert "1.000" in page and "nan" not in page.lower().replace("nano", "")


# The paper's table


def test_published_numbers_are_the_papers() -> None:
    """Each number as facts.md has it; the mean of the eight is the one that the paper prints."""
    vlm, text = published.load()["tables"]
    scores = [cell["ar"] for cell in vlm["tasks"].values()]
    assert scores == [75.0, 81.3, 89.2, 50.3, 32.6, 24.3, 60.4, 62.6]
    assert round(sum(scores) / 8, 1) == vlm["mean_score"]["ar"] == 59.5
    assert vlm["tpf"]["linear_spec"] == {"all": 3.63, ">100": 6.03, ">200": 7.45}
    assert text["mean_score"]["quadratic_spec"] == 64.04
    assert "not measured here" in published.load()["label"] and "2607.05722" in published.load()["label"]


def test_published_names_are_tasks() -> None:
    from trimode_vlm.eval.tasks import select

    names = list(published.load()["tables"][0]["tasks"])
    assert [task.name for task in select(names)] == names


def test_published_stands_only_beside_what_was_measured(built: dict[str, Any]) -> None:
    rows = built["published"]["rows"]
    assert [(r["what"], r["mode"], r["published"]) for r in rows] == [("chartqa", "ar", 81.3), ("docvqa", "ar", 89.2)]
    cell = built["tasks"]["docvqa"]["ar"]
    assert rows[1]["measured"] == pytest.approx(100 * cell["score"]) and rows[1]["num_samples"] == 15
    assert report_tables.published_table(built).head[2] == "published (arXiv 2607.05722), not measured here"
    only_diffusion = {"tasks": {"chartqa": {"diffusion": cell}, EVIL_TASK: {"ar": cell}}}
    assert published.beside(only_diffusion) is None


def test_published_means_need_all_eight() -> None:
    rng = random.Random(2)
    names = list(published.load()["tables"][0]["tasks"])
    made = [record(name, mode, i, rng) for name in names for mode in MODES for i in range(6)]
    extra = [record("mmstar", mode, i, rng) for mode in MODES for i in range(6)]
    result = report.build(settings(tasks=[*names, "mmstar"]), made + extra)
    rows = {(r["what"], r["mode"]): r for r in result["published"]["rows"]}
    assert len(rows) == 8 + 3 + 6
    own = [line for line in made if line["mode"] == "linear_spec"]
    wanted = 100 * statistics.fmean(naive([r for r in own if r["task"] == n])["score"] for n in names)
    assert rows["mean of benchmarks", "linear_spec"]["measured"] == pytest.approx(wanted)
    assert rows["mean of benchmarks", "linear_spec"]["published"] == 59.4
    tpf = naive([r for r in own if r["num_new_tokens"] > 200])["tpf_decode"]
    assert rows["TPF, >200 tokens", "linear_spec"]["measured"] == pytest.approx(tpf)
    fewer = report.build(settings(tasks=names[1:]), [r for r in made if r["task"] != names[0]])
    assert len(fewer["published"]["rows"]) == 7


# The page

VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


class Structure(HTMLParser):
    """Checks nesting; collects ids, texts, and whatever could be fetched."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"a handler on {tag}"
            if name == "id":
                self.ids.append(value or "")
            if name.split(":")[-1] in ("src", "href", "srcset", "data", "action", "poster"):
                self.links.append(value or "")
            if name == "aria-label":
                self.labels.append(value or "")
            self.links += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]} at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Structure:
    structure = Structure()
    structure.feed(page)
    structure.close()
    assert structure.open == []
    return structure


def test_page_is_whole_and_fetches_nothing(page: str) -> None:
    found = parsed(page)
    assert not {"script", "link", "iframe", "img", "object", "embed"} & set(found.tags)
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links) and found.links
    assert len(set(found.ids)) == len(found.ids), "two plots share an id"
    assert "@import" not in page and "url(h" not in page and "http" not in page
    assert page.count("<svg") == 3 and 'name="viewport"' in page and "prefers-color-scheme: dark" in page


def test_page_shows_other_peoples_text_as_text(page: str) -> None:
    found = parsed(page)
    assert SCRIPT in found.text and "What is 1 <&> 1?" in found.text, "letter by letter"
    assert any(EVIL_TASK in text for text in found.text) and any("some/<model>" in text for text in found.text)
    assert not {"b", "i"} & set(found.tags)
    assert any("a|b <b>" in text for text in found.text)


def test_plots_say_in_words_what_they_show(page: str, built: dict[str, Any]) -> None:
    labels = [label for label in parsed(page).labels if label.startswith(("Line", "Bars", "Hist"))]
    accepted = [int(n) for n, count in built["accepted_lengths"]["linear_spec"].items() for _ in range(count)]
    assert len(labels) == 3 and f"{statistics.fmean(accepted):.2f} tokens a cycle" in labels[1]
    last = built["tpf_by_length"]["diffusion"][-1]
    assert f"to {last['tpf_decode']:.2f} at {last['mean_tokens']:.0f}" in labels[0]
    assert f"ar {built['mean_of_tasks']['ar']['score']:.3f}" in labels[2]


def test_page_without_matplotlib_says_so(built: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = report_html.page(built)
    parsed(page)
    assert "<svg" not in page and "matplotlib is not installed" in page and "Every task in every mode" in page


def test_page_is_the_same_each_time(page: str, built: dict[str, Any]) -> None:
    assert report_html.page(built) == page


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
    return next((path for name in names if (path := shutil.which(name))), None)


# The page in frames of two widths, all of its folds open; what the browser measures comes back as text.
WATCH = """<!DOCTYPE html><meta charset="utf-8"><title>watch</title><pre id="found"></pre><script>
const found = [];
for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    page.querySelectorAll("details").forEach(fold => fold.open = true);
    const wide = [...page.querySelectorAll("body *")].filter(
      e => e.getBoundingClientRect().right > width + 0.5 && !e.closest(".scroll table, pre, svg"));
    found.push({width, inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth, wide: wide.map(e => e.tagName),
      tables: [...page.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth).length,
      fetched: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
      letters: Math.min(...[...page.querySelectorAll("figure svg text")].map(e => e.getBoundingClientRect().height))});
    document.getElementById("found").textContent = JSON.stringify(found);
  };
  frame.srcdoc = PAGE;
  document.body.append(frame);
}
</script>"""


@pytest.mark.skipif(browser() is None, reason="no Chromium here (apt-get install chromium)")
def test_page_in_a_browser(page: str, tmp_path: Path) -> None:
    """No sideways scrolling on a phone's width, wide tables scroll in their own box, nothing fetched, no complaint."""
    path = tmp_path / "watch.html"
    path.write_text(WATCH.replace("PAGE", json.dumps(page).replace("</", "<\\/")), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    command = [browser() or "", *flags, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    texts = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.S)
    assert texts and texts[1], "the page did not load"
    narrow, wide = sorted(json.loads(texts[1]), key=lambda frame: frame["width"])
    for frame in (narrow, wide):
        assert frame["scroll"] <= frame["inner"] == frame["width"], frame
        assert frame["wide"] == [] and frame["fetched"] == []
    assert narrow["tables"] >= 4 and narrow["letters"] >= 8


def test_colours_are_apart_from_their_background() -> None:
    """WCAG asks 3:1 of graphics: each mode's colour against the page, in light and in dark."""

    def luminance(color: str) -> float:
        parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for light, dark in report_html.COLORS:
        assert 1.05 / (luminance(light) + 0.05) >= 3
        assert (luminance(dark) + 0.05) / (luminance("#14171b") + 0.05) >= 3
