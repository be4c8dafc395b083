"""`Plan` -> a checkpoint on disk, in the source's own layout, that Orbax reads as its own."""

from reshard.writer.save import plan, save

__all__ = ["plan", "save"]
