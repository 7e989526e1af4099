"""The cost ledger: what a score function will cost, predicted from its graph and the schedule.

See README.md here; `Ledger` (page.py) is what a plan prints.
"""
