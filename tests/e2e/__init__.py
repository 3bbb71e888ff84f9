"""A whole sidecar, real peers on real sockets, and every signal it gives, compared with what the peers saw."""
