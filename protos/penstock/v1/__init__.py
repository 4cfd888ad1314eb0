"""The contract as generated stubs; `make protos` writes them; do not edit them."""
