"""Which of the workers that TensorFlow has lost it is given back, and when."""

from __future__ import annotations

from trainer.cluster.member import LostWorkers

WORKERS = ["worker-0", "worker-1", "worker-2"]


class Answers:
    """When each worker has answered last."""

    def __init__(self, **at: float) -> None:
        self.at = at

    def __call__(self, since: float) -> set[str]:
        return {f"worker-{name[1:]}" for name, at in self.at.items() if at > since}


def lost(**since: float) -> LostWorkers:
    made = LostWorkers()
    made.since |= {f"worker-{name[1:]}": at for name, at in since.items()}
    return made


def test_none_is_back_that_has_not_answered_since_the_last_was_lost() -> None:
    workers = lost(w0=1.0, w1=3.0)
    assert workers.poll(WORKERS, Answers(w0=2.0, w2=9.0), 10.0) is None
    assert lost().poll(WORKERS, Answers(w0=2.0), 10.0) is None


def test_once_one_is_back_all_must_answer_again() -> None:
    workers = lost(w0=1.0, w1=1.0)
    assert workers.poll(WORKERS, Answers(w0=9.0, w2=9.0), 10.0) == (set(), {"worker-0", "worker-1"})
    assert workers.poll(WORKERS, Answers(w0=11.0, w2=9.0), 11.5) == (set(), {"worker-0", "worker-1"})
    assert workers.poll(WORKERS, Answers(w0=11.0, w2=11.0), 12.0) == ({"worker-0"}, {"worker-1"})


def test_they_are_asked_again_for_the_next_one() -> None:
    workers = lost(w0=1.0, w1=1.0)
    assert workers.poll(WORKERS, Answers(w0=9.0, w2=9.0), 8.0) == ({"worker-0"}, {"worker-1"})
    del workers.since["worker-0"]
    assert workers.poll(WORKERS, Answers(w0=9.0, w1=9.0, w2=9.0), 10.0) == (set(), {"worker-1"})


def test_they_are_asked_again_where_the_one_that_was_back_is_lost_again() -> None:
    workers = lost(w0=1.0)
    assert workers.poll(WORKERS, Answers(w0=2.0), 3.0) == (set(), {"worker-0"})
    workers.since["worker-0"] = 4.0
    assert workers.poll(WORKERS, Answers(w0=2.0), 5.0) is None
    everyone = Answers(w0=6.0, w1=6.0, w2=6.0)
    assert workers.poll(WORKERS, everyone, 7.0) == (set(), {"worker-0"})
