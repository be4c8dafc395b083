"""Target trees: built, matched, taken apart and filled with arrays on devices."""
