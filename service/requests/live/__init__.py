"""Requests from their arrival to their end: preparation, changes, prompts that arrive in pieces, injections."""
