"""One checkpoint: saved under any layout, loaded under any other, never half written."""
