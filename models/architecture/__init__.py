"""Describes decoders as data, and reads the descriptions from Hugging Face configs. Reads no weights."""
