"""The arithmetic of a job, and the reading of boxes in bounded memory."""
