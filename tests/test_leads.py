"""What was tried: problems and schedules that exist, a record's numbers on the page."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

from cutedsl_fa3 import leads
from cutedsl_fa3.cases import of_row
from cutedsl_fa3.leads import LEADS
from cutedsl_fa3.record import Record, ScheduleRow, newest

META = {"device": "NVIDIA H200", "driver": "1", "date": "2026-11-30T00:00:00", "commit": "abcdef0"}


def recorded(slower: float) -> Record:
    """Every schedule `slower` times as slow as the chosen one, which takes 1 ms."""
    rows = [
        ScheduleRow(
            **asdict(case),
            schedule=asdict(schedule),
            ms=slower if number else 1.0,
            tflops=100.0,
            samples=(1.0,),
        )
        for case, schedules in leads.plans()
        for number, schedule in enumerate(schedules)
    ]
    return Record(META, tuple(rows))


@pytest.mark.parametrize("lead", LEADS, ids=lambda lead: lead.question)
def test_every_change_of_a_lead_can_be_tried_somewhere(lead):
    legal = [change for case in lead.cases for change, _ in leads.tried(lead, case)]
    assert all(change in legal for change in lead.changes)
    assert all(any(True for _ in leads.tried(lead, case)) for case in lead.cases)


def test_a_problem_is_measured_once_with_the_chosen_schedule_first_and_none_twice():
    found = leads.plans()
    cases = [case for case, _ in found]
    assert len(set(cases)) == len(cases) == len({c for lead in LEADS for c in lead.cases})
    for case, schedules in found:
        assert schedules[0] == leads.chosen(case)
        assert len(set(schedules)) == len(schedules) > 1


def test_the_page_shows_each_speed_over_that_of_the_chosen_schedule():
    text = leads.page(recorded(1.25))
    speeds = re.findall(r"\b[01]\.\d{3}\b", text)
    assert set(speeds) == {"1.000", "0.800"}
    shown = sum(len(list(leads.tried(lead, case))) for lead in LEADS for case in lead.cases)
    assert len(speeds) == shown
    assert text.count("## ") == len(LEADS)


def test_the_page_of_an_older_record_is_over_what_the_table_chose_then(monkeypatch):
    record, today = recorded(1.25), leads.chosen
    before = leads.page(record)

    def other(case):
        choice = today(case)
        return replace(choice, early=3) if choice.intra and choice.early else choice

    changed = [case for lead in LEADS for case in lead.cases if other(case) != today(case)]
    assert changed
    monkeypatch.setattr(leads, "chosen", other)
    assert leads.page(record) == before


def test_what_a_record_has_not_is_left_empty():
    whole = recorded(1.25)
    first = whole.rows[0]
    of_one = [row for row in whole.rows if of_row(row) == of_row(first)]
    text = leads.page(replace(whole, rows=tuple(of_one[:2])))
    assert "0.800" in text and text.count("S=") == sum(
        of_row(first) in lead.cases for lead in LEADS
    ) + text.count("Problems of S=")


def test_the_page_is_that_of_the_newest_record():
    record = newest(kind="leads")
    if record is None:
        assert not leads.PAGE.exists()
    else:
        assert leads.PAGE.read_text() == leads.page(record)
