"""`Plan` to a new checkpoint, whole or not at all; one module for each step on the way."""
