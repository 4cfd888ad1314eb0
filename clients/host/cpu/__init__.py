"""The processors of this machine that a process may use, and where its compute threads run."""
