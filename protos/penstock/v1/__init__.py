"""The contract as generated stubs; `make protos` writes them, nobody edits them."""
