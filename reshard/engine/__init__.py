"""The arithmetic of a job, and the reading of boxes within a memory budget."""
