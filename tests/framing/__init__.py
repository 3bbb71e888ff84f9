"""How HTTP/1.1 messages are cut out of bytes: a model written from RFC 9112, and the two parsers of the sidecar."""
