"""The other side of every socket: upstreams that follow a script, apps that write raw bytes."""
