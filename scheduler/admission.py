"""Whether a request may enter the queue. Knows limits and counts; changes nothing."""

from penstock.scheduler.request import RefusalKind, Refused, Request

RETRY_AFTER_MS = 1000


class Admission:
    """Bounds the queue, and refuses at once what could never run."""

    def __init__(
        self, max_queued_requests: int, max_queued_tokens: int, num_blocks: int, block_size: int, max_model_len: int
    ) -> None:
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len

    def max_tokens(self, request: Request) -> int:
        """Output tokens of a choice, within the model's context."""
        return min(request.max_tokens, self._max_model_len - len(request.prompt_token_ids))

    def check(self, request: Request, num_requests: int, num_tokens: int, now: float) -> None:
        """Raises Refused if the request may not enter a queue that holds so many requests, and tokens of prompts."""
        num_prompt_tokens = len(request.prompt_token_ids)
        assert 0 < num_prompt_tokens < self._max_model_len, "the prompt's length is checked before admission"
        assert request.max_tokens > 0
        if request.deadline is not None and request.deadline <= now:
            raise Refused(RefusalKind.DEADLINE, "the deadline had passed when the request arrived")
        # The last output token is never computed: nothing follows it.
        num_slots = num_prompt_tokens + self.max_tokens(request) - 1
        capacity = self._num_blocks * self._block_size
        if -(-num_slots // self._block_size) > self._num_blocks:
            raise Refused(
                RefusalKind.TOO_LARGE,
                f"prompt and max_tokens need {num_slots} tokens of KV cache, which holds {capacity}; "
                "shorten the prompt or lower max_tokens",
            )
        if num_requests + 1 > self._max_queued_requests:
            raise Refused(RefusalKind.QUEUE_FULL, f"{num_requests} requests are waiting already", RETRY_AFTER_MS)
        if num_tokens + num_prompt_tokens > self._max_queued_tokens:
            raise Refused(
                RefusalKind.QUEUE_FULL,
                f"{num_tokens} prompt tokens are waiting, and {num_prompt_tokens} more would exceed the limit",
                None if num_prompt_tokens > self._max_queued_tokens else RETRY_AFTER_MS,
            )
