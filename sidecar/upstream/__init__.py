"""The outgoing side: names to addresses, addresses to connections, one attempt over one connection."""
