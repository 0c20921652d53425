"""The classes of inputs."""

from benchmarks.fuzz.target import Target
from benchmarks.fuzz.targets.api import ChangedWeights, ForeignErrors, PythonApi
from benchmarks.fuzz.targets.command_line import CommandLine, Interrupts
from benchmarks.fuzz.targets.contents import Benchmark, Pictures, Templates, TrainingRows
from benchmarks.fuzz.targets.http import Heads, HttpBodies, SocketMessages, StoreFaults
from benchmarks.fuzz.targets.model_files import Checkpoints, GateFiles, SessionFileInputs
from benchmarks.fuzz.targets.tools import CutStreams, ToolBodies

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        CommandLine,
        Pictures,
        SessionFileInputs,
        GateFiles,
        Checkpoints,
        Templates,
        Benchmark,
        TrainingRows,
        PythonApi,
        HttpBodies,
        Interrupts,
        ForeignErrors,
        ChangedWeights,
        Heads,
        StoreFaults,
        ToolBodies,
        CutStreams,
        SocketMessages,
    )
}
