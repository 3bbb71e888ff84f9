"""Tests: names are sentences, peers are real sockets."""
