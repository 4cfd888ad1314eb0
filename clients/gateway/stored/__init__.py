"""Responses that the gateway stores, to continue, fetch, follow and delete them, and those in the background."""
