"""Recurrent layers: the short convolution and the scans, which advance the states of a step's rows."""
