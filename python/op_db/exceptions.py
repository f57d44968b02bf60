"""Operators of the database that are not tried, or that Tessera refuses, each with the reason. Names as in the table."""

#: Not tried.
LEFT_OUT: dict[str, str] = {}

#: Tried; being refused counts as right.
MAY_REFUSE: dict[str, str] = {}
