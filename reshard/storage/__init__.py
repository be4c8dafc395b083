"""Where bytes are: key-value stores, databases, and what only a local disk has."""
