"""What can be seen: facts about exchanges, and the signals derived from them. May use `config`, never `sidecar`."""
