"""What is done with Python packages of others than the API's makers: a talk, a loop of tool calls.

The openai and anthropic packages themselves are part of the tests: test_chat, test_responses and
test_providers speak to a server through them, and validate its objects as theirs.

``python client_programs.py NAME`` runs in the client's own environment, so this file imports
nothing of mmkv. It reads where the server is and the picture from stdin as JSON, and prints what
came of it. A package that is not installed ends it with :data:`MISSING`.

A talk has two turns: what is at a place of the picture, and, with the whole conversation, what at
another. A loop has two calls of the tool ``look``, both forced by the tool choice: the request
holds a picture, and so does the result of the first call where the client can send one. An agent is
a package's own: it has so many steps, in each of which it calls, and is shown a picture by each
result.
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


def _seen(picture: str, text: str) -> dict[str, Any]:
    shown = {"type": "input_image", "image_url": picture, "detail": "auto"}
    return {"role": "user", "content": [shown, {"type": "input_text", "text": text}]}


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


def _agents(form: str, streamed: bool, url: str, picture: str, steps: int) -> dict[str, Any]:
    """Run an agent of the OpenAI Agents SDK, which has to call and is shown a picture each step."""
    sdk = import_module("agents")
    sdk.set_tracing_disabled(True)
    client = import_module("openai").AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    calls = Calls()

    def look(row: Place, column: Place) -> Any:
        said = calls.add("look", {"row": row, "column": column})
        return [sdk.ToolOutputText(text=said), sdk.ToolOutputImage(image_url=picture)]

    rounds = []

    def enough(_: Any, results: list[Any]) -> Any:
        rounds.append(len(results))
        done = len(rounds) == steps
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
            parallel_tool_calls=False,
        ),
        tools=[sdk.function_tool(look, description_override=ABOUT)],
        reset_tool_choice=False,
        tool_use_behavior=enough,
    )

    async def run() -> str:
        given = [_seen(picture, ASKED[0])]
        if not streamed:
            return str((await sdk.Runner.run(agent, given, max_turns=steps + 2)).final_output)
        result = sdk.Runner.run_streamed(agent, given, max_turns=steps + 2)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

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


_CHAT, _RESPONSES = "OpenAIChatCompletionsModel", "OpenAIResponsesModel"
AGENTS: dict[str, Callable[[str, str, int], dict[str, Any]]] = {
    f"openai-agents, {name}{', stream' * streamed}": partial(_agents, form, streamed)
    for name, form in (("chat", _CHAT), ("responses", _RESPONSES))
    for streamed in (False, True)
}
LOOPS: dict[str, Callable[[str, str], dict[str, Any]]] = {
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
