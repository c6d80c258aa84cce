"""Deadlock: run a schedule's action lists and see which ranks are stuck. Twice: as gloo runs them, and as NCCL may.

`deadlock` posts receives where the schedule lists them, and delays sends while the channel's buffers are full: so the
runtime executes on CPUs. `rendezvous` lets every message block both its ranks until both have reached it. NCCL's
messages are kernels on the device: an action that waits for the whole device (to load a kernel, to allocate, to
compile) waits for every message that its rank has posted before. Neither covers a link without overlap, on which
`simulate` posts a receive only when its consumer is due: there a schedule that passes may still deadlock.

Ranks interact only by waiting, and progress is monotonic: what a rank waits for, once true, stays true. So if one run
completes, every run does, at any speed of ranks and links.
"""

from collections.abc import Iterator

from fivefold.schedules.action_index import ActionIndex, ScheduleProblem
from fivefold.schedules.actions import SEND_KINDS, Action, Channel
from fivefold.schedules.clock import Blocked


def deadlock(index: ActionIndex) -> Iterator[ScheduleProblem]:
    if index.run.blocks:
        first = _circle(index.run.blocks)[0]
        yield ScheduleProblem(deadlock_sentence(index.run.blocks), first.rank, first.place)


def rendezvous(index: ActionIndex) -> Iterator[ScheduleProblem]:
    if blocks := _blocked_at_meetings(index):
        first, why = _circle(blocks)[0], "on NCCL a posted message may hold up all that its rank does after it"
        cure = "leave out SEND and RECV, and write the line 'messages implied': then they are put where no circle is"
        yield ScheduleProblem(f"{deadlock_sentence(blocks)}; {why}; {cure}", first.rank, first.place)


def _blocked_at_meetings(index: ActionIndex) -> list[Blocked]:
    """The ranks that are stuck, if each message blocks both its ranks until both have reached it."""
    schedule, m = index.schedule, index.schedule.m
    channels = list(schedule.placement.channels)
    # By kind and stage, the number of the channel's first message; later microbatches' messages follow it.
    first = {(channel.send, channel.source): n * m for n, channel in enumerate(channels)}
    first |= {(channel.receive, channel.target): n * m for n, channel in enumerate(channels)}
    messages_of = [
        iter([n + k for kind, stage, k, _ in order if (n := first.get((kind, stage))) is not None])
        for order in schedule.ranks
    ]
    waiting: dict[int, int] = {}  # by message, the rank that has reached it first
    ready = list(range(schedule.p))
    while ready:
        rank = ready.pop()
        for message in messages_of[rank]:
            if message not in waiting:
                waiting[message] = rank
                break
            ready.append(waiting.pop(message))
    return sorted(_block(index, rank, channels[message // m], message % m) for message, rank in waiting.items())


def _block(index: ActionIndex, rank: int, channel: Channel, microbatch: int) -> Blocked:
    owner = index.schedule.placement.owner
    ends = [(channel.send, channel.source), (channel.receive, channel.target)]
    (kind, stage), (_, peer_stage) = ends if owner[channel.source] == rank else reversed(ends)
    place, number = index.places(kind, stage)[microbatch], index.sequence[kind, stage].index(microbatch)
    return Blocked(rank, Action(kind, stage, microbatch), channel, number, owner[peer_stage], place)


def deadlock_sentence(blocks: list[Blocked]) -> str:
    """A sentence that says which rank waits for which."""
    circle = _circle(blocks)
    verdict = f"and rank {circle[-1].peer} has nothing more to send or receive"
    if circle[-1].peer == circle[0].rank:
        verdict = f"that is a circle of {len(circle)}, and nobody in it can move"
    return f"{'; '.join(map(_wait_text, circle))}; {verdict}"


def _circle(blocks: list[Blocked]) -> list[Blocked]:
    """The ranks that wait for each other in a cycle; or the chain of ranks that ends at one that has finished."""
    by_rank = {block.rank: block for block in blocks}
    path = [blocks[0]]
    while path[-1].peer in by_rank:
        following = by_rank[path[-1].peer]
        if following in path:
            return path[path.index(following) :]
        path.append(following)
    return path


def _wait_text(block: Blocked) -> str:
    waits, message = f"rank {block.rank} waits at {block.action}", f"message {block.message} of the {block.channel}"
    if block.action.kind in SEND_KINDS:
        return f"{waits} until rank {block.peer} posts the receive of {message}"
    return f"{waits} for {message} from rank {block.peer}"
