"""What a layout does and what a run did, for a person: text, pictures and one page."""

from shardwright.report.page import write_page
from shardwright.report.pictures import draw_layout, draw_loss, draw_losses, draw_speed
from shardwright.report.show import describe, show_text

__all__ = ["describe", "draw_layout", "draw_loss", "draw_losses", "draw_speed", "show_text", "write_page"]
