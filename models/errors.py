"""The error of everything that can be wrong with a model's files or with the room that is left for it."""


class ModelError(Exception):
    """A model that cannot be served. The text is one line that names the file or field and the remedy."""
