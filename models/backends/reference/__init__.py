"""The reference backend: plain torch, for tests and for models that no other backend runs."""
