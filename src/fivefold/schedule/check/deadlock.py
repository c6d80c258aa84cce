"""Deadlock: run the lists, receives posted where they stand, sends held back by the buffers, and see who is left.

The proof is for receives posted where they stand and sends that do not block until they run out of buffers, because
that is how the runtime executes; with blocking sends or receives posted late, `simulate` may find a deadlock here too.
Waiting is all that ranks do to each other, and what they wait for never un-happens; so if one run gets through, every
run does, at any speed of ranks and links.
"""

from collections.abc import Iterator

from fivefold.schedule.actions import SENDS
from fivefold.schedule.check.index import Index, Problem
from fivefold.schedule.clock import Block


def deadlock(index: Index) -> Iterator[Problem]:
    if index.run.blocks:
        first = _circle(index.run.blocks)[0]
        yield Problem(deadlock_sentence(index.run.blocks), first.rank, first.place)


def deadlock_sentence(blocks: list[Block]) -> str:
    """Who waits for whom."""
    circle = _circle(blocks)
    verdict = f"and rank {circle[-1].peer} has nothing more to send or receive"
    if circle[-1].peer == circle[0].rank:
        verdict = f"that is a circle of {len(circle)}, and nobody in it can move"
    return f"{'; '.join(map(_waits, circle))}; {verdict}"


def _circle(blocks: list[Block]) -> list[Block]:
    """The ranks that wait for each other in a circle; or the chain to one that is done and will never answer."""
    by_rank = {block.rank: block for block in blocks}
    path = [blocks[0]]
    while path[-1].peer in by_rank:
        following = by_rank[path[-1].peer]
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return path


def _waits(block: Block) -> str:
    waits, message = f"rank {block.rank} waits at {block.action}", f"message {block.message} of the {block.channel}"
    if block.action.kind in SENDS:
        return f"{waits} until rank {block.peer} posts the receive of {message}"
    return f"{waits} for {message} from rank {block.peer}"
