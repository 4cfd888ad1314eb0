"""Frees the objects that a handled error keeps alive."""


def release_frames(error: BaseException) -> None:
    """Drops the tracebacks of a handled error and of the errors that caused it.

    Their frames hold the request's data, which may be megabytes, and usually also something that refers to the error,
    such as the task that raised it: a reference cycle, which would last until the cycle collector runs.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        errors += (each.__cause__, each.__context__)
