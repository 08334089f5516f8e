"""One checkpoint format for all layouts: saved under any layout, loaded under any other, never half written."""
