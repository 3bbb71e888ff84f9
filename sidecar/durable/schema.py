"""The tables, and how an older file becomes a newer one.

Law: `user_version` counts the migrations a file has seen. A migration, once released, is never changed; what comes
later is appended. Each runs in one transaction.

How dead letters are laid out, so that any filtered page is a few index look-ups whatever their number:
- `seq` is the time of creation in milliseconds, shifted left, plus a counter: the row order is the time order.
- the four words people filter by (upstream, class, verdict, status) are one number, the *facet*. Its row counts
  the entries that have it (kept by triggers, so that counts cannot drift), and (facet, seq) is indexed.
- what is sealed lies in a table of its own, so that listing never reads bodies.
"""

from __future__ import annotations

SEQ_SHIFT = 20  # a million entries in one millisecond

_COUNTED = """
CREATE TRIGGER {table}_counted_in AFTER INSERT ON {table} BEGIN
  UPDATE totals SET n = n + 1, bytes = bytes + new.size WHERE name = '{table}';
END""", """
CREATE TRIGGER {table}_counted_out AFTER DELETE ON {table} BEGIN
  UPDATE totals SET n = n - 1, bytes = bytes - old.size WHERE name = '{table}';
END""", """
CREATE TRIGGER {table}_recounted AFTER UPDATE OF size ON {table} BEGIN
  UPDATE totals SET bytes = bytes - old.size + new.size WHERE name = '{table}';
END"""  # fmt: skip  # one statement per text

