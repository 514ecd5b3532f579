"""Which worker is given which file, and what of each is trained."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.data_position import Position
from trainer.run.file_list import FileList
from trainer.training.steps import file_order
from trainer.training.steps.file_order import EMPTY_FILES, FileOrder

NAMES = [f"/data/part-{number}" for number in range(6)]


@dataclasses.dataclass
class Box:
    letters: list[tuple[int, int, int, str]] = dataclasses.field(default_factory=list)
    taken: int = 0

    def put(self, *letter: Any) -> None:
        self.letters.append(letter)

    def size(self) -> int:
        return len(self.letters) - self.taken

    def read(self) -> tuple[int, int, str]:
        """Take the next file; returns its ticket, the examples that were taken of it, and its name."""
        ticket, _, taken, name = self.letters[self.taken]
        self.taken += 1
        return ticket, taken, name


def order(names: list[str] = NAMES, workers: int = 2, seed: int = 7, **settings: Any) -> FileOrder[Box]:
    config = Config(program="a:B", input_sharding="dynamic", **settings)
    made = FileOrder(config, workers, seed, Box, lambda patterns: names)
    made.named(["/data/part-*"])
    made.begin(0)
    return made


def read(files: FileOrder[Box], worker: int, box: Box) -> tuple[int, str]:
    """Have a worker read its next file to the last of its eight examples."""
    files.fill()
    ticket, taken, name = box.read()
    files.advance(worker, (ticket, 8))
    return taken, name


def test_each_file_is_given_once_a_pass_and_most_to_the_fast_worker() -> None:
    files = order()
    slow, fast = files.mailbox(0), files.mailbox(1)
    _, held = read(files, 0, slow)
    found = [read(files, 1, fast)[1] for _ in range(4)]
    waiting = {name for *_, name in slow.letters[slow.taken :]}
    assert len(waiting) == 1
    assert sorted([held, *found, *waiting]) == NAMES


def test_passes_have_orders_of_their_own_which_follow_from_the_seed() -> None:
    def passes(seed: int) -> list[list[str]]:
        files = order(seed=seed)
        box = files.mailbox(0)
        names = [read(files, 0, box)[1] for _ in range(12)]
        return [names[:6], names[6:]]

    first, second = passes(7)
    assert sorted(first) == sorted(second) == NAMES
    assert first != second
    assert passes(7) == [first, second] != passes(8)


def test_a_lost_workers_files_go_to_the_others_where_it_was() -> None:
    files = order()
    lost, other = files.mailbox(0), files.mailbox(1)
    ticket, _, name = lost.read()
    files.advance(0, (ticket, 5))
    waiting = lost.letters[1:] or files.fill() or lost.letters[1:]
    files.lose({0: math.inf})
    files.advance(0, (ticket, 6))  # of a call that ended after its file was another's
    found = dict(reversed(read(files, 1, other)) for _ in range(4))
    assert found[name] == 5
    assert waiting[0][3] in found
    assert sorted(found) != NAMES  # the two that are left come after these


def test_a_worker_that_began_again_since_it_was_lost_keeps_its_files() -> None:
    files = order()
    box = files.mailbox(0)
    files.lose({0: 0.0})
    box.read()
    files.fill()
    assert box.size() == 1


def test_a_new_reading_of_a_worker_gives_back_what_it_had() -> None:
    files = order()
    before = files.mailbox(0)
    ticket, _, name = before.read()
    files.advance(0, (ticket, 2))
    after = files.mailbox(0)
    assert after.read()[1:] == (2, name)


@pytest.mark.parametrize("more", [{}, {"input_new_files_seconds": 5.0}])
def test_files_under_way_that_match_no_more_are_left_out(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As where each day has files of its own, or a file was removed."""
    earlier = order()
    letters = earlier.mailbox(0), earlier.mailbox(1)
    [kept], [gone] = ([letter[3] for letter in box.letters] for box in letters)
    assert earlier.position is not None
    names = [kept, "/new"]
    later = FileOrder(Config(program="a:B", input_sharding="dynamic", **more), 1, 7, Box, lambda patterns: names)
    later.named(["/data/part-*"])
    later.go_on_from(earlier.position)
    later.begin(9)
    later.come([name for name in names if name not in later.known()], False)
    box = later.mailbox(0)
    assert read(later, 0, box)[1] == kept
    later.fill()
    assert box.read()[2] == "/new"
    assert f"any more and are left out: ['{gone}']" in caplog.text


