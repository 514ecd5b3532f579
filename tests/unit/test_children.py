"""What is said of a process that has ended."""

from trainer.process.children import describe_code


def test_a_signal_without_a_name_is_described_too() -> None:
    assert describe_code(-9) == "137 (SIGKILL)"
    assert describe_code(-40) == "168 (signal 40)"
