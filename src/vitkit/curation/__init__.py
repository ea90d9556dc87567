"""Know a data set: features of every image, and what they say about duplicates, labels and splits."""

from vitkit.curation.index import Index, build_index, open_index, update_index

__all__ = ["Index", "build_index", "open_index", "update_index"]
