"""Why an agent cannot join."""


class JoinRefused(Exception):
    """The leader refuses an agent, or an agent the leader. The text is one line with the cause and the remedy."""

    def __init__(self, reason: str, *, is_final: bool = True) -> None:
        """``is_final``: whether trying again cannot help."""
        super().__init__(reason)
        self.is_final = is_final
