"""What is done with each Python client: a talk about a picture, and a loop of tool calls.

``python client_programs.py NAME`` runs in the client's own environment, so this file imports
nothing of mmkv. It reads where the server is and the picture from stdin as JSON, and prints what
came of it. A package that is not installed ends it with :data:`MISSING`.

A talk has two turns: what is at a place of the picture, and, with the whole conversation, what at
another. A loop has two calls of the tool ``look``, both forced by the tool choice: the request
holds a picture, and so does the result of the first call where the client can send one. Every
object of the server's is validated as the type that the openai or the anthropic package has for it.
An agent is a package's own: it has so many steps, in each of which it calls, and is shown a picture
by each result.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

MISSING = 42  # exit code where the package is not installed
MODEL = "tiny-vlm"
ASKED = ("what is at row 2, column 3?", "what is at row 1, column 1?")
PLACES = (1, 2, 3, 4)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "integer", "enum": list(PLACES)} for name in ("row", "column")},
    "required": ["row", "column"],
    "additionalProperties": False,
}
ABOUT = "Look at a place of the picture."
FUNCTION = {"name": "look", "description": ABOUT, "parameters": SCHEMA, "strict": True}
Place = Literal[1, 2, 3, 4]
_SETTINGS: dict[str, Any] = {"model": MODEL, "temperature": 0}
SHORT = _SETTINGS | {"max_tokens": 20}
# For a reply that has to call, and so may hold many calls.
_LONG = 1000
# The package has no parameter for it.
_GREEDY: dict[str, Any] = {"model": MODEL, "extra_body": {"temperature": 0}}


class Calls:
    """The calls of a loop, each of which has to satisfy the tool's schema."""

    def __init__(self) -> None:
        self.made: list[dict[str, int]] = []

    def add(self, name: str, arguments: str | dict[str, Any]) -> str:
        """Note one, and return what the tool says. Raises ValueError for one that is wrong."""
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        names = sorted(SCHEMA["required"])
        fits = isinstance(given, dict) and sorted(given) == names
        if name != "look" or not fits or not all(type(given[n]) is int for n in names):
            raise ValueError(f"a call that the schema does not allow: {name} {given}")
        if not all(given[one] in PLACES for one in names):
            raise ValueError(f"a call that the schema does not allow: {name} {given}")
        self.made.append(given)
        return "a frog"


def _expect(what: str, found: Any, *right: Any) -> None:
    if found not in right:
        raise ValueError(f"{what} is {found!r}, not {right[0]!r}")


# Talks.


def turns(picture: str, ask: Callable[[list[Any]], str]) -> list[str]:
    """Have a conversation of two turns, the first about a picture."""
    messages: list[Any] = []
    said = []
    for text in ASKED:
        messages.append(_asked(text, None if messages else picture))
        said.append(ask(messages))
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def _asked(text: str, picture: str | None) -> dict[str, Any]:
    parts: list[Any] = [{"type": "text", "text": text}]
    if picture is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": picture}})
    return {"role": "user", "content": parts}


def _openai(url: str) -> Any:
    return import_module("openai").OpenAI(base_url=url, api_key="none", max_retries=0)


def openai_sync(url: str, picture: str) -> list[str]:
    """The openai package."""
    create = _openai(url).with_options(timeout=60).chat.completions.create
    return turns(picture, lambda m: create(messages=m, **SHORT).choices[0].message.content)


def openai_async(url: str, picture: str) -> list[str]:
    """The openai package's asynchronous client."""
    client_class = import_module("openai").AsyncOpenAI

    async def ask(messages: list[Any]) -> str:
        async with client_class(base_url=url, api_key="none") as client:
            made = await client.chat.completions.create(messages=messages, **SHORT)
            return made.choices[0].message.content or ""

    return turns(picture, lambda messages: asyncio.run(ask(messages)))


