"""How far a run has read its data, and what that is for another number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.run.catalogue import Catalogue, Manifest
from trainer.run.data_position import Position

DATA = {"program": "a:B", "program_args": {"batch": 64}}
READ = Position(7, ((2, 10), (1, 30)), DATA)


def test_a_position_is_kept_as_json() -> None:
    assert Position.from_record(json.loads(json.dumps(READ.as_record()))) == READ


def test_as_many_parts_go_on_where_they_were() -> None:
    assert READ.among(2) == READ.parts


@pytest.mark.parametrize(("parts", "taken"), [(1, 60), (3, 20), (4, 15)])
def test_other_parts_begin_at_the_share_of_the_one_that_is_the_least_far(parts: int, taken: int) -> None:
    assert READ.among(parts) == ((1, taken),) * parts


@pytest.mark.parametrize(
    ("seed", "data", "why"),
    [
        (None, DATA, ""),
        (7, DATA, ""),
        (8, DATA, "seed is 8 and was 7"),
        (None, {**DATA, "program_args": {}}, "program_args is {} and was {'batch': 64}"),
        (None, {**DATA, "program": "a:C"}, "program is 'a:C' and was 'a:B'"),
    ],
)
def test_a_position_says_whether_it_counts_what_a_run_reads(seed: int | None, data: dict[str, Any], why: str) -> None:
    assert READ.differs(seed, data) == why


def test_a_position_of_other_data_begins_the_earliest_pass_again() -> None:
    assert READ.rewound(None, DATA) == Position(7, ((1, 0), (1, 0)), DATA)
    assert READ.rewound(8, DATA).seed == 8


def test_a_position_that_counted_batches_is_of_other_data() -> None:
    before = {"seed": 7, "parts": [[2, 10], [1, 30]]}
    assert Position.from_record(before).differs(None, DATA)


def test_a_run_that_begins_from_a_checkpoint_goes_on_at_its_position(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for ending in ("index", "data-00000-of-00001"):
        (tmp_path / "a" / f"ckpt-5.{ending}").write_text("x")
    Catalogue(tmp_path / "a").write_manifest(5, 1, "2.21", position=READ.as_record())
    Catalogue(tmp_path / "b").adopt(Catalogue(tmp_path / "a"), 5)
    manifest = Manifest.read(Catalogue(tmp_path / "b").manifest(5))
    assert manifest is not None
    assert manifest.input is not None
    assert Position.from_record(manifest.input) == READ
