"""Between Flax's two APIs: layouts, maps of paths, layers, optimizer state."""
