"""Reports on what a layout does and what a run did: text for the terminal, pictures, and HTML pages."""
