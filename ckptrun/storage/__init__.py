"""Where bytes are kept: local folders now, and the one place that will talk to fsspec for URLs."""
