"""Frees what a handled error keeps alive."""


def release_frames(error: BaseException) -> None:
    """Drops the tracebacks of a handled error and of the errors that caused it.

    Their frames hold what the request brought, which may be megabytes, and mostly something that holds the error as
    well, such as the task that raised it: a reference cycle, which would last until the cycle collector runs.
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