_FIRST = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE seal_keys (key_id TEXT PRIMARY KEY, proof BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE totals (name TEXT PRIMARY KEY, n INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO totals VALUES ('dead_letters', 0, 0), ('idempotency', 0, 0), ('deliveries', 0, 0)",
    "CREATE TABLE body_files (name TEXT PRIMARY KEY, stored INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE quarantine (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, source TEXT NOT NULL, ident TEXT NOT NULL, why TEXT NOT NULL,
        content BLOB NOT NULL)""",
    # ---- dead letters
    """CREATE TABLE facets (
        id INTEGER PRIMARY KEY, upstream TEXT NOT NULL, error_class TEXT NOT NULL, verdict TEXT NOT NULL,
        status TEXT NOT NULL, n INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
        UNIQUE (upstream, error_class, verdict, status))""",
    """CREATE TABLE dead_letters (
        seq INTEGER PRIMARY KEY, dlq_id TEXT NOT NULL UNIQUE, facet INTEGER NOT NULL,
        key_hash INTEGER, fingerprint INTEGER NOT NULL, url_hash INTEGER, workflow TEXT,
        verdict_until REAL, done_at REAL, lease_owner TEXT, lease_until REAL,
        size INTEGER NOT NULL, search TEXT NOT NULL, record BLOB NOT NULL, digest BLOB NOT NULL)""",
    "CREATE INDEX dead_letters_by_facet ON dead_letters (facet, seq)",
    "CREATE INDEX dead_letters_by_fingerprint ON dead_letters (fingerprint)",
    "CREATE INDEX dead_letters_by_key ON dead_letters (key_hash) WHERE key_hash IS NOT NULL",
    "CREATE INDEX dead_letters_by_url ON dead_letters (url_hash) WHERE url_hash IS NOT NULL",
    "CREATE INDEX dead_letters_by_workflow ON dead_letters (workflow, seq) WHERE workflow IS NOT NULL",
    "CREATE INDEX dead_letters_by_change ON dead_letters (verdict_until) WHERE verdict_until IS NOT NULL",
    "CREATE INDEX dead_letters_by_end ON dead_letters (done_at) WHERE done_at IS NOT NULL",
    """CREATE TABLE payloads (
        seq INTEGER PRIMARY KEY, head BLOB NOT NULL, body BLOB, body_file TEXT, response BLOB,
        original_head BLOB, original_body BLOB, original_body_file TEXT)""",
    # No positions: half the work on writing, and nobody searches for phrases.
    """CREATE VIRTUAL TABLE dead_letter_words USING fts5 (
        search, content='dead_letters', content_rowid='seq', detail=none, columnsize=0)""",
    """CREATE TRIGGER dead_letters_counted_in AFTER INSERT ON dead_letters BEGIN
        UPDATE facets SET n = n + 1, bytes = bytes + new.size WHERE id = new.facet;
        UPDATE totals SET n = n + 1, bytes = bytes + new.size WHERE name = 'dead_letters';
        INSERT INTO dead_letter_words (rowid, search) VALUES (new.seq, new.search);
    END""",
    """CREATE TRIGGER dead_letters_counted_out AFTER DELETE ON dead_letters BEGIN
        UPDATE facets SET n = n - 1, bytes = bytes - old.size WHERE id = old.facet;
        UPDATE totals SET n = n - 1, bytes = bytes - old.size WHERE name = 'dead_letters';
        INSERT INTO dead_letter_words (dead_letter_words, rowid, search) VALUES ('delete', old.seq, old.search);
    END""",
    """CREATE TRIGGER dead_letters_moved AFTER UPDATE OF facet, size ON dead_letters
        WHEN old.facet <> new.facet OR old.size <> new.size BEGIN
        UPDATE facets SET n = n - 1, bytes = bytes - old.size WHERE id = old.facet;
        UPDATE facets SET n = n + 1, bytes = bytes + new.size WHERE id = new.facet;
        UPDATE totals SET bytes = bytes - old.size + new.size WHERE name = 'dead_letters';
    END""",
    """CREATE TRIGGER dead_letters_reworded AFTER UPDATE OF search ON dead_letters WHEN old.search <> new.search BEGIN
        INSERT INTO dead_letter_words (dead_letter_words, rowid, search) VALUES ('delete', old.seq, old.search);
        INSERT INTO dead_letter_words (rowid, search) VALUES (new.seq, new.search);
    END""",
    """CREATE TABLE replay_jobs (
        job_id TEXT PRIMARY KEY, created_at REAL NOT NULL, boot TEXT NOT NULL, state TEXT NOT NULL,
        document BLOB NOT NULL) WITHOUT ROWID""",
    "CREATE INDEX replay_jobs_by_time ON replay_jobs (created_at)",
    # ---- idempotency
    """CREATE TABLE idempotency (
        id INTEGER PRIMARY KEY, upstream TEXT NOT NULL, api_key_id TEXT NOT NULL, method TEXT NOT NULL,
        path_hash BLOB NOT NULL, key_hash BLOB NOT NULL, version INTEGER NOT NULL,
        state TEXT NOT NULL, boot TEXT NOT NULL, started_at REAL NOT NULL, expires_at REAL NOT NULL,
        payload_hash BLOB NOT NULL, response BLOB, not_stored TEXT, size INTEGER NOT NULL,
        UNIQUE (upstream, api_key_id, method, path_hash, key_hash, version))""",
    "CREATE INDEX idempotency_by_expiry ON idempotency (expires_at)",
    "CREATE INDEX idempotency_in_flight ON idempotency (boot) WHERE state = 'in_flight'",
    *(text.format(table="idempotency") for text in _COUNTED),
    # ---- outbox
    """CREATE TABLE jobs (
        job_id TEXT PRIMARY KEY, idempotency_key TEXT NOT NULL UNIQUE, subject TEXT NOT NULL, version INTEGER NOT NULL,
        state TEXT NOT NULL, created_at REAL NOT NULL, finished_at REAL) WITHOUT ROWID""",
    "CREATE INDEX jobs_by_time ON jobs (created_at, job_id)",
    "CREATE INDEX jobs_by_state ON jobs (state, created_at, job_id)",
    "CREATE INDEX jobs_by_subject ON jobs (subject, version)",
    """CREATE TABLE deliveries (
        id INTEGER PRIMARY KEY, subject TEXT NOT NULL, recipient_hash BLOB NOT NULL, version INTEGER NOT NULL,
        upstream TEXT NOT NULL, host TEXT NOT NULL, send_key TEXT NOT NULL, state TEXT NOT NULL, boot TEXT,
        attempts INTEGER NOT NULL DEFAULT 0, lookups INTEGER NOT NULL DEFAULT 0, next_at REAL,
        ambiguous INTEGER NOT NULL DEFAULT 0, giving_up INTEGER NOT NULL DEFAULT 0,
        first_started_at REAL, started_at REAL, notified_at REAL, notification_id TEXT, evidence TEXT, last_error TEXT,
        request BLOB NOT NULL, body BLOB, body_file TEXT, size INTEGER NOT NULL,
        UNIQUE (subject, recipient_hash, version))""",
    "CREATE INDEX deliveries_due ON deliveries (next_at) WHERE next_at IS NOT NULL",
    "CREATE INDEX deliveries_sending ON deliveries (boot) WHERE boot IS NOT NULL",
    """CREATE INDEX deliveries_without_evidence ON deliveries (id)
        WHERE notified_at IS NOT NULL AND evidence IS NULL""",
    *(text.format(table="deliveries") for text in _COUNTED),
    """CREATE TABLE job_deliveries (
        job_id TEXT NOT NULL, delivery INTEGER NOT NULL, PRIMARY KEY (job_id, delivery)) WITHOUT ROWID""",
    "CREATE INDEX job_deliveries_by_delivery ON job_deliveries (delivery)",
    "CREATE TABLE job_counts (state TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID",
    """INSERT INTO job_counts VALUES ('in_progress', 0), ('succeeded', 0), ('retryable_failed', 0), ('failed', 0),
        ('unknown', 0)""",
    """CREATE TRIGGER jobs_counted_in AFTER INSERT ON jobs BEGIN
        UPDATE job_counts SET n = n + 1 WHERE state = new.state;
    END""",
    """CREATE TRIGGER jobs_counted_out AFTER DELETE ON jobs BEGIN
        UPDATE job_counts SET n = n - 1 WHERE state = old.state;
    END""",
    """CREATE TRIGGER jobs_moved AFTER UPDATE OF state ON jobs WHEN old.state <> new.state BEGIN
        UPDATE job_counts SET n = n - 1 WHERE state = old.state;
        UPDATE job_counts SET n = n + 1 WHERE state = new.state;
    END""",
)

_OPERATING = (
    """CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, who TEXT NOT NULL, claimed TEXT, client TEXT,
        agent TEXT, what TEXT NOT NULL, about TEXT NOT NULL, before TEXT, after TEXT, reason TEXT)""",
    """CREATE TRIGGER audit_is_not_changed BEFORE UPDATE ON audit BEGIN
        SELECT RAISE(ABORT, 'the audit is only ever added to');
    END""",
    """CREATE TRIGGER audit_is_not_shortened BEFORE DELETE ON audit BEGIN
        SELECT RAISE(ABORT, 'the audit is only ever added to');
    END""",
    "CREATE TABLE runtime_settings (key TEXT PRIMARY KEY, value TEXT NOT NULL, set_at REAL NOT NULL) WITHOUT ROWID",
    """CREATE TABLE forced_breakers (
        upstream TEXT NOT NULL, endpoint TEXT NOT NULL, state TEXT NOT NULL, until REAL, reason TEXT NOT NULL,
        PRIMARY KEY (upstream, endpoint)) WITHOUT ROWID""",
)

_KEYS_OF_APPS = (
    # Whether the app gave the delivery a key of its own, which providers honour unless it is said that they do not.
    "ALTER TABLE deliveries ADD COLUMN own_key INTEGER NOT NULL DEFAULT 0",
)

_PAYLOADS_OF_DELIVERIES = (
    # What was asked for, as a keyed hash: the same intent with another request is refused, not dropped.
    "ALTER TABLE deliveries ADD COLUMN payload_hash BLOB",
)

_ANSWERS_TO_DELIVERIES = (
    # What the provider said last, sealed: head and the beginning of its body.
    "ALTER TABLE deliveries ADD COLUMN answer BLOB",
)

_COMMITS = (
    # Every commit counts itself, on a page that most of them write anyway: see account.py.
    "INSERT INTO totals VALUES ('commits', 0, 0)",
)

_RETENTION_OF_THE_AUDIT = (
    # What is older than the moment in `meta` may go; it is set together with the deletion, by `Audit.expire` alone.
    "DROP TRIGGER audit_is_not_shortened",
    """CREATE TRIGGER audit_is_not_shortened BEFORE DELETE ON audit
        WHEN old.at >= coalesce((SELECT value FROM meta WHERE name = 'audit_kept_from'), 0) BEGIN
        SELECT RAISE(ABORT, 'the audit is only ever added to');
    END""",
    "CREATE INDEX audit_by_time ON audit (at)",
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _FIRST,
    _OPERATING,
    _KEYS_OF_APPS,
    _PAYLOADS_OF_DELIVERIES,
    _ANSWERS_TO_DELIVERIES,
    _COMMITS,
    _RETENTION_OF_THE_AUDIT,
)
VERSION = len(MIGRATIONS)
