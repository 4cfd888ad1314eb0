"""The error for everything that can be wrong with a model's files or with the memory left for it."""


class ModelError(Exception):
    """The model cannot be served. The text is one line that names the file or field and the remedy."""
