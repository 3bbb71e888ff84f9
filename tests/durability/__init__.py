"""What is needed to break disks and processes on purpose."""
