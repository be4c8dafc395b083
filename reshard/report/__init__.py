"""Pictures: an HTML page, and a tree in the terminal, of what the JSON documents say."""
