"""Of embeddings, what they have of their own."""

from dataclasses import replace

from .case import EMBEDDINGS, Case, Support
from .claims import (
    counts_kept_tokens,
    has_long_vectors,
    is_of_length,
    is_the_same_in_either_form,
    is_the_vector_of_its_text,
)

IGNORED, REFUSED = Support.IGNORED, Support.REFUSED
IDS = [531, 924, 296]
"""Of the demo's tokens those of "The kernel is"."""

OWN = (
    Case("input", "text", {}, is_of_length(256)),
    Case("input", "token ids", {"input": IDS}, is_the_vector_of_its_text),
    Case("input", "several texts", {"input": ["The kernel is", "A shell"]}, is_the_vector_of_its_text),
    Case("input", "several lists of ids", {"input": [IDS]}, is_the_vector_of_its_text),
    Case("input", "an empty list", {"input": []}, support=REFUSED),
    Case("input", "an empty text", {"input": ""}, support=REFUSED),
    Case("dimensions", "this many values, scaled again", {"dimensions": 8}, is_of_length(8)),
    Case("dimensions", "more than the model has", {"dimensions": 2**20}, support=REFUSED),
    Case("encoding_format", "float or base64", {"encoding_format": "base64"}, is_the_same_in_either_form),
    Case("encoding_format", "others", {"encoding_format": "int8"}, support=REFUSED),
    Case("normalize", "false leaves vectors as long as they are", {"normalize": False}, has_long_vectors),
    Case("add_special_tokens", "true", {"add_special_tokens": True}, is_of_length(256)),
    Case("add_special_tokens", "false", {"add_special_tokens": False}, support=REFUSED),
    Case("truncate_prompt_tokens", "an input's first tokens; -1 is the context",
         {"truncate_prompt_tokens": 2}, counts_kept_tokens),
    Case("truncate_prompt_tokens", "0", {"truncate_prompt_tokens": 0}, support=REFUSED),
    Case("truncation_side", "left keeps the last tokens",
         {"truncate_prompt_tokens": 2, "truncation_side": "left"}, counts_kept_tokens),
    Case("user", "", {"user": "me"}, support=IGNORED),
)  # fmt: skip

CASES = tuple(replace(case, endpoints=EMBEDDINGS, streams=False) for case in OWN)
