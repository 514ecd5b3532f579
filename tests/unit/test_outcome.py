import pytest

from fleet.site.outcome import outcome


@pytest.mark.parametrize(
    ("result", "end"),
    [
        ({"rc": 203, "stderr": "", "stdout": ""}, "exit code 203 and printed nothing; its program can't be run"),
        ({"rc": 226}, "exit code 226 and printed nothing; its view of the file system can't be made"),
        ({"rc": -9, "stderr": "\n  \n"}, "exit code -9 and printed nothing"),
        ({"rc": 1, "msg": "non-zero return code", "stderr": "", "stdout": ""}, "exit code 1 and printed nothing"),
        ({"rc": 1, "stderr": "", "stdout": "no space left\n"}, "no space left"),
        ({"msg": "Timed out", "failed": True}, "Timed out"),
        ({"failed": True}, "it ended and printed nothing"),
        ({"stderr": "1\n2\n3\n"}, "2\n3"),
    ],
)
def test_a_message_never_ends_with_nothing(result, end):
    assert end in outcome(result, 2)
    assert outcome(result).strip()
