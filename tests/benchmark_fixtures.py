"""A few made-up rows of every benchmark in its real schema on the hub, with what a right and a wrong answer look like.

Columns, types and the forms of answers are those of the data sets' cards; pictures, questions and answers are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from data_cases import picture
from datasets import Features, Image, List, Value

TEXT, INT, FLOAT, PICTURE = Value("string"), Value("int64"), Value("float64"), Image()
SIZES = ((60, 40), (84, 56), (40, 90))


def shown(n: int) -> Any:
    """Picture n, different from the others in size and colour."""
    return picture(*SIZES[n % 3], ((40 * n + 20) % 256, 90, (200 - 30 * n) % 256))


@dataclass(frozen=True)
class Fixture:
    """right[i], wrong[i]: answers to row i that score 1 and 0; categories[i]: what it is grouped under."""

    features: dict[str, Any]
    rows: list[dict[str, Any]]
    right: list[str]
    wrong: list[str]
    categories: list[str | None]
    split: str = "test"
    config: str | None = None

    def dataset(self) -> datasets.Dataset:
        return datasets.Dataset.from_list(self.rows, features=Features(self.features))

    def write(self, folder: Path) -> Path:
        """The rows as a clone of the hub's repository keeps them: Parquet in a folder per configuration."""
        inner = folder / (self.config or "data")
        inner.mkdir(parents=True)
        self.dataset().to_parquet(str(inner / f"{self.split}-00000-of-00001.parquet"))
        return folder


def docvqa(config: str, extra: dict[str, Any], values: list[dict[str, Any]], answers: list[list[str]]) -> Fixture:
    common = {"questionId": TEXT, "question": TEXT, "image": PICTURE, "answers": List(TEXT), "data_split": TEXT}
    rows = [
        {"questionId": str(49150 + n), "question": f"What is line {n}?", "image": shown(n), "answers": answer}
        | {"data_split": "val"}
        | value
        for n, (answer, value) in enumerate(zip(answers, values, strict=True))
    ]
    right, none = [answer[-1] for answer in answers], [None] * len(rows)
    return Fixture(common | extra, rows, right, ["zzzzzzzz"] * len(rows), none, "validation", config)


MMMU = {"id": TEXT, "question": TEXT, "options": TEXT, "explanation": TEXT}
MMMU |= {f"image_{n}": PICTURE for n in range(1, 8)}
MMMU |= {"img_type": TEXT, "answer": TEXT, "topic_difficulty": TEXT}
NO_IMAGES = dict.fromkeys(f"image_{n}" for n in range(1, 8))
MMMU_REST = NO_IMAGES | {"explanation": "", "img_type": "['Tables']", "topic_difficulty": "Easy"}
TEN = ["$1", "$22", "$33", "$44", "$55", "$66", "$77", "$88", "$99", "$10"]

