"""A model's files on disk: configuration, tensors, tokenizer, with limits on their size and kind."""
