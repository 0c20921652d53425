"""Queues per user, and deficit round robin over users."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping

from mmkv.scheduler.ticket import Ticket


class UserQueues:
    """Requests that wait or are being read: first in, first out for each user.

    The first of each user, its head, is served; later ones only beside it, in the same pass. Users
    stand in a row: a new one at the end, and one whose head was admitted goes to the end.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Ticket]:
        for queue in self._queues.values():
            yield from queue

    def push(self, ticket: Ticket) -> None:
        """Put a request at the end of its user's queue."""
        self._queues.setdefault(ticket.user, deque()).append(ticket)

    def push_first(self, ticket: Ticket) -> None:
        """Put a request at the front of its user's queue, behind those that are being read."""
        queue = self._queues.setdefault(ticket.user, deque())
        queue.insert(sum(other.state == "prefill" for other in queue), ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take a request out, wherever it stands."""
        queue = self._queues[ticket.user]
        queue.remove(ticket)
        if not queue:
            del self._queues[ticket.user]

    def heads(self, behind: Collection[Ticket] = ()) -> list[Ticket]:
        """Return the first request of each user that is not among ``behind``, in their order."""
        firsts = (next((t for t in q if t not in behind), None) for q in self._queues.values())
        return [ticket for ticket in firsts if ticket is not None]

    def to_the_end(self, user: str) -> None:
        """Let all other users go first the next time."""
        if user in self._queues:
            self._queues.move_to_end(user)


class DeficitRoundRobin:
    """Chooses whose chunk is next, so that users get equal numbers of tokens.

    At each visit a user is granted ``quantum`` tokens, and is served while what it was granted
    lasts; the rest, or what it owes, is kept for the next visit as long as it has something to be
    served. (Shreedhar and Varghese, "Efficient fair queueing using deficit round robin", 1995.)
    """

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self._deficit: OrderedDict[str, int] = OrderedDict()
        self._visited: str | None = None

    def next(self, costs: Mapping[str, int]) -> str:
        """Return the user to serve; :meth:`charge` it for what it has got then.

        Args:
            costs: by user the tokens of what it wants next; at least one user.
        """
        for user in [user for user in self._deficit if user not in costs]:
            del self._deficit[user]
        for user in costs:
            self._deficit.setdefault(user, 0)
        while True:
            user = next(iter(self._deficit))
            if user != self._visited:
                self._visited = user
                self._deficit[user] += self.quantum
            if self._deficit[user] >= costs[user]:
                return user
            self._deficit.move_to_end(user)
            self._visited = None

    def charge(self, user: str, tokens: int) -> None:
        """Count tokens of a user that :meth:`next` knows, chosen by it or read beside."""
        if user in self._deficit:
            self._deficit[user] -= tokens
