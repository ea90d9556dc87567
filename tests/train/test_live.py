"""What a run prints: how long it still takes, and its best score so far."""

from vitkit.training.live import PlainView, remaining
from vitkit.training.result import Line, Rate


def line(step: int) -> Line:
    return {"step": step, "epoch": 0.0, "loss": 1.0, "lr": 0.1}


def test_time_left_follows_the_steps_and_not_the_start(capsys) -> None:
    view = PlainView()
    view.step(0.01, line(1), Rate(50.0, 8))  # fifty seconds of starting up
    assert "left" not in capsys.readouterr().err
    view.written = 0.0
    view.step(0.11, line(11), Rate(60.0, 88))  # ten percent in ten seconds
    assert "89 s left" in capsys.readouterr().err
    assert [remaining(s) for s in (10, 600, 7200)] == ["10 s left", "10 min left", "2.0 h left"]


def test_the_best_is_told_also_when_it_was_before_a_resume(capsys) -> None:
    PlainView().evaluated(line(20), score="36.00%", best="64.00%")
    assert "validation 36.00%  best 64.00%" in capsys.readouterr().err
    PlainView().evaluated(line(20), score="", best="")
    assert not capsys.readouterr().err  # nothing was evaluated
