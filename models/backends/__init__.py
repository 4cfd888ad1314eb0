"""Backends run a batch on a device. This folder has what they all share."""
