"""Backends run a batch on a device. This folder has what all of them share."""
