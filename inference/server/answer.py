"""A request under way: gathers the events of its choices into one response or one stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from inference.decoding.logprobs import TokenLogprobs
from inference.measure.metrics import divide
from inference.server.envelope import ChoiceWriter, Envelope, Json
from inference.server.protocol import CHAT, Asked
from inference.server.scheduler import Done, Drafts, Piece
from inference.server.service import Service, Ticket

Found = TypeVar("Found")
Out = Callable[[Json], Awaitable[None]]


class Answer:
    """The choices of a request under way, once the first one has started."""

    def __init__(self, service: Service, asked: Asked, tickets: Sequence[Ticket]) -> None:
        self.service, self.asked, self.tickets = service, asked, tickets
        job = tickets[0].job
        ends = service.engine.target.eos_token_ids
        self.envelope = Envelope(asked.kind, job.id, service.name, int(time.time()))
        self.counts = [0] * len(tickets)
        """Tokens of every choice so far."""
        self.writers = [
            ChoiceWriter(asked, index, ticket.job.prompt, self._echo(index), service.texts, ends)
            for index, ticket in enumerate(tickets)
        ]

    def _echo(self, index: int) -> str:
        """The text of a choice's prompt if the request asks for it, otherwise empty."""
        if not self.asked.echo:
            return ""
        given = self.asked.prompts[index // self.asked.choices]
        return given if isinstance(given, str) else self.service.texts.prompt(given)

    async def whole(self) -> Json:
        """The response in one piece; raises `ApiError`."""
        done = await together([self._end(index) for index in range(len(self.tickets))])
        choices = [
            writer.whole(end.text, end.finish, end.tokens, end.logprobs, of_prompt(ticket))
            for writer, ticket, end in zip(self.writers, self.tickets, done, strict=True)
        ]
        return self.envelope.whole(choices, self.figures(done) | self._prompt_ids())

    async def _end(self, index: int) -> Done:
        ticket = await self._started(index)
        while not isinstance(event := await ticket.next(), Done):
            pass
        self.counts[index] = len(event.tokens)
        return event

    async def _started(self, index: int) -> Ticket:
        """The ticket of a choice, once its prompt was read; the first prompt was read already."""
        ticket = self.tickets[index]
        if index:
            await ticket.start()
        return ticket

    async def stream(self, out: Out) -> None:
        """Pass every part of a stream to `out`; raises `ApiError`."""
        done = await together([self._tell(index, out) for index in range(len(self.tickets))])
        if self.asked.usage:
            await out(self.envelope.part([], self.figures(done)))

    async def _tell(self, index: int, out: Out) -> Done:
        """Pass the parts of one choice to `out`."""
        writer, ticket = self.writers[index], await self._started(index)

        async def tell(choice: Json, figures: Json | None = None) -> None:
            usage: Json = {"usage": self.usage()} if self.asked.running_usage else {}
            await out(self.envelope.part([choice], usage | (figures or {})))

        if (opening := writer.opening(of_prompt(ticket))) is not None:
            await tell(opening, self._prompt_ids())
        while isinstance(event := await ticket.next(), Piece):
            if event.text:
                self.counts[index] = event.tokens
                await tell(writer.piece(event.text, event.logprobs))
        self.counts[index] = len(event.tokens)
        await tell(writer.end(event.finish, event.tokens, event.logprobs))
        return event

    def _prompt_ids(self) -> Json:
        """The token ids of a conversation, where token ids were asked for."""
        if not self.asked.ids or self.asked.kind != CHAT:
            return {}
        return {"prompt_token_ids": list(self.tickets[0].job.prompt)}

    def usage(self) -> Json:
        """Tokens read and written so far; a prompt counts once, even with several choices."""
        prompts = self.tickets[:: self.asked.choices]
        read, written = sum(len(ticket.job.prompt) for ticket in prompts), sum(self.counts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def figures(self, done: Sequence[Done]) -> Json:
        """The tokens of all choices, their seeds, which reproduce them, and drafting figures."""
        drafts, seeds = Drafts(), [ticket.job.seed for ticket in self.tickets]
        for end in done:
            drafts.passes += end.drafts.passes
            drafts.accepted += end.drafts.accepted
            drafts.committed += end.drafts.committed
        drafting: Json = {
            "seed": seeds[0],
            "verify_passes": drafts.passes,
            "accepted_drafts": drafts.accepted,
            "tau": divide(drafts.committed, drafts.passes) if drafts.passes else 1.0,
        }
        if len(seeds) > 1:
            drafting["seeds"] = seeds
        return {"usage": self.usage(), "headstart": drafting}

    def leave(self) -> None:
        """Note that the client has left."""
        for ticket in self.tickets:
            ticket.leave()

    def close(self) -> None:
        """See `Ticket.close`."""
        for ticket in self.tickets:
            ticket.close()


def of_prompt(ticket: Ticket) -> Sequence[TokenLogprobs]:
    """The log-probabilities of a choice's prompt, once it was read."""
    return () if ticket.job.logprobs is None else ticket.job.logprobs.prompt


async def together(works: Sequence[Coroutine[Any, Any, Found]]) -> list[Found]:
    """The results of all coroutines; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        # what they send is whole before anything else is sent
        await asyncio.gather(*tasks, return_exceptions=True)
