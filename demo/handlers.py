"""What the page does on the engine: answer, regenerate, edit, stop, compare, and the API's answer.

All of it is asyncio: no thread waits with a visitor, so that Stop always gets through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from trimode_vlm.demo import panels
from trimode_vlm.demo.chat_logic import (
    COMPARED,
    Limits,
    PictureError,
    as_shown,
    ask,
    clean_history,
    mark_of,
    user_message,
)
from trimode_vlm.demo.live_answer import LiveAnswer
from trimode_vlm.engine import Engine
from trimode_vlm.request import Request, RequestError

SETTING_NAMES = ("max_new_tokens", "block_length", "threshold", "temperature", "top_p", "seed")
Message = dict[str, Any]
Records = list[dict[str, Any]]


class Turn:
    """One answer under way. It may be stopped before it has a request, while a thread reads its pictures."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.request: Request | None = None

    def stop(self) -> None:
        self.is_stopped = True
        if self.request is not None:
            self.request.cancel()

    def take(self, request: Request) -> Request:
        """From the thread that submitted it: whoever waited for that thread may have gone."""
        self.request = request
        if self.is_stopped:
            request.cancel()
        return request


class Page:
    """The handlers. A visitor's turns are known by (session, chat); the newest turn of a chat ends the one before.

    Args:
        folders: where the pictures lie that a visitor may name: uploads and examples.
    """

    def __init__(self, engine: Engine, folders: Sequence[Path], limits: Limits | None = None) -> None:
        self.engine, self.folders, self.limits = engine, folders, limits or Limits()
        self._turns: dict[tuple[str, Hashable], Turn] = {}

    # --- chat

    async def ask(
        self, session: str, chat: str, value: Any, history: list[Message], records: Records, *options: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Answer what is in the box; yields (box, history, panel, session's table, records, note).

        A question that cannot be answered goes back to the box, without a picture that cannot be used.
        """
        message, history = user_message(value), clean_history(history)
        if not message["content"]:
            yield gr.skip(), *_unchanged(), panels.note("Write a question, or attach a picture.")
            return
        yield _box(running=True, value=_empty(value)), [*history, message], *_unchanged(3), panels.note("")
        is_asked = False
        async for shown in self._answer(session, chat, [*history, message], records, options):
            if not is_asked and isinstance(shown[0], Exception):
                yield _box(running=False, value=_without_bad(value, shown[0])), history, *shown[1:]
                return
            is_asked = True
            yield gr.skip(), *shown
        if (session, chat) not in self._turns:
            yield _box(running=False), *_unchanged(5)

    async def again(
        self, session: str, chat: str, history: list[Message], records: Records, *options: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Answer the last question once more; yields as `ask`. What cannot be answered leaves all as it is."""
        history = clean_history(history)
        question = list(history)
        while question and question[-1]["role"] != "user":
            question.pop()
        if not question:
            yield gr.skip(), *_unchanged(4), panels.note("Nothing to answer again yet.")
            return
        yield _box(running=True), question, *_unchanged(3), panels.note("")
        async for shown in self._answer(session, chat, question, records, options):
            yield gr.skip(), history if isinstance(shown[0], Exception) else shown[0], *shown[1:]
        if (session, chat) not in self._turns:
            yield _box(running=False), *_unchanged(5)

    async def _answer(
        self, session: str, chat: str, history: list[Message], records: Records, options: Sequence[Any]
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Yields (history, panel, session's table, records, note); for the history the reason when it is refused."""
        turn = self._begin(session, chat)
        try:
            mode, system, *settings = options
            try:
                request = await self._submit(turn, history, system, mode, settings)
            except (ValueError, RequestError) as error:
                yield error, *_unchanged(3), panels.note(_refusal(error))
                return
            answer: Message = {"role": "assistant", "content": []}
            live = None
            async for live in LiveAnswer(request).frames():
                if self._turns.get((session, chat)) is not turn:
                    return
                # As a part: Gradio strips the indentation of bare text.
                answer["content"] = [{"type": "text", "text": as_shown(live.text) + mark_of(live.record())}]
                yield [*history, answer], self._panel(live), *_unchanged(3)
            if self._turns.get((session, chat)) is not turn:
                return
            note = panels.note(f"⚠ {request.error}" if request.error is not None else "")
            if live is None:
                yield history, *_unchanged(3), note
                return
            # In place: the visitor's other tab adds to the same list.
            records.append(live.record())
            yield [*history, answer], self._panel(live), panels.session(records), records, note
        finally:
            self._end(session, chat, turn)

    async def _submit(
        self, turn: Turn, history: list[Message], system: str, mode: str, settings: Sequence[Any]
    ) -> Request:
        """Pictures take time to open: in a thread, which goes on when the visitor has left."""
        values = dict(zip(SETTING_NAMES, settings, strict=True))

        def submit() -> Request:
            request = ask(self.engine, history, system, mode, values, folders=self.folders, limits=self.limits)
            return turn.take(request)

        return await asyncio.to_thread(submit)

    def _begin(self, session: str, chat: Hashable) -> Turn:
        self.stop(session, chat)
        turn = self._turns[session, chat] = Turn()
        return turn

    def _end(self, session: str, chat: Hashable, turn: Turn) -> None:
        turn.stop()
        if self._turns.get((session, chat)) is turn:
            del self._turns[session, chat]

    def stop(self, session: str, chat: Hashable) -> None:
        """End what this visitor has running in a chat; what has come stays."""
        if (turn := self._turns.get((session, chat))) is not None:
            turn.stop()

    def clear(self, session: str, chat: str) -> tuple[Any, ...]:
        """Gives (box, history, panel, note)."""
        self.stop(session, chat)
        self._turns.pop((session, chat), None)
        empty: Any = "" if chat == "text" else {"text": "", "files": []}
        return _box(running=False, value=empty), [], panels.live_panel(None), panels.note("")

    def leave(self, session: str) -> None:
        """The visitor has closed the page."""
        for key in [key for key in self._turns if key[0] == session]:
            self._turns.pop(key).stop()

    def _panel(self, live: LiveAnswer) -> str:
        return panels.live_panel(live, self._piece, self.engine.model.config.mask_token_id)

    def _piece(self, token_id: int) -> str:
        return self.engine.processor.tokenizer.decode([token_id], skip_special_tokens=False)

    # --- all modes

    async def compare(
        self, session: str, value: Any, records: Records, *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        """One question in every mode, one after the other, so that their seconds are honest.

        Yields (box, a text per mode, comparison, panel, session's table, records, note).
        """
        message = user_message(value)
        if not message["content"]:
            yield *_unchanged(len(COMPARED) + 5), panels.note("Write a question, or attach a picture.")
            return
        texts: list[str] = [""] * len(COMPARED)
        compared: Records = []
        turn = self._begin(session, "compare")
        # Greedy, as only then the modes can be compared.
        greedy = [0.0 if name == "temperature" else v for name, v in zip(SETTING_NAMES, settings, strict=True)]
        try:
            for i, mode in enumerate(COMPARED):
                table = panels.comparison(compared, texts[:i])
                yield gr.skip(), *texts, table, *_unchanged(3), panels.note(f"{mode} answers …")
                try:
                    request = await self._submit(turn, [message], "", mode, greedy)
                except (ValueError, RequestError) as error:
                    box = gr.update(value=_without_bad(value, error))
                    yield box, *texts, *_unchanged(), panels.note(_refusal(error))
                    return
                live = None
                async for live in LiveAnswer(request).frames():
                    texts[i] = live.text
                    yield gr.skip(), *texts, gr.skip(), self._panel(live), *_unchanged(3)
                if request.error is not None or turn.is_stopped or live is None:
                    note = f"⚠ {request.error}" if request.error else "Stopped."
                    yield gr.skip(), *texts, *_unchanged(), panels.note(note)
                    return
                compared.append(live.record())
                records.append(compared[-1])
            is_cut = any(record["finish_reason"] == "length" for record in compared)
            note = f"Cut at {greedy[0]} tokens: the longest answer, in Settings." if is_cut else ""
            table, session_table = panels.comparison(compared, texts), panels.session(records)
            yield gr.skip(), *texts, table, gr.skip(), session_table, records, panels.note(note)
        finally:
            self._end(session, "compare", turn)

    # --- API

    async def answer(
        self, session: str, message: Any, mode: str, system: str, *settings: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """One question for gradio_client: {"text", "mode", counts} as the answer grows."""
        asked = user_message(message)
        if not asked["content"]:
            raise gr.Error("the message is empty: give a text or a picture", print_exception=False)
        chat = object()  # two calls of one client run side by side
        turn = self._begin(session, chat)
        try:
            request = await self._submit(turn, [asked], system, mode, settings)
            async for live in LiveAnswer(request).frames():
                yield {"text": live.text} | live.record()
            if request.error is not None:
                raise RequestError(str(request.error)) from request.error
        except (ValueError, RequestError) as error:
            raise gr.Error(str(error), print_exception=False) from error
        finally:
            self._end(session, chat, turn)


def _box(running: bool, **value: Any) -> Any:
    """The question's box with its button: send, or stop."""
    return gr.update(submit_btn=not running, stop_btn=running, **value)


def _empty(value: Any) -> Any:
    return "" if isinstance(value, str) else {"text": "", "files": []}


def _without_bad(value: Any, error: Exception) -> Any:
    """What a box holds, without the picture that was refused."""
    if not isinstance(error, PictureError):
        return value
    message = user_message(value)
    files = [part["path"] for part in message["content"] if "path" in part]
    return {"text": value.get("text"), "files": [path for path in files if Path(path) != error.path]}


def _refusal(error: Exception) -> str:
    return f"⚠ {error}" + (" (taken out of the question)" if isinstance(error, PictureError) else "")


def _unchanged(count: int = 4) -> tuple[Any, ...]:
    return (gr.skip(),) * count
