"""Every benchmark on rows of its real schema: prompts, pictures, gold answers; then through the runner on nano."""

from __future__ import annotations

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from benchmark_fixtures import FIXTURES, shown

from trimode_vlm.eval.benchmarks import BENCHMARKS, GROUPS
from trimode_vlm.eval.declarations import conversation, listed_choices
from trimode_vlm.eval.metrics import STYLES, score
from trimode_vlm.eval.tasks import EvalTask, images_of, list_tasks, select
from trimode_vlm.vision.images import open_image

CHOICE = "\nAnswer with the option's letter from the given choices directly."
SHORT = "\nAnswer the question using a single word or phrase."
BOXED = "\nReason step by step, and put the final answer within \\boxed{}."
# Row 0's whole text, after evaluation.md; <n> is the place of picture image_n.
PROMPTS = {
    "ai2d": f"<1>Which eats grass?\nA. fox\nB. hare\nC. owl{CHOICE}",
    "chartqa": "<1>How many bars?\nAnswer the question with a single word.",
    "docvqa": f"<1>What is line 0?{SHORT}",
    "infovqa": f"<1>What is line 0?{SHORT}",
    "mmmu": f"<1> What is the profit?\nA. $6\nB. $7\nC. $8\nD. $9{CHOICE}",
    "mmmu_pro": "Which sum is in <1>?\nA. $1\nB. $22\nC. $33\nD. $44\nE. $55\nF. $66\nG. $77\nH. $88\nI. $99\nJ. $10"
    f"{CHOICE}",
    "mmmu_pro_vision": "<1>Write out the multiple-choice question in the image and then solve it. The last line of "
    "your response should be of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of "
    "options. Think step by step before answering.",
    "mathvista": "<1>Hint: Give a number with one decimal place.\nQuestion: How long is it?",
    "realworldqa": "<1>Where do we go?\n\nA. Left\nB. Right\nC. Straight\nPlease answer directly with the letter.",
    "ocrbench": "<1>what is written in the image?",
    "textvqa": f"<1>what is the brand?{SHORT}",
    "mmstar": "<1>What stands there?\nOptions: A: A red car, parked, B: A bus, C: A van, D: Nothing" + CHOICE,
    "scienceqa": f"<1>Context: Look at the map.\nWhich is farthest north?\nA. Ohio\nB. Maine{CHOICE}",
    "pope": f"<1>Is there a dog in the image?{SHORT}",
    "mme": "<1>Is the output 0? Please answer yes or no.",
    "gsm8k": f"Two boxes of 9 eggs?{BOXED}",
    "math500": f"What is $1/2 + 1/3$?{BOXED}",
}
# lm-eval's rule for MATH compares all between the outer dollar signs, a box included, so that no boxed answer is right.
UNREADABLE = {("math500", "lmms")}


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Local copies of all fixtures by benchmark; the cache of `datasets` lies beside them."""
    root = tmp_path_factory.mktemp("benchmarks")
    datasets.config.HF_DATASETS_CACHE = root / "cache"
    datasets.disable_progress_bars()
    return {name: str(fixture.write(root / name)) for name, fixture in FIXTURES.items()}


def task_of(name: str, copies: dict[str, str]) -> EvalTask:
    return select([name], {name: copies[name]})[0]


def shape(messages: Any) -> str:
    """The text of the only turn, with <k> where its k-th picture stands."""
    (turn,) = messages
    assert turn["role"] == "user"
    if isinstance(turn["content"], str):
        return turn["content"]
    text, count = "", 0
    for part in turn["content"]:
        count += part["type"] == "image"
        text += f"<{count}>" if part["type"] == "image" else part["text"]
    return text


def pixels(picture: Any) -> Any:
    return np.asarray(open_image(picture))


def test_every_benchmark_has_a_fixture_and_a_prompt() -> None:
    assert set(BENCHMARKS) == set(FIXTURES) == set(PROMPTS)
    assert len(GROUPS["vlm"]) == 15 and len(GROUPS["paper"]) == 8 and set(GROUPS["paper"]) < set(GROUPS["vlm"])
    assert all(name in list_tasks() for name in (*BENCHMARKS, *GROUPS, "grid_json"))


@pytest.mark.parametrize("name", FIXTURES)
def test_prompts_and_pictures(name: str, copies: dict[str, str]) -> None:
    fixture, task = FIXTURES[name], task_of(name, copies)
    assert task.num_examples == len(fixture.rows)
    assert shape(task.example(0, 0).messages) == PROMPTS[name]
    for index, row in enumerate(fixture.rows):
        example = task.example(index, 0)
        assert example.id == index and example.category == fixture.categories[index]
        assert json.loads(json.dumps([example.gold, dict(example.info)])) == [example.gold, dict(example.info)]
        if (name, index) == ("mmmu", 1):
            continue  # shows a picture twice, see below
        given = [value for value in row.values() if hasattr(value, "tobytes")]
        found = images_of(example.messages)
        assert len(found) == len(given) and task.needs_image == bool(given)
        for one, other in zip(found, given, strict=True):
            assert np.array_equal(pixels(one), np.asarray(other))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", FIXTURES)
def test_right_answers_score_one_and_wrong_ones_zero(name: str, style: str, copies: dict[str, str]) -> None:
    if (name, style) in UNREADABLE:
        pytest.skip("this style reads no boxed answer")
    if name == "math500":
        pytest.importorskip("math_verify")
    task = task_of(name, copies)
    for index, (right, wrong) in enumerate(zip(FIXTURES[name].right, FIXTURES[name].wrong, strict=True)):
        example = task.example(index, 0)
        assert score(task.metric, right, example.gold, example.info, style).score == 1
        assert score(task.metric, wrong, example.gold, example.info, style).score == 0


def test_mmmu_pictures_stand_where_question_and_options_name_them(copies: dict[str, str]) -> None:
    task = task_of("mmmu", copies)
    second = task.example(1, 0)
    # The first picture to appear is image_2.
    assert shape(second.messages) == f"Which goes with <1>?\nA. <2>\nB. <3>\nC. neither's{CHOICE}"
    row = FIXTURES["mmmu"].rows[1]
    expected = [row["image_2"], row["image_1"], row["image_2"]]
    for found, wanted in zip(images_of(second.messages), expected, strict=True):
        assert np.array_equal(pixels(found), np.asarray(wanted))
    third = task.example(2, 0)
    assert shape(third.messages) == f"How many volts does <1> show?{SHORT}"
    assert third.gold == ["12.5", "twelve and a half"] and third.info["question_type"] == "open"


def test_gsm8k_answers_are_the_number_alone(copies: dict[str, str]) -> None:
    task = task_of("gsm8k", copies)
    assert [task.example(index, 0).gold for index in range(2)] == ["18", "1234"]


def test_conversation_places_pictures() -> None:
    assert shape(conversation("<image 2>a<image 1>", ["one", "two"], placeholders=True)) == "<1>a<2>"
    assert images_of(conversation("<image 2>a<image 1>", ["one", "two"], placeholders=True)) == ["two", "one"]
    # A benchmark without placeholders shows what a question says literally.
    assert shape(conversation("is <image 1> a tag?", ["one"])) == "<1>is <image 1> a tag?"
    assert shape(conversation("no placeholder", ["one", None, "three"], placeholders=True)) == "<1><2>no placeholder"
    for missing in ([], [None], ["one"]):
        with pytest.raises(ValueError, match="shows <image 2>, but there is no image_2"):
            conversation("see <image 2>", missing, placeholders=True)


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("Which?\nOptions: A: a cat, black, B: 3:4, C: x", ["a cat, black", "3:4", "x"]),
        ("Which?\nA. Left\nB. Right\nPlease answer with the letter.", ["Left", "Right"]),
        ("Which?\nChoices:\n(A) 1\n(B) 2", ["1", "2"]),
        ("Points (A) and (B) are marked.\nOptions: A: one, B: two, C: three", ["one", "two", "three"]),
        ("Is vitamin A. good?", []),
        ("Options: A: one, C: three", []),
        ("How many?", []),
    ],
)
def test_options_listed_in_a_question(text: str, choices: list[str]) -> None:
    assert listed_choices(text) == choices


def test_answers_name_options_by_index_letter_or_text(copies: dict[str, str], tmp_path: Path) -> None:
    for answer, gold in ((1, "B"), ("b", "B"), ("2", "A"), ("10", "C")):
        row = {"image": "a.png", "question": "?", "choices": ["2", "3", "10"], "answer": answer}
        (tmp_path / f"{answer}.json").write_text(json.dumps([row]), encoding="utf-8")
        shown(0).save(tmp_path / "a.png")
        assert select(["scienceqa"], {"scienceqa": str(tmp_path / f"{answer}.json")})[0].example(0, 0).gold == gold
    row["answer"] = "E"
    (tmp_path / "e.json").write_text(json.dumps([row]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^scienceqa: e.json row 0: the answer 'E' is none of 3 options$"):
        select(["scienceqa"], {"scienceqa": str(tmp_path / "e.json")})[0].example(0, 0)


# --- VLMEvalKit's TSV files -----------------------------------------------------------------------------------------

OPTIONS = {"ai2d": "options", "mmmu": "options", "mmmu_pro": "options", "mmmu_pro_vision": "options"}
OPTIONS |= {"scienceqa": "choices"}
IN_QUESTION = {"realworldqa", "mmstar"}


def encoded(picture: Any) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def as_tsv(name: str, path: Path) -> Path:
    """The fixture as the kit's file of that benchmark writes it: options in columns, answers as letters or literals."""
    import ast

    lines = []
    for index, row in enumerate(FIXTURES[name].rows):
        pictures = [encoded(value) for key, value in row.items() if hasattr(value, "tobytes")]
        line: dict[str, Any] = {"index": 100 + index, "question": row.get("question", row.get("problem", ""))}
        line["image"] = pictures[0] if len(pictures) == 1 else str(pictures)
        answer = row.get("answers", row.get("answer"))
        options = row.get(OPTIONS.get(name, ""))
        if name in IN_QUESTION:
            options = listed_choices(row["question"])
            line["question"] = row["question"].partition("\n")[0]
        options = ast.literal_eval(options) if isinstance(options, str) else options or []
        for letter, option in zip("ABCDEFGHIJ", options, strict=False):
            line[letter] = option
        if options and str(answer).isdigit():
            answer = "ABCDEFGHIJ"[int(answer)]
        line["answer"] = answer if isinstance(answer, str) else str(answer)
        for theirs in ("category", "hint", "question_type", "answer_type", "precision", "dataset"):
            if row.get(theirs) not in (None, ""):
                line[theirs] = row[theirs]
        if name == "mathvista":
            line |= {"question": row["query"], "task": row["metadata"]["task"]}
            line |= {"choices": str(row["choices"])} if row["choices"] else {}
        if name in ("mmmu", "mmmu_pro", "mmmu_pro_vision", "scienceqa", "ocrbench"):
            line["category"] = FIXTURES[name].categories[index]
        if name == "chartqa":
            line["split"] = f"test_{FIXTURES[name].categories[index]}"
        if name == "mme":
            line["image_path"] = row["question_id"]
        if name == "mmmu":
            line["split"] = "validation"
        lines.append(line)
    header = list(dict.fromkeys(key for line in lines for key in line))
    if name == "mmmu":  # the kit's file holds both splits
        lines.insert(0, lines[0] | {"index": 1, "split": "dev", "answer": "D"})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header, delimiter="\t", restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return path


