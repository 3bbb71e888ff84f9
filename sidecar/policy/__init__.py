"""Decisions as values, made by code that cannot do IO: no clock, no randomness, no sockets."""
