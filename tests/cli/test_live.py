"""What a run says while it goes: how long it still takes, and how good it has been."""

from vitkit.cli.live import PlainView, remaining


def line(step: int, seconds: float) -> dict:
    return {"step": step, "epoch": 0.0, "loss": 1.0, "lr": 0.1, "seconds": seconds, "images": 8 * step}


def test_time_left_follows_the_steps_and_not_the_start(capsys) -> None:
    view = PlainView()
    view.step(0.01, line(1, 50.0))  # fifty seconds of starting up
    assert "left" not in capsys.readouterr().err
    view.written = 0.0
    view.step(0.11, line(11, 60.0))  # ten percent in ten seconds
    assert "89 s left" in capsys.readouterr().err
    assert [remaining(s) for s in (10, 600, 7200)] == ["10 s left", "10 min left", "2.0 h left"]


def test_the_best_is_told_also_when_it_was_before_a_resume(capsys) -> None:
    view = PlainView()
    view.evaluated({"step": 20, "val_top1": 0.36, "best": 0.64})
    assert "validation 36.00%  best 64.00%" in capsys.readouterr().err
    PlainView().evaluated({"step": 20, "best": 0.0})
    assert not capsys.readouterr().err  # nothing to judge by
