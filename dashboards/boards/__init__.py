"""The four dashboards, one file each."""
