"""Messages between processes of one machine: waits that end."""

from __future__ import annotations

import threading

import pytest

from shardwright.comm.backends.message_blocks import POST, LateError, LostError, MessageExchange


@pytest.fixture
def exchanges(tmp_path):
    """Three connected ranks, whose waits are over at once."""
    made = [MessageExchange(rank, tmp_path, 5.0) for rank in range(3)]
    threads = [threading.Thread(target=each.connect, args=(range(3),)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in made:
        each.timeout_s = 0.0
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize(("awaited", "error"), [(2, LateError), (1, LostError)])
def test_a_rank_that_gives_up_lets_the_others_wait_no_longer_for_a_third(exchanges, monkeypatch, awaited, error):
    first, looks = exchanges[0], []
    look = first._receive_any

    def counted(wait_s):
        looks.append(look(wait_s))
        return looks[-1]

    monkeypatch.setattr(first, "_receive_any", counted)
    exchanges[1].close()
    with pytest.raises(error, match=f"rank {awaited} "):
        first.receive(awaited, POST, 0, 0)
    assert looks == [False]


def test_a_message_that_came_before_its_sender_closed_is_received(exchanges):
    exchanges[1].notify(0, POST, 0, 0)
    exchanges[1].close()
    assert exchanges[0].receive(1, POST, 0, 0).num_bytes == 0
