"""What the HTTP gateway does with each field of OpenAI's requests, and with those that vLLM adds: a case has a request,
and what must hold of its answer.

Each case is run whole and streamed, and the two answers must be one. Run as a module it prints the table of
docs/http.md.
"""

from . import embeddings, generation, responses
from .case import BASE, WORD, Answer, Case, Choice, Support

__all__ = ["BASE", "CASES", "WORD", "Answer", "Case", "Choice", "Support"]

CASES = (*generation.CASES, *responses.CASES, *embeddings.CASES)
