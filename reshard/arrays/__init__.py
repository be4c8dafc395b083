"""One array: boxes, dtypes, zarr metadata, operations, its handle, its digest."""