@pytest.mark.parametrize("name", GROUPS["vlm"])
def test_the_kits_tsv_gives_the_same_questions(name: str, copies: dict[str, str], tmp_path: Path) -> None:
    original, task = task_of(name, copies), task_of(name, {name: str(as_tsv(name, tmp_path / f"{name}.tsv"))})
    assert task.num_examples == original.num_examples
    for index in range(len(FIXTURES[name].rows)):
        ours, kits = original.example(index, 0), task.example(index, 0)
        assert (kits.gold, kits.category) == (ours.gold, ours.category)
        assert kits.info["question_id"] == str(100 + index)
        ignored = ("question_id", "image_id")
        assert {k: v for k, v in kits.info.items() if k not in ignored} == {
            k: v for k, v in ours.info.items() if k not in ignored
        }
        if name == "mme":
            assert kits.info["image_id"] == ours.info["image_id"]
        if name not in IN_QUESTION:
            assert shape(kits.messages) == shape(ours.messages)
        for one, other in zip(images_of(kits.messages), images_of(ours.messages), strict=True):
            assert np.array_equal(pixels(one), pixels(other))


def test_a_tsv_with_options_in_columns_asks_for_a_letter(tmp_path: Path) -> None:
    task = task_of("realworldqa", {"realworldqa": str(as_tsv("realworldqa", tmp_path / "a.tsv"))})
    assert shape(task.example(0, 0).messages) == f"<1>Where do we go?\nA. Left\nB. Right\nC. Straight{CHOICE}"


