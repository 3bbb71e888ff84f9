"""Raw messages, direct and through the sidecar: what differs is what a proxy must change, and nothing else."""