def openai_stream(url: str, picture: str) -> list[str]:
    """Streams of the openai package, with usage."""
    create = _openai(url).chat.completions.create
    more = {"stream": True, "stream_options": {"include_usage": True}}

    def ask(messages: list[Any]) -> str:
        text, usage = "", None
        for event in create(messages=messages, **SHORT, **more):
            usage = event.usage or usage
            text += (event.choices[0].delta.content or "") if event.choices else ""
        assert usage is not None and usage.completion_tokens > 0
        return text

    return turns(picture, ask)


def openai_responses(url: str, picture: str) -> list[str]:
    """Responses of the openai package, the second of which goes on from the first."""
    create = _openai(url).responses.create
    settings = _SETTINGS | {"max_output_tokens": 20}
    first = create(input=[_seen(picture, ASKED[0])], **settings)
    second = create(input=ASKED[1], previous_response_id=first.id, **settings)
    return [first.output_text, second.output_text]


def _seen(picture: str, text: str) -> dict[str, Any]:
    shown = {"type": "input_image", "image_url": picture, "detail": "auto"}
    return {"role": "user", "content": [shown, {"type": "input_text", "text": text}]}


def anthropic(url: str, picture: str) -> list[str]:
    """The anthropic package, with a whole reply and a streamed one."""
    messages = _anthropic(url).messages
    asked: list[Any] = [_shown(picture, ASKED[0])]
    settings = _GREEDY | {"max_tokens": 20}
    first = messages.create(messages=asked, **settings).content[0].text
    asked += [{"role": "assistant", "content": first}, {"role": "user", "content": ASKED[1]}]
    with messages.stream(messages=asked, **settings) as stream:
        return [first, stream.get_final_text()]


def _anthropic(url: str) -> Any:
    package = import_module("anthropic")
    return package.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


def _shown(picture: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [_block(picture), {"type": "text", "text": text}]}


def _block(picture: str) -> dict[str, Any]:
    data = picture.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source}


def langchain(url: str, picture: str) -> list[str]:
    """langchain-openai."""
    model = _chat_openai(url, max_completion_tokens=20)
    return turns(picture, lambda messages: str(model.invoke(messages).content))


def _chat_openai(url: str, **more: Any) -> Any:
    settings: dict[str, Any] = {"base_url": url, "api_key": "none", "model": MODEL}
    return import_module("langchain_openai").ChatOpenAI(temperature=0, **settings, **more)


def litellm(url: str, picture: str) -> list[str]:
    """litellm."""
    package = import_module("litellm")
    settings = SHORT | {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}

    def ask(messages: list[Any]) -> str:
        made: Any = package.completion(messages=messages, **settings)
        return str(made.choices[0].message.content)

    return turns(picture, ask)


TALKS: dict[str, Callable[[str, str], list[str]]] = {
    "openai": openai_sync,
    "openai, async": openai_async,
    "openai, stream": openai_stream,
    "openai, responses": openai_responses,
    "anthropic": anthropic,
    "langchain-openai": langchain,
    "litellm": litellm,
}


# Loops of tool calls.


_TOOLS = [{"type": "function", "function": FUNCTION}]
_NAMED = {"type": "function", "function": {"name": "look"}}


