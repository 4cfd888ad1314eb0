"""The tokens of the output that a caller expects."""

import penstock.v1 as pb
from penstock.service.config.limits import Validator
from penstock.service.text.prompt_limit import TextLimit
from penstock.service.text.tokenizer import Tokenizer


def predicted_ids(prediction: pb.Prediction, tokenizer: Tokenizer, validator: Validator) -> list[int]:
    """Returns the tokens of a prediction that has passed ``validator``, at most as many as the model's context. Tokens
    of a text that the model does not have are left out, because no output contains them. Raises ServiceError."""
    if prediction.WhichOneof("content") == "text":
        token_ids = tokenizer.encode_after(prediction.text, TextLimit(field="prediction.text"))
        token_ids = [token_id for token_id in token_ids if token_id < tokenizer.vocab_size]
    else:
        token_ids = list(prediction.token_ids.ids)
        validator.check_ids(token_ids, "prediction.token_ids.ids")
    return token_ids[: validator.limits.max_model_len]
