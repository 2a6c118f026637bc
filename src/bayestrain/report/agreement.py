"""Do several runs or particles find the same ranks? At how many bonds they lie within one of each other, in words."""

from collections.abc import Sequence

from bayestrain.report.words import plural

ENOUGH = 0.8
"""Share of the bonds from which on the ranks count as agreed on."""


def within_one(bonds: Sequence[Sequence[int]]) -> tuple[int, int]:
    """On how many bonds, of how many, all ranks lie within one of each other."""
    return sum(max(ranks) - min(ranks) <= 1 for ranks in bonds), len(bonds)


def agree(within: int, bonds: int) -> bool:
    """Whether that is enough of the bonds."""
    return within / bonds >= ENOUGH


def agreement_sentence(within: int, bonds: int, who: str, whose: str, uncut: int = 0) -> str:
    """`who` agree or not ("The particles"), by `whose` ranks ("their own ranks"); at `uncut` bonds none was cut."""
    share = f"{within} of {plural(bonds, 'bond')} ({100 * within // bonds}\u00a0%)"
    if not agree(within, bonds):
        few = f"only {share}" if within else f"none of {plural(bonds, 'bond')}"
        return (
            f"{who} do not agree on the ranks: on {few} do {whose} lie within one of each other. "
            f"Agreement would take {100 * ENOUGH:.0f}\u00a0%."
        )
    text = f"{who} agree on the ranks: on {share} {whose} lie within one of each other"
    return f"{text}, though on {uncut} of them simply because none cut anything." if uncut else f"{text}."
