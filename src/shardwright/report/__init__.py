"""What a layout does and what a run did, for a person: text, pictures and one page."""
