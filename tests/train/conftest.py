"""What tests of training share."""

import pytest

from shardwright.train import loop


@pytest.fixture
def no_predictions(monkeypatch):
    """A run predicts no steps at its end: ``run.json`` has no figures of them, which only their own tests look at."""
    with monkeypatch.context() as patched:
        patched.setattr(loop, "note_predicted", lambda *_: None)
        yield
