"""The formats of strings that can be kept, and the patterns by which they are.

The grammar compiler ignores formats that it does not know, and of those that it knows some allow
values that no validator accepts (30 February, `01.2.3.4`) or text that is no JSON (quotes in an
email address). Formats with a pattern here are compiled as that pattern; the others are the
compiler's. A pattern allows some values of its format, not necessarily all: years from 1000,
addresses whose domain has a dot.
"""

from __future__ import annotations

YEAR = "[1-9][0-9]{3}"
LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
DAYS = (
    f"({YEAR}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|{YEAR}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|{YEAR}-02-(0[1-9]|1[0-9]|2[0-8])|{LEAP_YEAR}-02-29)"
)
HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{HOUR_AND_MINUTE})"
LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
GROUP = "[0-9A-Fa-f]{1,4}"
SHORTENED = "|".join(f"({GROUP}:){{1,{7 - after}}}(:{GROUP}){{1,{after}}}" for after in range(1, 7))
"""IPv6 addresses with `::` between two groups."""

FORMATS: dict[str, str | None] = {
    "date": DAYS,
    "time": TIME,
    "date-time": f"{DAYS}T{TIME}",
    "duration": None,
    "email": rf"{ATOM}(\.{ATOM})*@{LABEL}(\.{LABEL})+",
    "hostname": rf"{LABEL}(\.{LABEL})*",
    "ipv4": rf"({BYTE}\.){{3}}{BYTE}",
    "ipv6": f"(({GROUP}:){{7}}{GROUP}|({GROUP}:){{1,7}}:|:(:{GROUP}){{1,7}}|::|{SHORTENED})",
    "uri": None,
    "uri-reference": None,
    "uuid": None,
}
"""Format -> its pattern; None: the compiler's."""