def _chat_loop(picture: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """Have a loop by chat completions; ``ask`` returns the message and the reason of its end."""
    calls = Calls()
    messages: list[Any] = [_asked(ASKED[0], picture)]
    for choice in ("required", _NAMED):
        message, reason = ask(messages, choice)
        _expect("finish_reason", reason, "tool_calls")
        _expect("content", message.get("content"), None, "")
        messages.append({"role": "assistant"} | message)
        for call in message["tool_calls"]:
            said = calls.add(call["function"]["name"], call["function"]["arguments"])
            result = _asked(said, picture)["content"] if choice == "required" else said
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    message, reason = ask(messages, "none")
    _expect("finish_reason", reason, "stop", "length")
    _expect("tool_calls", message.get("tool_calls") or [], [])
    return {"calls": calls.made, "said": message["content"]}


def openai_calls(url: str, picture: str) -> dict[str, Any]:
    """The openai package: chat completions."""
    create = _openai(url).chat.completions.with_raw_response.create
    chat = import_module("openai.types.chat").ChatCompletion

    def ask(messages: list[Any], choice: Any) -> Any:
        got = create(
            messages=messages, tools=_TOOLS, tool_choice=choice, max_tokens=_LONG, **_SETTINGS
        )
        made = chat.model_validate_json(got.text)
        message = made.choices[0].message.model_dump(exclude_none=True)
        return message, made.choices[0].finish_reason

    return _chat_loop(picture, ask)


def openai_stream_calls(url: str, picture: str) -> dict[str, Any]:
    """The openai package: streamed chat completions."""
    create = _openai(url).chat.completions.create
    chunk_class = import_module("openai.types.chat").ChatCompletionChunk

    def ask(messages: list[Any], choice: Any) -> Any:
        message: dict[str, Any] = {"content": ""}
        reason, pieces = None, 0
        given = {"messages": messages, "tools": _TOOLS, "tool_choice": choice, "max_tokens": _LONG}
        for event in create(stream=True, **given, **_SETTINGS):
            made = chunk_class.model_validate(event.to_dict())
            for one in made.choices:
                reason = one.finish_reason or reason
                message["content"] += one.delta.content or ""
                for piece in one.delta.tool_calls or ():
                    pieces += 1
                    calls = message.setdefault("tool_calls", [])
                    if piece.id is not None:  # with its name, once
                        _expect("index", piece.index, len(calls))
                        function = {"name": piece.function.name, "arguments": ""}
                        calls.append({"id": piece.id, "type": "function", "function": function})
                    calls[piece.index]["function"]["arguments"] += piece.function.arguments or ""
        if choice != "none" and pieces < 3:
            raise ValueError(f"arguments come in {pieces} pieces")
        return message, reason

    return _chat_loop(picture, ask)


def openai_parsed_calls(url: str, picture: str) -> dict[str, Any]:
    """The openai package: its own helper for streams, with a tool made of a model of pydantic."""
    package = import_module("openai")
    look = import_module("pydantic").create_model("look", row=(Place, ...), column=(Place, ...))
    tools = [package.pydantic_function_tool(look)]
    calls = Calls()
    stream = _openai(url).chat.completions.stream
    messages: list[Any] = [_asked(ASKED[0], picture)]
    given: dict[str, Any] = {"messages": messages, "tools": tools, "max_tokens": _LONG}
    for _ in range(2):
        with stream(tool_choice="required", **given, **_SETTINGS) as events:
            message = events.get_final_completion().choices[0].message
        messages.append(message)
        for call in message.tool_calls:
            said = calls.add(call.function.name, call.function.parsed_arguments.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return {"calls": calls.made}


def openai_responses_calls(url: str, picture: str) -> dict[str, Any]:
    """The openai package: responses, each going on from the one before."""
    create = _openai(url).responses.with_raw_response.create
    response = import_module("openai.types.responses").Response
    return _responses_loop(
        picture, lambda **given: response.model_validate_json(create(**given).text)
    )


def openai_responses_stream_calls(url: str, picture: str) -> dict[str, Any]:
    """The openai package: streamed responses."""
    create = _openai(url).responses.create
    types = import_module("openai.types.responses")
    adapter = import_module("pydantic").TypeAdapter(types.ResponseStreamEvent)

    def ask(**given: Any) -> Any:
        last, arguments = None, ""
        for number, event in enumerate(create(stream=True, **given)):
            last = adapter.validate_python(event.to_dict())
            _expect("sequence_number", last.sequence_number, number)
            if last.type == "response.function_call_arguments.delta":
                arguments += last.delta
            elif last.type == "response.function_call_arguments.done":
                _expect("arguments", last.arguments, arguments)
                arguments = ""
        assert last is not None
        _expect("the last event", last.type, "response.completed", "response.incomplete")
        return last.response

    return _responses_loop(picture, ask)


def _responses_loop(picture: str, ask: Callable[..., Any]) -> dict[str, Any]:
    calls = Calls()
    given: dict[str, Any] = {"tools": [{"type": "function"} | FUNCTION], "max_output_tokens": _LONG}
    items: list[Any] = [_seen(picture, ASKED[0])]
    made: Any = None
    choices: list[Any] = ["required", {"type": "function", "name": "look"}]
    for choice in choices:
        more = {} if made is None else {"previous_response_id": made.id}
        made = ask(input=items, tool_choice=choice, **more, **given, **_SETTINGS)
        _expect("status", made.status, "completed")
        found = [item for item in made.output if item.type == "function_call"]
        _expect("whether it calls", bool(found), True)
        items = []
        for item in found:
            said: Any = calls.add(item.name, item.arguments)
            if choice == "required":
                said = _seen(picture, said)["content"]
            output = {"type": "function_call_output", "call_id": item.call_id, "output": said}
            items.append(output)
    more = {"previous_response_id": made.id, "tool_choice": "none"}
    made = ask(input=items, **more, **given, **_SETTINGS)
    return {"calls": calls.made, "said": made.output_text}


_BLOCK_TOOLS = [{"name": "look", "description": ABOUT, "input_schema": SCHEMA}]


def anthropic_calls(url: str, picture: str) -> dict[str, Any]:
    """The anthropic package: messages."""
    message = import_module("anthropic.types").Message
    create = _anthropic(url).messages.with_raw_response.create
    return _blocks_loop(
        url, picture, lambda **given: message.model_validate_json(create(**given).text())
    )


def anthropic_stream_calls(url: str, picture: str) -> dict[str, Any]:
    """The anthropic package: streamed messages, by its own helper."""
    create, stream = _anthropic(url).messages.create, _anthropic(url).messages.stream
    types = import_module("anthropic.types")
    adapter = import_module("pydantic").TypeAdapter(types.RawMessageStreamEvent)

    def ask(**given: Any) -> Any:
        kinds = [adapter.validate_python(e.to_dict()).type for e in create(stream=True, **given)]
        _expect("the first event", kinds[0], "message_start")
        _expect("the last event", kinds[-1], "message_stop")
        with stream(**given) as events:
            return types.Message.model_validate(events.get_final_message().to_dict())

    return _blocks_loop(url, picture, ask)


def _blocks_loop(url: str, picture: str, ask: Callable[..., Any]) -> dict[str, Any]:
    calls = Calls()
    messages: list[Any] = [_shown(picture, ASKED[0])]
    given: dict[str, Any] = {"model": MODEL, "tools": _BLOCK_TOOLS, "messages": messages}
    choices = [{"type": "any"}, {"type": "tool", "name": "look"}]
    for choice in choices:
        made = ask(tool_choice=choice, max_tokens=_LONG, **(given | _GREEDY))
        _expect("stop_reason", made.stop_reason, "tool_use")
        messages.append({"role": "assistant", "content": [one.to_dict() for one in made.content]})
        results = []
        for block in made.content:
            if block.type != "tool_use":
                continue
            said: Any = calls.add(block.name, block.input)
            if choice["type"] == "any":
                said = [{"type": "text", "text": said}, _block(picture)]
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": said})
        messages.append({"role": "user", "content": results})
    counted = _anthropic(url).messages.count_tokens(**given).input_tokens
    made = ask(tool_choice={"type": "none"}, max_tokens=20, **(given | _GREEDY))
    read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    _expect("count_tokens", counted, read)
    return {"calls": calls.made, "said": "".join(one.text for one in made.content)}


def _agents(form: str, streamed: bool, url: str, picture: str, steps: int = 0) -> dict[str, Any]:
    """Run an agent of the OpenAI Agents SDK, which has to call in each of its turns.

    Args:
        steps: how many those are, each with a picture as its result; 0: two, the first with one.
    """
    sdk = import_module("agents")
    sdk.set_tracing_disabled(True)
    client = import_module("openai").AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    calls = Calls()

    def look(row: Place, column: Place) -> Any:
        said = calls.add("look", {"row": row, "column": column})
        if rounds and not steps:
            return said
        return [sdk.ToolOutputText(text=said), sdk.ToolOutputImage(image_url=picture)]

    rounds = []

    def enough(_: Any, results: list[Any]) -> Any:
        rounds.append(len(results))
        done = len(rounds) == (steps or 2)
        return sdk.ToolsToFinalOutputResult(
            is_final_output=done, final_output="done" if done else None
        )

    agent = sdk.Agent(
        name="looker",
        instructions="Look at the picture.",
        model=getattr(sdk, form)(model=MODEL, openai_client=client),
        model_settings=sdk.ModelSettings(
            tool_choice="required",
            max_tokens=_LONG,
            temperature=0,
            parallel_tool_calls=False if steps else None,
        ),
        tools=[sdk.function_tool(look, description_override=ABOUT)],
        reset_tool_choice=False,
        tool_use_behavior=enough,
    )

    async def run() -> str:
        given = [_seen(picture, ASKED[0])]
        if not streamed:
            return str((await sdk.Runner.run(agent, given, max_turns=turns)).final_output)
        result = sdk.Runner.run_streamed(agent, given, max_turns=turns)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    turns = (steps or 2) + 2
    _expect("the end", asyncio.run(run()), "done")
    return {"calls": calls.made, "steps": len(rounds)}


def _langchain_agent(model: Any, question: dict[str, Any], none: Any = "none") -> dict[str, Any]:
    """Run LangChain's agent; a middleware has the first two replies call, and the third not."""
    agents = import_module("langchain.agents")
    middleware = import_module("langchain.agents.middleware")
    tools = import_module("langchain_core.tools")
    calls = Calls()
    asked: list[Any] = []

    def look(row: Place, column: Place) -> str:
        return calls.add("look", {"row": row, "column": column})

    @middleware.wrap_model_call
    def force(request: Any, handler: Any) -> Any:
        choice = "any" if len(asked) < 2 else none
        asked.append(choice)
        return handler(request.override(tool_choice=choice))

    tool = tools.StructuredTool.from_function(look, description=ABOUT)
    agent = agents.create_agent(model, [tool], middleware=[force])
    messages = agent.invoke({"messages": [question]})["messages"]
    kinds = [kind for kind, _ in itertools.groupby(one.type for one in messages)]
    _expect("messages", kinds, ["human", "ai", "tool", "ai", "tool", "ai"])
    return {"calls": calls.made, "said": messages[-1].text}


def langchain_calls(url: str, picture: str) -> dict[str, Any]:
    """LangChain's agent on chat completions."""
    model = _chat_openai(url, max_completion_tokens=_LONG)
    return _langchain_agent(model, _asked(ASKED[0], picture))


def langchain_stream_calls(url: str, picture: str) -> dict[str, Any]:
    """LangChain's agent on streamed chat completions."""
    model = _chat_openai(url, max_completion_tokens=_LONG, streaming=True)
    return _langchain_agent(model, _asked(ASKED[0], picture))


def langchain_responses_calls(url: str, picture: str) -> dict[str, Any]:
    """LangChain's agent on responses."""
    model = _chat_openai(url, max_tokens=_LONG, use_responses_api=True)
    return _langchain_agent(model, _asked(ASKED[0], picture))


def langchain_anthropic_calls(url: str, picture: str) -> dict[str, Any]:
    """LangChain's agent on messages."""
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": _LONG}
    settings |= {"base_url": url.removesuffix("/v1"), "api_key": "none"}
    model = import_module("langchain_anthropic").ChatAnthropic(**settings)
    return _langchain_agent(model, _shown(picture, ASKED[0]), {"type": "none"})


def litellm_calls(url: str, picture: str) -> dict[str, Any]:
    """litellm, by chat completions."""
    return _litellm_loop(picture, {"model": f"openai/{MODEL}", "api_base": url})


def litellm_anthropic_calls(url: str, picture: str) -> dict[str, Any]:
    """litellm, by messages."""
    return _litellm_loop(
        picture, {"model": f"anthropic/{MODEL}", "api_base": url.removesuffix("/v1")}
    )


def _litellm_loop(picture: str, settings: dict[str, Any]) -> dict[str, Any]:
    package = import_module("litellm")
    settings |= {"api_key": "none", "temperature": 0, "max_tokens": _LONG}

    def ask(messages: list[Any], choice: Any) -> Any:
        made = package.completion(messages=messages, tools=_TOOLS, tool_choice=choice, **settings)
        return made.choices[0].message.model_dump(exclude_none=True), made.choices[0].finish_reason

    return _chat_loop(picture, ask)


def litellm_responses_calls(url: str, picture: str) -> dict[str, Any]:
    """litellm, by responses."""
    package = import_module("litellm")
    where = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}
    return _responses_loop(picture, lambda **given: package.responses(**(given | where)))


def anthropic_threads(streamed: bool, url: str, picture: str, steps: int) -> dict[str, Any]:
    """Run the anthropic package's tool runner; each step goes on from the thread of the one before.

    The last step may not call, so that the runner ends by itself.
    """
    package, calls, threads = import_module("anthropic"), Calls(), []
    client = _anthropic(url)
    create = client.beta.messages.create

    def noted(**given: Any) -> Any:
        threads.append((given["thread"]["type"], len(given["messages"])))
        return create(**given)

    client.beta.messages.create = noted

    def look(row: Place, column: Place) -> Any:
        said = calls.add("look", {"row": row, "column": column})
        return [{"type": "text", "text": said}, _block(picture)]

    runner = client.beta.messages.tool_runner(
        messages=[_shown(picture, ASKED[0])],
        tools=[package.beta_tool(look, description=ABOUT)],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=_LONG,
        stream=streamed,
        **_GREEDY,
    )
    count = 0
    for count, made in enumerate(runner, 1):
        last = made.get_final_message() if streamed else made
        if count == steps - 1:
            quiet = {"tool_choice": {"type": "none"}, "max_tokens": 20}
            runner.set_messages_params(lambda now, more=quiet: {**now, **more})
    _expect("the reason of the end", last.stop_reason, "end_turn", "max_tokens")
    _expect("what was sent", threads, [("create", 1), *[("continue", 1)] * (steps - 1)])
    read = last.usage.cache_read_input_tokens
    return {"calls": calls.made, "steps": count, "read before the last step": read}


_CHAT, _RESPONSES = "OpenAIChatCompletionsModel", "OpenAIResponsesModel"
AGENTS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    f"openai-agents, {name}{', stream' * streamed}": partial(_agents, form, streamed)
    for name, form in (("chat", _CHAT), ("responses", _RESPONSES))
    for streamed in (False, True)
}
AGENTS["anthropic, threads"] = partial(anthropic_threads, False)
AGENTS["anthropic, threads, stream"] = partial(anthropic_threads, True)
LOOPS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai": openai_calls,
    "openai, stream": openai_stream_calls,
    "openai, stream helper": openai_parsed_calls,
    "openai, responses": openai_responses_calls,
    "openai, responses, stream": openai_responses_stream_calls,
    "anthropic": anthropic_calls,
    "anthropic, stream": anthropic_stream_calls,
    "openai-agents": partial(_agents, _CHAT, False),
    "openai-agents, stream": partial(_agents, _CHAT, True),
    "openai-agents, responses": partial(_agents, _RESPONSES, False),
    "openai-agents, responses, stream": partial(_agents, _RESPONSES, True),
    "langchain-openai": langchain_calls,
    "langchain-openai, stream": langchain_stream_calls,
    "langchain-openai, responses": langchain_responses_calls,
    "langchain-anthropic": langchain_anthropic_calls,
    "litellm": litellm_calls,
    "litellm, messages": litellm_anthropic_calls,
    "litellm, responses": litellm_responses_calls,
}


def package_of(name: str) -> str:
    """Return the package that a client's name begins with."""
    return name.partition(",")[0]


def main() -> int:
    """Run one client; what came of it goes to stdout."""
    kind, name = sys.argv[1:]
    given = json.loads(sys.stdin.read())
    programs: Any = {"talk": TALKS, "loop": LOOPS, "agent": AGENTS}[kind]
    try:
        found: dict[str, Any] = {"version": version(package_of(name))}
        found["result"] = programs[name](*given)
    except (ImportError, PackageNotFoundError) as error:
        print(error, file=sys.stderr)
        return MISSING
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
