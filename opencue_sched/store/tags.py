"""How statements compare tags: as ``domain.clusters.normalise_tag`` writes them, without spaces and in lower case.

Only the letters A to Z have another case here, as in that function. What ``lower()`` makes of others depends on the
locale of the database, and what one side folds and the other does not would never meet.
"""

from __future__ import annotations


def compared_tag(column: str) -> str:
    """SQL for the tag in a column, in the form in which tags are compared. Revision 0016 has an index of ``host_tag``
    by this expression."""
    return f"""lower(replace({column}, ' ', '') COLLATE "C")"""


def compared_tags(column: str) -> str:
    """SQL for the tags in a column such as ``layer.str_tags``, in the form in which tags are compared: an array."""
    return f"string_to_array({compared_tag(column)}, '|')"
