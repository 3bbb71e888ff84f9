"""What survives a restart: dead letters, idempotency keys and the outbox, in one SQLite file and a folder of bodies.

Law: a promise is made only after the commit that holds it has reached the disk, and no disk work ever runs on the
event loop's thread.
"""
