"""How the pieces of a job are shared out among Ray's actors; the rest is tested with a real Ray."""

import numpy as np
import pytest

pytest.importorskip("ray")


@pytest.mark.parametrize(("count", "actors"), [(1, 2), (7, 2), (79, 2), (10_000, 8), (3, 64)])
def test_every_piece_once_and_fewer_towards_the_end(count: int, actors: int) -> None:
    from vitkit.ray.job import tasks

    todo = list(range(5, 5 + count))
    shares = tasks(todo, actors)
    assert np.concatenate(shares).tolist() == todo
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert len(shares) <= 64 * actors + 8 * actors * 8
