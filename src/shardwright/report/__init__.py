"""What a layout does and what a run did, as text, as pictures and as one page."""
