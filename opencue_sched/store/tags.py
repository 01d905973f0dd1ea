"""How statements compare tags: as ``domain.clusters.normalise_tag`` writes them, without spaces and in lower case.

Only the letters A to Z have another case here, as in that function. What ``lower()`` makes of others depends on the
locale of the database, and what one side folds and the other does not would never meet.
"""

from __future__ import annotations


def compared_tag(column: str) -> str:
    """The tag in a column as it is compared. Revision 0016 has an index of these of ``host_tag``."""
    return f"""lower(replace({column}, ' ', '') COLLATE "C")"""


def compared_tags(column: str) -> str:
    """The tags in a column of ``layer.str_tags`` as they are compared: an array."""
    return f"string_to_array({compared_tag(column)}, '|')"