# --- Selecting ------------------------------------------------------------------------------------------------------


def test_selecting_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: pytest.fail("opened"))
    tasks = select(["vlm", "text", "ai2d", "nano"])
    assert [task.name for task in tasks][:17] == [*GROUPS["vlm"], *GROUPS["text"]]
    assert {task.name: task.max_new_tokens for task in tasks}["mmmu_pro_vision"] == 2048
    assert [task.name for task in tasks if task.macro] == ["mmstar"]


def test_pictures_are_not_decoded_before_they_are_looked_at(
    copies: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.setattr(Image, "open", lambda *args, **options: pytest.fail("decoded"))
    assert images_of(task_of("ai2d", copies).example(0, 0).messages)


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (["chartqaa"], {}, "unknown task 'chartqaa'; did you mean chartqa"),
        (["chartqa"], {"charqa": "x"}, "--data charqa=x: the tasks that read data are chartqa; did you mean chartqa"),
        (["nano"], {"chartqa": "x"}, "--data chartqa=x: no task here reads data"),
    ],
)
def test_unknown_names(names: list[str], data: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        select(names, data)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_yaml_file_renames_columns_and_budget(tmp_path: Path) -> None:
    shown(0).save(tmp_path / "one.png")
    row = {"frage": "How many?", "label": "4", "bild": "one.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (bare,) = select(["chartqa"], {"chartqa": str(tmp_path / "rows.jsonl")})
    with pytest.raises(ValueError) as error:
        bare.example(0, 0)
    assert str(error.value).startswith(
        "chartqa: rows.jsonl row 0 has no column 'question' (columns: frage, label, bild)"
    )
    assert "--data chartqa=FILE.yaml" in str(error.value) and "\n" not in str(error.value)
    said = {"path": "rows.jsonl", "columns": {"question": "frage", "answer": "label", "image": "bild"}}
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(said | {"max_new_tokens": 7}), encoding="utf-8")
    (task,) = select(["chartqa"], {"chartqa": str(tmp_path / "map.yaml")})
    example = task.example(0, 0)
    assert (example.gold, task.max_new_tokens) == ("4", 7)
    assert np.array_equal(pixels(images_of(example.messages)[0]), np.asarray(shown(0)))
    (tmp_path / "bad.yaml").write_text("colums: {}\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="unknown field 'colums'; did you mean columns\\?; known: path, config, split, columns, images"
    ):
        select(["chartqa"], {"chartqa": str(tmp_path / "bad.yaml")})
