from bench.recovery import Marks, cells, medians


def test_parts_add_up_to_the_time_from_the_fault_to_the_step():
    marks = Marks(fault=100, noticed=101, started=103, imported=106, restored=110, stepped=115)
    assert marks.parts() == [1, 2, 3, 4, 5]


def test_what_did_not_happen_is_no_part():
    marks = Marks(fault=100, noticed=101, started=None, imported=None, restored=104, stepped=105)
    assert marks.parts() == [1, None, None, 3, 1]


def test_what_was_over_before_took_no_time():
    marks = Marks(fault=100, noticed=102, started=101, imported=105, restored=106, stepped=107)
    assert marks.parts() == [2, 0, 3, 1, 1]


def test_medians_leave_out_rounds_without_the_part():
    assert medians([[1.0, None, 5.0], [2.0, None, None], [9.0, None, 7.0]]) == [2.0, None, 6.0]


def test_cells_show_what_there_was():
    assert cells([1.0, None], 2.5) == ["1.00", "-", "2.50"]