FIXTURES: dict[str, Fixture] = {
    "ai2d": Fixture(
        {"question": TEXT, "options": List(TEXT), "answer": TEXT, "image": PICTURE},
        [
            {"question": "Which eats grass?", "options": ["fox", "hare", "owl"], "answer": "1", "image": shown(0)},
            {"question": "How many legs?", "options": ["2", "3", "1", "8"], "answer": "3", "image": shown(1)},
        ],
        ["B", "D"],
        ["A", "C"],
        [None, None],
    ),
    "chartqa": Fixture(
        {"type": TEXT, "question": TEXT, "answer": TEXT, "image": PICTURE},
        [
            {"type": "human_test", "question": "How many bars?", "answer": "14", "image": shown(0)},
            {"type": "augmented_test", "question": "What share in 2019?", "answer": "27.4", "image": shown(1)},
            {"type": "human_test", "question": "Is blue the highest?", "answer": "Yes", "image": shown(2)},
        ],
        ["14", "28.1", "Yes"],
        ["15", "31", "No"],
        ["human", "augmented", "human"],
    ),
    "docvqa": docvqa(
        "DocVQA",
        {"question_types": List(TEXT), "docId": INT, "ucsf_document_id": TEXT, "ucsf_document_page_no": TEXT},
        [
            {
                "question_types": ["handwritten"],
                "docId": 14465,
                "ucsf_document_id": "pybv",
                "ucsf_document_page_no": "8",
            },
            {"question_types": ["layout"], "docId": 14466, "ucsf_document_id": "ffbf", "ucsf_document_page_no": "1"},
        ],
        [["0.28"], ["University of Oslo", "Oslo University"]],
    ),
    "infovqa": docvqa(
        "InfographicVQA",
        {"answer_type": List(TEXT), "image_url": TEXT, "operation/reasoning": List(TEXT), "ocr": TEXT},
        [
            {"answer_type": ["single span"], "image_url": "a.jpg", "operation/reasoning": ["counting"], "ocr": "{}"},
            {"answer_type": ["multi-span"], "image_url": "b.jpg", "operation/reasoning": [], "ocr": "{}"},
        ],
        [["7 million"], ["bees, wasps", "wasps, bees"]],
    ),
    "mmmu": Fixture(
        MMMU | {"question_type": TEXT, "subfield": TEXT},
        [
            MMMU_REST
            | {"id": "validation_Accounting_1", "question": "<image 1> What is the profit?", "image_1": shown(0)}
            | {"options": "['$6', '$7', '$8', '$9']", "answer": "B"}
            | {"question_type": "multiple-choice", "subfield": "Managerial Accounting"},
            MMMU_REST
            | {"id": "validation_Art_Theory_3", "question": "Which goes with <image 2>?", "image_1": shown(1)}
            | {"image_2": shown(2), "options": "['<image 1>', '<image 2>', \"neither's\"]", "answer": "C"}
            | {"question_type": "multiple-choice", "subfield": "Art"},
            MMMU_REST
            | {"id": "validation_Physics_9", "question": "How many volts does <image 1> show?", "image_1": shown(2)}
            | {
                "options": "[]",
                "answer": "['12.5', 'twelve and a half']",
                "question_type": "open",
                "subfield": "Optics",
            },
        ],
        ["B", "C", "12.5"],
        ["A", "B", "13"],
        ["Accounting", "Art_Theory", "Physics"],
        "validation",
    ),
    "mmmu_pro": Fixture(
        MMMU | {"subject": TEXT},
        [
            MMMU_REST
            | {"id": "test_History_1", "question": "Which sum is in <image 1>?", "image_1": shown(0)}
            | {"options": str(TEN), "answer": "J", "subject": "History"},
            MMMU_REST
            | {"id": "test_Math_4", "question": "Compare <image 1> and <image 2>.", "image_1": shown(1)}
            | {"image_2": shown(2), "options": str(TEN), "answer": "A", "subject": "Math"},
        ],
        ["J", "A"],
        ["A", "J"],
        ["History", "Math"],
        config="standard (10 options)",
    ),
    "mmmu_pro_vision": Fixture(
        {"id": TEXT, "image": PICTURE, "options": TEXT, "answer": TEXT, "subject": TEXT},
        [
            {"id": "test_History_1", "image": shown(0), "options": str(TEN), "answer": "C", "subject": "History"},
            {"id": "test_Math_4", "image": shown(1), "options": str(TEN), "answer": "I", "subject": "Math"},
        ],
        ["Two and two, so\nAnswer: C", "The table says it.\n\nAnswer: I"],
        ["Two and two, so\nAnswer: D", "The table says it.\n\nAnswer: A"],
        ["History", "Math"],
        config="vision",
    ),
    "mathvista": Fixture(
        {"pid": TEXT, "question": TEXT, "image": TEXT, "decoded_image": PICTURE, "choices": List(TEXT), "unit": TEXT}
        | {"precision": FLOAT, "answer": TEXT, "question_type": TEXT, "answer_type": TEXT}
        | {"metadata": {"category": TEXT, "split": TEXT, "task": TEXT, "skills": List(TEXT)}, "query": TEXT},
        [
            {"pid": "1", "question": "How long is it?", "image": "images/1.jpg", "decoded_image": shown(0)}
            | {"choices": None, "unit": None, "precision": 1.0, "answer": "1.2", "question_type": "free_form"}
            | {
                "answer_type": "float",
                "query": "Hint: Give a number with one decimal place.\nQuestion: How long is it?",
            }
            | {"metadata": {"category": "math-targeted-vqa", "split": "testmini", "task": "geometry", "skills": []}},
            {"pid": "2", "question": "Same length?", "image": "images/2.jpg", "decoded_image": shown(1)}
            | {"choices": ["equal", "larger", "smaller"], "unit": None, "precision": None, "answer": "larger"}
            | {"question_type": "multi_choice", "answer_type": "text"}
            | {"query": "Hint: Give a letter.\nQuestion: Same length?\nChoices:\n(A) equal\n(B) larger\n(C) smaller"}
            | {"metadata": {"category": "general-vqa", "split": "testmini", "task": "figure", "skills": ["logic"]}},
            {"pid": "3", "question": "How many?", "image": "images/3.jpg", "decoded_image": shown(2), "choices": None}
            | {"unit": "$", "precision": None, "answer": "46", "question_type": "free_form", "answer_type": "integer"}
            | {"query": "Hint: Give an integer.\nQuestion: How many? (Unit: $)"}
            | {"metadata": {"category": "general-vqa", "split": "testmini", "task": "figure", "skills": []}},
        ],
        ["1.2", "B", "46"],
        ["1.4", "C", "64"],
        ["geometry", "figure", "figure"],
        "testmini",
    ),
    "realworldqa": Fixture(
        {"image": PICTURE, "image_path": TEXT, "question": TEXT, "answer": TEXT},
        [
            {"image": shown(0), "image_path": "0.webp", "answer": "C"}
            | {
                "question": "Where do we go?\n\nA. Left\nB. Right\nC. Straight\nPlease answer directly with the letter."
            },
            {"image": shown(1), "image_path": "1.webp", "answer": "No"}
            | {"question": "Is the light green? Please answer directly with a single word or number."},
        ],
        ["C", "No"],
        ["A", "Yes"],
        [None, None],
    ),
    "ocrbench": Fixture(
        {"dataset": TEXT, "question": TEXT, "question_type": TEXT, "answer": List(TEXT), "image": PICTURE},
        [
            {
                "dataset": "IIIT5K",
                "question": "what is written in the image?",
                "question_type": "Regular Text Recognition",
            }
            | {"answer": ["CENTRE"], "image": shown(0)},
            {
                "dataset": "HME100k",
                "question": "Please write out the expression of the formula in the image using LaTeX.",
            }
            | {"question_type": "Handwritten Mathematical Expression Recognition"}
            | {"answer": ["\\frac { a } { B }"], "image": shown(1)},
            {"dataset": "ESTVQA", "question": "What is the price?", "question_type": "Scene Text-centric VQA"}
            | {"answer": ["9.99", "$9.99"], "image": shown(2)},
        ],
        ["It says centre.", "\\frac{a}{B}", "The price is 9.99"],
        ["It says center.", "\\frac{a}{b}", "9,99"],
        [
            "Regular Text Recognition",
            "Handwritten Mathematical Expression Recognition",
            "Scene Text-centric VQA",
        ],
    ),
    "textvqa": Fixture(
        {"image_id": TEXT, "question_id": INT, "question": TEXT, "question_tokens": List(TEXT), "image": PICTURE}
        | {"image_width": INT, "image_height": INT, "flickr_original_url": TEXT, "flickr_300k_url": TEXT}
        | {"answers": List(TEXT), "image_classes": List(TEXT), "set_name": TEXT, "ocr_tokens": List(TEXT)},
        [
            {"image_id": f"00{n}", "question_id": 34602 + n, "question": question, "question_tokens": question.split()}
            | {"image": shown(n), "image_width": 60, "image_height": 40, "flickr_original_url": "", "set_name": "val"}
            | {"flickr_300k_url": "", "answers": answers, "image_classes": ["Box"], "ocr_tokens": ["NOUS"]}
            for n, (question, answers) in enumerate(
                [
                    ("what is the brand?", ["nous les gosses"] * 8 + ["nous", "dakota"]),
                    ("how many bottles?", ["two", "2", "2", "two", "2", "3", "2", "2", "2", "2"]),
                ]
            )
        ],
        ["nous les gosses", "2"],
        ["les", "7"],
        [None, None],
        "validation",
    ),
    "mmstar": Fixture(
        {"index": INT, "question": TEXT, "image": PICTURE, "answer": TEXT, "category": TEXT, "l2_category": TEXT}
        | {"meta_info": {"source": TEXT, "split": TEXT, "image_path": TEXT}},
        [
            {"index": 0, "image": shown(0), "answer": "A", "category": "coarse perception"}
            | {"question": "What stands there?\nOptions: A: A red car, parked, B: A bus, C: A van, D: Nothing"}
            | {"l2_category": "image scene and topic"}
            | {"meta_info": {"source": "MMBench", "split": "val", "image_path": "0.jpg"}},
            {"index": 1, "image": shown(1), "answer": "D", "category": "math", "l2_category": "geometry"}
            | {"question": "What is the angle at (A)?\nOptions: A: 10, B: 20, C: 30, D: 40"}
            | {"meta_info": {"source": "MathVista", "split": "testmini", "image_path": "1.jpg"}},
        ],
        ["A", "D"],
        ["B", "A"],
        ["coarse perception", "math"],
        "val",
    ),
    "scienceqa": Fixture(
        {"image": PICTURE, "question": TEXT, "choices": List(TEXT), "answer": INT, "hint": TEXT, "task": TEXT}
        | {"grade": TEXT, "subject": TEXT, "topic": TEXT, "category": TEXT, "skill": TEXT, "lecture": TEXT}
        | {"solution": TEXT},
        [
            {"image": shown(0), "question": "Which is farthest north?", "choices": ["Ohio", "Maine"], "answer": 1}
            | {"hint": "Look at the map.", "task": "closed choice", "grade": "grade2", "subject": "social science"}
            | {"topic": "geography", "category": "Geography", "skill": "Read a map", "lecture": "", "solution": ""},
            {"image": shown(1), "question": "How many?", "choices": ["1", "2", "0"], "answer": 2, "hint": ""}
            | {"task": "closed choice", "grade": "grade4", "subject": "natural science", "topic": "physics"}
            | {"category": "Magnets", "skill": "Count", "lecture": "", "solution": ""},
        ],
        ["B", "C"],
        ["A", "B"],
        ["social science", "natural science"],
        config="ScienceQA-IMG",
    ),
    "pope": Fixture(
        {"id": TEXT, "question_id": TEXT, "question": TEXT, "answer": TEXT, "image_source": TEXT, "image": PICTURE}
        | {"category": TEXT},
        [
            {"id": str(n), "question_id": str(n), "question": f"Is there a {thing} in the image?", "answer": answer}
            | {"image_source": "COCO_val2014_000000310196", "image": shown(0), "category": category}
            for n, (thing, answer, category) in enumerate(
                [("dog", "yes", "random"), ("car", "no", "popular"), ("cup", "no", "adversarial")]
            )
        ],
        ["yes", "no", "no"],
        ["no", "yes", "yes"],
        ["random", "popular", "adversarial"],
    ),
    "mme": Fixture(
        {"question_id": TEXT, "image": PICTURE, "question": TEXT, "answer": TEXT, "category": TEXT},
        [
            {"question_id": f"code_reasoning/002{n // 2}.png", "image": shown(n // 2), "category": "code_reasoning"}
            | {"question": f"Is the output {n}? Please answer yes or no.", "answer": "No" if n % 2 else "Yes"}
            for n in range(4)
        ],
        ["Yes", "No", "Yes", "No"],
        ["No", "Yes", "No", "Yes"],
        ["code_reasoning"] * 4,
    ),
    "gsm8k": Fixture(
        {"question": TEXT, "answer": TEXT},
        [
            {"question": "Two boxes of 9 eggs?", "answer": "There are 2 * 9 = <<2*9=18>>18 eggs.\n#### 18"},
            {"question": "Half of 2,468?", "answer": "2468 / 2 = <<2468/2=1234>>1,234.\n#### 1,234"},
        ],
        ["2 * 9 = 18\n#### 18", "It is half of 2468.\n#### 1234"],
        ["2 * 9 = 19\n#### 19", "It is half of 2468.\n#### 12"],
        [None, None],
        config="main",
    ),
    "math500": Fixture(
        {"problem": TEXT, "solution": TEXT, "answer": TEXT, "subject": TEXT, "level": INT, "unique_id": TEXT},
        [
            {"problem": "What is $1/2 + 1/3$?", "solution": "$\\boxed{\\frac{5}{6}}$", "answer": "\\frac{5}{6}"}
            | {"subject": "Prealgebra", "level": 2, "unique_id": "test/prealgebra/1.json"},
            {"problem": "Solve $2x = 14$.", "solution": "$x = \\boxed{7}$", "answer": "7"}
            | {"subject": "Algebra", "level": 1, "unique_id": "test/algebra/2.json"},
        ],
        ["So it is $\\boxed{\\frac{5}{6}}$.", "\\boxed{7}"],
        ["So it is $\\boxed{\\frac{6}{5}}$.", "\\boxed{14}"],
        ["Prealgebra", "Algebra"],
    ),
}