def test_a_position_goes_on_with_any_number_of_workers() -> None:
    files = order()
    boxes = [files.mailbox(0), files.mailbox(1)]
    done = [read(files, 0, boxes[0])[1] for _ in range(3)][:-1]  # the last is known to be done with the next
    ticket, _, half = boxes[1].read()
    files.advance(1, (ticket, 4))
    assert files.position is not None
    later = order(workers=1)
    assert not later.go_on_from(Position.from_record(files.position.as_record()))
    later.begin(9)
    box = later.mailbox(0)
    found = [read(later, 0, box)[::-1] for _ in range(4)]
    assert sorted([*done, *(name for name, _ in found)]) == NAMES
    assert dict(found)[half] == 4
    assert sum(taken for _, taken in found) == 4 + 8


def test_files_under_way_begin_again_with_another_pipeline_and_done_ones_stay_done() -> None:
    files = order()
    box = files.mailbox(0)
    read(files, 0, box)
    read(files, 0, box)
    assert files.position is not None
    later = order(program_args={"batch": 3})
    assert not later.go_on_from(files.position)
    assert later.files.counts()["done"] == 1
    assert all(taken == 0 for *_, taken in later.files.as_record()["open"])


def test_a_pass_has_the_files_that_are_there_when_it_begins() -> None:
    names = NAMES[:2]
    files = order(names)
    box = files.mailbox(0)
    names.append(NAMES[2])
    found = [read(files, 0, box)[1] for _ in range(5)]
    assert sorted(found[2:]) == NAMES[:3]


def test_small_files_are_given_ahead() -> None:
    files = order([f"/data/{number}" for number in range(100)])
    box = files.mailbox(0)
    assert box.size() == 1
    for _ in range(6):
        read(files, 0, box)
    files.fill()
    assert box.size() == 6


def test_files_without_examples_end_the_run() -> None:
    files = order()
    box = files.mailbox(0)
    for _ in range(EMPTY_FILES):
        files.fill()
        box.read()
    with pytest.raises(UserError, match="1,000 files of '/data/part-\\*' in a row have no example"):
        files.fill()


def test_a_pattern_without_files_ends_the_run() -> None:
    with pytest.raises(UserError, match="no file matches '/data/part-\\*'; expected files that the coordinator"):
        order([])


def test_a_record_says_what_is_done_by_directory() -> None:
    files = FileList(1)
    files.find(["/a/x", "gs://b/c/y"])
    first, second = files.give(), files.give()
    assert first
    assert second
    assert files.give() is None
    files.finish(first)
    files.finish(second)
    assert files.as_record() == {"turn": 0, "done": {"/a/": ["x"], "gs://b/c/": ["y"]}, "open": []}


def arriving(**settings: Any) -> FileOrder[Box]:
    config = Config(program="a:B", input_sharding="dynamic", input_new_files_seconds=10.0, **settings)
    made = FileOrder(config, 2, 7, Box, list)
    made.begin(0)
    return made


def test_files_that_come_are_given_once_in_the_order_in_which_they_were_found() -> None:
    files = arriving()
    box = files.mailbox(0)
    assert box.size() == 0
    files.come(["/data/b", "/data/a"], is_end=False)
    files.come(["/data/c", "/data/a"], is_end=False)
    found = [read(files, 0, box)[1] for _ in range(3)]
    files.fill()
    assert (found, box.size()) == (["/data/b", "/data/a", "/data/c"], 0)


def test_data_are_over_when_all_files_are_trained_and_the_end_is_told() -> None:
    files = arriving()
    box = files.mailbox(0)
    files.come(["/data/a"], is_end=False)
    read(files, 0, box)
    files.come([], is_end=True)
    assert not files.is_over
    assert files.news == ""
    ticket = box.letters[0][0]
    files.advance(0, (ticket, -1))  # it has looked for another file
    assert files.is_over
    assert files.news.endswith("1 are trained")


def test_data_are_over_when_no_file_has_come_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    files = arriving(input_no_files_seconds=60.0)
    files.come([], is_end=False)
    assert not files.is_over
    now = file_order.time.monotonic()
    monkeypatch.setattr(file_order.time, "monotonic", lambda: now + 61)
    assert files.is_over


def test_trained_files_that_are_found_again_by_a_later_coordinator_are_left_out() -> None:
    files = arriving()
    box = files.mailbox(0)
    files.come(["/data/a", "/data/b"], is_end=False)
    for _ in range(2):
        read(files, 0, box)
    assert files.position is not None
    later = arriving()
    assert not later.go_on_from(Position.from_record(files.position.as_record()))
    assert later.known() == {"/data/a", "/data/b"}
    later.come(["/data/a", "/data/c"], is_end=False)
    assert later.counts() == {"done": 1, "under_way": 1, "found": 3}
    box = later.mailbox(1)
    assert sorted(read(later, 1, box)[::-1] for _ in range(2)) == [("/data/b", 8), ("/data/c", 0)]
