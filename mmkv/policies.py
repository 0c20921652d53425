"""What ``mmkv policies`` lists: each policy, its paper, needs and parameters, and where it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING

from mmkv.engine.backends.cuda.backend import CudaBackend
from mmkv.engine.backends.cuda.kernels.evict import scores_in_torch
from mmkv.engine.errors import PolicyError
from mmkv.engine.model.gates import Gates, WriteGates, make_random_write_gates
from mmkv.engine.policies import Policy, find_preset, make_policy, names
from mmkv.engine.policies.preset import show
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model

if TYPE_CHECKING:
    from rich.table import Table

# Words for needs that have a value: for 1, and for others.
_NEEDS = {
    "gates": ("", "{} gates"),
    "queries": ("1 query", "{} queries"),
    "positions": ("their positions", ""),
    "state": ("1 number an entry", "{} numbers an entry"),
    "mass": ("", "attention mass ({} of a group)"),
    "taps": ("", "hidden states"),
    "outputs": ("output matrices", ""),
    "shares": ("what a row may keep", ""),
}


@dataclass(frozen=True)
class ListedParameter:
    """A parameter of a preset, its default as text, and where the paper gives it."""

    name: str
    default: str
    takes: str
    help: str
    place: str


@dataclass(frozen=True)
class ListedPolicy:
    """One row.

    Attributes:
        needs: what it reads beside positions, in a few words each.
        cpu: where it runs in a decode step on this machine's CPU: ``C step, C eviction``, or torch
            and why. gpu: the same of a GPU with Triton.
        problem: why it cannot be made, empty where it can.
    """

    name: str
    title: str = ""
    source: str = ""
    needs: list[str] = field(default_factory=list)
    parameters: list[ListedParameter] = field(default_factory=list)
    cpu: str = ""
    gpu: str = ""
    problem: str = ""

    @property
    def paper(self) -> str:
        """Title and arXiv id, as far as they are known."""
        return f"{self.title} ({self.source})" if self.title and self.source else self.source


def listed() -> list[ListedPolicy]:
    """Return a row for each preset and each policy that others offer.

    Where a policy runs is asked of an engine with the bundled model, in float32 on the CPU.
    """
    base = Runtime.from_pretrained(
        bundled_model(), policy="dbtrimkv", device="cpu", dtype="float32"
    )
    return [_row(name, base) for name in names()]


def as_json(rows: list[ListedPolicy]) -> list[dict[str, object]]:
    """Return the rows as JSON can hold them."""
    return [asdict(row) for row in rows]


def table(rows: list[ListedPolicy]) -> Table:
    """Return the rows for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(show_lines=True)
    for column in ("policy", "paper, needs, where it runs", "parameters and their defaults"):
        made.add_column(column, no_wrap=column == "policy")
    for row in rows:
        facts = [row.problem or row.paper]
        if not row.problem:
            facts.append(f"needs: {', '.join(row.needs) or 'nothing'}")
            facts += [f"CPU: {row.cpu}", f"GPU: {row.gpu}"]
        parameters = (
            f"{one.name}={one.default}: {one.help}" + (f" ({one.place})" if one.place else "")
            for one in row.parameters
        )
        made.add_row(row.name, escape("\n".join(facts)), escape("\n".join(parameters)) or "-")
    return made


def _row(name: str, base: Runtime) -> ListedPolicy:
    try:
        policy, preset = make_policy(name), find_preset(name)
    except PolicyError as error:
        return ListedPolicy(name, problem=str(error))
    parameters = {} if preset is None else preset.parameters
    return ListedPolicy(
        name,
        "" if preset is None else preset.title,
        policy.source,
        needs_of(policy),
        [
            ListedParameter(key, show(one.default), one.taken(), one.help, one.place)
            for key, one in parameters.items()
        ],
        _on_cpu(policy, base),
        _on_gpu(policy),
    )


def needs_of(policy: Policy) -> list[str]:
    """Return what the scorer declares, a few words for each need, and what a pruner prunes."""
    found = [] if policy.pruner is None else ["pictures of prompts"]
    found += [] if policy.merger is None else ["CLIP's tower (LLaVA)"]
    found += [] if policy.admission is None else ["write gates"]
    for need in fields(policy.scoring.needs):
        value = getattr(policy.scoring.needs, need.name)
        if not value:
            continue
        if need.name in _NEEDS:
            one, many = _NEEDS[need.name]
            found.append(one if value == 1 else many.format(value))
        else:
            found.append(need.name)
    return found


def _on_cpu(policy: Policy, base: Runtime) -> str:
    gates: Gates | WriteGates | None = base.decoder.gates
    if policy.gates == "write":
        gates = make_random_write_gates(base.spec)
    elif policy.admission is not None:
        policy = replace(policy, admission=replace(policy.admission, gates="random"))
    if policy.merger is not None:  # which asks for another tower, and a step is the same without it
        policy = replace(policy, pruner=None)
    engine = Runtime(base.family, base.spec, base.decoder.weights, gates, policy)
    step = engine.decode_path.replace("native", "C step").replace("torch: ", "torch step: ")
    if not policy.evicts and policy.admission is None:
        return step
    cut = engine.evict_path.partition(": policy")[0]  # the row names the policy
    cut = cut.replace("native", "C eviction").replace("torch: ", "torch eviction: ")
    return f"{step}, {cut}"


def _on_gpu(policy: Policy) -> str:
    why = CudaBackend.policy_reason(policy)
    if why:
        return f"torch eviction, no CUDA graph: {why}"
    in_torch = [] if policy.admission is None else ["write gates"]
    if policy.evicts:
        in_torch += ["scores"] if scores_in_torch(policy) else []
        in_torch += ["states of entries"] if policy.scoring.needs.state else []
    path = "CUDA graph, Triton eviction" if policy.evicts else "CUDA graph"
    return path + (f"; its own formulas in torch: {', '.join(in_torch)}" if in_torch else "")
