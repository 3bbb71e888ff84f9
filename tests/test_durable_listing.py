"""Lists of dead letters: filters, pages, cursors, counts, and what malformed ones are told."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from sidecar.durable import listing as listing_module
from sidecar.durable.filters import Filter
from sidecar.durable.trouble import BadInput
from tests.durability.rigs import START, Rig, failed, rig_in, terms

CODES = ("NETWORK_TIMEOUT", "CONNECTION_REFUSED", "INVALID_API_KEY")


async def fill(rig: Rig, count: int) -> list[str]:
    """Entries a second apart, upstreams and codes in turn; the ids, oldest first."""
    ids = []
    for number in range(count):
        code = CODES[number % 3]
        failure = failed(
            number,
            upstream=f"u{number % 4}",
            code=code,
            at=START + number,
            phase=0 if code == "CONNECTION_REFUSED" else 3,
            status=401 if code == "INVALID_API_KEY" else None,
            workflow=f"w{number % 5}" if number % 2 else None,
        )
        ids.append((await rig.letters.keep(failure)).dlq_id)
    return ids


async def test_every_combination_of_filters_agrees_with_looking_at_each_entry(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await fill(rig, 60)
        await rig.operator.discard(ids[7], "me")
        entries = [await rig.entry(dlq_id) for dlq_id in ids]
        choices: dict[str, list[Any]] = {
            "status": [(), ("pending",), ("discarded", "pending"), ("completed",)],
            "upstream": [(), ("u1",), ("u0", "u3")],
            "error_class": [(), ("NETWORK_TIMEOUT",), ("INVALID_API_KEY", "CONNECTION_REFUSED")],
            "verdict": [(), ("safe",), ("unsafe",)],
            "since": [None, START + 20],
            "until": [None, START + 45],
            "workflow": ["", "w3"],
            "q": ["", "answer"],
        }
        for values in itertools.product(*choices.values()):
            wanted = Filter(**dict(zip(choices, values, strict=True)))
            expected = [
                entry.dlq_id
                for entry in entries
                if all(
                    not getattr(wanted, name) or getattr(entry, name) in getattr(wanted, name)
                    for name in list(choices)[:4]
                )
                and (wanted.since is None or entry.created_at >= wanted.since)
                and (wanted.until is None or entry.created_at < wanted.until)
                and (not wanted.workflow or entry.workflow == wanted.workflow)
            ]
            assert expected[::-1] == await rig.ids(wanted, limit=100), wanted
            assert len(expected) == sum((await rig.listing.count(wanted)).values()), wanted


@pytest.mark.parametrize("wanted", [Filter(), Filter(status=("pending",)), Filter(q="answer"), Filter(workflow="w1")])
@pytest.mark.parametrize("oldest_first", [False, True])
async def test_pages_follow_each_other_without_gap_or_repetition(
    tmp_path: Path, wanted: Filter, oldest_first: bool
) -> None:
    async with rig_in(tmp_path) as rig:
        await fill(rig, 31)
        everything = await rig.ids(wanted, limit=100, oldest_first=oldest_first)
        for size in (1, 7, len(everything), 100):
            found: list[str] = []
            cursor = None
            while True:
                page = await rig.listing.page(wanted, limit=size, cursor=cursor, oldest_first=oldest_first)
                found += [entry.dlq_id for entry in page.items]
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert everything == found


async def test_a_new_entry_does_not_disturb_a_list_being_read(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await fill(rig, 10)
        page = await rig.listing.page(Filter(), limit=5)
        await rig.letters.keep(failed(99, at=START + 1000))
        rest = await rig.listing.page(Filter(), limit=50, cursor=page.next_cursor)
        assert ids[::-1] == [entry.dlq_id for entry in (*page.items, *rest.items)]


async def test_entries_of_the_same_millisecond_are_all_listed(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = {(await rig.letters.keep(failed(number))).dlq_id for number in range(30)}
        assert kept == set(await rig.ids(Filter(), limit=100))


async def test_words_are_found_in_any_order_and_are_never_syntax(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        kept = await rig.letters.keep(failed(context={"request_id": "abc123def", "trace_id": "t-99"}))
        for words in (
            "abc123def",
            "abc123*",
            "PAYMENTS.test",
            kept.dlq_id,
            "answer no",
            "t-99",
            "network_time*",
            'answer"',
            "api.pay* answ*",
        ):
            assert [kept.dlq_id] == await rig.ids(Filter(q=words)), words
        for words in ("abc123", "answer OR nonsense", "charges"):
            assert [] == await rig.ids(Filter(q=words)), words


async def test_a_search_that_looks_at_too_much_stops_with_a_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing_module, "_MOST_LOOKED_AT", 8)
    async with rig_in(tmp_path) as rig:
        ids = await fill(rig, 20)
        wanted = Filter(q="answer", upstream=("u0",))
        found: list[str] = []
        pages, cursor = 0, None
        while True:
            page = await rig.listing.page(wanted, limit=50, cursor=cursor)
            found += [entry.dlq_id for entry in page.items]
            pages, cursor = pages + 1, page.next_cursor
            if cursor is None:
                break
        assert ids[::4][::-1] == found
        assert 3 == pages


async def test_counts_and_ages_come_from_the_rows_themselves(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        ids = await fill(rig, 24)
        await rig.operator.discard(ids[0], "me")
        stats = await rig.listing.refresh()
        assert {"u0": 5, "u1": 6, "u2": 6, "u3": 6} == stats.waiting
        assert {"u0": START + 4, "u1": START + 1, "u2": START + 2, "u3": START + 3} == stats.oldest
        assert {"pending": 23, "discarded": 1} == stats.count("status")
        assert {"NETWORK_TIMEOUT": 8, "CONNECTION_REFUSED": 8, "INVALID_API_KEY": 8} == stats.count("error_class")
        assert {"unsafe": 7, "safe": 16} == stats.count("verdict", ["pending"])
        assert stats.bytes > 24 * 500
        assert (stats.disk_free or 0) > 0
        assert {"u0", "u1", "u2", "u3"} == rig.letters.waiting


async def test_a_verdict_that_time_has_changed_is_not_listed_under_the_old_word(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await rig.letters.keep(failed(idempotency_key="k", key_honoured=True))
        assert 1 == len(await rig.ids(Filter(verdict=("safe",))))
        rig.now += 86_401
        assert [] == await rig.ids(Filter(verdict=("safe",)))
        (entry,) = (await rig.listing.page(Filter())).items
        assert "key_window_expired" == entry.verdict


async def test_a_shown_row_has_no_secrets(tmp_path: Path) -> None:
    async with rig_in(tmp_path, {"payments": terms()}) as rig:
        await rig.letters.keep(failed())
        (row,) = await rig.listing.rows_shown(await rig.listing.page(Filter()))
        assert "https://api.payments.test/v1/charges?order=0&token=REDACTED" == row["url"]
        assert "canary" not in repr(row)


async def test_limits_and_cursors_that_were_not_given_out_are_refused(tmp_path: Path) -> None:
    async with rig_in(tmp_path) as rig:
        await fill(rig, 3)
        for limit in (0, 501):
            with pytest.raises(BadInput, match="limit"):
                await rig.listing.page(Filter(), limit=limit)
        for cursor in ("?", "aGVsbG8", "x" * 40):
            with pytest.raises(BadInput, match="cursor"):
                await rig.listing.page(Filter(), cursor=cursor)
        cursor = (await rig.listing.page(Filter(), limit=1)).next_cursor
        with pytest.raises(BadInput, match="another filter; start again"):
            await rig.listing.page(Filter(upstream=("u1",)), cursor=cursor)
        assert 2 == len((await rig.listing.page(Filter(since=START - 5), cursor=cursor)).items), "times may move"


def test_a_filter_shows_only_what_was_set() -> None:
    assert {"status": ("pending",), "q": "x"} == Filter(status=("pending",), q="x").shown()
