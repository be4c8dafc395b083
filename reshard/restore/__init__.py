"""Target trees: built, matched, flattened, and restored with arrays on devices."""
